import assert from "node:assert/strict";
import { test } from "node:test";
import { Outcomes, questionOf, Row } from "../../../src/mlx_ring/api/page/web/cluster/what-if.js";
import { toHtml } from "./support.js";

const EMPTY = { machine: "", link: "", model: "", context: "", prompt: "", answer: "", objective: "" };
/** @param {object} [more] @returns {any} */
const outcome = (more = {}) => ({
  label: "now",
  model: "org/twin",
  fits: true,
  why: "",
  context_tokens: 8192,
  kv_bits: 16,
  prompt_tokens: 1024,
  answer_tokens: 256,
  memory_bytes: 5e9,
  tokens_per_s_range: [10, 20],
  first_token_s_range: [1, 2],
  request_s_range: [11.5, 34.5],
  users: 7,
  users_tokens_per_s: 99,
  stages: ["mini 0-31"],
  left_out: ["box: too slow"],
  ...more,
});

test("a question has only the fields that were filled in", () => {
  assert.deepEqual(questionOf(EMPTY), {});
  assert.deepEqual(questionOf({ ...EMPTY, link: "tb5" }), {}, "a link alone means nothing");
  const fields = { ...EMPTY, machine: "m4-16", link: "tb5", prompt: "500", answer: "40", objective: "first-token" };
  assert.deepEqual(questionOf({ ...fields, model: "8b", context: "4096" }), {
    add: ["m4-16"],
    link: "tb5",
    model: "8b",
    context_tokens: 4096,
    prompt_tokens: 500,
    answer_tokens: 40,
    optimize_for: "first-token",
  });
});

test("an answer names its model, its request and machines without layers", () => {
  const text = toHtml(Outcomes({ outcomes: [outcome(), outcome({ label: "with m4-16" })] }));
  assert.match(text, />org\/twin</);
  assert.match(text, /a prompt of 1,024 tokens and an answer of 256\./);
  assert.match(text, /Without layers: box: too slow\./);
  assert.doesNotMatch(toHtml(Outcomes({ outcomes: Array(5).fill(outcome()) })), /Without layers/);
});

test("a row shows the time of the request, or why nothing fits", () => {
  assert.match(toHtml(Row({ outcome: outcome() })), /11\.5 – 34\.5/);
  const large = outcome({ fits: false, why: "1 GB is missing." });
  assert.match(toHtml(Row({ outcome: large })), /does not fit/);
  assert.match(toHtml(Outcomes({ outcomes: [large] })), /now: 1 GB is missing\./);
});
