// The title of the open conversation, with its name field and exports.

/** @import { Conversation } from "./conversation.js" */

import { isForInputMethod, useReturningFocus } from "../components.js";
import { html, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { fileName, saveFile, toJson, toMarkdown } from "./export.js";

/**
 * Render the title bar. Nothing for a conversation without messages.
 * @param {{ conversation: Conversation, rename: (title: string) => void }} props
 */
export function TitleBar({ conversation, rename }) {
  const [isRenaming, setRenaming] = useState(false);
  const [saved, setSaved] = useState("");
  const button = useReturningFocus(isRenaming);
  const { title, messages } = conversation;
  if (!messages.length) return null;
  if (isRenaming) {
    const done = (/** @type {string | null} */ name) => {
      if (name !== null) rename(name);
      setRenaming(false);
    };
    return html`<${NameForm} title=${title} done=${done} />`;
  }
  const save = (/** @type {string} */ suffix, /** @type {string} */ type, /** @type {string} */ text) => {
    const name = fileName(title, suffix);
    saveFile(name, type, text);
    setSaved(`Saved ${name}`);
  };
  const asMarkdown = () => save("md", "text/markdown", toMarkdown(conversation));
  const asJson = () => save("json", "application/json", toJson(conversation));
  return html`<header class="title-bar">
    <h1 dir="auto">${title || "Untitled"}</h1>
    <button type="button" class="quiet" ref=${button} onClick=${() => setRenaming(true)}>Rename</button>
    <span class="exports" role="group" aria-label="Export this chat">
      <span class="muted" aria-hidden="true">Export:</span>
      <button type="button" class="quiet framed" aria-label="Export as Markdown" onClick=${asMarkdown}>Markdown</button>
      <button type="button" class="quiet framed" aria-label="Export as JSON" onClick=${asJson}>JSON</button>
    </span>
    <span class="muted" role="status">${saved}</span>
  </header>`;
}

/**
 * Render the field for a title. `done` gets null if it was cancelled.
 * @param {{ title: string, done: (title: string | null) => void }} props
 */
function NameForm({ title, done }) {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  useLayoutEffect(() => field.current?.select(), []);
  const onSubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    done(field.current?.value ?? null);
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (isForInputMethod(event)) return;
    if (event.key === "Escape") done(null);
  };
  return html`<form class="title-bar" onSubmit=${onSubmit}>
    <label class="grow">
      <span class="visually-hidden">Name of this chat</span>
      <input ref=${field} type="text" dir="auto" defaultValue=${title} onKeyDown=${onKeyDown} autocomplete="off" />
    </label>
    <button type="submit">Save name</button>
    <button type="button" class="quiet" onClick=${() => done(null)}>Cancel</button>
  </form>`;
}
