// Loads, unloads and downloads that this page asked for. They continue while another view is open.

import { ApiError, isAbort, readLines, request } from "../api.js";

/**
 * Download so far. `total` is 0 until the server knows it.
 * @typedef {object} Progress
 * @property {string} status as the server says it
 * @property {Record<string, { total: number, completed: number }>} parts by their digests
 */

/**
 * What the page asked of a model. One that ended stays if it has a problem, or was a download.
 * @typedef {object} Job
 * @property {"load" | "unload" | "download"} kind
 * @property {boolean} isRunning
 * @property {string} problem a sentence, or empty
 * @property {boolean} isConflict whether the server refused because the model is in use
 * @property {Progress | null} progress of a download
 */

/** @typedef {Record<string, Job>} Jobs by the model's name */

/** @type {Progress} */
const NO_PROGRESS = { status: "", parts: {} };
const CONFLICT = 409;

/** The jobs of this page. */
export class ModelJobs {
  /** @type {Jobs} */
  now = {};
  /** @type {Set<(now: Jobs) => void>} */
  #listeners = new Set();
  /** @type {Map<string, AbortController>} */
  #downloads = new Map();

  /**
   * Call a listener after every change. Return a function that unsubscribes it.
   * @param {(now: Jobs) => void} listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /**
   * Load a model, and serve it from now on.
   * @param {string} model
   */
  load(model) {
    return this.#run(model, "load", () => request("models/load", { body: { model } }));
  }

  /**
   * Free a model's memory. `force` ends its requests.
   * @param {string} model
   */
  unload(model, force = false) {
    return this.#run(model, "unload", () => request("models/unload", { body: { model, force } }));
  }

  /**
   * Download a model to the head's machine.
   * @param {string} model
   */
  download(model) {
    const abort = new AbortController();
    this.#downloads.set(model, abort);
    return this.#run(model, "download", async () => {
      for await (const progress of pullModel(model, abort.signal)) this.#set(model, { progress });
    });
  }

  /**
   * Stop a download.
   * @param {string} model
   */
  cancel(model) {
    this.#downloads.get(model)?.abort();
  }

  /**
   * Forget a job that ended with a problem.
   * @param {string} model
   */
  dismiss(model) {
    const { [model]: _, ...others } = this.now;
    this.#update(others);
  }

  /**
   * Run a job. Return true if it ended without a problem.
   * @param {string} model
   * @param {Job["kind"]} kind
   * @param {() => Promise<unknown>} act
   */
  async #run(model, kind, act) {
    if (this.now[model]?.isRunning) return false;
    this.#update({ ...this.now, [model]: { kind, isRunning: true, problem: "", isConflict: false, progress: null } });
    try {
      await act();
      if (kind === "download") this.#set(model, { isRunning: false });
      else this.dismiss(model);
      return true;
    } catch (error) {
      if (isAbort(error)) this.dismiss(model);
      else if (!(error instanceof ApiError)) throw error;
      else this.#set(model, { isRunning: false, problem: error.message, isConflict: error.status === CONFLICT });
      return false;
    }
  }

  /**
   * @param {string} model
   * @param {Partial<Job>} change
   */
  #set(model, change) {
    const job = this.now[model];
    if (job) this.#update({ ...this.now, [model]: { ...job, ...change } });
  }

  /** @param {Jobs} now */
  #update(now) {
    this.now = now;
    for (const listener of this.#listeners) listener(now);
  }
}

/**
 * Download a model to the head's machine. Yield the progress with each line of the server.
 * @param {string} model
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Progress>}
 * @throws {ApiError} if the server refuses, or the download fails or breaks off
 */
export async function* pullModel(model, signal) {
  const response = await request("api/pull", { body: { model, stream: true }, signal, accept: "application/x-ndjson" });
  let progress = NO_PROGRESS;
  for await (const line of readLines(response)) {
    const said = JSON.parse(line);
    if (said.error) throw new ApiError(String(said.error));
    progress = addProgress(progress, said);
    yield progress;
    if (said.status === "success") return;
  }
  throw new ApiError("The download stopped before it was complete. Start it again.");
}

/**
 * Return the progress after another line. A line may name one file of several.
 * @param {Progress} progress
 * @param {{ status?: string, digest?: string, total?: number, completed?: number }} line
 * @returns {Progress}
 */
export function addProgress({ status, parts }, { status: said = status, digest = "", total, completed }) {
  if (!total) return { status: said, parts };
  return { status: said, parts: { ...parts, [digest]: { total, completed: Math.min(completed ?? 0, total) } } };
}

/**
 * Return the bytes that have arrived, and all those known of.
 * @param {Progress} progress
 */
export function totalProgress({ parts }) {
  const all = Object.values(parts);
  return {
    completed: all.reduce((sum, part) => sum + part.completed, 0),
    total: all.reduce((sum, part) => sum + part.total, 0),
  };
}
