// How the cluster stands, kept up to date for as long as somebody looks.

import { ApiError, events, key, request } from "./api.js";
import { patched } from "./patch.js";

const SILENCE_MS = 15_000;
const HIDDEN_MS = 30_000;
const WAITS_S = [0.5, 1, 2, 4, 8, 15];
const POINTS = 300;
const LINES = 300;
const NOTHING = { state: null, lines: [], points: [], trouble: null, retryAt: null };

/**
 * One connection to `/cluster/events`. `now` holds what is known:
 *   connection: "connecting", "open", "lost", "locked" (a key is needed) or "resting" (nobody looks)
 *   state: the server's last word, null before the first; it stays while the connection is lost
 *   lines: of the head's log; points: one for each second, for charts
 *   trouble: why there is no connection; retryAt: when it is tried again, in the browser's milliseconds
 */
export class Live {
  now = { connection: lacksKey() ? "locked" : "connecting", ...NOTHING };
  #listeners = new Set();
  #abort = new AbortController();
  #wake = () => {};
  #attempt = 0;
  #atOnce = false;
  #unseen = false;

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  start() {
    let hiding = 0;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(hiding);
      if (document.hidden) hiding = setTimeout(() => this.#rest(), HIDDEN_MS);
      else this.#seen();
    });
    window.addEventListener("online", () => this.now.connection === "lost" && this.retry());
    this.#keep();
  }

  /** Try again at once. */
  retry() {
    this.#atOnce = true;
    this.#attempt = 0;
    this.#abort.abort();
    this.#wake();
  }

  /** The key is another one now, or none: whatever was shown with the old one goes. */
  useKey(value) {
    if (value) key.set(value);
    else key.forget();
    this.#tell({ connection: "connecting", ...NOTHING });
    this.retry();
  }

  /** Some request was told that a key is needed, or another one. */
  lock(trouble) {
    if (this.now.connection === "locked") return;
    this.#tell({ connection: "locked", ...NOTHING, trouble });
    this.#abort.abort();
  }

  async #keep() {
    if (this.now.connection === "locked") await this.#until(null);
    for (;;) await this.#until(this.#next(await this.#watch()));
  }

  /** Until the connection ends; gives what ended it. */
  async #watch() {
    const abort = new AbortController();
    this.#abort = abort;
    let alarm = setTimeout(() => abort.abort(), SILENCE_MS);
    const heard = () => {
      clearTimeout(alarm);
      alarm = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      const response = await request("cluster/events", { signal: abort.signal, accept: "text/event-stream" });
      for await (const { event, data } of events(response, heard)) this.#hear(event, JSON.parse(data));
      return null;
    } catch (error) {
      return error;
    } finally {
      clearTimeout(alarm);
    }
  }

  /** When to try again; null: not before somebody says so. */
  #next(trouble) {
    if (this.#atOnce) {
      this.#atOnce = false;
      return Date.now();
    }
    if (this.now.connection === "locked") return null;
    if (trouble instanceof ApiError && trouble.status === 401) {
      this.#tell({ connection: "locked", ...NOTHING, trouble: key.get() ? trouble.message : null });
      return null;
    }
    if (this.#unseen) {
      this.#tell({ connection: "resting" });
      return null;
    }
    const waitS = trouble?.retryAfterS ?? WAITS_S[Math.min(this.#attempt, WAITS_S.length - 1)];
    this.#attempt += 1;
    const retryAt = Date.now() + 1000 * waitS * (0.85 + 0.3 * Math.random());
    const why = trouble instanceof ApiError ? trouble.message : "The connection to the server broke.";
    this.#tell({ connection: "lost", trouble: why, retryAt, points: withGap(this.now.points) });
    return retryAt;
  }

  #until(at) {
    return new Promise((done) => {
      let timer = 0;
      // What wakes this wait is heeded with it; who asks later asks the connection that is made then to be made again.
      const wake = () => {
        clearTimeout(timer);
        this.#atOnce = false;
        this.#wake = () => {};
        done();
      };
      this.#wake = wake;
      if (this.#atOnce) wake();
      else if (at !== null) timer = setTimeout(wake, Math.max(0, at - Date.now()));
    });
  }

  /** A page that nobody sees asks for nothing after a while, and goes on when it is seen. */
  #rest() {
    this.#unseen = true;
    this.#abort.abort();
  }

  #seen() {
    this.#unseen = false;
    if (this.now.connection === "resting" || this.now.connection === "lost") this.retry();
  }

  #hear(event, data) {
    this.#attempt = 0;
    if (event === "log") {
      this.#tell({ lines: joined(this.now.lines, data).slice(-LINES) });
      return;
    }
    const before = this.now.state;
    const state = event === "state" ? data : patched(before, data);
    const points = before && before.began !== state.began ? [] : this.now.points;
    const point = { time: state.time, pace: state.pace };
    this.#tell({ connection: "open", state, points: [...points, point].slice(-POINTS), trouble: null, retryAt: null });
  }

  #tell(change) {
    this.now = { ...this.now, ...change };
    for (const listener of this.#listeners) listener(this.now);
  }
}

/** The page says whether the server asks for a key: it need not be refused to learn that. */
const lacksKey = () => document.documentElement.dataset.asks === "key" && !key.get();

/** Whoever connects again is told all lines again, and so is who meets a server that counts from one again. */
function joined(known, news) {
  const last = known.at(-1);
  return last && news[0].number <= last.number ? news : [...known, ...news];
}

/** A chart draws no line over the time of which nothing is known. */
function withGap(points) {
  const last = points.at(-1);
  return last && last.pace ? [...points, { time: last.time + 0.5, pace: null }] : points;
}
