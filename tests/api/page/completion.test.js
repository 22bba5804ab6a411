import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { streamCompletion } from "../../../src/mlx_ring/api/page/web/chat/completion.js";
import { setUpBrowser } from "./support.js";

/**
 * Stream an answer from these chunks. Return its states, the error that ended it and the request's body.
 * @param {unknown[]} chunks
 * @param {{ isDone?: boolean, status?: number }} [options]
 */
async function stream(chunks, { isDone = true, status = 200 } = {}) {
  setUpBrowser();
  const text =
    chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("") + (isDone ? "data: [DONE]\n\n" : "");
  const fetch = mock.method(globalThis, "fetch", async () => new Response(text, { status }));
  const answers = [];
  let problem = null;
  try {
    const request = { messages: [{ role: "user", content: "?" }], seed: 1 };
    for await (const answer of streamCompletion(request, new AbortController().signal)) answers.push(answer);
  } catch (error) {
    problem = error instanceof Error ? error.message : String(error);
  }
  const options = /** @type {any} */ (fetch.mock.calls.at(0)).arguments[1];
  return { answers, last: answers.at(-1), problem, body: JSON.parse(options.body) };
}

/** @param {object} delta @param {string | null} [end] */
const chunk = (delta, end = null) => ({ choices: [{ delta, finish_reason: end }] });

test("an answer is paused from the server's comment until its next chunk", async () => {
  setUpBrowser();
  const [first, last] = [chunk({ content: "Par" }), chunk({ content: "is." }, "stop")].map((one) =>
    JSON.stringify(one),
  );
  const text = `data: ${first}\n\n: keep-alive\n\n: resuming\n\ndata: ${last}\n\ndata: [DONE]\n\n`;
  mock.method(globalThis, "fetch", async () => new Response(text));
  const states = [];
  for await (const { content, isPaused } of streamCompletion({}, new AbortController().signal)) {
    states.push([content, isPaused]);
  }
  assert.deepEqual(states, [
    ["Par", false],
    ["Par", true],
    ["Paris.", false],
  ]);
});

/**
 * Stream an answer over several connections. Return its states, the error that ended it, and the ids of the last
 * events that were sent.
 * @param {(string | Error | Response)[]} connections what each gives before it ends
 */
async function streamOver(connections) {
  setUpBrowser();
  const [rest, sent] = [[...connections], /** @type {(string | undefined)[]} */ ([])];
  mock.method(globalThis, "fetch", async (/** @type {URL} */ _, /** @type {any} */ { headers }) => {
    sent.push(headers["last-event-id"]);
    const next = rest.shift();
    if (next instanceof Error) throw next;
    return next instanceof Response ? next : new Response(next);
  });
  const states = [];
  const waits = [];
  let problem = null;
  try {
    for await (const { content, isPaused, waitsFor } of streamCompletion(
      {},
      new AbortController().signal,
      undefined,
      0,
    )) {
      states.push([content, isPaused]);
      waits.push(waitsFor);
    }
  } catch (error) {
    problem = error instanceof Error ? error.message : String(error);
  }
  return { states, waits, problem, sent };
}

const [par, is] = [chunk({ content: "Par" }), chunk({ content: "is." }, "stop")].map((one) => JSON.stringify(one));

test("a broken connection is followed by others that give the rest of a kept answer", async () => {
  const { states, problem, sent } = await streamOver([
    `id: c:0\ndata: ${par}\n\n: keep-alive\n`,
    new TypeError("Failed to fetch"),
    new Response("{}", { status: 503 }),
    `: keep-alive\nid: c:1\ndata: ${is}\n\ndata: [DONE]\n\n`,
  ]);
  assert.equal(problem, null);
  assert.deepEqual(sent, [undefined, "c:0", "c:0", "c:0"]);
  assert.deepEqual(states.at(0), ["Par", false]);
  assert.deepEqual(states.slice(1, -1), Array(3).fill(["Par", true]));
  assert.deepEqual(states.at(-1), ["Paris.", false]);
});

/** @param {string} code */
const refused = (code) => {
  const error = { code, message: "The model is being loaded; ask again in a moment." };
  return new Response(JSON.stringify({ error }), { status: 503, headers: { "retry-after": "5" } });
};

test("a question is sent again until its model is loaded, but not to a server that is shutting down", async () => {
  const loading = await streamOver([refused("not_ready"), refused("not_ready"), `data: ${is}\n\ndata: [DONE]\n\n`]);
  assert.equal(loading.problem, null);
  assert.deepEqual(loading.waits, ["The model is being loaded.", "The model is being loaded.", ""]);
  assert.deepEqual(loading.states.at(-1), ["is.", false]);
  const draining = await streamOver([refused("draining")]);
  assert.equal(draining.problem, "The model is being loaded; ask again in a moment.");
});

