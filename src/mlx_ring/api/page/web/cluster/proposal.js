// The proposal of another split of a model's layers, and the button that moves to it.

/** @import { PlannedSplit, ProposalStatus, ReplannedModel } from "../types.js" */

import { ApiError, request } from "../api.js";
import { BusyButton, Notice } from "../components.js";
import { bytes, duration, figures, percent } from "../format.js";
import { html, useEffect, useState } from "../vendor/preact.js";

/**
 * Move of a model that this page asked for. One that ended stays until a person has read it.
 * @typedef {object} Move
 * @property {boolean} isRunning
 * @property {string} problem a sentence, or empty
 * @property {string} outcome a sentence, or empty
 */

/** Moves of this page. They continue while another view is open. */
export class Moves {
  /** By the model's name. @type {Record<string, Move>} */
  now = {};
  /** @type {Set<(now: Record<string, Move>) => void>} */
  #listeners = new Set();

  /**
   * Call a listener after every change. Return a function that unsubscribes it.
   * @param {(now: Record<string, Move>) => void} listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /**
   * Move a model to its proposed split, once at a time.
   * @param {Pick<ProposalStatus, "model" | "needs_pause">} proposal
   */
  async move({ model, needs_pause: pause }) {
    if (this.now[model]?.isRunning) return;
    this.#set(model, { isRunning: true, problem: "", outcome: "" });
    let [problem, outcome] = ["", ""];
    try {
      /** @type {ReplannedModel} */
      const { moved } = await (await request("cluster/replan", { body: { model, pause } })).json();
      outcome = moved
        ? `${model} has moved, in ${duration(moved.seconds)}.`
        : `${model} runs on the best split already.`;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem = error.message;
    } finally {
      this.#set(model, { isRunning: false, problem, outcome });
    }
  }

  /**
   * Forget a move that ended.
   * @param {string} model
   */
  dismiss(model) {
    const { [model]: _, ...others } = this.now;
    this.#update(others);
  }

  /**
   * @param {string} model
   * @param {Move} move
   */
  #set(model, move) {
    this.#update({ ...this.now, [model]: move });
  }

  /** @param {Record<string, Move>} now */
  #update(now) {
    this.now = now;
    for (const listener of this.#listeners) listener(now);
  }
}

/**
 * Return the moves, and render again when they change.
 * @param {Moves} moves
 */
function useMoves(moves) {
  const [now, setNow] = useState(moves.now);
  useEffect(() => {
    // One may have ended between the first rendering and this.
    setNow(moves.now);
    return moves.subscribe(setNow);
  }, [moves]);
  return now;
}

/**
 * Render how the moves of this page ended. The server proposes nothing once a model has moved.
 * @param {{ moves: Moves }} props
 */
export function MoveOutcomes({ moves }) {
  return Object.entries(useMoves(moves))
    .filter(([, { isRunning }]) => !isRunning)
    .map(
      ([model, { problem, outcome }]) => html`<${Notice}
        key=${model}
        tone=${problem ? "bad" : "note"}
        action=${html`<button type="button" class="quiet" onClick=${() => moves.dismiss(model)}>Dismiss</button>`}
      >${problem ? `${model} was not moved: ${problem}` : outcome}</${Notice}>`,
    );
}

/**
 * Render the proposal.
 * @param {{ proposal: ProposalStatus, moves: Moves }} props
 */
export function Proposal({ proposal, moves }) {
  const { title, details, pause } = explain(proposal);
  return html`<div class="proposal" role="group" aria-label=${`Better split of ${proposal.model}`}>
    <p><b>${title}</b> ${details}</p>
    ${pause && html`<p class="muted">${pause}</p>`}
    <${MoveButton} proposal=${proposal} moves=${moves} />
  </div>`;
}

/**
 * Render the button that moves a model to its proposed split. While it moves, each button of the model is disabled.
 * @param {{ proposal: ProposalStatus, moves: Moves }} props
 */
export function MoveButton({ proposal, moves }) {
  const { model } = proposal;
  const { isRunning = false, problem = "" } = useMoves(moves)[model] ?? {};
  const pauses = proposal.way !== "beside";
  return html`<p>
    <${BusyButton} isBusy=${isRunning} act=${() => moves.move(proposal)}>
      ${isRunning ? `Moving ${model}` : `Move ${model} there, ${pauses ? "with" : "without"} a pause`}
    </${BusyButton}>
    ${problem && html` <span class="state bad">It was not moved.</span>`}
  </p>`;
}

/**
 * Return the texts of a proposal.
 * @param {ProposalStatus} proposal
 */
export function explain(proposal) {
  const { why, way, pause_s: pauseTime, gained_bytes: gained, loaded, planned } = proposal;
  const length = pauseTime === null ? "meanwhile" : `for about ${duration(pauseTime)}`;
  const loads = gained === null ? "" : `Workers stay, and load ${bytes(gained)} of layers that they gain. `;
  const before = loaded ? `, instead of ${speeds(loaded)} now` : "";
  return {
    title: titleOf(proposal),
    details: `${describe(planned)} Predicted: ${speeds(planned)}${before}.`,
    pause: way === "beside" ? "" : `${loads}Answers pause ${length}. ${why ?? ""}`,
  };
}

/** @param {ProposalStatus} proposal */
function titleOf({ model, gain, planned, unused = [] }) {
  if (gain === null) return "The machines have less memory than this split counts on.";
  if (unused.length) return `${placeOf(model, planned)} also uses ${unused.join(", ")}.`;
  return `${placeOf(model, planned)} is ${faster(gain)}.`;
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
