import assert from "node:assert/strict";
import { beforeEach, describe, mock, test } from "node:test";
import { apiKey } from "../../../src/mlx_ring/api/page/web/api.js";
import { answers, LiveCluster } from "../../../src/mlx_ring/api/page/web/live.js";
import { createStream, settle, setUpBrowser, sse } from "./support.js";

/** @param {object} [more] */
const state = (more = {}) => ({ time: 100, began: 1, pace: { one: { tokens_per_s: 5 } }, requests: [], ...more });

/** @param {number[]} numbers */
const lines = (...numbers) => numbers.map((number) => ({ number, text: `line ${number}` }));

/** @type {ReturnType<typeof createStream>[]} */
let streams;
/** @type {{ url: string, headers: Record<string, string>, signal: AbortSignal }[]} */
let requests;
/** @type {Response[]} responses instead of a stream */
let refusals;

beforeEach(() => {
  streams = [];
  requests = [];
  refusals = [];
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout", "Date"] });
  mock.method(globalThis, "fetch", async (/** @type {URL} */ url, /** @type {any} */ options) => {
    requests.push({ url: String(url), ...options });
    const refusal = refusals.shift();
    if (refusal) return refusal;
    const stream = createStream();
    options.signal.addEventListener("abort", () => stream.abort());
    streams.push(stream);
    return stream.response;
  });
});

/** @param {{ asksKey?: boolean }} [options] */
async function connect(options) {
  const browser = setUpBrowser(options);
  apiKey.forget();
  const live = new LiveCluster();
  live.start();
  await settle();
  return { live, ...browser };
}

/** @param {string} text */
async function receive(text) {
  await streams.at(-1)?.write(text);
  await settle();
}

/** @param {number} ms */
async function pass(ms) {
  mock.timers.tick(ms);
  await settle();
}

describe("events", () => {
  test("changes are applied to the state", async () => {
    const { live } = await connect();
    assert.equal(live.now.connection, "connecting");
    await receive(sse("state", state()));
    assert.equal(live.now.connection, "open");
    await receive(sse("change", [{ op: "replace", path: "/time", value: 101 }]));
    assert.deepEqual(live.now.state, state({ time: 101 }));
    assert.deepEqual(
      live.now.points.map(({ time }) => time),
      [100, 101],
    );
  });

  test("an event in several pieces is read whole", async () => {
    const { live } = await connect();
    for (const byte of new TextEncoder().encode(sse("state", state({ version: "ü" })))) {
      await streams[0]?.writeBytes(Uint8Array.of(byte));
    }
    await settle();
    assert.deepEqual(live.now.state, state({ version: "ü" }));
  });

  test("a change before any state is ignored", async () => {
    const { live } = await connect();
    await receive(sse("change", [{ op: "replace", path: "/time", value: 101 }]));
    assert.equal(live.now.state, null);
    assert.equal(live.now.connection, "connecting");
  });

  test("a new state replaces the changed one", async () => {
    const { live } = await connect();
    await receive(sse("state", state()) + sse("change", [{ op: "add", path: "/extra", value: 1 }]));
    await receive(sse("state", state({ time: 105 })));
    assert.deepEqual(live.now.state, state({ time: 105 }));
  });

  test("a change that does not fit the state requests the whole state again", async () => {
    const { live } = await connect();
    await receive(sse("state", state()));
    await receive(sse("change", [{ op: "replace", path: "/nothing/there", value: 1 }]));
    assert.equal(live.now.connection, "lost");
    assert.deepEqual(live.now.state, state());
    await pass(1000);
    assert.equal(requests.length, 2);
  });

  test("a restarted server starts a new chart", async () => {
    const { live } = await connect();
    await receive(sse("state", state()) + sse("state", state({ began: 50, time: 60 })));
    assert.deepEqual(
      live.now.points.map(({ time }) => time),
      [60],
    );
  });

  test("points are limited to five minutes", async () => {
    const { live } = await connect();
    for (let time = 0; time < 310; time += 1) await receive(sse("state", state({ time })));
    assert.equal(live.now.points.length, 300);
    assert.equal(live.now.points.at(0)?.time, 10);
  });

  test("an unknown event is ignored", async () => {
    const { live } = await connect();
    await receive(`${sse("state", state())}${sse("another", [1])}: a comment\n\n`);
    assert.deepEqual(live.now.state, state());
  });

  test("listeners are called until they unsubscribe", async () => {
    const { live } = await connect();
    const listener = mock.fn();
    const unsubscribe = live.subscribe(listener);
    await receive(sse("state", state()));
    unsubscribe();
    await receive(sse("state", state()));
    assert.equal(listener.mock.callCount(), 1);
  });
});

describe("log lines", () => {
  test("new lines are appended, and the last 300 are kept", async () => {
    const { live } = await connect();
    await receive(sse("log", lines(1, 2)) + sse("log", lines(3)));
    assert.deepEqual(live.now.lines, lines(1, 2, 3));
    await receive(sse("log", lines(...Array.from({ length: 400 }, (_, index) => index + 4))));
    assert.equal(live.now.lines.length, 300);
    assert.equal(live.now.lines.at(-1)?.number, 403);
  });

  test("lines that are sent again replace the known ones", async () => {
    const { live } = await connect();
    await receive(sse("log", lines(1, 2, 3)) + sse("log", lines(1, 2)));
    assert.deepEqual(live.now.lines, lines(1, 2));
  });
});

