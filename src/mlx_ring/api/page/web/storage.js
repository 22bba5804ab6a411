// Values that this browser stores. Where storage is blocked or full, nothing is stored and nothing fails.

/**
 * Return the value stored under a name, or null without one.
 * @param {string} name
 * @returns {any}
 */
export function readStored(name) {
  try {
    return JSON.parse(localStorage.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

/**
 * Store a value under a name, or remove it with null. Return false where there is no room.
 * @param {string} name
 * @param {unknown} value
 */
export function writeStored(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
