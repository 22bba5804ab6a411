// A what-if question about the cluster: another machine, link, context or model, beside the cluster as it is.

/** @import { Answer, Outcome, WhatIfChoices } from "../types.js" */

import { ApiError, request } from "../api.js";
import { Notice, onValue } from "../components.js";
import { bytes, figures } from "../format.js";
import { html, useEffect, useState } from "../vendor/preact.js";

/** Texts of the form's fields. */
const EMPTY = { machine: "", link: "", model: "", context: "", prompt: "", answer: "", objective: "" };
const FEWEST_CONTEXT = 256;
const MOST_CONTEXT = 1048576;
const LENGTHS = /** @type {const} */ ([
  { name: "context", label: "Context of each user", least: FEWEST_CONTEXT, usual: "8192" },
  { name: "prompt", label: "Prompt", least: 1, usual: "as the server's" },
  { name: "answer", label: "Answer", least: 1, usual: "as the server's" },
]);
/** Number of rows up to which machines without layers are named. */
const FEW_ROWS = 4;

/** Render the panel of what-if questions. */
export function WhatIf() {
  const [isOpen, setOpen] = useState(false);
  const [choices, setChoices] = useState(/** @type {WhatIfChoices | null} */ (null));
  const [fields, setFields] = useState(EMPTY);
  const [answer, setAnswer] = useState(/** @type {Answer | null} */ (null));
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    if (!isOpen || choices) return;
    ask("GET").then(setChoices).catch(report);
  }, [isOpen]);
  /** @param {unknown} error */
  function report(error) {
    if (!(error instanceof ApiError)) throw error;
    setProblem(error.message);
  }
  /** @param {keyof typeof EMPTY} name */
  const field = (name) => onValue((value) => setFields({ ...fields, [name]: value }));
  const onToggle = (/** @type {Event & { currentTarget: HTMLDetailsElement }} */ event) =>
    setOpen(event.currentTarget.open);
  const onSubmit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      setAnswer(await ask("POST", questionOf(fields)));
    } catch (error) {
      setAnswer(null);
      report(error);
    } finally {
      setBusy(false);
    }
  };
  return html`<section class="panel what-if" aria-label="What if">
    <details onToggle=${onToggle}>
      <summary><h2>What if</h2><span class="muted">another machine, link, context or model</span></summary>
      <form onSubmit=${onSubmit}>
        <label>Add a machine
          <select value=${fields.machine} onChange=${field("machine")}>
            <option value="">none</option>
            ${choices?.machines.map((name) => html`<option key=${name} value=${name}>${name} GB</option>`)}
          </select>
        </label>
        <label>Link to the others
          <select value=${fields.link} onChange=${field("link")} disabled=${!fields.machine}>
            <option value="">1 Gbit/s Ethernet</option>
            ${choices?.links.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
          </select>
        </label>
        <label>Model
          <select value=${fields.model} onChange=${field("model")}>
            <option value="">the served one</option>
            ${choices?.models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
          </select>
        </label>
        <label>Optimize for
          <select value=${fields.objective} onChange=${field("objective")}>
            <option value="">as the server does</option>
            ${choices?.objectives.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
          </select>
        </label>
        ${LENGTHS.map(
          ({ name, label, least, usual }) => html`<label key=${name}>${label}
            <input
              type="number"
              min=${least}
              max=${MOST_CONTEXT}
              step="1"
              placeholder=${usual}
              value=${fields[name]}
              onInput=${field(name)}
            />
          </label>`,
        )}
        <button class="primary" disabled=${isBusy}>${isBusy ? "Planning" : "Compare"}</button>
      </form>
      ${problem && html`<${Notice} tone="bad">${problem}</${Notice}>`}
      ${answer && html`<${Outcomes} outcomes=${answer.outcomes} />`}
    </details>
  </section>`;
}

/**
 * Send a question, or ask for the names that one may use.
 * @param {"GET" | "POST"} method
 * @param {object} [body]
 */
async function ask(method, body) {
  const response = await request("cluster/what-if", method === "POST" ? { body: body ?? {} } : {});
  return response.json();
}

/**
 * Return the request's fields; empty texts are left out.
 * @param {typeof EMPTY} fields
 */
export function questionOf({ machine, link, model, context, prompt, answer, objective }) {
  return {
    ...(machine && { add: [machine] }),
    ...(machine && link && { link }),
    ...(model && { model }),
    ...(context && { context_tokens: Number(context) }),
    ...(prompt && { prompt_tokens: Number(prompt) }),
    ...(answer && { answer_tokens: Number(answer) }),
    ...(objective && { optimize_for: objective }),
  };
}

/**
 * Render the rows of an answer, and what they hold for.
 * @param {{ outcomes: Outcome[] }} props
 */
export function Outcomes({ outcomes }) {
  const { context_tokens: context = 0, prompt_tokens: prompt = 0, answer_tokens: answer = 0 } = outcomes[0] ?? {};
  const left = outcomes.length > FEW_ROWS ? [] : (outcomes.at(-1)?.left_out ?? []);
  return html`<p class="muted">${[...new Set(outcomes.map(({ model }) => model))].join(", ")}</p>
    <div class="scroll" tabindex="0">
      <table>
        <thead>
          <tr>
            <th></th>
            ${["tokens/s", "first token, s", "request, s", "users", "tokens/s, all", "memory"].map(
              (name) => html`<th key=${name} class="right">${name}</th>`,
            )}
            <th>layers</th>
          </tr>
        </thead>
        <tbody>${outcomes.map((one) => html`<${Row} key=${one.label} outcome=${one} />`)}</tbody>
      </table>
    </div>
    ${outcomes
      .filter(({ fits }) => !fits)
      .map(({ label, why }) => html`<p key=${label} class="muted">${label}: ${why}</p>`)}
    ${left.map((why) => html`<p key=${why} class="muted">Without layers: ${why}.</p>`)}
    <p class="muted">
      A request has a prompt of ${prompt.toLocaleString("en")} tokens and an answer of${" "}
      ${answer.toLocaleString("en")}. Each user has a context of ${context.toLocaleString("en")} tokens.
    </p>`;
}

/**
 * Render one row.
 * @param {{ outcome: Outcome }} props
 */
export function Row({ outcome: one }) {
  if (!one.fits) {
    return html`<tr>
      <td>${one.label}</td>
      <td colspan="5" class="state bad">does not fit</td>
      <td class="right">${bytes(one.memory_bytes)}</td>
      <td></td>
    </tr>`;
  }
  return html`<tr>
    <td>${one.label}</td>
    <td class="right">${range(one.tokens_per_s_range)}</td>
    <td class="right">${range(one.first_token_s_range)}</td>
    <td class="right">${range(one.request_s_range)}</td>
    <td class="right">${figures(one.users, 5)}</td>
    <td class="right">${figures(one.users_tokens_per_s)}</td>
    <td class="right">${bytes(one.memory_bytes)}</td>
    <td>${one.stages?.join(", ")}</td>
  </tr>`;
}

/** @param {[number, number]} [pair] */
function range([low, high] = [0, 0]) {
  return `${figures(low)} – ${figures(high)}`;
}
