// Loads, unloads and downloads that this page asked for or follows. They continue while another view is open.

/** @import { Model, PullStatus } from "../types.js" */

import { ApiError, isAbort, readEvents, request } from "../api.js";
import { takeDownloadSlot } from "../chat/answer-slots.js";
import { readDisk } from "../models.js";

/**
 * What the page asked of a model. One that ended stays until a person has read it.
 * @typedef {object} Job
 * @property {"load" | "unload" | "download"} kind
 * @property {boolean} isRunning
 * @property {string} problem a sentence, or empty
 * @property {boolean} isConflict whether the server refused because the model is in use
 * @property {boolean} isTooLarge whether the server refused a download because no machines here could load the model
 * @property {string} waitsFor models of which the load of one must end first, or empty
 * @property {PullStatus | null} progress of a download
 * @property {boolean} loadsNext whether the model is loaded after its download
 * @property {string} served the server's name of the model once the job has ended well, else empty
 * @property {number} startedAt in milliseconds of `performance.now`
 * @property {number} seconds that a load took
 */

/** @typedef {Record<string, Job>} Jobs by the model's name */

const CONFLICT = 409;
const TOO_LARGE = "exceeds_memory";
const STOPPED = "The download stopped before it was complete. Start it again.";
/** Largest number of loads that are sent at once. */
const MAX_LOADS = 2;
/** Time between two looks at downloads that others began. */
const FOLLOW_MS = 2000;
/** @type {Omit<Job, "kind">} */
const NEW_JOB = {
  isRunning: true,
  problem: "",
  isConflict: false,
  isTooLarge: false,
  waitsFor: "",
  progress: null,
  loadsNext: false,
  served: "",
  startedAt: 0,
  seconds: 0,
};

/** The jobs of this page. */
export class ModelJobs {
  /** @type {Jobs} */
  now = {};
  /** @type {Set<(now: Jobs) => void>} */
  #listeners = new Set();
  /** @type {Map<string, AbortController>} */
  #downloads = new Map();
  /** Models whose downloads others began, and this page follows. @type {Set<string>} */
  #followed = new Set();
  #isWatching = false;
  /** Names and bytes of downloads that this page does not follow by itself. @type {Set<string | number>} */
  #left = new Set();
  /** Models whose loads the server has. @type {Set<string>} */
  #loading = new Set();
  /**
   * Loads that wait for those, the oldest first.
   * @type {Map<string, { begin: () => void, refuse: (why: Error) => void }>}
   */
  #waiting = new Map();

  /**
   * Call a listener after every change. Return a function that unsubscribes it.
   * @param {(now: Jobs) => void} listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /**
   * Download what is missing of a model, then load it. A download in progress continues, and the load follows it.
   * @param {string} model
   */
  async add(model) {
    if (isDownloading(this.now[model])) this.#set(model, { loadsNext: true });
    else await this.download(model, true);
  }

