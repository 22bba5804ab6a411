import assert from "node:assert/strict";
import { mock, test } from "node:test";
import {
  askToUnload,
  countRequests,
  describeEnd,
  describeMemory,
  describeRunning,
  describeSpeed,
  suggestions,
} from "../../../src/mlx_ring/api/page/web/catalog/model-card.js";
import { ModelJobs, pullModel } from "../../../src/mlx_ring/api/page/web/catalog/model-jobs.js";
import { describeOutcome, loadableName, rank, verdict } from "../../../src/mlx_ring/api/page/web/catalog/prediction.js";
import { createStream, settle, setUpBrowser } from "./support.js";

setUpBrowser();

/** @param {Response} response */
function answerWith(response) {
  return mock.method(globalThis, "fetch", async () => response);
}

/**
 * @param {string} status
 * @param {number} done_bytes
 * @param {number} total_bytes
 */
const said = (status, done_bytes, total_bytes) => ({ model: "org/m", status, done_bytes, total_bytes });
/** @param {unknown[]} statuses */
const events = (...statuses) => statuses.map((status) => `data: ${JSON.stringify(status)}\n\n`).join("");
const DONE = events(said("done", 10, 10));

test("a download yields what the server says, and ends with its last word", async () => {
  const statuses = [said("downloading", 4, 10), said("verifying", 10, 10), said("done", 10, 10)];
  const fetch = answerWith(new Response(`${events(...statuses)}: keep-alive\n\n`));
  const seen = [];
  for await (const progress of pullModel("org/m", new AbortController().signal)) seen.push(progress);
  assert.deepEqual(seen, statuses);
  const [url, { body }] = /** @type {any} */ (fetch.mock.calls[0]).arguments;
  assert.equal(url.pathname, "/models/pull");
  assert.deepEqual(JSON.parse(body), { model: "org/m", stream: true });
});

const broken = /** @type {[string, unknown[], RegExp][]} */ ([
  [
    "an error in the stream",
    [said("downloading", 1, 2), { error: { message: "No space is left." } }],
    /No space is left/,
  ],
  ["a stream that breaks off", [said("downloading", 1, 2)], /stopped before it was complete/],
]);
for (const [name, statuses, message] of broken) {
  test(`${name} is a problem of the download`, async () => {
    answerWith(new Response(events(...statuses)));
    const jobs = new ModelJobs();
    assert.equal(await jobs.download("org/m"), false);
    assert.match(jobs.now["org/m"]?.problem ?? "", message);
    jobs.dismiss("org/m");
    assert.deepEqual(jobs.now, {});
  });
}

test("a refusal is shown", async () => {
  answerWith(Response.json({ error: { message: "There is no such model." } }, { status: 404 }));
  const jobs = new ModelJobs();
  await jobs.download("none");
  assert.equal(jobs.now.none?.problem, "There is no such model.");
});

test("a cancelled download leaves nothing, and a second job of a model does not start", async () => {
  const stream = createStream();
  const fetch = answerWith(stream.response);
  const jobs = new ModelJobs();
  const ended = jobs.download("org/m");
  stream.write(events(said("downloading", 5, 10)));
  await settle();
  assert.equal(jobs.now["org/m"]?.progress?.done_bytes, 5);
  assert.equal(await jobs.load("org/m"), false);
  assert.equal(fetch.mock.calls.length, 1);
  jobs.cancel("org/m");
  stream.abort().catch(() => {});
  await ended;
  assert.deepEqual(jobs.now, {});
  const { body } = /** @type {any} */ (fetch.mock.calls[1]).arguments[1];
  assert.deepEqual(JSON.parse(body), { model: "org/m", cancel: true });
});

/** @param {Record<string, () => Response | Promise<Response>>} answers by path */
function answerPaths(answers) {
  /** @type {[path: string, model: string][]} */
  const asked = [];
  mock.method(globalThis, "fetch", async (/** @type {URL} */ url, /** @type {any} */ { body }) => {
    const path = url.pathname.slice(1);
    asked.push([path, JSON.parse(body).model]);
    return answers[path]?.() ?? Response.json({ error: { message: `No answer for ${path}.` } }, { status: 404 });
  });
  return asked;
}

/** @param {number} total */
const somePulled = (total) => events(said("downloading", 1, total));

