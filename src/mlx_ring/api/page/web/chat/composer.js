// The field for a question, with the choice of model, reasoning and parameters.

/** @typedef {import("preact").ComponentChildren} Children */
/** @import { ChatModel } from "../models.js" */
/** @import { Parameters } from "./parameters.js" */

import { isForInputMethod, onSingleClick, onValue } from "../components.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { readFiles } from "./attachments.js";
import { ModelSelect } from "./model-choice.js";
import { ParameterPanel, summarize } from "./parameters.js";

const KEYS = "Enter sends, Shift+Enter begins a new line.";
/** Largest height of the field, as a share of the window's. */
const MAX_HEIGHT = 0.4;

/**
 * @typedef {object} ComposerProps
 * @property {(text: string) => boolean} ask returns false if nothing was sent
 * @property {() => void} stop
 * @property {boolean} isRunning
 * @property {ChatModel[]} models
 * @property {ChatModel | undefined} model undefined while the server does not have the wanted one
 * @property {string[]} onDisk
 * @property {string | null} wanted name of the chosen model
 * @property {string} refusal why nothing can be sent now; empty if it can
 * @property {(id: string) => void} setModel
 * @property {Parameters} parameters
 * @property {(changed: Parameters) => void} setParameters
 * @property {string | null} problem
 * @property {boolean} isPanelOpen
 * @property {(isOpen: boolean) => void} setPanelOpen
 * @property {string} draft text that was not sent before the view changed
 * @property {(text: string) => void} setDraft
 * @property {string} focusKey the field takes the focus when it changes
 * @property {Children} gauge
 */

/**
 * Render the composer.
 * @param {ComposerProps} props
 */
export function Composer(props) {
  const { isPanelOpen, setPanelOpen, parameters, setParameters, problem } = props;
  const hasTouch = matchMedia("(pointer: coarse)").matches;
  const summary = summarize(parameters);
  return html`<div class="composer">
    ${isPanelOpen && html`<${ParameterPanel} parameters=${parameters} change=${setParameters} problem=${problem} />`}
    <${QuestionForm} key=${props.focusKey} ...${props} hasTouch=${hasTouch} />
    <div class="options">
      <${ModelSelect} ...${props} />
      <${EffortSelect} ...${props} />
      <button
        type="button"
        class="quiet"
        aria-expanded=${isPanelOpen}
        aria-controls="parameters"
        onClick=${() => setPanelOpen(!isPanelOpen)}
      >Parameters${summary ? html`<span class="muted">: ${summary}</span>` : null}</button>
      ${props.gauge}
    </div>
  </div>`;
}

/**
 * Return what a key in the field does besides writing, or null.
 * @param {Pick<KeyboardEvent, "key" | "shiftKey" | "isComposing" | "keyCode">} event
 * @param {{ isRunning: boolean, hasTouch: boolean }} now
 * @returns {"send" | "stop" | null}
 */
export function keyAction(event, { isRunning, hasTouch }) {
  if (isForInputMethod(event)) return null;
  if (event.key === "Escape") return isRunning ? "stop" : null;
  return event.key === "Enter" && !event.shiftKey && !hasTouch ? "send" : null;
}