  /**
   * Load a model that is on the disk, and serve it from now on. Only two loads are sent at once, because each holds a
   * connection. A browser opens six to a server: three for answers, and one for the live figures.
   * @param {string} model
   */
  load(model) {
    return this.#run(model, "load", false, () =>
      this.#inTurn(model, () => nameOf(request("models/load", { body: { model } }))),
    );
  }

  /**
   * Wait until fewer loads are under way, then load.
   * @param {string} model
   * @param {() => Promise<string>} load
   */
  async #inTurn(model, load) {
    if (this.#loading.size < MAX_LOADS) this.#loading.add(model);
    else {
      await new Promise((begin, refuse) => {
        this.#waiting.set(model, { begin: () => begin(undefined), refuse });
        this.#showWaiting();
      });
      this.#set(model, { startedAt: performance.now() });
    }
    try {
      return await load();
    } finally {
      this.#loading.delete(model);
      this.#beginNext();
    }
  }

  /** Begin the load that has waited longest, if any does. */
  #beginNext() {
    const [next] = this.#waiting;
    if (next) {
      const [model, { begin }] = next;
      this.#waiting.delete(model);
      this.#loading.add(model);
      this.#set(model, { waitsFor: "" });
      begin();
    }
    this.#showWaiting();
  }

  /** Show for which others each load waits. While any does, let the browser ask before it closes the page. */
  #showWaiting() {
    let before = [...this.#loading].join(" or ");
    for (const model of this.#waiting.keys()) {
      this.#set(model, { waitsFor: before });
      before = model;
    }
    if (this.#waiting.size) window.addEventListener("beforeunload", askBeforeLeave);
    else window.removeEventListener("beforeunload", askBeforeLeave);
  }

  /**
   * Cancel a load that waits for others. The server does not know of it yet.
   * @param {string} model
   */
  cancelLoad(model) {
    const waits = this.#waiting.get(model);
    this.#waiting.delete(model);
    waits?.refuse(new DOMException("The load was cancelled.", "AbortError"));
    this.#showWaiting();
  }

  /**
   * Free a model's memory. `force` ends its requests.
   * @param {string} model
   */
  unload(model, force = false) {
    return this.#run(model, "unload", false, () => nameOf(request("models/unload", { body: { model, force } })));
  }

  /**
   * Download a model to the head's machine. Return true if it arrived, and was loaded where that was wanted.
   * @param {string} model
   * @param {boolean} [loadsNext]
   * @param {boolean} [force] whether to download also what the machines here could not load
   */
  async download(model, loadsNext = false, force = false) {
    if (this.now[model]?.isRunning) return false;
    const abort = new AbortController();
    this.#downloads.set(model, abort);
    const isHere = await this.#run(model, "download", loadsNext, () => this.#pull(model, abort.signal, force));
    return isHere && this.now[model]?.loadsNext ? this.load(model) : isHere;
  }

  /**
   * Download a model, and return its name. Only one download streams its progress, because a connection for each would
   * leave none for the rest of the page. The server continues the others, and its list tells their progress.
   * @param {string} model
   * @param {AbortSignal} signal
   * @param {boolean} force
   */
  async #pull(model, signal, force) {
    /** Function that frees the place for a stream; null if another download has it. @type {(() => void) | null} */
    let release = null;
    let isComplete = false;
    try {
      for await (const progress of pullModel(model, signal, force)) {
        this.#set(model, { progress });
        isComplete = progress.status === "done";
        if (isComplete || release || !progress.total_bytes) continue;
        release = await takeDownloadSlot();
        if (!release) break;
      }
    } finally {
      release?.();
    }
    if (!isComplete) await this.#untilOnDisk(model, signal);
    return model;
  }

  /**
   * Follow this page's download in the server's list until it is complete.
   * @param {string} model
   * @param {AbortSignal} signal
   * @throws {ApiError} if it ends before
   */
  async #untilOnDisk(model, signal) {
    const names = new Set([model]);
    for (;;) {
      await new Promise((done) => setTimeout(done, FOLLOW_MS));
      signal.throwIfAborted();
      const disk = await readDisk(signal);
      signal.throwIfAborted();
      if (!disk) continue;
      const total = totalOf(/** @type {Job} */ (this.now[model]));
      const pull = disk.pulls.find((each) => names.has(each.model) || each.total_bytes === total);
      if (pull) {
        names.add(pull.model);
        this.#set(model, { progress: { ...pull, model } });
      } else if (disk.models.some(({ name, short_names }) => names.has(name) || short_names.includes(model))) return;
      else throw new ApiError(STOPPED);
    }
  }

  /**
   * Follow downloads in progress that another page or program began, except those that this page left. The server's
   * list tells their progress, because a connection for each would leave none for the rest of the page. Nothing stays
   * of one that ended.
   * @param {PullStatus[]} pulls
   */
  follow(pulls) {
    for (const model of this.#followed) {
      const progress = pulls.find((pull) => pull.model === model);
      if (progress) this.#set(model, { progress });
      else this.#endFollowed(model);
    }
    for (const pull of this.others(pulls)) {
      if (!this.#left.has(pull.model) && !this.#left.has(pull.total_bytes)) this.join(pull);
    }
  }

  /**
   * Follow a download in progress of another page or program.
   * @param {PullStatus} progress
   */
  join(progress) {
    if (this.now[progress.model]?.isRunning) return;
    this.#followed.add(progress.model);
    this.#update({ ...this.now, [progress.model]: { ...NEW_JOB, kind: "download", progress } });
    this.#watch();
  }

  /** Read the list of downloads while this page follows any. */
  async #watch() {
    if (this.#isWatching) return;
    this.#isWatching = true;
    while (this.#followed.size) {
      await new Promise((done) => setTimeout(done, FOLLOW_MS));
      const disk = this.#followed.size ? await readDisk() : null;
      if (disk) this.follow(disk.pulls);
    }
    this.#isWatching = false;
  }

  /** @param {string} model */
  #endFollowed(model) {
    const loadsNext = this.now[model]?.loadsNext ?? false;
    this.#followed.delete(model);
    this.dismiss(model);
    if (loadsNext) this.download(model, true);
  }

  /**
   * Return the downloads in progress that are no job of this page. A job may have a short name: then its bytes tell.
   * @param {PullStatus[]} pulls
   */
  others(pulls) {
    const own = Object.values(this.now).filter(({ kind }) => kind === "download");
    // Until the server has said how many bytes a job awaits, any download may be that job's.
    if (own.some((job) => job.isRunning && !totalOf(job))) return [];
    const totals = own.map(totalOf);
    const isOwn = (/** @type {Job | undefined} */ job) => job && (job.isRunning || job.kind === "download");
    return pulls.filter(({ model, total_bytes }) => !isOwn(this.now[model]) && !totals.includes(total_bytes));
  }

  /**
   * Stop a download, for all who wait for it. The server keeps the bytes that arrived.
   * @param {string} model
   */
  async cancel(model) {
    const job = this.now[model];
    if (!isDownloading(job)) return;
    this.#left.add(model).add(totalOf(job));
    this.#downloads.get(model)?.abort();
    if (this.#followed.delete(model)) this.dismiss(model);
    try {
      await request("models/pull", { body: { model, cancel: true } });
    } catch (error) {
      // It ended meanwhile, or the list of downloads shows that it continues.
      if (!(error instanceof ApiError)) throw error;
    }
  }

  /**
   * Forget a job that ended.
   * @param {string} model
   */
  dismiss(model) {
    const { [model]: _, ...others } = this.now;
    this.#update(others);
  }

  /** Forget all jobs that ended, except downloads whose models can still be loaded. */
  dismissEnded() {
    const stays = (/** @type {Job} */ job) => job.isRunning || (job.kind === "download" && !job.problem);
    this.#update(Object.fromEntries(Object.entries(this.now).filter(([, job]) => stays(job))));
  }

  /**
   * Run a job. Return true if it ended without a problem.
   * @param {string} model
   * @param {Job["kind"]} kind
   * @param {boolean} loadsNext
   * @param {() => Promise<string>} act returns the server's name of the model
   */
  async #run(model, kind, loadsNext, act) {
    if (this.now[model]?.isRunning) return false;
    /** @type {Job} */
    const job = { ...NEW_JOB, kind, loadsNext, startedAt: performance.now() };
    this.#update({ ...this.now, [model]: job });
    try {
      const served = await act();
      const { startedAt } = this.now[model] ?? job;
      this.#set(model, { isRunning: false, served, seconds: (performance.now() - startedAt) / 1000 });
      return true;
    } catch (error) {
      if (isAbort(error)) this.dismiss(model);
      else if (!(error instanceof ApiError)) throw error;
      // The notice of the connection tells why, and goes when the server is back.
      else if (error.code === "unreachable") this.dismiss(model);
      else {
        const [isConflict, isTooLarge] = [error.status === CONFLICT, error.code === TOO_LARGE];
        this.#set(model, { isRunning: false, problem: error.message, isConflict, isTooLarge });
      }
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
 * Return true for a download in progress.
 * @param {Job | undefined} job
 * @returns {job is Job}
 */
function isDownloading(job) {
  return job?.kind === "download" && job.isRunning;
}

/**
 * Return the name under which the server lists the model of its answer.
 * @param {Promise<Response>} answered
 * @returns {Promise<string>}
 */
async function nameOf(answered) {
  /** @type {Pick<Model, "id">} */
  const { id } = await (await answered).json();
  return id;
}

/** @param {BeforeUnloadEvent} event */
function askBeforeLeave(event) {
  event.preventDefault();
  // Older browsers ask only for this value.
  event.returnValue = true;
}

/** @param {Job} job */
function totalOf({ progress }) {
  return progress?.total_bytes ?? 0;
}

/**
 * Download a model to the head's machine. The server continues if this page leaves. Yield what it says of the progress.
 * @param {string} model
 * @param {AbortSignal} signal
 * @param {boolean} [force] whether to download also what the machines here could not load
 * @returns {AsyncGenerator<PullStatus>}
 * @throws {ApiError} if the server refuses, or the download fails or breaks off
 */
export async function* pullModel(model, signal, force = false) {
  const body = { model, stream: true, ...(force && { force }) };
  const response = await request("models/pull", { body, signal, accept: "text/event-stream" });
  for await (const { data } of readEvents(response)) {
    /** @type {PullStatus & { error?: { message: string, code?: string | null } }} */
    const said = JSON.parse(data);
    if (said.error) throw new ApiError(said.error.message, { code: said.error.code ?? null });
    yield said;
    if (said.status === "done") return;
  }
  throw new ApiError(STOPPED);
}
