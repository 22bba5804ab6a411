// A streamed chat completion.

/** @import { ChatCompletionChunk, ChatDelta, OpenAiError, ToolCallDelta } from "../types.js" */

import { ApiError, readEvents, request } from "../api.js";

/** Time between two tries to get the rest of an answer, and the longest time of all tries without an event. */
const [TRY_EVERY_MS, GIVE_UP_MS] = [1000, 120000];
/** Longest pause between two tries of a question, in units of the usual one: a person waits. */
const MAX_PAUSE = 2;
/** Longest wait for a model that is being loaded: a large one may have to be downloaded. */
const MAX_WAIT_MS = 3_600_000;
/** End of the server's sentence that the page follows by itself. */
const ASK_AGAIN = /[.;,:]? (ask|try) again in a moment\.$/i;

/** @typedef {{ id: string, name: string, arguments: string }} ToolCall */

/**
 * Function that waits for a turn, and returns the one that ends it.
 * @typedef {() => Promise<() => void>} TakeTurn
 */

/** @type {TakeTurn} */
const NO_TURNS = async () => () => {};

/**
 * What an answer costs. Null where nothing is known yet.
 * @typedef {object} Figures
 * @property {number | null} firstTokenS time to first token, measured here where a person waits
 * @property {number | null} tokensPerS as the server measured it
 * @property {number | null} tokens
 * @property {number | null} promptTokens
 * @property {number | null} cachedTokens of the prompt
 */

/**
 * An answer as far as it has arrived.
 * @typedef {object} Completion
 * @property {string} id the server's; empty before the first chunk
 * @property {string | null} model that answers; null before the first chunk
 * @property {string} content
 * @property {string} reasoning
 * @property {ToolCall[]} calls
 * @property {string | null} end "stop", "length" or "tool_calls"; null until the end
 * @property {boolean} isPaused true while the model is loaded again after a loss, or the connection is lost
 * @property {string} [waitsFor] why the model cannot answer yet, while the question is sent again and again
 * @property {Figures} figures
 */

/**
 * Request a chat completion. Yield the whole answer again with each chunk.
 *
 * While the model is being loaded, the question is sent again and again, also after a loss of the connection.
 *
 * If the connection breaks, a server with a journal gives the rest, also after it was started again.
 * @param {object} body fields of the request
 * @param {AbortSignal} signal
 * @param {TakeTurn} [takeTurn] waits until the question may be sent; a question that waits for its model has no turn
 * @param {number} [tryEveryMs] time between two tries to get the rest
 * @returns {AsyncGenerator<Completion>}
 * @throws {ApiError} if the server refuses the request, or the stream breaks and its rest cannot be had
 */
export async function* streamCompletion(body, signal, takeTurn = NO_TURNS, tryEveryMs = TRY_EVERY_MS) {
  const meter = new Meter();
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  /** @type {Completion} */
  let answer = {
    id: "",
    model: null,
    content: "",
    reasoning: "",
    calls: [],
    end: null,
    isPaused: false,
    waitsFor: "",
    figures: meter.figures(),
  };
  for await (const { event, data } of readStream(streamed, signal, takeTurn, tryEveryMs, meter)) {
    if (event === "wait") {
      yield { ...answer, waitsFor: data };
      continue;
    }
    if (event === "comment") {
      if (data === "resuming") yield { ...answer, isPaused: true };
      continue;
    }
    /** @type {ChatCompletionChunk | OpenAiError} */
    const chunk = JSON.parse(data);
    if ("error" in chunk) throw new ApiError(chunk.error.message, { code: chunk.error.code });
    for (const { delta, finish_reason: end } of chunk.choices) {
      if (delta.content || reasoningOf(delta) || delta.tool_calls) meter.markToken();
      answer = extend(answer, delta, end);
    }
    meter.record(chunk);
    answer = {
      ...answer,
      id: chunk.id ?? answer.id,
      model: chunk.model ?? answer.model,
      isPaused: false,
      figures: meter.figures(),
    };
    yield answer;
  }
}

/**
 * Yield the events of a stream up to its end, each once, over as many connections as that takes.
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {TakeTurn} takeTurn
 * @param {number} tryEveryMs
 * @param {Meter} meter started again with each question
 */
