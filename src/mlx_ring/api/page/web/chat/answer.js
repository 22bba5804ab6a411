// One answer of the model, as it comes.

import { ApiError, events, request } from "../api.js";

/**
 * Ask, and give the answer again and again as it grows, whole each time:
 *   content, reasoning: text; calls: tools to be called, {id, name, arguments}
 *   end: "stop", "length", "tool_calls", or null while more is to come
 *   figures: what it cost, see below
 */
export async function* answering(body, signal) {
  const clock = new Clock();
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { body: asked, signal, accept: "text/event-stream" });
  let answer = { content: "", reasoning: "", calls: [], end: null, figures: clock.figures() };
  let isWhole = false;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") {
      isWhole = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? "The server ended the answer.", { code: chunk.error.code });
    for (const choice of chunk.choices ?? []) {
      if (saysSomething(choice.delta)) clock.tick();
      answer = grown(answer, choice);
    }
    answer = { ...answer, figures: clock.figures(chunk) };
    yield answer;
  }
  if (!isWhole) throw new ApiError("The connection ended in the middle of the answer.", { code: "unreachable" });
}

function saysSomething(delta) {
  return Boolean(delta && (delta.content || reasoningOf(delta) || delta.tool_calls));
}

/** Servers call it by two names. */
function reasoningOf(delta) {
  return delta.reasoning_content ?? delta.reasoning ?? "";
}

function grown(answer, { delta = {}, finish_reason: end }) {
  return {
    ...answer,
    content: answer.content + (delta.content ?? ""),
    reasoning: answer.reasoning + reasoningOf(delta),
    calls: (delta.tool_calls ?? []).reduce(withCall, answer.calls),
    end: end ?? answer.end,
  };
}

function withCall(calls, { index = 0, id, function: called = {} }) {
  const before = calls[index] ?? { id: "", name: "", arguments: "" };
  const after = {
    id: id ?? before.id,
    name: before.name + (called.name ?? ""),
    arguments: before.arguments + (called.arguments ?? ""),
  };
  const copy = [...calls];
  copy[index] = after;
  return copy;
}

/**
 * What an answer costs. Seconds to the first token are measured here, where a person waits. All else is told when the
 * server has counted: tokens, of them cached ones of the prompt, and its pace. A chunk can hold several of them.
 */
class Clock {
  #asked = performance.now();
  #first = null;
  #told = null;

  tick() {
    this.#first ??= performance.now();
  }

  figures(chunk = {}) {
    if (chunk.usage) this.#told = { usage: chunk.usage, performance: chunk.performance ?? {} };
    const usage = this.#told?.usage;
    return {
      firstTokenS: this.#first === null ? null : (this.#first - this.#asked) / 1000,
      tokensPerS: this.#told?.performance.generation_tokens_per_second ?? null,
      tokens: usage?.completion_tokens ?? null,
      promptTokens: usage?.prompt_tokens ?? null,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
    };
  }
}
