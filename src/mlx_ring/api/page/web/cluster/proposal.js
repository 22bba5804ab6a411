// The proposal of another split of a model's layers, and the button that moves to it.

/** @import { PlannedSplit, ProposalStatus, ReplannedModel } from "../types.js" */

import { ApiError, request } from "../api.js";
import { Notice, onSingleClick } from "../components.js";
import { bytes, duration, figures, percent } from "../format.js";
import { html, useState } from "../vendor/preact.js";

/**
 * Render the proposal. The server proposes nothing once the model has moved.
 * @param {{ proposal: ProposalStatus, onMoved: (text: string) => void }} props
 */
export function Proposal({ proposal, onMoved }) {
  const { title, details, pause } = explain(proposal);
  return html`<div class="proposal" role="group" aria-label=${`Better split of ${proposal.model}`}>
    <p><b>${title}</b> ${details}</p>
    ${pause && html`<p class="muted">${pause}</p>`}
    <${MoveButton} proposal=${proposal} onMoved=${onMoved} />
  </div>`;
}

/**
 * Render the button that moves a model to its proposed split. `onMoved` gets a sentence once it has moved.
 * @param {{ proposal: ProposalStatus, onMoved: (text: string) => void }} props
 */
export function MoveButton({ proposal, onMoved }) {
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const { model } = proposal;
  const pauses = proposal.way !== "beside";
  const move = async () => {
    setBusy(true);
    setProblem("");
    try {
      /** @type {ReplannedModel} */
      const { moved } = await (
        await request("cluster/replan", { body: { model, pause: proposal.needs_pause } })
      ).json();
      onMoved(
        moved ? `${model} has moved, in ${duration(moved.seconds)}.` : `${model} runs on the best split already.`,
      );
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error.message);
    } finally {
      setBusy(false);
    }
  };
  return html`<p>
      <button type="button" disabled=${isBusy} onClick=${onSingleClick(move)}>
        ${isBusy ? `Moving ${model}` : `Move ${model} there, ${pauses ? "with" : "without"} a pause`}
      </button>
    </p>
    ${problem && html`<${Notice} tone="bad">${problem}</${Notice}>`}`;
}

/**
 * Return the texts of a proposal.
 * @param {ProposalStatus} proposal
 */
export function explain({ model, why, gain, way, pause_s: pauseTime, gained_bytes: gained, loaded, planned }) {
  const length = pauseTime === null ? "meanwhile" : `for about ${duration(pauseTime)}`;
  const loads = gained === null ? "" : `Workers stay, and load ${bytes(gained)} of layers that they gain. `;
  const before = loaded ? `, instead of ${speeds(loaded)} now` : "";
  return {
    title:
      gain === null
        ? "The machines have less memory than this split counts on."
        : `${placeOf(model, planned)} is ${faster(gain)}.`,
    details: `${describe(planned)} Predicted: ${speeds(planned)}${before}.`,
    pause: way === "beside" ? "" : `${loads}Answers pause ${length}. ${why ?? ""}`,
  };
}

/** @param {number} gain */
function faster(gain) {
  return gain < 1 ? `${percent(gain)} faster` : `${figures(1 + gain, 2)} times as fast`;
}

/**
 * @param {string} model
 * @param {PlannedSplit} split
 */
function placeOf(model, { stages }) {
  const nodes = new Set(stages.flatMap((stage) => stage.nodes));
  return nodes.size === 1 ? `${model} on ${[...nodes].join("")} alone` : "Another split";
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
