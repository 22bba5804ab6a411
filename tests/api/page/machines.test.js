import assert from "node:assert/strict";
import { test } from "node:test";
import {
  describeEnergy,
  describePower,
  describeRole,
  describeYielding,
} from "../../../src/mlx_ring/api/page/web/cluster/machines.js";

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

/** @param {number | null} watts @returns {any} */
const part = (name = "cpu", watts = null) => ({ part: name, joules: 5, watts });

test("power is that of the parts that have one", () => {
  assert.equal(describePower([part("cpu", 23.46), part("gpu", 0), part("memory", null)]), "Power: CPU 23.5 W, GPU 0 W");
  assert.equal(describePower([part("memory", null)]), "");
  assert.equal(describePower([]), "");
});

test("energy per token is named where it is known", () => {
  assert.equal(describeEnergy(/** @type {any} */ ({ joules_per_token: 0.1234 })), "0.123 J per generated token");
  assert.equal(describeEnergy(/** @type {any} */ ({ joules_per_token: null })), "");
});

test("a machine that yields says why, and what plans count of it", () => {
  /** @param {number} speed @param {number} memory @returns {any} */
  const yielding = (speed, memory) => ({
    reason: "it is busy",
    speed_share: speed,
    memory_share: memory,
    priority: "",
  });
  assert.equal(describeYielding(yielding(1, 1)), "yields to its user: it is busy");
  assert.equal(
    describeYielding(yielding(0.25, 0.5)),
    "yields to its user: it is busy; plans count 25 % of its speed and 50 % of its memory",
  );
});
