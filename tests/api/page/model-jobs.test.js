import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { describeMemory, describeSpeed } from "../../../src/mlx_ring/api/page/web/catalog/model-card.js";
import {
  addProgress,
  ModelJobs,
  pullModel,
  totalProgress,
} from "../../../src/mlx_ring/api/page/web/catalog/model-jobs.js";
import { describeOutcome } from "../../../src/mlx_ring/api/page/web/catalog/prediction.js";
import { createStream, settle, setUpBrowser } from "./support.js";

setUpBrowser();

/** @param {Response} response */
function answerWith(response) {
  return mock.method(globalThis, "fetch", async () => response);
}

/** @param {unknown[]} lines */
const jsonLines = (lines) => lines.map((line) => `${JSON.stringify(line)}\n`).join("");

test("a download adds up its files, and ends with success", async () => {
  const lines = [
    { status: "pulling manifest" },
    { status: "pulling a", digest: "a", total: 100, completed: 40 },
    { status: "pulling b", digest: "b", total: 300 },
    { status: "pulling a", digest: "a", total: 100, completed: 130 },
    { status: "success" },
  ];
  const fetch = answerWith(new Response(jsonLines(lines)));
  const seen = [];
  for await (const progress of pullModel("org/m", new AbortController().signal)) {
    const { completed, total } = totalProgress(progress);
    seen.push([progress.status, completed, total]);
  }
  assert.deepEqual(seen, [
    ["pulling manifest", 0, 0],
    ["pulling a", 40, 100],
    ["pulling b", 40, 400],
    ["pulling a", 100, 400],
    ["success", 100, 400],
  ]);
  const { body } = /** @type {any} */ (fetch.mock.calls[0]).arguments[1];
  assert.deepEqual(JSON.parse(body), { model: "org/m", stream: true });
});

test("progress without a digest counts as one file", () => {
  const progress = addProgress(addProgress({ status: "", parts: {} }, { total: 10, completed: 1 }), {
    total: 10,
    completed: 6,
  });
  assert.deepEqual(totalProgress(progress), { completed: 6, total: 10 });
});

const broken = /** @type {[string, unknown[], RegExp][]} */ ([
  ["an error in the stream", [{ status: "pulling" }, { error: "No space is left." }], /No space is left/],
  ["a stream that breaks off", [{ status: "pulling" }], /stopped before it was complete/],
]);
for (const [name, lines, message] of broken) {
  test(`${name} is a problem of the download`, async () => {
    answerWith(new Response(jsonLines(lines)));
    const jobs = new ModelJobs();
    assert.equal(await jobs.download("org/m"), false);
    assert.match(jobs.now["org/m"]?.problem ?? "", message);
    jobs.dismiss("org/m");
    assert.deepEqual(jobs.now, {});
  });
}

test("a refusal in Ollama's format is shown", async () => {
  answerWith(new Response(JSON.stringify({ error: "There is no such model." }), { status: 404 }));
  const jobs = new ModelJobs();
  await jobs.download("none");
  assert.equal(jobs.now.none?.problem, "There is no such model.");
});

test("a cancelled download leaves nothing, and a second job of a model does not start", async () => {
  const stream = createStream();
  const fetch = answerWith(stream.response);
  const jobs = new ModelJobs();
  const ended = jobs.download("org/m");
  stream.write(jsonLines([{ status: "pulling", digest: "a", total: 10, completed: 5 }]));
  await settle();
  assert.equal(jobs.now["org/m"]?.progress?.status, "pulling");
  assert.equal(await jobs.load("org/m"), false);
  assert.equal(fetch.mock.calls.length, 1);
  jobs.cancel("org/m");
  stream.abort().catch(() => {});
  await ended;
  assert.deepEqual(jobs.now, {});
});

test("an unload that is refused as busy can be forced", async () => {
  const refusal = { error: { message: "demo answers 1 request.", code: "conflict" } };
  answerWith(new Response(JSON.stringify(refusal), { status: 409 }));
  const jobs = new ModelJobs();
  await jobs.unload("demo");
  assert.deepEqual([jobs.now.demo?.problem, jobs.now.demo?.isConflict], ["demo answers 1 request.", true]);
  const fetch = answerWith(new Response("{}"));
  assert.equal(await jobs.unload("demo", true), true);
  const { body } = /** @type {any} */ (fetch.mock.calls[0]).arguments[1];
  assert.deepEqual(JSON.parse(body), { model: "demo", force: true });
  assert.deepEqual(jobs.now, {});
});

/** @type {any} */
const DEVICE = { weight_bytes: 2e9, kv_bytes: 5e8, device_memory_bytes: 3e9 };
/** @type {any} */
const INSTANCE = {
  stages: [{ memory: { promised: { total_bytes: 4e9 } } }, { memory: { promised: null } }],
  stream: { measured_tokens_per_s: 81.4, predicted_tokens_per_s: 90 },
  promise: { tokens_per_s: 400, sequences: 8 },
};

test("a card adds up the memory of all workers, and names the predicted one", () => {
  assert.equal(
    describeMemory([DEVICE, DEVICE], [INSTANCE], null),
    "6 GB: 4 GB of weights, 1 GB of KV cache, predicted 4 GB when full",
  );
  assert.equal(describeMemory([], [], 11e6), "11 MB on disk, none in memory");
  assert.equal(describeMemory([], [], null), "");
});

test("a card tells the measured speed from the predicted one", () => {
  assert.equal(
    describeSpeed([INSTANCE]),
    "81.4 tokens/s measured, 90 tokens/s predicted, 400 tokens/s predicted for 8 requests together",
  );
  assert.equal(describeSpeed([]), "");
});

test("a prediction says what fits and what does not", () => {
  const outcome = /** @type {any} */ ({
    fits: true,
    memory_bytes: 5e9,
    tokens_per_s_range: [20, 30],
    first_token_s: 0.5,
  });
  assert.equal(describeOutcome(outcome), "Predicted: 5 GB of memory, 20 to 30 tokens/s, first token after 500 ms.");
  assert.equal(
    describeOutcome({ ...outcome, fits: false, why: "7 GB are missing." }),
    "It does not fit: 7 GB are missing.",
  );
});