describe("a lost connection", () => {
  test("keeps the state, breaks the chart's line and is retried with growing delays", async () => {
    const { live } = await connect();
    await receive(sse("state", state()));
    await streams[0]?.close();
    await settle();
    assert.equal(live.now.connection, "lost");
    assert.deepEqual(live.now.state, state());
    assert.equal(live.now.points.at(-1)?.pace, null);
    const delays = [];
    for (let attempt = 0; attempt < 4; attempt += 1) {
      delays.push((live.now.retryAt ?? 0) - Date.now());
      refusals.push(new Response("", { status: 502, statusText: "Bad Gateway" }));
      await pass(20_000);
      assert.match(live.now.problem ?? "", /502 Bad Gateway/);
    }
    assert.deepEqual(
      delays,
      delays.toSorted((one, two) => one - two),
    );
    assert.ok(
      delays.every((delay) => delay > 400 && delay < 6000),
      String(delays),
    );
  });

  test("is retried after the time that the server gives", async () => {
    refusals.push(
      Response.json({ error: { message: "Too many." } }, { status: 429, headers: { "retry-after": "10" } }),
    );
    const { live } = await connect();
    assert.equal(live.now.problem, "Too many.");
    assert.equal(live.now.connection, "unfollowed");
    assert.ok(answers(live.now.connection));
    const delay = (live.now.retryAt ?? 0) - Date.now();
    assert.ok(delay >= 8500 && delay <= 11_500, String(delay));
    await pass(12_000);
    await receive(sse("state", state()));
    assert.equal(live.now.connection, "open");
    await streams[0]?.close();
    await settle();
    assert.ok(!answers(live.now.connection));
  });

  test("is retried at once on demand and when the network is back", async () => {
    const { live, window } = await connect();
    for (const retry of [() => live.retry(), () => window.dispatchEvent(new Event("online"))]) {
      await streams.at(-1)?.close();
      await settle();
      assert.equal(live.now.connection, "lost");
      const before = requests.length;
      retry();
      await settle();
      assert.equal(requests.length, before + 1);
      await receive(sse("state", state()));
      assert.equal(live.now.connection, "open");
      assert.equal(live.now.problem, null);
    }
  });

  test("is detected by silence", async () => {
    const { live } = await connect();
    await receive(sse("state", state()));
    await pass(14_000);
    await receive(": alive\n\n");
    await pass(14_000);
    assert.equal(requests[0]?.signal.aborted, false);
    await pass(1000);
    assert.equal(requests[0]?.signal.aborted, true);
    assert.equal(live.now.connection, "lost");
  });
});

describe("an API key", () => {
  test("is requested from the user without a request to the server if the HTML says so", async () => {
    const { live } = await connect({ asksKey: true });
    assert.equal(live.now.connection, "locked");
    assert.equal(requests.length, 0);
    live.useKey("secret");
    await settle();
    assert.equal(requests[0]?.headers.authorization, "Bearer secret");
    await receive(sse("state", state()));
    assert.equal(live.now.connection, "open");
  });

  test("is requested again if the server refuses it, without a retry", async () => {
    const { live } = await connect({ asksKey: true });
    refusals.push(Response.json({ error: { message: "Not one of this server's keys." } }, { status: 401 }));
    live.useKey("wrong");
    await settle();
    assert.equal(live.now.connection, "locked");
    assert.equal(live.now.problem, "Not one of this server's keys.");
    await pass(60_000);
    assert.equal(requests.length, 1);
  });

  test("clears the state and the log when it is removed", async () => {
    const { live } = await connect();
    await receive(sse("state", state()) + sse("log", lines(1)));
    live.lock("A key is needed.");
    assert.deepEqual([live.now.connection, live.now.state, live.now.lines], ["locked", null, []]);
  });
});

describe("a hidden page", () => {
  test("disconnects after half a minute, and connects again when it is shown", async () => {
    const { live, document } = await connect();
    document.hidden = true;
    document.dispatchEvent(new Event("visibilitychange"));
    await receive(sse("state", state()));
    await pass(10_000);
    assert.equal(requests[0]?.signal.aborted, false);
    await receive(": alive\n\n");
    await pass(10_000);
    await receive(": alive\n\n");
    await pass(10_000);
    assert.equal(live.now.connection, "paused");
    await pass(60_000);
    assert.equal(requests.length, 1);
    document.hidden = false;
    document.dispatchEvent(new Event("visibilitychange"));
    await settle();
    assert.equal(requests.length, 2);
    await receive(sse("state", state()));
    assert.equal(live.now.connection, "open");
  });

  test("stays connected if it is shown again in time", async () => {
    const { document } = await connect();
    for (const hidden of [true, false]) {
      document.hidden = hidden;
      document.dispatchEvent(new Event("visibilitychange"));
      await receive(": alive\n\n");
      await pass(14_000);
    }
    await receive(": alive\n\n");
    await pass(14_000);
    assert.equal(requests[0]?.signal.aborted, false);
  });
});
