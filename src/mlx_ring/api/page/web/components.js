// Components that several views share.

/** @typedef {import("preact").ComponentChildren} Children */

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

const CONFIRMATION_MS = 1600;

/**
 * Render a button that copies `text()` and confirms it.
 * @param {{ text: () => string, what: string }} props
 */
export function CopyButton({ text, what }) {
  const [label, setLabel] = useState("Copy");
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const onClick = async () => {
    setLabel((await copy(text())) ? "Copied" : "Not copied");
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setLabel("Copy"), CONFIRMATION_MS);
  };
  return html`<button
    type="button"
    class="quiet"
    onClick=${onClick}
    aria-label=${label === "Copy" ? `Copy ${what}` : label}
  >${label}</button>`;
}

/** @param {string} text */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/**
 * Copy without the clipboard API, which browsers deny to pages of other machines without TLS.
 * @param {string} text
 */
function copyBySelection(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "visually-hidden";
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
    if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  }
}

/**
 * Return a ref whose element takes the focus when it appears; with `onlyIfLost` only if nothing has it any more.
 * @param {{ onlyIfLost?: boolean }} [options]
 */
export function useFocus({ onlyIfLost = false } = {}) {
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  useLayoutEffect(() => {
    const isLost = document.activeElement === null || document.activeElement === document.body;
    if (isLost || !onlyIfLost) element.current?.focus({ preventScroll: true });
  }, []);
  return element;
}

/**
 * Ignore the second click of a double click, because another button may have taken the first one's place.
 * @param {() => void} act
 */
export function onSingleClick(act) {
  return (/** @type {MouseEvent} */ event) => {
    if (event.detail < 2) act();
  };
}

/**
 * Render a button that does nothing while it is busy. It keeps the focus, which a disabled one loses.
 * @param {{ isBusy: boolean, act: () => void, disabled?: boolean, children?: Children }} props
 */
export function BusyButton({ isBusy, act, disabled = false, children }) {
  return html`<button
    type="button"
    disabled=${disabled}
    aria-disabled=${isBusy ? "true" : null}
    onClick=${onSingleClick(() => isBusy || act())}
  >${children}</button>`;
}

/**
 * Return true for a key that an input method takes, as for Chinese, Japanese and Korean. In Safari, the Enter that
 * confirms a word comes after the composition has ended, and only its key code tells.
 * @param {Pick<KeyboardEvent, "isComposing" | "keyCode">} event
 */
export function isForInputMethod({ isComposing, keyCode }) {
  return isComposing || keyCode === 229;
}

/**
 * Return the reference of a button that a form replaces while it is open. The button gets the focus when the form
 * closes, unless something else has taken it.
 * @param {boolean} isOpen
 */
export function useReturningFocus(isOpen) {
  const button = useRef(/** @type {HTMLButtonElement | null} */ (null));
  const wasOpen = useRef(false);
  useLayoutEffect(() => {
    if (wasOpen.current && !isOpen && document.activeElement === document.body) button.current?.focus();
    wasOpen.current = isOpen;
  }, [isOpen]);
  return button;
}

/**
 * Return a handler that passes on a field's value.
 * @param {(value: string) => void} set
 */
export function onValue(set) {
  return (/** @type {{ currentTarget: HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement }} */ event) =>
    set(event.currentTarget.value);
}

/**
 * Render a sentence about a problem or an operation in progress.
 * @param {{ tone?: "bad" | "busy" | "note", children?: Children, action?: Children }} props
 */
export function Notice({ tone = "note", children, action }) {
  return html`<div class="notice ${tone}" role=${tone === "bad" ? "alert" : "status"}>
    <p>${children}</p>
    ${action}
  </div>`;
}

/**
 * Return a sentence of the server with its commands, which are between backticks, as code.
 * @param {string} sentence
 */
export function withCommands(sentence) {
  return sentence.split("`").map((part, place) => (place % 2 ? html`<code>${unbroken(part)}</code>` : part));
}

/**
 * Return a command whose lines break only between its words, not after the hyphens of an option.
 * @param {string} command
 */
