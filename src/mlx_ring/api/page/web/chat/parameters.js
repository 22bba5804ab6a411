// What goes with every question: system prompt, sampling, tools. An empty field leaves it to the model.

import { html } from "../vendor/preact.js";
import { kept } from "../parts.js";

const KEPT = "mlx-ring.parameters";
const EMPTY = { system: "", temperature: "", topP: "", maxTokens: "", seed: "", effort: "", tools: "" };

/** name in the request, field, label, whole or not, least, most, what an empty field means */
const NUMBERS = [
  ["temperature", "temperature", "Temperature", false, 0, 2, "model's own"],
  ["top_p", "topP", "Top-p", false, 0, 1, "model's own"],
  ["max_completion_tokens", "maxTokens", "Most tokens", true, 1, 2 ** 30, "server's limit"],
  ["seed", "seed", "Seed", true, 0, Number.MAX_SAFE_INTEGER, "random"],
];

export function readParameters() {
  return { ...EMPTY, ...kept.read(KEPT) };
}

export function keepParameters(parameters) {
  kept.write(KEPT, isEmpty(parameters) ? null : parameters);
}

const isEmpty = (parameters) => Object.keys(EMPTY).every((name) => !parameters[name]);

/** The request's fields. To be asked only where `problemOf` finds nothing. */
export function fieldsOf(parameters) {
  const fields = {};
  for (const [name, field] of NUMBERS) if (parameters[field].trim()) fields[name] = Number(parameters[field]);
  if (parameters.effort) fields.reasoning_effort = parameters.effort;
  if (parameters.tools.trim()) fields.tools = JSON.parse(parameters.tools);
  return fields;
}

/** Why no question can go out with these; null where one can. */
export function problemOf(parameters) {
  for (const [, field, label, isWhole, least, most] of NUMBERS) {
    const text = parameters[field].trim();
    const value = Number(text);
    const isRight = !text || (Number.isFinite(value) && value >= least && value <= most && (!isWhole || Number.isInteger(value)));
    if (!isRight) return `${label} is ${text}; it should be ${isWhole ? "a whole number" : "a number"} from ${least} to ${most}.`;
  }
  return toolsProblem(parameters.tools);
}

function toolsProblem(text) {
  if (!text.trim()) return null;
  try {
    return Array.isArray(JSON.parse(text)) ? null : "Tools should be a JSON list, as OpenAI's API takes it.";
  } catch (error) {
    return `Tools are not valid JSON: ${error.message}.`;
  }
}

/** In a few words, what is not left to the model. */
export function summaryOf(parameters) {
  const set = NUMBERS.filter(([, field]) => parameters[field].trim()).map(
    ([, field, label]) => `${label.toLowerCase()} ${parameters[field].trim()}`,
  );
  if (parameters.system.trim()) set.unshift("system prompt");
  if (parameters.tools.trim()) set.push("tools");
  return set.join(", ");
}

export function ParameterPanel({ parameters, change, problem }) {
  const field = (name) => ({
    value: parameters[name],
    onInput: (event) => change({ ...parameters, [name]: event.target.value }),
  });
  return html`<section class="parameters" id="parameters" aria-label="Parameters">
    <label class="wide">
      <span>System prompt</span>
      <textarea rows="2" placeholder="none" ...${field("system")}></textarea>
    </label>
    ${NUMBERS.map(
      ([name, key, label, isWhole, , , placeholder]) => html`<label key=${name}>
        <span>${label}</span>
        <input type="text" inputmode=${isWhole ? "numeric" : "decimal"} placeholder=${placeholder} autocomplete="off" ...${field(key)} />
      </label>`,
    )}
    <label class="wide">
      <span>Tools, as a JSON list in OpenAI's form</span>
      <textarea rows="2" class="mono" spellcheck=${false} placeholder="none" ...${field("tools")}></textarea>
    </label>
    <p class="wide row">
      ${problem ? html`<span class="problem" role="alert">${problem}</span>` : html`<span class="muted">Kept in this browser. Empty fields leave it to the model.</span>`}
      <button type="button" class="quiet" onClick=${() => change({ ...EMPTY })}>Reset</button>
    </p>
  </section>`;
}