test("a question that waits for its model is sent again after a loss of the connection, until it is accepted", async () => {
  const lost = new TypeError("Failed to fetch");
  const { waits, states, problem } = await streamOver([
    refused("not_ready"),
    lost,
    lost,
    `data: ${is}\n\ndata: [DONE]\n\n`,
  ]);
  assert.equal(problem, null);
  assert.deepEqual(waits, [...Array(3).fill("The model is being loaded."), ""]);
  assert.deepEqual(states.at(-1), ["is.", false]);
  assert.match((await streamOver([lost])).problem ?? "", /./, "one that does not wait");
  const accepted = await streamOver([refused("not_ready"), ": keep-alive\n\n", `data: ${is}\n\ndata: [DONE]\n\n`]);
  assert.match(accepted.problem ?? "", /closed before the answer was complete/);
});

test("a question that waits for its model has no turn, and its first token counts from when it was sent last", async () => {
  setUpBrowser();
  let [now, turns] = [0, 0];
  mock.method(performance, "now", () => now);
  const replies = [refused("not_ready"), refused("not_ready"), new Response(`data: ${is}\n\ndata: [DONE]\n\n`)];
  mock.method(globalThis, "fetch", async () => {
    now += 500;
    return replies.shift();
  });
  const takeTurn = async () => {
    turns += 1;
    now += 60_000;
    return () => {
      turns -= 1;
    };
  };
  const seen = [];
  for await (const { waitsFor, figures } of streamCompletion({}, new AbortController().signal, takeTurn, 0)) {
    seen.push([waitsFor !== "", turns, figures.firstTokenS]);
  }
  mock.restoreAll();
  assert.deepEqual(seen, [
    [true, 0, null],
    [true, 0, null],
    [false, 1, 0.5],
  ]);
  assert.equal(turns, 0);
});

test("an answer that is not kept ends with its connection", async () => {
  const { problem, sent } = await streamOver([`data: ${par}\n\n`]);
  assert.match(problem ?? "", /closed before the answer was complete/);
  assert.deepEqual(sent, [undefined]);
});

test("a server that lost the answer says so", async () => {
  const lost = new Response(JSON.stringify({ error: { message: "The journal has no answer 'c'." } }), { status: 404 });
  const { problem } = await streamOver([`id: c:0\ndata: ${par}\n\n`, lost]);
  assert.equal(problem, "The journal has no answer 'c'.");
});

test("deltas of text and of reasoning are joined, under either field name of the reasoning", async () => {
  const { last, answers, problem } = await stream([
    chunk({ role: "assistant" }),
    chunk({ reasoning_content: "Hm" }),
    chunk({ reasoning: "m." }),
    chunk({ content: "Par" }),
    chunk({ content: "is." }, "stop"),
  ]);
  assert.equal(problem, null);
  assert.equal(answers.length, 5);
  assert.deepEqual([last?.reasoning, last?.content, last?.end], ["Hmm.", "Paris.", "stop"]);
});

test("the request asks for a stream with usage", async () => {
  const { body } = await stream([]);
  assert.deepEqual(body, {
    messages: [{ role: "user", content: "?" }],
    seed: 1,
    stream: true,
    stream_options: { include_usage: true },
  });
});

test("tool calls are assembled from their deltas", async () => {
  const call = (/** @type {number} */ index, /** @type {object} */ more) => chunk({ tool_calls: [{ index, ...more }] });
  const { last } = await stream([
    call(0, { id: "a", function: { name: "get_weather", arguments: "" } }),
    call(0, { function: { arguments: '{"city":' } }),
    call(1, { id: "b", function: { name: "get_time", arguments: "{}" } }),
    call(0, { function: { arguments: '"Paris"}' } }),
    chunk({}, "tool_calls"),
  ]);
  assert.deepEqual(last?.calls, [
    { id: "a", name: "get_weather", arguments: '{"city":"Paris"}' },
    { id: "b", name: "get_time", arguments: "{}" },
  ]);
});

test("figures are the server's, and null before it sends them", async () => {
  const { answers, last } = await stream([
    chunk({ content: "a" }),
    {
      choices: [],
      usage: { prompt_tokens: 7, completion_tokens: 3, prompt_tokens_details: { cached_tokens: 4 } },
      performance: { generation_tokens_per_second: 12.5 },
    },
  ]);
  assert.equal(answers[0]?.figures.tokens, null);
  assert.equal(typeof answers[0]?.figures.firstTokenS, "number");
  const { firstTokenS, ...figures } = last?.figures ?? {};
  assert.ok((firstTokenS ?? -1) >= 0);
  assert.deepEqual(figures, { tokensPerS: 12.5, tokens: 3, promptTokens: 7, cachedTokens: 4 });
});

test("an answer without a token has no time to first token", async () => {
  const { last } = await stream([chunk({ role: "assistant" }), chunk({}, "stop")]);
  assert.equal(last?.figures.firstTokenS, null);
});

test("an error in the stream ends the answer with its message", async () => {
  const { last, problem } = await stream([
    chunk({ content: "a" }),
    { error: { message: "Worker lost.", code: "lost" } },
  ]);
  assert.equal(problem, "Worker lost.");
  assert.equal(last?.content, "a");
});

test("a stream that ends without [DONE] is an error", async () => {
  const { problem } = await stream([chunk({ content: "a" })], { isDone: false });
  assert.match(problem ?? "", /before the answer was complete/);
});

test("a refused request is an error with the status", async () => {
  const { problem } = await stream([], { status: 503 });
  assert.match(problem ?? "", /503/);
});
