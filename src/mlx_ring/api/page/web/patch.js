// JSON patches (RFC 6902), as far as the server sends them: add, remove and replace in objects, replace in lists.

/** @import { PatchOperation } from "./types.js" */

/**
 * Return the document after the operations. Changed parts are copied, so the old document stays as it was.
 * @template T
 * @param {T} document
 * @param {PatchOperation[]} operations
 * @returns {T}
 */
export function applyPatch(document, operations) {
  return operations.reduce((value, { op, path, value: given }) => applyAt(value, parsePath(path), op, given), document);
}

/** @param {string} path */
function parsePath(path) {
  return path
    .split("/")
    .slice(1)
    .map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
}

/**
 * @param {any} value
 * @param {string[]} path
 * @param {PatchOperation["op"]} op
 * @param {unknown} given
 * @returns {any}
 */
function applyAt(value, path, op, given) {
  const [name, ...inner] = path;
  if (name === undefined) return given;
  if (value === null || typeof value !== "object") throw new TypeError(`A patch names ${name}, which is not there.`);
  const copy = Array.isArray(value) ? [...value] : { ...value };
  if (inner.length) copy[name] = applyAt(copy[name], inner, op, given);
  else if (op === "remove") delete copy[name];
  else copy[name] = given;
  return copy;
}
