// One message of a conversation.

/** @import { ToolCall } from "./completion.js" */
/** @import { RequestStatus } from "../types.js" */
/** @import { AnswerMessage, ToolMessage, UserMessage as Question } from "./conversation.js" */

import {
  CopyButton,
  isForInputMethod,
  Notice,
  onSingleClick,
  onValue,
  useReturningFocus,
  withCommands,
} from "../components.js";
import { counted, duration, figures } from "../format.js";
import { Markdown } from "../markdown/markdown.js";
import { html, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { canContinue, hasText, isCutOff, versionSteps, versionsOf } from "./conversation.js";
import { AnswerProgress } from "./progress.js";

/** Characters and lines beyond which a question is shown in part. */
const [LONG, LONG_LINES] = [2000, 30];

/** @type {Record<string, string>} */
const ENDS = {
  length: "The answer reached the token limit or the end of the context.",
  stopped: "Stopped.",
  cut: "The connection broke before the answer was complete.",
  unreached: "The server could not be reached, so there is no answer.",
  unknown: "The answer was incomplete when the page was closed, or another tab receives it.",
};

const HAS_RESULTS = "A version that calls tools cannot be shown or left once messages follow it.";

/**
 * Render a question. `edit` returns false if nothing was sent. `draft` is a change that was begun before the view
 * changed.
 * @param {{
 *   message: Question, isRunning: boolean, draft: string | null, setDraft: (text: string | null) => void,
 *   edit: (text: string) => boolean, editApart: ((text: string) => boolean) | null
 * }} props `editApart` asks in a new conversation; null if nothing else would be lost
 */
export function UserMessage({ message, isRunning, draft, setDraft, edit, editApart }) {
  const [isEditing, setEditing] = useState(draft !== null);
  const [isWhole, setWhole] = useState(false);
  const isLong = message.content.length > LONG || message.content.split("\n").length > LONG_LINES;
  const button = useReturningFocus(isEditing);
  if (isEditing) {
    const close = () => {
      setDraft(null);
      setEditing(false);
    };
    const closeAfter = (/** @type {(text: string) => boolean} */ ask) => (/** @type {string} */ text) => {
      if (ask(text)) close();
    };
    return html`<${Editor}
      text=${draft ?? message.content}
      setDraft=${setDraft}
      ask=${closeAfter(edit)}
      askApart=${editApart && closeAfter(editApart)}
      cancel=${close}
    />`;
  }
  const begin = () => {
    setDraft(message.content);
    setEditing(true);
  };
  return html`<article class="message user" aria-label="You">
    <div class=${`text${isLong && !isWhole ? " folded" : ""}`} dir="auto">${message.content}</div>
    <footer>
      ${
        isLong &&
        html`<button type="button" class="quiet" aria-expanded=${isWhole} onClick=${() => setWhole(!isWhole)}>
        ${isWhole ? "Show less" : "Show all"}
      </button>`
      }
      <${CopyButton} text=${() => message.content} what="question" />
      ${
        !isRunning &&
        html`<button type="button" class="quiet" ref=${button} onClick=${begin}>
        Edit
      </button>`
      }
    </footer>
  </article>`;
}

/**
 * Render the form that changes a question.
 * @param {{
 *   text: string, setDraft: (text: string) => void, ask: (text: string) => void,
 *   askApart: ((text: string) => void) | null, cancel: () => void
 * }} props
 */
function Editor({ text, setDraft, ask, askApart, cancel }) {
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  // Before the first paint: whatever is typed next goes into this field.
  useLayoutEffect(() => field.current?.focus(), []);
  const written = () => field.current?.value.trim() ?? "";
  const send = () => (written() ? ask(written()) : cancel());
  const onSubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    send();
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (isForInputMethod(event)) return;
    if (event.key === "Escape") cancel();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  };
  return html`<form class="message editor" onSubmit=${onSubmit}>
    <label>
      <span class="muted">
        Edit the question. The messages after it are replaced${askApart ? ", unless you ask in a new chat" : ""}.
      </span>
      <textarea
        ref=${field}
        dir="auto"
        rows=${Math.min(12, text.split("\n").length + 1)}
        defaultValue=${text}
        onInput=${onValue(setDraft)}
        onKeyDown=${onKeyDown}
      ></textarea>
    </label>
    <footer>
      <button type="submit" class="primary">Ask again</button>
      ${
        askApart &&
        html`<button type="button" onClick=${onSingleClick(() => written() && askApart(written()))}>
        Ask in a new chat
      </button>`
      }
      <button type="button" class="quiet" onClick=${cancel}>Cancel</button>
    </footer>
  </form>`;
}

