// How many answers and downloads stream at once, over all tabs of this browser.
//
// A browser opens six connections to a server over HTTP/1.1. Each tab needs one for live figures and one for the rest.

/** Largest number of answers that stream at once. */
export const MAX_STREAMS = 3;

const NAMES = Array.from({ length: MAX_STREAMS }, (_, place) => `mlx-ring.answer-${place}`);

/**
 * Answers of this tab that wait, where the browser has no locks: pages of other machines without TLS.
 * @type {(() => void)[]}
 */
const waiting = [];
let free = MAX_STREAMS;

/**
 * Wait until another answer may stream. Return the function that lets the next one.
 * @param {AbortSignal} signal
 * @param {() => void} onWait called if others must end first
 * @returns {Promise<() => void>}
 * @throws {DOMException} AbortError if the signal aborts first
 */
export async function takeSlot(signal, onWait) {
  signal.throwIfAborted();
  const locks = globalThis.navigator?.locks;
  if (!locks) return takeOwnSlot(signal, onWait);
  try {
    return (await takeFreeLock(locks)) ?? (await takeAnyLock(locks, signal, onWait));
  } catch (error) {
    signal.throwIfAborted();
    // A browser that blocks storage also refuses locks.
    console.warn(error);
    return takeOwnSlot(signal, onWait);
  }
}

let isDownloadFree = true;

/**
 * Take the only place for a download that streams its progress. Return the function that frees it; null if another
 * download has it, in any tab.
 * @returns {Promise<(() => void) | null>}
 */
export async function takeDownloadSlot() {
  const locks = globalThis.navigator?.locks;
  try {
    if (locks) return await holdLock(locks, "mlx-ring.download", { ifAvailable: true });
  } catch (error) {
    // A browser that blocks storage also refuses locks.
    console.warn(error);
  }
  if (!isDownloadFree) return null;
  isDownloadFree = false;
  return () => {
    isDownloadFree = true;
  };
}

/** @param {LockManager} locks */
async function takeFreeLock(locks) {
  for (const name of NAMES) {
    const release = await holdLock(locks, name, { ifAvailable: true });
    if (release) return release;
  }
  return null;
}

/**
 * Wait for the first lock that another answer releases.
 * @param {LockManager} locks
 * @param {AbortSignal} signal
 * @param {() => void} onWait
 */
async function takeAnyLock(locks, signal, onWait) {
  onWait();
  const others = new AbortController();
  const onAbort = () => others.abort();
  signal.addEventListener("abort", onAbort, { once: true });
  /** @type {(() => void) | null} */
  let taken = null;
  const holds = NAMES.map(async (name) => {
    const release = await holdLock(locks, name, { signal: others.signal });
    if (!release) return;
    if (taken) return release();
    taken = release;
    others.abort();
  });
  if (signal.aborted) onAbort();
  // The others end by the abort, which is no failure.
  await Promise.allSettled(holds);
  if (taken) return /** @type {() => void} */ (taken);
  throw signal.reason;
}

/**
 * Hold a lock until the returned function is called. Return null if it is not available.
 * @param {LockManager} locks
 * @param {string} name
 * @param {LockOptions} options
 * @returns {Promise<(() => void) | null>}
 */
function holdLock(locks, name, options) {
  return new Promise((resolve, reject) => {
    const hold = (/** @type {Lock | null} */ lock) =>
      lock ? new Promise((release) => resolve(() => release(undefined))) : resolve(null);
    locks.request(name, options, hold).catch(reject);
  });
}

/**
 * @param {AbortSignal} signal
 * @param {() => void} onWait
 */
async function takeOwnSlot(signal, onWait) {
  if (free > 0) {
    free -= 1;
    return releaseOwnSlot;
  }
  onWait();
  await new Promise((resolve, reject) => {
    const go = () => resolve(undefined);
    waiting.push(go);
    const onAbort = () => {
      const place = waiting.indexOf(go);
      if (place >= 0) waiting.splice(place, 1);
      reject(signal.reason);
    };
    signal.addEventListener("abort", onAbort, { once: true });
  });
  return releaseOwnSlot;
}

function releaseOwnSlot() {
  const next = waiting.shift();
  if (next) next();
  else free += 1;
}
