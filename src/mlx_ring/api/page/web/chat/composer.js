// Where a question is written, and what goes with it.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { onceClicked } from "../parts.js";
import { ParameterPanel, summaryOf } from "./parameters.js";

const TALLEST = 0.4;

/** `draft` is what was written and not sent before another view was looked at. */
export function Composer({ ask, stop, isRunning, models, model, setModel, parameters, setParameters, problem, isOpen, setOpen, draft, keepDraft, focusOn }) {
  const [text, setText] = useState(draft);
  const field = useRef(null);
  const hasTouch = matchMedia("(pointer: coarse)").matches;

  useEffect(() => grow(field.current), [text]);
  // On a phone the keyboard would cover what is to be read.
  useEffect(() => (hasTouch ? undefined : field.current.focus()), [focusOn]);

  const write = (changed) => {
    keepDraft(changed);
    setText(changed);
  };
  const send = () => {
    if (text.trim() && !isRunning && ask(text.trim())) write("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape" && isRunning) stop();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || hasTouch) return;
    event.preventDefault();
    send();
  };
  const onSubmit = (event) => {
    event.preventDefault();
    send();
  };
  const summary = summaryOf(parameters);
  const efforts = models.find(({ id }) => id === model)?.efforts ?? [];

  return html`<div class="composer">
    ${isOpen && html`<${ParameterPanel} parameters=${parameters} change=${setParameters} problem=${problem} />`}
    <form class="ask" onSubmit=${onSubmit}>
      <label class="unseen" for="question">Your question</label>
      <textarea
        id="question"
        ref=${field}
        rows="1"
        dir="auto"
        placeholder="Ask something"
        value=${text}
        onInput=${(event) => write(event.target.value)}
        onKeyDown=${onKeyDown}
      ></textarea>
      ${isRunning
        ? html`<button type="button" class="primary" onClick=${onceClicked(stop)}>Stop</button>`
        : html`<button type="submit" class="primary" disabled=${!text.trim()}>Send</button>`}
    </form>
    <div class="with">
      ${models.length > 1 &&
      html`<label><span class="unseen">Model</span>
        <select value=${model} onChange=${(event) => setModel(event.target.value)}>
          ${models.map(({ id, note }) => html`<option key=${id} value=${id} selected=${id === model}>${note ? `${id} (${note})` : id}</option>`)}
        </select>
      </label>`}
      ${efforts.length > 0 &&
      html`<label><span>Thinking</span>
        <select value=${parameters.effort} onChange=${(event) => setParameters({ ...parameters, effort: event.target.value })}>
          ${["", ...efforts].map((value) => html`<option key=${value} value=${value} selected=${value === parameters.effort}>${effortName(value, efforts)}</option>`)}
        </select>
      </label>`}
      <button
        type="button"
        class="quiet"
        aria-expanded=${isOpen}
        aria-controls="parameters"
        onClick=${() => setOpen(!isOpen)}
      >Parameters${summary ? html`<span class="muted">: ${summary}</span>` : null}</button>
      ${!hasTouch && html`<span class="hint">Enter sends, Shift+Enter begins a line</span>`}
    </div>
  </div>`;
}

/** Of a model that can only be told to think or not, it is called that. */
function effortName(value, efforts) {
  if (!value) return "model's own";
  if (value === "none") return "off";
  return efforts.length === 2 ? "on" : value;
}

/** As tall as its text, up to a part of the window. */
function grow(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, window.innerHeight * TALLEST)}px`;
}
