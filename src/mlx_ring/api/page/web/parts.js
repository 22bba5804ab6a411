// Small pieces that several views share.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";

const SHOWN_MS = 1600;

/** Copies what `text()` gives, and says so. */
export function CopyButton({ text, what }) {
  const [word, setWord] = useState("Copy");
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const onClick = async () => {
    setWord((await copied(text())) ? "Copied" : "Not copied");
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setWord("Copy"), SHOWN_MS);
  };
  return html`<button type="button" class="quiet" onClick=${onClick} aria-label=${word === "Copy" ? `Copy ${what}` : word}>
    ${word}
  </button>`;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedTheOldWay(text);
  }
}

/** Browsers give pages of other machines without TLS no clipboard. */
function copiedTheOldWay(text) {
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
  }
}

/** For a button whose place another takes: the second click of a double one was not meant for that. */
export const onceClicked = (act) => (event) => {
  if (event.detail < 2) act();
};

/** A sentence that something went wrong, or is under way. `tone`: "bad", "busy" or "note". */
export function Notice({ tone = "note", children, action }) {
  return html`<div class="notice ${tone}" role=${tone === "bad" ? "alert" : "status"}>
    <p>${children}</p>
    ${action}
  </div>`;
}

/**
 * A bar of several parts. `parts`: {name, value, style} in the order in which they are drawn; `style` is a class.
 * What is left of `total` stays empty.
 */
export function Bar({ parts, total, label }) {
  const whole = Math.max(total ?? 0, parts.reduce((sum, part) => sum + part.value, 0)) || 1;
  const drawn = parts.filter((part) => part.value > 0);
  return html`<div class="bar" role="img" aria-label=${label}>
    ${drawn.map(
      (part) => html`<span key=${part.name} class=${part.style} style=${{ width: `${(100 * part.value) / whole}%` }} title=${part.title ?? part.name}></span>`,
    )}
  </div>`;
}

/** What the colours of bars mean. `items`: {name, style, value}. */
export function Legend({ items }) {
  return html`<ul class="legend">
    ${items.map(
      ({ name, style, value }) => html`<li key=${name}><i class=${style} aria-hidden="true"></i>${name}${value ? html` <b>${value}</b>` : null}</li>`,
    )}
  </ul>`;
}

/** The class of a stage's colour. */
export const stageStyle = (stage) => `stage-${stage % 8}`;

/** The mark of the page: a ring of stages. */
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

/** What is kept in this browser under a name; nothing where it keeps nothing. */
export const kept = {
  read(name) {
    try {
      return JSON.parse(localStorage.getItem(name));
    } catch {
      return null;
    }
  },
  /** Tells whether there was room. */
  write(name, value) {
    try {
      if (value === null) localStorage.removeItem(name);
      else localStorage.setItem(name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  },
};
