// A what-if question about the cluster: another machine, link, context or model, beside the cluster as it is.

/** @import { Answer, Curves, Outcome, Point, WhatIfChoices } from "../types.js" */

import { ApiError, request } from "../api.js";
import { Notice, onValue } from "../components.js";
import { bytes, figures } from "../format.js";
import { html, useEffect, useState } from "../vendor/preact.js";

/** Texts of the form's fields. */
const EMPTY = {
  machine: "",
  link: "",
  model: "",
  context: "",
  prompt: "",
  answer: "",
  users: "",
  objective: "",
  bits: "",
  plot: "",
};
/** Value of the field `model` that asks for popular models. */
const ALL_MODELS = "*";
const ALL_BITS = [16, 8, 4];
const FEWEST_CONTEXT = 256;
const MOST_CONTEXT = 1048576;
const LENGTHS = /** @type {const} */ ([
  { name: "context", label: "Context of each user", least: FEWEST_CONTEXT, usual: "8192" },
  { name: "prompt", label: "Prompt", least: 1, usual: "as the server's" },
  { name: "answer", label: "Answer", least: 1, usual: "as the server's" },
  { name: "users", label: "Users at once", least: 1, usual: "as the server's" },
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
    if (isBusy) return;
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
            <option value=${ALL_MODELS}>what fits: all popular ones</option>
            ${choices?.models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
          </select>
        </label>
        <label>Optimize for
          <select value=${fields.objective} onChange=${field("objective")}>
            <option value="">as the server does</option>
            ${choices?.objectives.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
          </select>
        </label>
        <label>KV cache
          <select value=${fields.bits} onChange=${field("bits")}>
            <option value="">as the server's</option>
            ${ALL_BITS.map((bits) => html`<option key=${bits} value=${bits}>${bits} bits</option>`)}
            <option value=${ALL_BITS.join(",")}>16, 8 and 4 bits compared</option>
          </select>
        </label>
        <label>Plot
          <select value=${fields.plot} onChange=${field("plot")}>
            <option value="">none</option>
            <option value="on">tokens/s over context and users</option>
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
        <button class="primary" aria-disabled=${isBusy ? "true" : null}>${isBusy ? "Planning" : "Compare"}</button>
      </form>
      ${problem && html`<${Notice} tone="bad">${problem}</${Notice}>`}
      ${answer?.remarks?.map((remark) => html`<p key=${remark} class="muted">${remark}</p>`)}
      ${answer && html`<${Outcomes} outcomes=${answer.outcomes} />`}
      ${answer?.curves && html`<${Plots} curves=${answer.curves} />`}
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
export function questionOf({ machine, link, model, context, prompt, answer, users, objective, bits, plot }) {
  return {
    ...(machine && { add: [machine] }),
    ...(machine && link && { link }),
    ...(model && (model === ALL_MODELS ? { what_fits: true } : { model })),
    ...(context && { context_tokens: Number(context) }),
    ...(prompt && { prompt_tokens: Number(prompt) }),
    ...(answer && { answer_tokens: Number(answer) }),
    ...(users && { users: Number(users) }),
    ...(objective && { optimize_for: objective }),
    ...(bits && { kv_bits: bits.split(",").map(Number) }),
    ...(plot && { curves: true }),
  };
}

/**
 * Render the rows of an answer, and what they hold for.
 * @param {{ outcomes: Outcome[] }} props
 */
export function Outcomes({ outcomes }) {
  const { context_tokens: context = 0, prompt_tokens: prompt = 0, answer_tokens: answer = 0 } = outcomes[0] ?? {};
  const users = outcomes[0]?.at_once ?? 1;
  const models = [...new Set(outcomes.map(({ model }) => model))];
  const left = outcomes.length > FEW_ROWS ? [] : (outcomes.at(-1)?.left_out ?? []);
  return html`<p class="muted">${models.length > FEW_ROWS ? `${models.length} models` : models.join(", ")}</p>
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
      .filter(({ fits }) => !fits && outcomes.length <= FEW_ROWS)
      .map(({ label, why }) => html`<p key=${label} class="muted">${label}: ${why}</p>`)}
    ${left.map((why) => html`<p key=${why} class="muted">Without layers: ${why}.</p>`)}
    <p class="muted">
      A request has a prompt of ${prompt.toLocaleString("en")} tokens and an answer of${" "}
      ${answer.toLocaleString("en")}. ${users > 1 && `${users} users send one at once. `}
      Each user has a context of${" "}
      ${context.toLocaleString("en")} tokens.
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
      <td colspan="5" class="state bad" title=${one.why}>does not fit</td>
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
    <td class="right">
      ${figures(one.users_tokens_per_s)}${one.fastest_users !== one.users && ` with ${figures(one.fastest_users, 5)}`}
    </td>
    <td class="right">${bytes(one.memory_bytes)}</td>
    <td>${one.stages?.join(", ")}</td>
  </tr>`;
}

/** @param {[number, number]} [pair] */
function range([low, high] = [0, 0]) {
  return `${figures(low)} – ${figures(high)}`;
}

const PLOT = { width: 480, height: 180, left: 48, right: 16, top: 16, bottom: 28 };

/**
 * Render both curves of the last case that fits.
 * @param {{ curves: Curves }} props
 */
export function Plots({ curves }) {
  return html`<div class="plots">
    <${Plot} title=${`tokens/s of one user over the context, ${curves.label}`} points=${curves.by_context} />
    <${Plot} title=${`tokens/s of all users over their number, ${curves.label}`} points=${curves.by_users} />
  </div>`;
}

/**
 * Render one curve: equal steps across, tokens per second from 0 upwards.
 * @param {{ title: string, points: Point[] }} props
 */
export function Plot({ title, points }) {
  const { width, height, left, right, top, bottom } = PLOT;
  const most = Math.max(...points.map((point) => point.tokens_per_s), Number.MIN_VALUE);
  const step = (width - left - right) / Math.max(1, points.length - 1);
  const places = points.map((point, index) => ({
    x: left + index * step,
    y: height - bottom - ((height - bottom - top) * point.tokens_per_s) / most,
    point,
  }));
  return html`<figure>
    <figcaption class="muted">${title}</figcaption>
    <svg viewBox="0 0 ${width} ${height}" role="img" aria-label=${title}>
      <path class="axes" d="M${left} ${top}V${height - bottom}H${width - right}" />
      <polyline points=${places.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ")} />
      ${places.map(
        ({ x, y, point }) => html`<g key=${point.at}>
          <circle cx=${x} cy=${y} r="3"><title>${figures(point.tokens_per_s)}</title></circle>
          <text x=${x} y=${height - 10} text-anchor="middle">${tokens(point.at)}</text>
        </g>`,
      )}
      <text x=${left - 6} y=${top + 4} text-anchor="end">${figures(most)}</text>
      <text x=${left - 6} y=${height - bottom} text-anchor="end">0</text>
    </svg>
  </figure>`;
}

/** @param {number} count */
function tokens(count) {
  return count >= 1024 && count % 1024 === 0 ? `${count / 1024}k` : String(count);
}
