// The proposal of another split of a model's layers, and the button that moves to it.

/** @import { PlannedSplit, ProposalStatus } from "../types.js" */

import { ApiError, request } from "../api.js";
import { Notice, onSingleClick } from "../components.js";
import { duration, figures, percent } from "../format.js";
import { html, useState } from "../vendor/preact.js";

/**
 * Render the proposal. The button is gone once the model has moved, because the server then proposes nothing.
 * @param {{ proposal: ProposalStatus }} props
 */
export function Proposal({ proposal }) {
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const { model, way, why, gain, load_s: loadTime, loaded, planned } = proposal;
  const pauses = way === "after";
  const move = async () => {
    setBusy(true);
    setProblem("");
    try {
      await request("cluster/replan", { body: { model, pause: pauses } });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error.message);
    } finally {
      setBusy(false);
    }
  };
  const pause = loadTime === null ? "Answers pause meanwhile." : `Answers pause for about ${duration(loadTime)}.`;
  return html`<div class="proposal" role="group" aria-label=${`Better split of ${model}`}>
    <p>
      <b>${gain === null ? "The machines have less memory than this split counts on." : `Another split is ${percent(gain)} faster.`}</b>
      ${" "}${describe(planned)} Predicted: ${speeds(planned)}${loaded && `, instead of ${speeds(loaded)} now`}.
    </p>
    ${pauses && html`<p class="muted">${pause} ${why}</p>`}
    <p>
      <button type="button" disabled=${isBusy} onClick=${onSingleClick(move)}>
        ${isBusy ? "Moving" : pauses ? "Move, with a pause" : "Move without a pause"}
      </button>
    </p>
    ${problem && html`<${Notice} tone="bad">${problem}</${Notice}>`}
  </div>`;
}

/** @param {PlannedSplit} split */
function describe({ stages }) {
  const parts = stages.map(
    ({ nodes, layers: [start, end] }) =>
      `${nodes.join(" and ")}: ${end - start > 1 ? `layers ${start} to ${end - 1}` : `layer ${start}`}`,
  );
  return `${parts.join("; ")}.`;
}

/** @param {PlannedSplit} split */
function speeds({ tokens_per_s: pace, first_token_s: first }) {
  return `${figures(pace)} tokens/s, first token after ${duration(first)}`;
}