test("a model that is added is loaded once it is downloaded, and never after a download that failed", async () => {
  const stream = createStream();
  const asked = answerPaths({
    "models/pull": () => stream.response,
    "models/load": () => Response.json({ id: "org/m" }),
  });
  const jobs = new ModelJobs();
  const ended = jobs.add("org/m");
  stream.write(somePulled(10));
  await settle();
  assert.equal(jobs.now["org/m"]?.progress?.total_bytes, 10);
  assert.deepEqual(asked, [["models/pull", "org/m"]]);
  stream.write(DONE);
  await ended;
  assert.deepEqual(asked[1], ["models/load", "org/m"]);
  assert.deepEqual([jobs.now["org/m"]?.kind, jobs.now["org/m"]?.served], ["load", "org/m"]);
  const refused = answerPaths({
    "models/pull": () => Response.json({ error: { message: "It is too large." } }, { status: 400 }),
  });
  await jobs.add("org/large");
  assert.equal(jobs.now["org/large"]?.problem, "It is too large.");
  assert.deepEqual(refused, [["models/pull", "org/large"]]);
});

test("a model whose download runs is loaded afterwards if it is added meanwhile", async () => {
  const stream = createStream();
  const asked = answerPaths({
    "models/pull": () => stream.response,
    "models/load": () => Response.json({ id: "org/m" }),
  });
  const jobs = new ModelJobs();
  const ended = jobs.download("org/m");
  await jobs.add("org/m");
  stream.write(DONE);
  await ended;
  assert.deepEqual(asked, [
    ["models/pull", "org/m"],
    ["models/load", "org/m"],
  ]);
});

test("a download can be cancelled after it was asked for twice", async () => {
  const stream = createStream();
  const fetch = answerWith(stream.response);
  const jobs = new ModelJobs();
  const ended = jobs.download("org/m");
  assert.equal(await jobs.download("org/m"), false);
  const { signal } = /** @type {any} */ (fetch.mock.calls[0]).arguments[1];
  jobs.cancel("org/m");
  assert.ok(signal.aborted);
  stream.abort().catch(() => {});
  await ended;
});

/** @param {string} model @param {number} total_bytes @param {number} [done_bytes] @returns {any} */
const pull = (model, total_bytes, done_bytes = 1) => ({ model, total_bytes, done_bytes, status: "downloading" });

test("downloads of others are followed, but not this page's own by another name, nor one that it left", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const stream = createStream();
  const asked = answerPaths({ "models/pull": () => stream.response });
  const jobs = new ModelJobs();
  const own = jobs.download("qwen3:8b");
  await settle();
  jobs.follow([pull("org/Qwen3-8B-4bit", 70)]);
  stream.write(somePulled(70));
  await settle();
  const pulls = [pull("org/Qwen3-8B-4bit", 70), pull("org/other", 90)];
  assert.deepEqual(jobs.others(pulls), [pulls[1]]);
  jobs.follow(pulls);
  assert.ok(jobs.now["org/other"]?.isRunning);
  assert.equal(asked.length, 1, "none for the download of others");
  jobs.cancel("qwen3:8b");
  stream.abort().catch(() => {});
  await own;
  jobs.follow(pulls);
  assert.deepEqual(jobs.others(pulls), [pulls[0]]);
  jobs.follow([]);
  assert.deepEqual(jobs.now, {});
  mock.timers.reset();
});

test("downloads of others share one look at the server's list, until they end or are cancelled", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  let pulls = [pull("org/a", 10), pull("org/b", 20), pull("org/c", 30)];
  /** @type {string[]} */
  const asked = [];
  mock.method(globalThis, "fetch", async (/** @type {URL} */ { pathname }, /** @type {any} */ { body }) => {
    asked.push(`${pathname} ${body ?? ""}`.trim());
    if (pathname === "/models/pull" && !JSON.parse(body).cancel) return new Response(DONE);
    return Response.json(pathname === "/cluster/models" ? { models: [], pulls, interrupted: [] } : { id: "org/b" });
  });
  const look = async () => {
    mock.timers.tick(2000);
    await settle();
  };
  const jobs = new ModelJobs();
  jobs.follow(pulls);
  pulls = [pull("org/a", 10, 9), pull("org/b", 20, 9), pull("org/c", 30, 9)];
  await look();
  assert.deepEqual(asked, ["/cluster/models"]);
  assert.deepEqual(
    Object.values(jobs.now).map((job) => job.progress?.done_bytes),
    [9, 9, 9],
  );
  await jobs.add("org/b");
  await jobs.cancel("org/c");
  assert.deepEqual(Object.keys(jobs.now), ["org/a", "org/b"]);
  pulls = [pull("org/c", 30, 9)];
  await look();
  assert.deepEqual(jobs.others(pulls), pulls);
  assert.deepEqual([Object.keys(jobs.now), jobs.now["org/b"]?.kind], [["org/b"], "load"]);
  const before = asked.length;
  await look();
  assert.equal(asked.length, before);
  mock.timers.reset();
});

