// Libraries that are loaded when a message first needs them.

import { useEffect, useState } from "../vendor/preact.js";

/** @typedef {import("../vendor/highlight.min.js").Highlighter} Highlighter */
/** @typedef {import("../vendor/katex.min.js").Katex} Katex */

/** @returns {Promise<Highlighter>} */
export const loadHighlighter = () => import("../vendor/highlight.min.js").then((module) => module.default);

/** @returns {Promise<Katex>} */
export const loadKatex = () => import("../vendor/katex.min.js").then(() => window.katex);

/** @type {Map<() => Promise<unknown>, unknown>} */
const loaded = new Map();

/**
 * Return a library, or null until it is loaded. Without a load function nothing is loaded.
 * @template T
 * @param {(() => Promise<T>) | null} load always the same function for a library
 * @returns {T | null}
 */
export function useLibrary(load) {
  const known = load ? /** @type {T | undefined} */ (loaded.get(load)) : undefined;
  const [, setLoads] = useState(0);
  useEffect(() => {
    if (!load || known) return undefined;
    let isNeeded = true;
    load().then(
      (library) => {
        loaded.set(load, library);
        if (isNeeded) setLoads((count) => count + 1);
      },
      () => {}, // The server has stopped or was updated: the source stays as it is.
    );
    return () => {
      isNeeded = false;
    };
  }, [load]);
  return known ?? null;
}
