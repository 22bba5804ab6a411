// A prediction of the memory and speed of a model on this cluster.

/** @import { Answer, Outcome } from "../types.js" */

import { ApiError, request } from "../api.js";
import { onSingleClick } from "../components.js";
import { bytes, duration, figures } from "../format.js";
import { html, useState } from "../vendor/preact.js";

/**
 * Render a button that asks for a prediction, and the answer.
 * @param {{ model: string }} props
 */
export function Prediction({ model }) {
  const [text, setText] = useState("");
  const [isBusy, setBusy] = useState(false);
  const predict = async () => {
    setBusy(true);
    setText(await readPrediction(model));
    setBusy(false);
  };
  return html`<p class="row prediction">
    <button type="button" disabled=${isBusy || !model} onClick=${onSingleClick(predict)}>
      ${isBusy ? "Planning" : "Predict memory and speed"}
    </button>
    <span class="muted" role="status">${text}</span>
  </p>`;
}

/** @param {string} model */
async function readPrediction(model) {
  try {
    const response = await request("cluster/what-if", { body: { model } });
    /** @type {Answer} */
    const { outcomes, remarks = [] } = await response.json();
    return [...outcomes.map(describeOutcome), ...remarks].join(" ");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return error.message;
  }
}

/**
 * Return a prediction as a sentence.
 * @param {Outcome} outcome
 */
export function describeOutcome({ fits, why, memory_bytes, tokens_per_s_range: speeds, first_token_s }) {
  if (!fits) return `It does not fit: ${why}`;
  const [low = 0, high = 0] = speeds ?? [];
  const first = first_token_s ? `, first token after ${duration(first_token_s)}` : "";
  return `Predicted: ${bytes(memory_bytes)} of memory, ${figures(low)} to ${figures(high)} tokens/s${first}.`;
}
