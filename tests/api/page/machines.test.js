import assert from "node:assert/strict";
import { test } from "node:test";
import {
  describeEnergy,
  describePower,
  describeRole,
  describeYielding,
  whyUnused,
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

/** @param {object} [more] @returns {any} */
const unused = (more = {}) => ({ id: "mini-1", state: "attending", stages: [], ...more });
/** @param {object} [more] @returns {any} */
const loaded = (more = {}) => ({
  name: "demo-1",
  model: "demo",
  state: "ready",
  left_out: [],
  remarks: [],
  stream: { predicted_tokens_per_s: 4.8 },
  ...more,
});

test("a machine without layers says why for each model, with the speed without it", () => {
  const leftOut = [{ node: "mini", why: "no plan with it answers a request sooner" }];
  const instances = [loaded({ left_out: leftOut }), loaded({ name: "moe-1", model: "moe", stream: null })];
  assert.deepEqual(
    whyUnused(unused(), { instances, proposals: [] }, "mini").map(({ text }) => text),
    [
      "Not used by demo: no plan with it answers a request sooner. Predicted without it: 4.8 tokens/s.",
      "Not used by moe: it joined after moe was loaded, and no faster split with it is known yet.",
    ],
  );
});

test("a machine that one machine alone is faster than has the times of both", () => {
  const compared = "One machine alone is fastest: 4.56 s for a request instead of 5.01 with 2 machines.";
  const remarks = ["Other.", `${compared} \`--strategy balanced\` splits the layers all the same.`];
  const instance = loaded({ left_out: [{ node: "mini-1", why: "no plan with it answers a request sooner" }], remarks });
  const [found] = whyUnused(unused(), { instances: [instance], proposals: [] }, "mini");
  assert.equal(found?.text, `Not used by demo: no plan with it answers a request sooner. ${compared}`);
});

test("a machine that a better split would use says what it gains", () => {
  const split = { first_token_s: 1, tokens_per_s: 9 };
  /** @type {any} */
  const proposal = {
    model: "demo",
    way: "beside",
    why: null,
    gain: 1.2,
    load_s: 3,
    loaded: { ...split, stages: [], request_s: 40 },
    planned: { ...split, stages: [{ nodes: ["mini"], layers: [0, 8] }], request_s: 18.4 },
  };
  const [found] = whyUnused(unused(), { instances: [loaded()], proposals: [proposal] }, "mini");
  assert.equal(found?.proposal, proposal);
  assert.match(found?.text ?? "", /^Not used by demo yet. demo on mini alone is 2.2 times as fast\./);
  assert.match(found?.text ?? "", /A request then takes 18 s, instead of 40 s\.$/);
});

test("a machine that computes, is away or waits for a load needs no reason", () => {
  const cases = /** @type {[any, any][]} */ ([
    [unused({ stages: ["demo-1/0"] }), loaded()],
    [unused({ state: "drained" }), loaded()],
    [unused(), loaded({ state: "loading" })],
  ]);
  for (const [node, instance] of cases) {
    assert.deepEqual(whyUnused(node, { instances: [instance], proposals: [] }, "mini"), []);
  }
});
