// Marks of the chats that receive an answer, for all tabs of this browser.
//
// A mark is stored at once, so that no other tab asks in the same chat. The tab renews it, and a mark that is not
// renewed expires. Where the browser has locks, one for each mark tells sooner that its tab has crashed.

import { readStored, writeStored } from "../storage.js";

const PREFIX = "mlx-ring.chat-";
const RENEW_MS = 5000;
/** Age at which a mark is no longer valid. Browsers let the timers of hidden tabs run only once a minute. */
const EXPIRES_MS = 70_000;
/** Age from which a mark must have its lock. A browser grants it in a moment. */
const LOCKED_MS = 2000;

/** @typedef {{ tab: string, at: number }} Mark */

/**
 * Return true if a storage event is about a mark.
 * @param {string | null} name
 */
export function isMark(name) {
  return name?.startsWith(PREFIX) ?? false;
}

/** Marks of one tab, and its look at those of others. */
export class AnswerMarks {
  #tab;
  /** Functions that release the locks, by the chat's id. @type {Map<string, () => void>} */
  #held = new Map();
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #timer;

  /** @param {string} tab id of this tab */
  constructor(tab) {
    this.#tab = tab;
  }

  /**
   * Mark a chat until `end`.
   * @param {string} id
   */
  begin(id) {
    this.#write(id);
    if (this.#held.has(id)) return;
    this.#held.set(id, holdWhile(PREFIX + id));
    this.#timer ??= setInterval(() => {
      for (const each of this.#held.keys()) this.#write(each);
    }, RENEW_MS);
  }

  /**
   * Remove the mark of a chat.
   * @param {string} id
   */
  end(id) {
    if (!this.#held.has(id)) return;
    this.#held.get(id)?.();
    this.#held.delete(id);
    if (!this.isElsewhere(id)) writeStored(PREFIX + id, null);
    if (this.#held.size) return;
    clearInterval(this.#timer);
    this.#timer = undefined;
  }

  /** Remove the marks of all chats of this tab. */
  endAll() {
    for (const id of [...this.#held.keys()]) this.end(id);
  }

  /**
   * Return true if another tab receives an answer in a chat.
   * @param {string} id
   */
  isElsewhere(id) {
    const mark = readMark(id);
    return mark !== null && mark.tab !== this.#tab && Date.now() - mark.at < EXPIRES_MS;
  }

  /**
   * Remove marks of tabs that have crashed, as far as locks tell.
   * @param {Iterable<string>} ids of chats
   */
  async sweep(ids) {
    const names = await heldLocks();
    if (names === null) return;
    for (const id of ids) {
      const mark = readMark(id);
      const isLeft = mark !== null && mark.tab !== this.#tab && Date.now() - mark.at > LOCKED_MS;
      if (isLeft && !names.has(PREFIX + id)) writeStored(PREFIX + id, null);
    }
  }

  /** @param {string} id */
  #write(id) {
    writeStored(PREFIX + id, { tab: this.#tab, at: Date.now() });
  }
}

/**
 * Read the mark of a chat.
 * @param {string} id
 * @returns {Mark | null}
 */
function readMark(id) {
  const mark = readStored(PREFIX + id);
  return typeof mark?.tab === "string" && typeof mark.at === "number" ? mark : null;
}

/**
 * Hold a lock until the returned function is called. Without locks, do nothing.
 * @param {string} name
 * @returns {() => void}
 */
function holdWhile(name) {
  const abort = new AbortController();
  const ended = new Promise((end) => abort.signal.addEventListener("abort", () => end(undefined), { once: true }));
  // A browser that blocks storage also refuses locks, and an answer may end before its lock is free.
  globalThis.navigator?.locks?.request(name, { signal: abort.signal }, () => ended).catch(() => {});
  return () => abort.abort();
}

/**
 * Return the names of the locks that any tab holds, or null where the browser has no locks.
 * @returns {Promise<Set<string> | null>}
 */
async function heldLocks() {
  try {
    const state = await globalThis.navigator?.locks?.query();
    return state ? new Set((state.held ?? []).map(({ name = "" }) => name)) : null;
  } catch {
    return null;
  }
}