/** @param {ComposerProps & { hasTouch: boolean }} props */
function QuestionForm({ ask, stop, isRunning, draft, setDraft, focusKey, hasTouch, refusal }) {
  const [text, setText] = useState(draft);
  const [problem, setProblem] = useState("");
  const chooser = useRef(/** @type {HTMLInputElement | null} */ (null));
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));

  useEffect(() => fitHeight(field.current), [text]);
  useEffect(() => {
    // A phone's keyboard would cover the conversation.
    if (!hasTouch) field.current?.focus();
  }, [focusKey]);

  const write = (/** @type {string} */ changed) => {
    setDraft(changed);
    setText(changed);
    setProblem("");
  };
  const attach = async (/** @type {File[]} */ files) => {
    const { text: added, problem: found } = await readFiles(files, field.current?.value);
    const before = field.current?.value.trimEnd() ?? "";
    if (added) write(`${before ? `${before}\n\n` : ""}${added}\n\n`);
    setProblem(found);
    field.current?.focus();
  };
  useDroppedFiles(attach);
  const onPaste = (/** @type {ClipboardEvent} */ event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    // Programs that copy text often add a picture of it.
    if (!files.length || event.clipboardData?.getData("text/plain")) return;
    event.preventDefault();
    attach(files);
  };
  const onChoose = (/** @type {{ currentTarget: HTMLInputElement }} */ { currentTarget: chosen }) => {
    attach([...(chosen.files ?? [])]);
    chosen.value = "";
  };
  const send = () => {
    if (text.trim() && !isRunning && ask(text.trim())) write("");
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    const act = keyAction(event, { isRunning, hasTouch });
    if (act === "stop") stop();
    if (act !== "send") return;
    event.preventDefault();
    send();
  };
  const onSubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    send();
  };
  const stopButton = html`<button type="button" class="primary" onClick=${onSingleClick(stop)}>Stop</button>`;
  const sendButton = html`<button type="submit" class="primary" disabled=${!text.trim() || refusal !== ""}
    title=${refusal || null}>Send</button>`;
  return html`${problem && html`<p class="problem" role="alert">${problem}</p>`}
  <form class="question" onSubmit=${onSubmit}>
    <input ref=${chooser} id="files" type="file" aria-label="Files to attach" multiple hidden onChange=${onChoose} />
    <button
      type="button"
      class="quiet attach"
      aria-label="Attach files"
      title="Add the text of files to the question. You can also drop them here."
      onClick=${() => chooser.current?.click()}
    >+</button>
    <label class="visually-hidden" for="question">Your question</label>
    <textarea
      id="question"
      ref=${field}
      rows="1"
      dir="auto"
      placeholder=${refusal || (hasTouch ? "Ask something" : `Ask something. ${KEYS}`)}
      value=${text}
      onInput=${onValue(write)}
      onKeyDown=${onKeyDown}
      onPaste=${onPaste}
    ></textarea>
    ${isRunning ? stopButton : sendButton}
  </form>`;
}

/**
 * Take files that are dropped anywhere on the page.
 * @param {(files: File[]) => void} take
 */
function useDroppedFiles(take) {
  const newest = useRef(take);
  newest.current = take;
  useEffect(() => {
    const onDrop = (/** @type {DragEvent} */ event) => {
      const files = [...(event.dataTransfer?.files ?? [])];
      if (files.length) newest.current(files);
    };
    window.addEventListener("drop", onDrop);
    return () => window.removeEventListener("drop", onDrop);
  }, []);
}

/** @param {ComposerProps} props */
function EffortSelect({ model, parameters, setParameters }) {
  const efforts = model?.efforts ?? [];
  if (!efforts.length) return null;
  const onChange = onValue((value) => setParameters({ ...parameters, effort: value }));
  return html`<label><span>Reasoning</span>
    <select value=${parameters.effort} onChange=${onChange}>
      ${["", ...efforts].map(
        (effort) => html`<option key=${effort} value=${effort} selected=${effort === parameters.effort}>
          ${effortLabel(effort, efforts)}
        </option>`,
      )}
    </select>
  </label>`;
}

/**
 * Return the label of a reasoning effort. A model with a single effort reasons or does not.
 * @param {string} effort
 * @param {string[]} efforts
 */
function effortLabel(effort, efforts) {
  if (!effort) return "default";
  if (effort === "none") return "off";
  return efforts.length === 2 ? "on" : effort;
}

/**
 * Make the field as tall as its text, up to a part of the window.
 * @param {HTMLTextAreaElement | null} field
 */
function fitHeight(field) {
  if (!field) return;
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, window.innerHeight * MAX_HEIGHT)}px`;
}
