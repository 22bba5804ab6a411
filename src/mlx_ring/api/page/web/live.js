// The cluster's state, kept up to date while the page is visible.

/** @import { ClusterState, LogLine, Rates, PatchOperation } from "./types.js" */

import { ApiError, apiKey, readEvents, request } from "./api.js";
import { applyPatch } from "./patch.js";

const SILENCE_MS = 15_000;
const HIDDEN_MS = 30_000;
const RETRY_DELAYS_S = [0.5, 1, 2, 4];
const MAX_POINTS = 300;
const MAX_LINES = 300;

/**
 * Pace at one moment, for charts. `pace` is null where a line must break.
 * @typedef {{ time: number, pace: Record<string, Rates> | null }} Point
 */

/**
 * What is known now.
 * @typedef {object} Snapshot
 * @property {"connecting" | "open" | "lost" | "locked" | "paused" | "unfollowed"} connection "locked" if a
 *   key is required, "paused" if the page is hidden, "unfollowed" if too many others follow the server
 * @property {ClusterState | null} state last state of the server; it stays while the connection is lost
 * @property {LogLine[]} lines of the head's log
 * @property {Point[]} points one for each second
 * @property {string | null} problem why there is no connection
 * @property {number | null} retryAt time of the next attempt, in the browser's milliseconds
 */

const TOO_MANY = 429;
const EMPTY = { state: null, lines: [], points: [], problem: null, retryAt: null };

/**
 * Return true if the server answers requests, with live figures or without.
 * @param {Snapshot["connection"]} connection
 */
export function answers(connection) {
  return connection === "open" || connection === "unfollowed";
}

/** One connection to `/cluster/events`, which connects again by itself. */
export class LiveCluster {
  /** @type {Snapshot} */
  now = { connection: lacksKey() ? "locked" : "connecting", ...EMPTY };
  /** @type {Set<(now: Snapshot) => void>} */
  #listeners = new Set();
  #abort = new AbortController();
  #wake = () => {};
  #attempt = 0;
  #retriesAtOnce = false;
  #isHidden = false;

