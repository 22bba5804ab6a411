import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { EMPTY_ANSWER } from "../../../src/mlx_ring/api/page/web/chat/conversation.js";
import {
  contextTokens,
  describePrefill,
  nextSample,
  requestOf,
  startOfReading,
} from "../../../src/mlx_ring/api/page/web/chat/progress.js";

/** @param {object} [more] @returns {any} */
const request = (more = {}) => ({ id: "chatcmpl-1-0", prompt_tokens: 1000, tokens: 20, age_s: 2, ...more });
/** @param {any[]} messages @returns {any} */
const conversation = (...messages) => ({ id: "c", title: "", at: 0, messages });

test("an answer finds its own request", () => {
  const others = [request({ id: "chatcmpl-2-0" }), request()];
  assert.equal(requestOf(others, "chatcmpl-1"), others[1]);
  assert.equal(requestOf(others, ""), undefined);
});

test("the live speed is that since the state before", () => {
  const first = nextSample(null, request({ tokens: 5, age_s: 1 }));
  assert.equal(first.rate, null);
  const second = nextSample(first, request({ tokens: 25, age_s: 2 }));
  assert.equal(second.rate, 20);
  assert.equal(nextSample(second, request({ tokens: 25, age_s: 2 })).rate, 20);
  assert.equal(nextSample(second, request({ tokens: 1, age_s: 0.5 })).rate, null);
});

describe("prefill", () => {
  test("says what is left by the tokens that were computed", () => {
    assert.equal(
      describePrefill(request({ prompt_tokens: 20000, read_tokens: 6000, cached_tokens: 1000, age_s: 5 }), {
        read: 0,
        ageS: 0,
      }),
      "Reading the prompt: 6,000 of 20,000 tokens (30 %). About 14 s left.",
    );
  });

  test("does not count the time in the queue", () => {
    const waits = [1, 120].map((age_s) => request({ state: "waiting", read_tokens: 0, cached_tokens: 0, age_s }));
    const reads = { state: "reading", prompt_tokens: 8192, cached_tokens: 0 };
    const [first, second] = [1024, 2048].map((read_tokens, place) =>
      request({ ...reads, read_tokens, age_s: 122 + 2 * place }),
    );
    const start = [...waits, first, second].reduce(startOfReading, null);
    assert.match(describePrefill(first, start), /About 14 s left/);
    assert.match(describePrefill(second, start), /About 12 s left/);
    // A page that did not see the wait counts from the first state that it sees.
    const seen = startOfReading(null, first);
    assert.doesNotMatch(describePrefill(first, seen), /left/);
    assert.match(describePrefill(second, startOfReading(seen, second)), /About 12 s left/);
  });

  test("says nothing of the rest before the first tokens are computed", () => {
    assert.equal(
      describePrefill(request({ read_tokens: 500, cached_tokens: 500 }), { read: 0, ageS: 0 }),
      "Reading the prompt: 500 of 1,000 tokens (50 %).",
    );
  });
});

test("the context holds the prompt and the answer, and nothing is known before the first answer", () => {
  const answer = { ...EMPTY_ANSWER, figures: { promptTokens: 100, tokens: 7 } };
  assert.equal(contextTokens(conversation(), undefined), null);
  assert.equal(contextTokens(conversation({ role: "user", content: "?" }, answer), undefined), 107);
  assert.equal(contextTokens(conversation(answer), request()), 1020);
});
