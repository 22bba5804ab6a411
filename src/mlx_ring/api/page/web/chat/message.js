// One message of a conversation.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { counted, duration, figures } from "../format.js";
import { Markdown } from "../markdown.js";
import { CopyButton, Notice } from "../parts.js";

const ENDS = {
  length: "The answer reached its limit of tokens, or the end of the context.",
  stopped: "Stopped.",
  unknown: "It was being written when the page was closed, or is in another tab.",
};

/** `edit` tells whether it was asked. */
export function UserMessage({ message, isRunning, edit }) {
  const [isEditing, setEditing] = useState(false);
  if (isEditing) {
    return html`<${Editor}
      text=${message.content}
      done=${(text) => {
        if (text === null || edit(text)) setEditing(false);
      }}
    />`;
  }
  return html`<article class="message user" aria-label="You">
    <div class="said" dir="auto">${message.content}</div>
    <footer>
      <${CopyButton} text=${() => message.content} what="question" />
      ${!isRunning && html`<button type="button" class="quiet" onClick=${() => setEditing(true)}>Edit</button>`}
    </footer>
  </article>`;
}

function Editor({ text, done }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const send = () => done(field.current.value.trim() || null);
  const onKeyDown = (event) => {
    if (event.key === "Escape") done(null);
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  };
  return html`<form
    class="message editor"
    onSubmit=${(event) => {
      event.preventDefault();
      send();
    }}
  >
    <label>
      <span class="muted">Change the question; what came after it is replaced.</span>
      <textarea ref=${field} dir="auto" rows=${Math.min(12, text.split("\n").length + 1)} defaultValue=${text} onKeyDown=${onKeyDown}></textarea>
    </label>
    <footer>
      <button type="submit" class="primary">Ask again</button>
      <button type="button" class="quiet" onClick=${() => done(null)}>Cancel</button>
    </footer>
  </form>`;
}

/** `retry` is there on the last answer only; `giveResult` where calls wait for results. */
export function Answer({ message, isRunning, several, retry, openCalls, giveResult }) {
  const isEmpty = !message.content && !message.reasoning && !message.calls.length;
  return html`<article class="message answer" aria-label="Answer" aria-busy=${isRunning}>
    ${message.reasoning && html`<${Reasoning} text=${message.reasoning} isRunning=${isRunning && !message.content} />`}
    ${message.content && html`<${Markdown} text=${message.content} />`}
    ${message.calls.map(
      (call) => html`<${Call}
        key=${call.id}
        call=${call}
        give=${!isRunning && openCalls.includes(call) ? (text) => giveResult(call, text) : null}
      />`,
    )}
    ${isRunning && html`<p class="caret">${isEmpty ? html`<span class="muted">Waiting for the first token</span>` : null}<i aria-hidden="true"></i></p>`}
    ${message.problem && html`<${Notice} tone="bad">${message.problem}</${Notice}>`}
    ${!isRunning && html`<${Footing} message=${message} several=${several} retry=${retry} />`}
  </article>`;
}

function Reasoning({ text, isRunning }) {
  return html`<details class="reasoning">
    <summary>${isRunning ? "Thinking" : "Thought"} <span class="muted">${counted(text.trim().split(/\s+/).length, "word")}</span></summary>
    <${Markdown} text=${text} />
  </details>`;
}

function Call({ call, give }) {
  const [result, setResult] = useState("");
  return html`<section class="call" aria-label=${`Call of ${call.name}`}>
    <header><span class="muted">calls</span> <code>${call.name}</code> <${CopyButton} text=${() => call.arguments} what="arguments" /></header>
    <pre tabindex="0"><code>${pretty(call.arguments)}</code></pre>
    ${give &&
    html`<form
      class="row"
      onSubmit=${(event) => {
        event.preventDefault();
        give(result);
      }}
    >
      <label class="grow"><span class="unseen">Result of ${call.name}</span>
        <input type="text" placeholder="its result" value=${result} onInput=${(event) => setResult(event.target.value)} autocomplete="off" />
      </label>
      <button type="submit">Give result</button>
    </form>`}
  </section>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function ToolResult({ message }) {
  return html`<article class="message result" aria-label=${`Result of ${message.name}`}>
    <span class="muted">result of</span> <code>${message.name}</code>
    <pre tabindex="0"><code>${message.content}</code></pre>
  </article>`;
}

function Footing({ message, several, retry }) {
  const said = ENDS[message.end];
  return html`<footer>
    ${message.content && html`<${CopyButton} text=${() => message.content} what="answer" />`}
    ${retry && html`<button type="button" class="quiet" onClick=${retry}>Retry</button>`}
    ${several && message.model && html`<span class="muted">${message.model}</span>`}
    <span class="figures">${costs(message).map((text) => html`<span key=${text}>${text}</span>`)}</span>
    ${said && html`<span class="muted">${said}</span>`}
  </footer>`;
}

/** Tokens per second, time to the first token, how many there were, and how many were cached. */
function costs({ figures: told }) {
  const costs = [];
  if (told.tokensPerS) costs.push(`${figures(told.tokensPerS, 3)} tokens/s`);
  if (told.firstTokenS !== null && told.firstTokenS !== undefined) costs.push(`first after ${duration(told.firstTokenS)}`);
  if (told.tokens) costs.push(counted(told.tokens, "token"));
  if (told.promptTokens) {
    const cached = told.cachedTokens ? `, ${figures(told.cachedTokens, 5)} cached` : "";
    costs.push(`prompt ${figures(told.promptTokens, 5)}${cached}`);
  }
  return costs;
}
