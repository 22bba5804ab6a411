// Values that this browser stores. Where storage is blocked or full, nothing is stored and nothing fails.

/** @typedef {"localStorage" | "sessionStorage"} Place for all tabs, or for this one until it is closed */

/**
 * Return the value stored under a name, or null without one.
 * @param {string} name
 * @param {Place} [place]
 * @returns {any}
 */
export function readStored(name, place = "localStorage") {
  try {
    return JSON.parse(globalThis[place].getItem(name) ?? "null");
  } catch {
    return null;
  }
}

/**
 * Store a value under a name, or remove it with null. Return false where there is no room.
 * @param {string} name
 * @param {unknown} value
 * @param {Place} [place]
 */
export function writeStored(name, value, place = "localStorage") {
  try {
    if (value === null) globalThis[place].removeItem(name);
    else globalThis[place].setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/**
 * Return the names of the stored values that begin so.
 * @param {string} prefix
 * @param {Place} place
 */
export function storedNames(prefix, place) {
  try {
    const storage = globalThis[place];
    const names = Array.from({ length: storage.length }, (_, index) => storage.key(index) ?? "");
    return names.filter((name) => name.startsWith(prefix));
  } catch {
    return [];
  }
}