/**
 * @typedef {object} AnswerProps
 * @property {AnswerMessage} message
 * @property {boolean} isRunning
 * @property {RequestStatus | undefined} request the server's, while the answer streams
 * @property {(() => void) | null} retry null if it cannot be requested again
 * @property {boolean} isLast true if no message follows
 * @property {((number: number) => void) | null} showVersion null while it cannot be changed
 * @property {string} refusalOfVersions why no other version can be shown; empty if one can
 * @property {(() => void) | null} branch copies the conversation up to here; null while the answer streams
 * @property {(() => void) | null} proceed continues the answer; null on all but the last
 * @property {string} refusal why nothing can be sent now; empty if it can
 * @property {ToolCall[]} openCalls calls without a result
 * @property {(call: ToolCall, text: string) => void} addResult
 */

/**
 * Render an answer.
 * @param {AnswerProps} props
 */
export function Answer(props) {
  const { message, isRunning, request, openCalls, addResult } = props;
  const { content, reasoning, calls, problem, isPaused, kept, failed, isQueued = false, waitsFor = "" } = message;
  const isEmpty = !content && !reasoning && !calls.length;
  return html`<article class="message answer" aria-label="Answer" aria-busy=${isRunning}>
    ${reasoning && html`<${Reasoning} text=${reasoning} />`}
    ${content && html`<${Markdown} text=${content} />`}
    ${calls.map((call) => {
      const add = (/** @type {string} */ text) => addResult(call, text);
      const isOpen = !isRunning && openCalls.includes(call);
      return html`<${Call} key=${call.id} call=${call} addResult=${isOpen ? add : null} />`;
    })}
    ${
      isRunning &&
      html`<p class="caret">
        <${AnswerProgress}
          request=${request}
          isEmpty=${isEmpty || kept !== undefined}
          isPaused=${isPaused}
          isQueued=${isQueued}
          waitsFor=${waitsFor}
        />
        <i aria-hidden="true"></i>
      </p>`
    }
    ${problem && !kept && html`<${Notice} tone="bad">${withCommands(problem)}</${Notice}>`}
    ${failed && html`<${Notice} tone="bad">${withCommands(describeFailed(failed))}</${Notice}>`}
    ${!isRunning && html`<${AnswerFooter} ...${props} />`}
  </article>`;
}

/** @param {{ text: string }} props */
function Reasoning({ text }) {
  return html`<details class="reasoning">
    <summary>Reasoning <span class="muted">${counted(text.trim().split(/\s+/).length, "word")}</span></summary>
    <${Markdown} text=${text} />
  </details>`;
}

/** @param {{ call: ToolCall, addResult: ((text: string) => void) | null }} props */
function Call({ call, addResult }) {
  const [result, setResult] = useState("");
  const onSubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    addResult?.(result);
  };
  return html`<section class="call" aria-label=${`Call of ${call.name}`}>
    <header>
      <span class="muted">Call of</span> <code>${call.name}</code>
      <${CopyButton} text=${() => call.arguments} what="arguments" />
    </header>
    <pre tabindex="0"><code>${indentJson(call.arguments)}</code></pre>
    ${
      addResult &&
      html`<form class="row" onSubmit=${onSubmit}>
      <label class="grow"><span class="visually-hidden">Result of ${call.name}</span>
        <textarea
          rows=${Math.min(12, result.split("\n").length)}
          dir="auto"
          placeholder="Result"
          value=${result}
          onInput=${onValue(setResult)}
          autocomplete="off"
        ></textarea>
      </label>
      <button type="submit">Send result</button>
    </form>`
    }
  </section>`;
}

/** @param {string} text */
function indentJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // Arguments that still stream, or that are no JSON.
  }
}

/**
 * Render a tool's result.
 * @param {{ message: ToolMessage }} props
 */
