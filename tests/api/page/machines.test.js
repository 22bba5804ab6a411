import assert from "node:assert/strict";
import { test } from "node:test";
import { describeRole } from "../../../src/mlx_ring/api/page/web/cluster/machines.js";

/** @param {object} [more] @returns {any} */
const worker = (more = {}) => ({ model: "demo", rank: 0, layers: [0, 5], ...more });
/** @param {boolean} isHead @returns {any} */
const node = (isHead) => ({ is_head: isHead });

const cases = /** @type {[string, boolean, any[]][]} */ ([
  ["Head: serves the API and computes layers 0 to 4 of demo", true, [worker()]],
  ["Head: serves the API and computes no layers", true, []],
  [
    "Computes layers 5 to 7 of demo, layer 0 of other",
    false,
    [worker({ layers: [5, 8] }), worker({ model: "other", layers: [0, 1] })],
  ],
  ["Computes layers 0 to 7 of demo", false, [worker({ layers: [5, 8] }), worker()]],
  ["Computes layers 0 to 4 and layer 7 of demo", false, [worker(), worker({ layers: [7, 8] })]],
  ["Computes a share of layers 0 to 4 of demo", false, [worker(), worker({ rank: 1 })]],
]);
for (const [text, isHead, workers] of cases) {
  test(`the role of a machine: ${text}`, () => assert.equal(describeRole(node(isHead), workers), text));
}
