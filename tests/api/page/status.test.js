import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { describePlacement, describeStatus, nodeNames } from "../../../src/mlx_ring/api/page/web/status.js";

/** @param {object} [more] @returns {any} */
const node = (more = {}) => ({ id: "mini-1", name: "mini", state: "attending", reason: null, ...more });
/** @param {object} [more] @returns {any} */
const model = (more = {}) => ({ model: "demo", state: "ready", reason: null, instances: [], ...more });
/** @param {object} [more] @returns {any} */
const stage = (more = {}) => ({
  node: "mini-1",
  ranks: [],
  loading: { phase: "weights", bytes_loaded: 5e8, bytes_to_load: 2e9 },
  ...more,
});
/** @param {object} [more] @returns {any} */
const instance = (more = {}) => ({
  name: "demo-1",
  model: "demo",
  state: "ready",
  reason: null,
  layers: 8,
  stages: [stage()],
  ...more,
});

/**
 * @param {{ cluster?: object, draining?: boolean, connection?: any }} options
 */
function status({ cluster = {}, draining = false, connection = "open" }) {
  const none = { missing_machines: 0, absent_nodes: [] };
  const whole = { nodes: [node()], models: [model()], instances: [instance()], ...none, ...cluster };
  return describeStatus({ connection, state: /** @type {any} */ ({ time: 1000, draining, cluster: whole }) });
}

describe("before the first state", () => {
  for (const [connection, label] of /** @type {const} */ ([
    ["connecting", "connecting"],
    ["lost", "offline"],
    ["unfollowed", "no live figures"],
    ["locked", "key needed"],
  ])) {
    test(connection, () => assert.equal(describeStatus({ connection, state: null }).label, label));
  }
});

describe("the label", () => {
  const cases = /** @type {const} */ ([
    ["ready", "good", {}],
    ["degraded", "busy", { cluster: { nodes: [node({ state: "gone" })] } }],
    ["degraded", "busy", { cluster: { models: [model(), model({ model: "other", state: "unavailable" })] } }],
    ["loading", "busy", { cluster: { models: [model({ state: "loading" })] } }],
    ["unavailable", "bad", { cluster: { models: [model({ state: "unavailable" })] } }],
    ["unloaded", "busy", { cluster: { models: [model({ state: "unloaded" })] } }],
    ["shutting down", "busy", { draining: true }],
    ["offline", "bad", { connection: "lost" }],
    ["waiting for 1 machine", "busy", { cluster: { models: [model({ state: "loading" })], missing_machines: 1 } }],
  ]);
  for (const [label, tone, options] of cases) {
    test(`${label}: ${JSON.stringify(options).slice(0, 60)}`, () => {
      const found = status(options);
      assert.deepEqual([found.label, found.tone], [label, tone]);
    });
  }
});

describe("notices", () => {
  const cases = /** @type {const} */ ([
    [{}, []],
    [
      { cluster: { models: [model({ state: "loading" })], instances: [instance({ state: "loading" })] } },
      ["demo is loading: 25 % of 2 GB of weights loaded."],
    ],
    [
      { cluster: { models: [model({ state: "loading", reason: "Waiting for 2 machines." })], instances: [] } },
      ["Waiting for 2 machines."],
    ],
    [
      { cluster: { models: [model({ state: "unavailable", reason: "A worker died." })] } },
      ["demo is unavailable. A worker died."],
    ],
    [
      { cluster: { models: [model({ state: "unloaded", reason: "No memory." })], instances: [] } },
      ["demo is not loaded. The next request loads it. The last load failed: No memory."],
    ],
    [
      { cluster: { instances: [instance(), instance({ name: "demo-2", state: "unavailable", reason: "Lost." })] } },
      ["Replica 2 of demo is unavailable. Lost. Other replicas serve its requests."],
    ],
    [
      {
        cluster: {
          models: [model({ state: "loading", reason: "2 machines." }), model({ model: "other", state: "loading" })],
          instances: [],
          missing_machines: 2,
        },
      },
      ["Loading demo and other waits for 2 more machines."],
    ],
    [
      {
        cluster: {
          models: [model({ state: "loading" })],
          instances: [],
          missing_machines: 1,
          absent_nodes: ["mini-2"],
        },
      },
      [
        "Loading demo waits for 1 more machine. " +
          "mini-2 is not connected yet: it joins by itself while mlx-ring runs there.",
      ],
    ],
    [{ cluster: { nodes: [node({ state: "gone" })] } }, ["mini is disconnected."]],
    [
      { cluster: { nodes: [node({ state: "quarantined", quarantined_until: 1300, reason: "it failed 3 times" })] } },
      ["mini is quarantined for 5 minutes: it failed 3 times"],
    ],
    [
      { draining: true, cluster: { models: [model({ state: "unavailable" })], nodes: [node({ state: "gone" })] } },
      ["The server is shutting down. It finishes running requests and accepts no new ones."],
    ],
    [{ connection: "lost", cluster: { models: [model({ state: "unavailable", reason: "Lost." })] } }, []],
  ]);
  for (const [options, texts] of cases) {
    test(texts[0] ?? "none", () => {
      assert.deepEqual(
        status(options).notices.map(({ text }) => text),
        texts,
      );
    });
  }
});

test("a notice stays the same one while only its figures change, and each has a key of its own", () => {
  /** @param {number} bytes_loaded */
  const keys = (bytes_loaded) => {
    const loading = { phase: "weights", bytes_loaded, bytes_to_load: 2e9 };
    const models = ["demo", "other"].map((name) => model({ model: name, state: "loading" }));
    const instances = models.map((each) => instance({ ...each, stages: [stage({ loading })] }));
    const nodes = [node({ state: "gone" }), node({ id: "mini-2", state: "gone" })];
    return status({ cluster: { models, instances, nodes } }).notices.map(({ key }) => key);
  };
  assert.deepEqual(keys(1e8), keys(2e8));
  assert.equal(new Set(keys(1e8)).size, 4);
});

describe("the placement", () => {
  /** @param {object} cluster */
  const placement = (cluster, name = "demo") =>
    describePlacement(/** @type {any} */ ({ nodes: [node()], ...cluster }), name);

  test("names machines once, and the stages", () => {
    const nodes = [node(), node({ id: "pro-1", name: "pro" })];
    const stages = [stage(), stage({ node: "pro-1" }), stage()];
    assert.equal(
      placement({ nodes, instances: [instance({ stages })] }),
      "It runs on mini and pro, with 8 layers in 3 stages.",
    );
  });

  test("names all machines of a stage that several share", () => {
    const nodes = ["a", "b", "c"].map((id) => node({ id, name: id }));
    const stages = [stage({ ranks: nodes.map(({ id }) => ({ node: id })) })];
    assert.equal(
      placement({ nodes, instances: [instance({ stages })] }),
      "It runs on a, b and c, with all 8 layers in one stage.",
    );
  });

  test("is that of the chosen model, with all its replicas", () => {
    const instances = [instance(), instance({ model: "demo-moe", layers: 16 })];
    assert.equal(placement({ instances }, "demo-moe"), "It runs on mini, with all 16 layers in one stage.");
    assert.equal(placement({ instances: [instance(), instance()] }), "It runs on mini, in 2 replicas.");
  });

  test("is empty without an instance", () => {
    assert.equal(placement({ instances: [instance({ model: "other" })] }), "");
  });
});

test("machines with the same name are shown by their ids", () => {
  const nodes = [node(), node({ id: "mini-2" }), node({ id: "pro-1", name: "pro" })];
  assert.deepEqual([...nodeNames({ nodes }).values()], ["mini-1", "mini-2", "pro"]);
});
