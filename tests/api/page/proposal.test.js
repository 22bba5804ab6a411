import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { explain, Moves } from "../../../src/mlx_ring/api/page/web/cluster/proposal.js";

import { settle, setUpBrowser } from "./support.js";

setUpBrowser();

const loaded = { stages: [{ nodes: ["mini"], layers: [0, 8] }], tokens_per_s: 8, first_token_s: 0.5, request_s: 9 };
const planned = {
  stages: [
    { nodes: ["mini"], layers: [0, 7] },
    { nodes: ["a", "b"], layers: [7, 8] },
  ],
  tokens_per_s: 10,
  first_token_s: 0.25,
  request_s: 7,
};
/** @param {object} [more] @returns {any} */
const proposal = (more = {}) => ({
  ...{ gain: 0.25, loaded, planned, way: "beside", why: null, pause_s: 0, gained_bytes: null },
  ...more,
});

test("a proposal says what it gains, where the layers go, and how fast both are", () => {
  assert.deepEqual(explain(proposal()), {
    title: "Another split is 25 % faster.",
    details:
      "mini: layers 0 to 6; a and b: layer 7. Predicted: 10 tokens/s, first token after 250 ms, " +
      "instead of 8 tokens/s, first token after 500 ms now.",
    pause: "",
  });
});

test("a gain of more than double is a multiple", () => {
  assert.equal(explain(proposal({ gain: 2.51 })).title, "Another split is 3.5 times as fast.");
});

test("a pause is announced with its reason and length", () => {
  const more = { way: "after", why: "There is no room.", pause_s: 3 };
  assert.equal(explain(proposal(more)).pause, "Answers pause for about 3 s. There is no room.");
  assert.equal(explain(proposal({ ...more, pause_s: null })).pause, "Answers pause meanwhile. There is no room.");
  assert.equal(
    explain(proposal({ ...more, way: "ranges", pause_s: 1, gained_bytes: 2_000_000 })).pause,
    "Workers stay, and load 2 MB of layers that they gain. Answers pause for about 1 s. There is no room.",
  );
});

test("machines without layers are named instead of a gain, if the strategy uses all machines", () => {
  assert.equal(explain(proposal({ gain: -0.1, unused: ["a", "b"] })).title, "Another split also uses a, b.");
});

test("memory that no longer suffices has no gain", () => {
  const { title, details } = explain(proposal({ gain: null, loaded: null }));
  assert.equal(title, "The machines have less memory than this split counts on.");
  assert.ok(details.endsWith("Predicted: 10 tokens/s, first token after 250 ms."));
});

test("a move runs once at a time, whatever is shown meanwhile, and its end stays until it is dismissed", async () => {
  /** @type {((response: Response) => void)[]} */
  const pending = [];
  mock.method(globalThis, "fetch", () => new Promise((answer) => pending.push(answer)));
  const moves = new Moves();
  const ofDemo = { model: "demo", needs_pause: false };
  moves.move(ofDemo);
  moves.move(ofDemo);
  moves.move({ model: "other", needs_pause: true });
  assert.equal(pending.length, 2);
  assert.equal(moves.now.demo?.isRunning, true);
  pending[0]?.(Response.json({ error: { message: "A machine left." } }, { status: 409 }));
  pending[1]?.(Response.json({ moved: { seconds: 3 } }));
  await settle();
  assert.deepEqual(moves.now, {
    demo: { isRunning: false, problem: "A machine left.", outcome: "" },
    other: { isRunning: false, problem: "", outcome: "other has moved, in 3 s." },
  });
  moves.dismiss("other");
  moves.move(ofDemo);
  pending[2]?.(Response.json({ moved: null }));
  await settle();
  assert.deepEqual(moves.now, {
    demo: { isRunning: false, problem: "", outcome: "demo runs on the best split already." },
  });
});