  /**
   * Call a listener after every change. Return a function that unsubscribes it.
   * @param {(now: Snapshot) => void} listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /** Connect, and pause while the page stays hidden. */
  start() {
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let hiding;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(hiding);
      if (document.hidden) hiding = setTimeout(() => this.#pause(), HIDDEN_MS);
      else this.#resume();
    });
    window.addEventListener("online", () => this.now.connection === "lost" && this.retry());
    this.#run();
  }

  /** Connect again now. */
  retry() {
    this.#retriesAtOnce = true;
    this.#attempt = 0;
    this.#abort.abort();
    this.#wake();
  }

  /**
   * Change the API key, or forget it with an empty string. Everything read with the old key is dropped.
   * @param {string} value
   */
  useKey(value) {
    if (value) apiKey.set(value);
    else apiKey.forget();
    this.#update({ connection: "connecting", ...EMPTY });
    this.retry();
  }

  /**
   * Ask for an API key, because the server refused a request without a valid one.
   * @param {string} problem
   */
  lock(problem) {
    if (this.now.connection === "locked") return;
    this.#update({ connection: "locked", ...EMPTY, problem });
    this.#abort.abort();
  }

  async #run() {
    if (this.now.connection === "locked") await this.#sleep(null);
    for (;;) await this.#sleep(this.#planRetry(await this.#connect()));
  }

  /** Read events until the connection ends. Return the error that ended it, if any. */
  async #connect() {
    const abort = new AbortController();
    this.#abort = abort;
    let alarm = setTimeout(() => abort.abort(), SILENCE_MS);
    const onBytes = () => {
      clearTimeout(alarm);
      alarm = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      const response = await request("cluster/events", { signal: abort.signal, accept: "text/event-stream" });
      for await (const { event, data } of readEvents(response, onBytes)) this.#onEvent(event, JSON.parse(data));
      return null;
    } catch (error) {
      return error;
    } finally {
      clearTimeout(alarm);
    }
  }

  /**
   * Return the time of the next attempt. Null: wait until `retry` is called.
   * @param {unknown} error
   */
  #planRetry(error) {
    if (this.#retriesAtOnce) {
      this.#retriesAtOnce = false;
      return Date.now();
    }
    if (this.now.connection === "locked") return null;
    const apiError = error instanceof ApiError ? error : null;
    if (apiError?.status === 401) {
      this.#update({ connection: "locked", ...EMPTY, problem: apiKey.get() ? apiError.message : null });
      return null;
    }
    if (this.#isHidden) {
      this.#update({ connection: "paused" });
      return null;
    }
    const delayS = apiError?.retryAfterS ?? RETRY_DELAYS_S[this.#attempt] ?? RETRY_DELAYS_S.at(-1) ?? 0;
    this.#attempt += 1;
    const retryAt = Date.now() + 1000 * delayS * (0.85 + 0.3 * Math.random());
    const problem = apiError?.message ?? "The connection to the server broke.";
    const connection = apiError?.status === TOO_MANY ? "unfollowed" : "lost";
    this.#update({ connection, problem, retryAt, points: withGap(this.now.points) });
    return retryAt;
  }

  /** @param {number | null} until */
  #sleep(until) {
    return new Promise((done) => {
      /** @type {ReturnType<typeof setTimeout> | undefined} */
      let timer;
      // A retry that wakes this sleep is done with it. A later one means the connection that is made then.
      const wake = () => {
        clearTimeout(timer);
        this.#retriesAtOnce = false;
        this.#wake = () => {};
        done(undefined);
      };
      this.#wake = wake;
      if (this.#retriesAtOnce) wake();
      else if (until !== null) timer = setTimeout(wake, Math.max(0, until - Date.now()));
    });
  }

  #pause() {
    this.#isHidden = true;
    this.#abort.abort();
  }

  #resume() {
    this.#isHidden = false;
    if (["paused", "lost", "unfollowed"].includes(this.now.connection)) this.retry();
  }

  /**
   * @param {string} event
   * @param {any} data
   */
  #onEvent(event, data) {
    this.#attempt = 0;
    if (event === "log") this.#update({ lines: joinLines(this.now.lines, data).slice(-MAX_LINES) });
    else if (event === "state") this.#onState(data);
    else if (event === "change" && this.now.state)
      this.#onState(applyPatch(this.now.state, /** @type {PatchOperation[]} */ (data)));
  }

  /** @param {ClusterState} state */
  #onState(state) {
    const before = this.now.state;
    const points = before && before.began !== state.began ? [] : this.now.points;
    const point = { time: state.time, pace: state.pace };
    this.#update({
      connection: "open",
      state,
      points: [...points, point].slice(-MAX_POINTS),
      problem: null,
      retryAt: null,
    });
  }

  /** @param {Partial<Snapshot>} change */
  #update(change) {
    this.now = { ...this.now, ...change };
    for (const listener of this.#listeners) listener(this.now);
  }
}

/** Return true if the HTML says that the server requires a key, and there is none: asking would only be refused. */
function lacksKey() {
  return document.documentElement.dataset.asks === "key" && !apiKey.get();
}

/**
 * Append new log lines. A server that starts again numbers its lines from one and sends them all.
 * @param {LogLine[]} known
 * @param {LogLine[]} added
 */
function joinLines(known, added) {
  const last = known.at(-1);
  const first = added.at(0);
  return last && first && first.number <= last.number ? added : [...known, ...added];
}

/**
 * Break the chart's line, because nothing is known of the time without a connection.
 * @param {Point[]} points
 * @returns {Point[]}
 */
function withGap(points) {
  const last = points.at(-1);
  return last?.pace ? [...points, { time: last.time + 0.5, pace: null }] : points;
}