async function* readStream(body, signal, takeTurn, tryEveryMs, meter) {
  let [lastEventId, lastAt] = ["", performance.now()];
  /** Why the question waits, and since when; empty unless its model is being loaded. */
  let [wait, waitsSince] = ["", Number.POSITIVE_INFINITY];
  /** @type {(() => void) | null} */
  let endTurn = null;
  try {
    for (;;) {
      let isAccepted = false;
      try {
        endTurn ??= await takeTurn();
        signal.throwIfAborted();
        if (!lastEventId) meter.start();
        const options = { body, signal, accept: "text/event-stream", lastEventId };
        const response = await request("v1/chat/completions", options);
        isAccepted = true;
        for await (const each of readEvents(response, undefined, true)) {
          if (each.data === "[DONE]") return;
          lastEventId = each.id ?? lastEventId;
          lastAt = performance.now();
          yield each;
        }
        throw new ApiError("The connection closed before the answer was complete.", { code: "unreachable" });
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        const now = performance.now();
        const isLoading = error.code === "not_ready" && !lastEventId;
        if (isLoading) {
          [wait, waitsSince] = [error.message.replace(ASK_AGAIN, "."), Math.min(waitsSince, now)];
          lastAt = now;
        }
        // A question that was accepted is not sent twice.
        const isLost = error.code === "unreachable" && wait !== "" && !isAccepted && now - lastAt < GIVE_UP_MS;
        if ((isLoading || isLost) && now - waitsSince < MAX_WAIT_MS) {
          // Other answers need no wait for this model.
          endTurn?.();
          endTurn = null;
          yield { event: "wait", data: wait, id: null };
          await pause(Math.min(error.retryAfterS ?? 1, MAX_PAUSE) * tryEveryMs, signal);
          continue;
        }
        const passes = error.code === "unreachable" || error.status === 503;
        if (!passes || !lastEventId || now - lastAt > GIVE_UP_MS) throw error;
        yield { event: "comment", data: "resuming", id: null };
        await pause(tryEveryMs, signal);
      }
    }
  } finally {
    endTurn?.();
  }
}

/**
 * Return how an answer ended, by what was thrown.
 * @param {unknown} error
 * @param {boolean} isStopped whether the person stopped it
 * @param {boolean} hasBegun whether anything of it arrived
 */
export function endOf(error, isStopped, hasBegun) {
  if (isStopped) return { end: "stopped" };
  if (!(error instanceof ApiError)) {
    console.error(error);
    return { end: "error", problem: "The page could not read the answer." };
  }
  // The notice of the connection tells why, and goes when the server is back.
  if (error.code === "unreachable") return { end: hasBegun ? "cut" : "unreached" };
  return { end: "error", problem: error.message };
}

/**
 * Wait, unless the signal aborts.
 * @param {number} ms
 * @param {AbortSignal} signal
 */
function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(new DOMException("The answer was stopped.", "AbortError"));
    if (signal.aborted) onAbort();
    signal.addEventListener("abort", onAbort, { once: true });
    setTimeout(resolve, ms);
  });
}

/**
 * Return the delta's reasoning, for which servers have two names.
 * @param {ChatDelta} delta
 */
function reasoningOf(delta) {
  return delta.reasoning_content ?? delta.reasoning ?? "";
}

/**
 * @param {Completion} answer
 * @param {ChatDelta} delta
 * @param {string | null} end
 * @returns {Completion}
 */
function extend(answer, delta, end) {
  return {
    ...answer,
    content: answer.content + (delta.content ?? ""),
    reasoning: answer.reasoning + reasoningOf(delta),
    calls: (delta.tool_calls ?? []).reduce(extendCalls, answer.calls),
    end: end ?? answer.end,
  };
}

/**
 * @param {ToolCall[]} calls
 * @param {ToolCallDelta} delta
 */
function extendCalls(calls, { index, id, function: called }) {
  const before = calls[index] ?? { id: "", name: "", arguments: "" };
  const copy = [...calls];
  copy[index] = {
    id: id ?? before.id,
    name: before.name + (called.name ?? ""),
    arguments: before.arguments + called.arguments,
  };
  return copy;
}

/** Measures an answer, and keeps the counts that the server sends. One chunk can hold several tokens. */
class Meter {
  #startedAt = performance.now();
  /** @type {number | null} */
  #firstTokenAt = null;
  /** @type {Partial<ChatCompletionChunk>} */
  #counts = {};

  /** Count from now on: the question is sent. */
  start() {
    this.#startedAt = performance.now();
  }

  markToken() {
    this.#firstTokenAt ??= performance.now();
  }

  /** @param {ChatCompletionChunk} chunk */
  record(chunk) {
    if (chunk.usage) this.#counts = chunk;
  }

  /** @returns {Figures} */
  figures() {
    const { usage, performance: measured } = this.#counts;
    return {
      firstTokenS: this.#firstTokenAt === null ? null : (this.#firstTokenAt - this.#startedAt) / 1000,
      tokensPerS: measured?.generation_tokens_per_second ?? null,
      tokens: usage?.completion_tokens ?? null,
      promptTokens: usage?.prompt_tokens ?? null,
      cachedTokens: usage?.prompt_tokens_details.cached_tokens ?? null,
    };
  }
}