export function ToolResult({ message }) {
  return html`<article class="message result" aria-label=${`Result of ${message.name}`}>
    <span class="muted">Result of</span> <code>${message.name}</code>
    <pre tabindex="0"><code>${message.content}</code></pre>
  </article>`;
}

/**
 * Return why an answer is not complete. Empty if it is, or if it has a problem of its own.
 * @param {AnswerMessage} message
 */
export function describeEnd(message) {
  if (message.end === "unreached" && hasText(message)) {
    return "The server could not be reached, so the answer was not continued.";
  }
  return ENDS[message.end ?? ""] ?? "";
}

/**
 * Return why the next try of an answer has no text.
 * @param {NonNullable<AnswerMessage["failed"]>} failed
 */
export function describeFailed({ end, problem }) {
  if (problem) return problem;
  if (end === "unreached") return "The server could not be reached, so there is no other answer.";
  if (end === "cut") return "The connection broke before another answer began.";
  return "The model wrote no other answer.";
}

/** @param {AnswerProps} props */
function AnswerFooter(props) {
  const { message, retry, branch, proceed, refusal } = props;
  const end = describeEnd(message);
  const tone = isCutOff(message) ? "state bad" : "muted";
  const button = (/** @type {string} */ name, /** @type {(() => void) | null} */ act) =>
    act &&
    html`<button
      type="button"
      class="quiet"
      disabled=${refusal !== ""}
      title=${refusal || null}
      onClick=${act}
    >${name}</button>`;
  return html`<footer>
    ${end !== "" && html`<p class=${`end ${tone}`}>${end}</p>`}
    ${message.content !== "" && html`<${CopyButton} text=${() => message.content} what="answer" />`}
    <${Versions} ...${props} />
    ${button("Retry", retry)} ${button("Continue", canContinue(message) ? proceed : null)}
    ${
      branch &&
      html`<button
        type="button"
        class="quiet"
        title="Continue in a copy of this chat up to here"
        onClick=${onSingleClick(branch)}
      >Branch</button>`
    }
    ${message.model && html`<span class="muted">${message.model}</span>`}
    <span class="figures">${describeFigures(message).map((text) => html`<span key=${text}>${text}</span>`)}</span>
  </footer>`;
}

/**
 * Render which version of an answer is shown, and the way to the others. Nothing if there is only one.
 * @param {Pick<AnswerProps, "message" | "isLast" | "showVersion" | "refusalOfVersions">} props
 */
export function Versions({ message, isLast, showVersion, refusalOfVersions }) {
  const { length: count } = versionsOf(message);
  const number = message.earlier?.length ?? 0;
  if (count < 2) return null;
  const steps = versionSteps(message, isLast);
  // A button that were disabled would lose the focus.
  const step = (
    /** @type {string} */ sign,
    /** @type {string} */ name,
    /** @type {number | null} */ wanted,
    /** @type {boolean} */ isAny,
  ) => {
    const refusal = refusalOfVersions || (isAny && wanted === null ? HAS_RESULTS : "");
    const act = wanted !== null && !refusal && showVersion ? () => showVersion(wanted) : null;
    return html`<button
      type="button"
      class="quiet"
      aria-label=${name}
      aria-disabled=${act ? null : "true"}
      title=${refusal || name}
      onClick=${act}
    >${sign}</button>`;
  };
  return html`<span class="versions" role="group" aria-label="Versions of this answer">
    ${step("«", "Earlier version", steps.earlier, number > 0)}
    <span role="status">${number + 1}/${count}</span>
    ${step("»", "Later version", steps.later, number < count - 1)}
  </span>`;
}

/** @param {AnswerMessage} message */
function describeFigures({ figures: { tokensPerS, firstTokenS, tokens, promptTokens, cachedTokens } }) {
  const parts = [];
  if (tokensPerS) parts.push(`${figures(tokensPerS, 3)} tokens/s`);
  if (typeof firstTokenS === "number") parts.push(`first token after ${duration(firstTokenS)}`);
  if (tokens) parts.push(counted(tokens, "token"));
  if (promptTokens) {
    const cached = cachedTokens ? `, ${figures(cachedTokens, 5)} cached` : "";
    parts.push(`${counted(promptTokens, "prompt token")}${cached}`);
  }
  return parts;
}