export function unbroken(command) {
  return command
    .split(" ")
    .flatMap((word, place) => [
      place ? " " : "",
      word.startsWith("-") ? html`<span class="option">${word}</span>` : word,
    ]);
}

/**
 * Render a command to run, with a button that copies it.
 * @param {{ command: string, what?: string }} props
 */
export function Command({ command, what = "command" }) {
  return html`<div class="row command">
    <code class="grow">${unbroken(command)}</code>
    <${CopyButton} text=${() => command} what=${what} />
  </div>`;
}

/** What the server says if traffic that is not encrypted would need an interface that nobody trusts. */
const UNTRUSTED = /--trusted-interface|\btrusted interface|\binterfaces?\b.*\btrust/;

/**
 * Render how to trust an interface, if a sentence of the server says that this is missing.
 * @param {{ text: string }} props
 */
export function TrustHint({ text }) {
  if (!UNTRUSTED.test(text)) return null;
  return html`<details class="trust">
    <summary>How to trust an interface</summary>
    <p>
      What machines exchange there is neither encrypted nor authenticated. Trust only an interface that nobody else can
      reach, such as a cable between the two machines. <code>ifconfig</code> or <code>ip address</code> lists their
      names, such as en5. Give the option to the server, and to each machine that joins, then start both again:
    </p>
    <${Command} command="mlx-ring serve MODEL --nodes 2 --trusted-interface NAME" what="the server's command" />
    <${Command} command="mlx-ring join --trusted-interface NAME" what="the other machine's command" />
  </details>`;
}

/**
 * Part of a bar; `style` is a class.
 * @typedef {{ name: string, value: number, style: string, title?: string }} BarPart
 */

/**
 * Render a bar of several parts, in their order. The rest of `total` stays empty.
 * @param {{ parts: BarPart[], total?: number, label: string }} props
 */
export function Bar({ parts, total = 0, label }) {
  const sum = parts.reduce((all, part) => all + part.value, 0);
  const whole = Math.max(total, sum) || 1;
  return html`<div class="bar" role="img" aria-label=${label}>
    ${parts
      .filter((part) => part.value > 0)
      .map(
        ({ name, value, style, title }) => html`<span
          key=${name}
          class=${style}
          style=${{ width: `${(100 * value) / whole}%` }}
          title=${title ?? name}
        ></span>`,
      )}
  </div>`;
}

/**
 * Render what the colours of bars mean; `style` is a class.
 * @param {{ items: { name: string, style: string }[], title?: string }} props
 */
export function Legend({ items, title }) {
  return html`<ul class="legend" aria-label=${title ?? "Legend"}>
    ${title && html`<li><b>${title}</b></li>`}
    ${items.map(({ name, style }) => html`<li key=${name}><i class=${style} aria-hidden="true"></i>${name}</li>`)}
  </ul>`;
}

/**
 * Render names and their values.
 * @param {{ rows: Children[][] }} props
 */
export function Facts({ rows }) {
  const entry = (/** @type {Children[]} */ [name, value]) => [
    html`<dt key=${`${name} name`}>${name}</dt>`,
    html`<dd key=${name}>${value}</dd>`,
  ];
  return html`<dl>${rows.flatMap(entry)}</dl>`;
}

/**
 * Return the class that sets a stage's colour.
 * @param {number} stage
 */
export const stageColour = (stage) => `stage-${stage % 8}`;

/**
 * Return the classes of an area filled with a stage's colour.
 * @param {number} stage
 */
export const stageFill = (stage) => `stage-fill ${stageColour(stage)}`;

/** Render the logo: a ring of stages. */
export function Ring({ size = 24 }) {
  return html`<svg class="ring" width=${size} height=${size} viewBox="0 0 32 32" aria-hidden="true">
    <g fill="none" stroke-width="5">
      <path class="ring-1" d="M16 4a12 12 0 0 1 10.4 6" />
      <path class="ring-2" d="M27.6 13a12 12 0 0 1-7.6 14.3" />
      <path class="ring-0" d="M16.5 28a12 12 0 0 1-12.5-12" />
      <path class="ring-3" d="M4.5 12.6a12 12 0 0 1 8-8.1" />
    </g>
  </svg>`;
}
