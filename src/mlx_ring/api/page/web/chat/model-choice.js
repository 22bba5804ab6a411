// The choice of the model that answers, and what is said of one that is not loaded.

/** @import { Job, ModelJobs } from "../catalog/model-jobs.js" */
/** @import { ChatModel } from "../models.js" */
/** @import { Conversation } from "./conversation.js" */

import { Notice, onSingleClick } from "../components.js";
import { duration } from "../format.js";
import { readStored, writeStored } from "../storage.js";
import { html } from "../vendor/preact.js";
import { isAnswer } from "./conversation.js";

const STORED_MODEL = "mlx-ring.model";

/** Models that a person chose, by conversation. @typedef {Map<string, string>} Picks */

/** Return the model that this browser chose last, or null. */
export function readModel() {
  const stored = readStored(STORED_MODEL);
  return typeof stored === "string" ? stored : null;
}

/** @param {string} id */
export function storeModel(id) {
  writeStored(STORED_MODEL, id);
}

/**
 * Return the name of the model that a conversation wants: the one chosen for it, else that of its last answer. A new
 * one wants the model chosen last if the server has it, else the server's first. The server may not have it any more.
 * @param {Conversation} conversation
 * @param {Picks} picks
 * @param {string | null} stored
 * @param {ChatModel[]} models
 * @returns {string | null}
 */
export function wantedModel({ id, messages }, picks, stored, models) {
  const picked = picks.get(id);
  if (picked !== undefined) return picked;
  const answer = messages.findLast((message) => isAnswer(message) && message.model);
  const answered = answer && isAnswer(answer) ? answer.model : null;
  const usual = models.length === 0 || findModel(models, stored) ? stored : null;
  return answered ?? usual ?? models[0]?.id ?? null;
}

/**
 * Return the served model of a name, or undefined.
 * @param {ChatModel[]} models
 * @param {string | null} name
 */
export function findModel(models, name) {
  return models.find(({ id, aliases }) => id === name || aliases.includes(name ?? ""));
}

/**
 * Return true if the server lists its models, but not this one: a request would be refused.
 * @param {ChatModel[]} models
 * @param {string | null} name
 */
export function isMissing(models, name) {
  return name !== null && models.length > 0 && !findModel(models, name);
}

/**
 * Render the choice of models: served ones, those on the disk, and the way to more.
 * @param {{ models: ChatModel[], onDisk: string[], wanted: string | null, setModel: (id: string) => void }} props
 */
export function ModelSelect({ models, onDisk, wanted, setModel }) {
  const current = findModel(models, wanted)?.id ?? wanted;
  const onChange = (/** @type {{ currentTarget: HTMLSelectElement }} */ { currentTarget: select }) => {
    const name = select.value;
    // The last entry is no model: it only opens another view.
    if (name) return setModel(name);
    select.value = current ?? "";
    location.hash = "#models";
  };
  const served = new Set(models.map(({ id }) => id));
  const others = onDisk.filter((name) => !findModel(models, name));
  if (current !== null && !served.has(current) && !others.includes(current)) others.unshift(current);
  // Without a list, such as that of a server that has stopped, nothing is known.
  const absent = models.length ? "not loaded" : "";
  const option = (/** @type {string} */ id, /** @type {string} */ note) =>
    html`<option key=${id} value=${id} selected=${id === current}>${note ? `${id} (${note})` : id}</option>`;
  return html`<label><span>Model</span>
    <select value=${current} onChange=${onChange}>
      ${models.map(({ id, note }) => option(id, note))} ${others.map((id) => option(id, absent))}
      <option value="">More models…</option>
    </select>
  </label>`;
}

/**
 * Render why the wanted model does not answer at once, and what to do, or that it was just loaded from this page.
 * @param {{
 *   models: ChatModel[], wanted: string | null, job: Job | undefined, jobs: ModelJobs, setModel: (id: string) => void
 * }} props
 */
export function ModelNotice({ models, wanted, job, jobs, setModel }) {
  const model = findModel(models, wanted);
  if (wanted && job?.kind === "load" && job.served && model?.state === "ready") {
    const dismiss = html`<button type="button" class="quiet" onClick=${() => jobs.dismiss(wanted)}>Dismiss</button>`;
    return html`<${Notice} action=${dismiss}>${wanted} is loaded, after ${duration(job.seconds)}.</${Notice}>`;
  }
  if (!wanted || !models.length || (model && model.state !== "unloaded")) return null;
  if (job?.waitsFor) {
    const cancel = html`<button type="button" class="quiet" onClick=${onSingleClick(() => jobs.cancelLoad(wanted))}>
      Cancel
    </button>`;
    return html`<${Notice} tone="busy" action=${cancel}>${wanted} waits for the load of ${job.waitsFor}.</${Notice}>`;
  }
  if (job?.isRunning) {
    return html`<${Notice} tone="busy">${job.kind === "unload" ? "Unloading" : "Loading"} ${wanted}.</${Notice}>`;
  }
  const other = models.find(({ id, state }) => id !== model?.id && state === "ready");
  const buttons = html`<span class="row">
    ${!model && html`<button type="button" onClick=${onSingleClick(() => jobs.load(wanted))}>Load ${wanted}</button>`}
    ${other && html`<button type="button" onClick=${() => setModel(other.id)}>Use ${other.id}</button>`}
  </span>`;
  const text = `${wanted} is not loaded${model ? ": sending loads it." : "."} ${job?.problem ?? ""}`;
  return html`<${Notice} tone=${job?.problem ? "bad" : "note"} action=${buttons}>${text}</${Notice}>`;
}