test("of several downloads of this page, only one holds a connection, and the server's list tells how the others end", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const streams = new Map(["org/a", "org/b", "org/c"].map((model) => [model, createStream()]));
  /** @type {Set<string>} */
  const open = new Set();
  /** @type {any} */
  let disk = {};
  mock.method(globalThis, "fetch", async (/** @type {URL} */ { pathname }, /** @type {any} */ { body }) => {
    if (pathname === "/cluster/models") return Response.json({ models: [], pulls: [], interrupted: [], ...disk });
    const { model } = JSON.parse(body);
    const stream = streams.get(model);
    assert.ok(stream);
    open.add(model);
    const cancel = () => void open.delete(model);
    const source = stream.response.body?.getReader();
    const pass = new ReadableStream({
      pull: async (to) => {
        const { done, value } = (await source?.read()) ?? { done: true, value: undefined };
        if (done) to.close();
        else to.enqueue(value);
      },
      cancel,
    });
    return new Response(pass);
  });
  const look = async (/** @type {any} */ now) => {
    disk = now;
    mock.timers.tick(2000);
    await settle();
  };
  const jobs = new ModelJobs();
  const ended = ["org/a", "org/b", "org/c"].map((model) => jobs.download(model));
  for (const [total, stream] of [...streams.values()].entries()) stream.write(somePulled(10 + total));
  await settle();
  assert.deepEqual([...open], ["org/a"], "the others have closed theirs");
  await look({ pulls: [pull("org/a", 10, 5), pull("org/b", 11, 5), pull("org/c", 12, 5)] });
  assert.deepEqual([jobs.now["org/b"]?.progress?.done_bytes, jobs.now["org/a"]?.progress?.done_bytes], [5, 1]);
  await look({ pulls: [pull("org/c", 12, 6)], models: [{ name: "org/b", short_names: [] }] });
  assert.deepEqual([jobs.now["org/b"]?.served, jobs.now["org/c"]?.progress?.done_bytes], ["org/b", 6]);
  await look({});
  assert.match(jobs.now["org/c"]?.problem ?? "", /stopped before it was complete/);
  streams.get("org/a")?.write(DONE);
  await settle();
  assert.deepEqual(await Promise.all(ended), [true, true, false]);
  const again = jobs.download("org/a");
  streams.get("org/a")?.write(somePulled(10));
  await settle();
  assert.ok(open.has("org/a"), "the place is free again");
  jobs.cancel("org/a");
  const cancelled = streams.get("org/a")?.abort();
  await Promise.allSettled([cancelled, again]);
  mock.timers.reset();
});

test("a lost server leaves no problem of a job, because the notice of the connection says it", async () => {
  mock.method(globalThis, "fetch", async () => {
    throw new TypeError("Failed to fetch");
  });
  const jobs = new ModelJobs();
  assert.equal(await jobs.load("demo"), false);
  assert.deepEqual(jobs.now, {});
});

test("an unload that is refused as busy can be forced", async () => {
  const refusal = { error: { message: "demo answers 1 request.", code: "conflict" } };
  answerWith(new Response(JSON.stringify(refusal), { status: 409 }));
  const jobs = new ModelJobs();
  await jobs.unload("demo");
  assert.deepEqual([jobs.now.demo?.problem, jobs.now.demo?.isConflict], ["demo answers 1 request.", true]);
  const fetch = answerWith(Response.json({ id: "demo" }));
  assert.equal(await jobs.unload("demo", true), true);
  const { body } = /** @type {any} */ (fetch.mock.calls[0]).arguments[1];
  assert.deepEqual(JSON.parse(body), { model: "demo", force: true });
  assert.equal(jobs.now.demo?.problem, "");
  jobs.dismissEnded();
  assert.deepEqual(jobs.now, {});
});

