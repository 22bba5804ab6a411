// Parameters of every request: system prompt, sampling, tools. An empty field uses the model's default.

import { onValue } from "../components.js";
import { readStored, writeStored } from "../storage.js";
import { html } from "../vendor/preact.js";

const STORED_PARAMETERS = "mlx-ring.parameters";

/** Texts of the form's fields. */
const EMPTY = { system: "", temperature: "", topP: "", maxTokens: "", seed: "", effort: "", tools: "" };

/** @typedef {typeof EMPTY} Parameters */

/**
 * Number in the form. `name` is its name in the request.
 * @typedef {object} NumberField
 * @property {string} name
 * @property {keyof Parameters} field
 * @property {string} label
 * @property {boolean} isWhole
 * @property {number} least
 * @property {number} most
 * @property {string} placeholder
 */

/** @type {NumberField[]} */
const NUMBERS = [
  {
    name: "temperature",
    field: "temperature",
    label: "Temperature",
    isWhole: false,
    least: 0,
    most: 2,
    placeholder: "default",
  },
  { name: "top_p", field: "topP", label: "Top-p", isWhole: false, least: 0, most: 1, placeholder: "default" },
  {
    name: "max_completion_tokens",
    field: "maxTokens",
    label: "Max tokens",
    isWhole: true,
    least: 1,
    most: 2 ** 30,
    placeholder: "server limit",
  },
  {
    name: "seed",
    field: "seed",
    label: "Seed",
    isWhole: true,
    least: 0,
    most: Number.MAX_SAFE_INTEGER,
    placeholder: "random",
  },
];

/**
 * Read the parameters that this browser stored.
 * @returns {Parameters}
 */
export function readParameters() {
  return { ...EMPTY, ...readStored(STORED_PARAMETERS) };
}

/**
 * Store the parameters in this browser.
 * @param {Parameters} parameters
 */
export function storeParameters(parameters) {
  const isEmpty = Object.values(parameters).every((text) => !text);
  writeStored(STORED_PARAMETERS, isEmpty ? null : parameters);
}

/**
 * Return the request's fields. `findProblem` must have found none.
 * @param {Parameters} parameters
 */
export function requestFields(parameters) {
  /** @type {Record<string, unknown>} */
  const fields = {};
  for (const { name, field } of NUMBERS) {
    if (parameters[field].trim()) fields[name] = Number(parameters[field]);
  }
  if (parameters.effort) fields.reasoning_effort = parameters.effort;
  if (parameters.tools.trim()) fields.tools = JSON.parse(parameters.tools);
  return fields;
}

/**
 * Return what an export says of a request: the fields that were set, except tools, and the system prompt.
 * @param {Parameters} parameters
 */
export function chosenFields(parameters) {
  const system = parameters.system.trim();
  return { ...(system ? { system } : {}), ...requestFields({ ...parameters, tools: "" }) };
}

/**
 * Return why the parameters cannot be sent, or null.
 * @param {Parameters} parameters
 * @returns {string | null}
 */
export function findProblem(parameters) {
  for (const { field, label, isWhole, least, most } of NUMBERS) {
    const text = parameters[field].trim();
    const value = Number(text);
    const isInRange = Number.isFinite(value) && value >= least && value <= most;
    if (text && !(isInRange && (!isWhole || Number.isInteger(value)))) {
      return `${label} is ${text}. Enter a ${isWhole ? "whole number" : "number"} from ${least} to ${most}.`;
    }
  }
  return findToolsProblem(parameters.tools);
}

/** @param {string} text */
function findToolsProblem(text) {
  if (!text.trim()) return null;
  try {
    return Array.isArray(JSON.parse(text)) ? null : "Tools must be a JSON list in the OpenAI API's format.";
  } catch (error) {
    return `Tools are not valid JSON: ${error instanceof Error ? error.message : error}.`;
  }
}

/**
 * Summarize the parameters that differ from the model's defaults.
 * @param {Parameters} parameters
 */
export function summarize(parameters) {
  const parts = NUMBERS.filter(({ field }) => parameters[field].trim()).map(
    ({ field, label }) => `${label.toLowerCase()} ${parameters[field].trim()}`,
  );
  if (parameters.system.trim()) parts.unshift("system prompt");
  if (parameters.tools.trim()) parts.push("tools");
  return parts.join(", ");
}

/**
 * Render the form of parameters.
 * @param {{ parameters: Parameters, change: (changed: Parameters) => void, problem: string | null }} props
 */
export function ParameterPanel({ parameters, change, problem }) {
  /** @param {keyof Parameters} name */
  const field = (name) => ({
    value: parameters[name],
    onInput: onValue((value) => change({ ...parameters, [name]: value })),
  });
  const hint = html`<span class="muted">Stored in this browser. Empty fields use the model's defaults.</span>`;
  return html`<section class="parameters" id="parameters" aria-label="Parameters">
    <label class="wide">
      <span>System prompt</span>
      <textarea rows="2" placeholder="none" ...${field("system")}></textarea>
    </label>
    ${NUMBERS.map(
      ({ name, field: key, label, isWhole, placeholder }) => html`<label key=${name}>
        <span>${label}</span>
        <input
          type="text"
          inputmode=${isWhole ? "numeric" : "decimal"}
          placeholder=${placeholder}
          autocomplete="off"
          ...${field(key)}
        />
      </label>`,
    )}
    <label class="wide">
      <span>Tools (JSON list in the OpenAI API's format)</span>
      <textarea rows="2" class="mono" spellcheck=${false} placeholder="none" ...${field("tools")}></textarea>
    </label>
    <p class="wide row">
      ${problem ? html`<span class="problem" role="alert">${problem}</span>` : hint}
      <button type="button" class="quiet" onClick=${() => change({ ...EMPTY })}>Reset</button>
    </p>
  </section>`;
}