test("an unload says first how many requests it cuts off", () => {
  /** @param {number} running @param {number} waiting */
  const instance = (running, waiting) => ({ instance: "demo-1", running, waiting });
  const count = countRequests(/** @type {any} */ ({ instances: [instance(1, 2), instance(1, 0)] }));
  assert.equal(count, 4);
  assert.deepEqual(askToUnload("demo", count), {
    question: "Unloading demo cuts off 4 requests that run or wait.",
    button: "Unload and end 4 requests",
  });
  assert.equal(askToUnload("demo", 1).question, "Unloading demo cuts off 1 request that runs or waits.");
  assert.deepEqual(askToUnload("demo", 0), {
    question: "demo has no requests any more.",
    button: "Unload demo",
  });
});

test("a load that ended says where the model runs and how long it took, an unload that it can be undone", async () => {
  /** @param {string} state @returns {any} */
  const cluster = (state) => ({
    models: [{ model: "org/Qwen3-8B-4bit", state }],
    nodes: ["mini", "pro"].map((id) => ({ id, name: id })),
    devices: ["mini", "pro", "mini"].map((node) => ({ node, model: "org/Qwen3-8B-4bit" })),
  });
  answerWith(Response.json({ id: "org/Qwen3-8B-4bit" }));
  const jobs = new ModelJobs();
  await jobs.load("qwen3:8b");
  assert.equal(jobs.now["qwen3:8b"]?.isRunning, false);
  /** @type {any} */
  const loaded = { ...jobs.now["qwen3:8b"], seconds: 12.04 };
  assert.equal(
    describeEnd("qwen3:8b", loaded, cluster("ready")),
    "qwen3:8b is loaded as org/Qwen3-8B-4bit, on mini, pro. It took 12 s.",
  );
  assert.equal(describeEnd("qwen3:8b", loaded, cluster("unloaded")), "");
  assert.equal(describeEnd("qwen3:8b", { ...loaded, isRunning: true }, cluster("ready")), "");
  answerWith(Response.json({ id: "org/Qwen3-8B-4bit" }));
  await jobs.unload("org/Qwen3-8B-4bit");
  const unloaded = jobs.now["org/Qwen3-8B-4bit"];
  assert.match(describeEnd("org/Qwen3-8B-4bit", unloaded, cluster("unloaded")), /is unloaded\./);
  assert.equal(describeEnd("org/Qwen3-8B-4bit", unloaded, cluster("ready")), "");
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
  assert.match(
    describeMemory([{ ...DEVICE, device: "cpu", rss_bytes: 7e9 }], [], null),
    /its processes take 7 GB in all$/,
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
    tokens_per_s: 25,
    tokens_per_s_range: [20, 30],
    first_token_s: 0.5,
  });
  const predicted = "Predicted: 5 GB of memory, 20 to 30 tokens/s, first token after 500 ms.";
  assert.equal(describeOutcome(outcome), `${predicted} Runs well here.`);
  assert.equal(describeOutcome({ ...outcome, tokens_per_s: 0.2 }), `${predicted} Too slow here.`);
  assert.equal(
    describeOutcome({ ...outcome, fits: false, why: "7 GB are missing." }),
    "It does not fit: 7 GB are missing.",
  );
});

test("models that run well come first, the largest first, and those that do not fit are left out", () => {
  /** @param {string} model @param {number} tokens_per_s @param {number} memory_bytes @returns {any} */
  const outcome = (model, tokens_per_s, memory_bytes, first_token_s = 1, fits = true) => ({
    ...{ model, tokens_per_s, memory_bytes, first_token_s, fits },
  });
  const all = [
    outcome("s", 0.5, 9),
    outcome("a", 90, 1),
    outcome("p", 60, 50, 200),
    outcome("q", 50, 60, 100),
    outcome("b", 6, 4),
    outcome("t", 2, 9),
    outcome("n", 0, 99, 1, false),
  ];
  assert.deepEqual(
    rank(all).map(({ model }) => model),
    ["b", "a", "q", "p", "t", "s"],
  );
});

/** Jobs whose loads the test answers. @param {string[]} models */
async function loadAll(models) {
  /** @type {Record<string, (response: Response) => void>} */
  const answer = {};
  const asked = /** @type {string[]} */ ([]);
  mock.method(globalThis, "fetch", (/** @type {URL} */ _, /** @type {any} */ { body }) => {
    const { model } = JSON.parse(body);
    asked.push(model);
    return new Promise((done) => {
      answer[model] = done;
    });
  });
  const jobs = new ModelJobs();
  const ended = models.map((model) => jobs.load(model));
  await settle();
  const waits = () => Object.values(jobs.now).map(({ waitsFor, isRunning }) => isRunning && waitsFor);
  const end = async (/** @type {string} */ model) => {
    answer[model]?.(Response.json({ id: model }));
    await settle();
  };
  return { jobs, answer, asked, ended, waits, end };
}

/** Return true if the browser would ask before it closes the page. */
function asksBeforeLeave() {
  return !window.dispatchEvent(new Event("beforeunload", { cancelable: true }));
}

test("two loads are sent at once, and others say for which they wait, because each holds a connection", async () => {
  const { jobs, answer, asked, ended, waits, end } = await loadAll(["a", "b", "c", "d"]);
  assert.deepEqual(
    [waits(), asked],
    [
      ["", "", "a or b", "c"],
      ["a", "b"],
    ],
  );
  assert.equal(describeRunning("c", /** @type {any} */ (jobs.now.c)), "c waits for the load of a or b");
  answer.b?.(Response.json({ error: { message: "It does not fit." } }, { status: 503 }));
  await settle();
  assert.deepEqual(
    [waits(), asked],
    [
      ["", false, "", "a or c"],
      ["a", "b", "c"],
    ],
  );
  await end("a");
  assert.deepEqual([waits(), asked.length], [[false, false, "", ""], 4]);
  await end("c");
  await end("d");
  assert.deepEqual(await Promise.all(ended), [true, false, true, true]);
  const last = jobs.load("a");
  await settle();
  assert.equal(jobs.now.a?.waitsFor, "");
  await end("a");
  assert.equal(await last, true);
});

test("a load that waits can be cancelled, and the browser asks before it closes the page meanwhile", async () => {
  const { jobs, asked, ended, waits, end } = await loadAll(["a", "b", "c", "d"]);
  assert.equal(asksBeforeLeave(), true);
  jobs.cancelLoad("c");
  jobs.cancelLoad("a");
  assert.equal(await ended[2], false);
  assert.deepEqual(
    [Object.keys(jobs.now), waits()],
    [
      ["a", "b", "d"],
      ["", "", "a or b"],
    ],
  );
  assert.equal(asksBeforeLeave(), true);
  await end("b");
  assert.deepEqual([asked, asksBeforeLeave()], [["a", "b", "d"], false]);
  await end("a");
  await end("d");
  assert.deepEqual(await Promise.all(ended), [true, true, false, true]);
});

test("a download that was refused because of the memory can be forced", async () => {
  const error = { message: "It needs more memory.", code: "exceeds_memory" };
  answerWith(Response.json({ error }, { status: 503 }));
  const jobs = new ModelJobs();
  await jobs.add("org/m");
  assert.equal(jobs.now["org/m"]?.isTooLarge, true);
  const fetch = answerWith(new Response(DONE));
  assert.equal(await jobs.download("org/m", false, true), true);
  const { body } = /** @type {any} */ (fetch.mock.calls[0]).arguments[1];
  assert.deepEqual(JSON.parse(body), { model: "org/m", stream: true, force: true });
});

test("a verdict says whether a model is of use in a chat", () => {
  const verdicts = [
    [false, 0, 0],
    [true, 0.2, 900],
    [true, 3, 1],
    [true, 9, 61],
    [true, 9, 1],
  ].map(([fits, tokens_per_s, first_token_s]) => verdict(/** @type {any} */ ({ fits, tokens_per_s, first_token_s })));
  assert.deepEqual(verdicts, [
    "does not fit",
    "too slow here",
    "slow here",
    "slow with long prompts",
    "runs well here",
  ]);
  assert.equal(loadableName("Qwen3-0.6B 4-bit"), "qwen3-0.6b-4-bit");
  assert.equal(loadableName("Kimi-K2.6 INT4 and BF16"), null);
});

test("a new action forgets problems, but no job that runs; names that a refusal suggests can be used", async () => {
  answerWith(
    Response.json(
      { error: { message: "There is no model 'dem'. Did you mean 'demo' or 'demo-moe'?" } },
      { status: 404 },
    ),
  );
  const jobs = new ModelJobs();
  await jobs.load("dem");
  assert.deepEqual(suggestions(jobs.now.dem?.problem ?? ""), ["demo", "demo-moe"]);
  assert.deepEqual(suggestions("There is no model 'dem'."), []);
  const stream = createStream();
  answerWith(stream.response);
  const ended = jobs.download("org/m");
  jobs.dismissEnded();
  assert.deepEqual(Object.keys(jobs.now), ["org/m"]);
  stream.write(DONE);
  await ended;
});
