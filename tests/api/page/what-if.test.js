import assert from "node:assert/strict";
import { test } from "node:test";
import { Outcomes, Plot, Plots, questionOf, Row } from "../../../src/mlx_ring/api/page/web/cluster/what-if.js";
import { toHtml } from "./support.js";

const EMPTY = {
  machine: "",
  link: "",
  model: "",
  context: "",
  prompt: "",
  answer: "",
  users: "",
  objective: "",
  bits: "",
  plot: "",
};
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
  fastest_users: 7,
  at_once: 1,
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

test("a question may list what fits, compare bits of the KV cache, and ask for curves and users", () => {
  assert.deepEqual(questionOf({ ...EMPTY, model: "*", bits: "16,8,4", plot: "on", users: "3" }), {
    what_fits: true,
    users: 3,
    kv_bits: [16, 8, 4],
    curves: true,
  });
  assert.deepEqual(questionOf({ ...EMPTY, bits: "8" }), { kv_bits: [8] });
});

test("curves are drawn over context and users", () => {
  const by = (/** @type {number[]} */ ...counts) => counts.map((at) => ({ at, tokens_per_s: 100 / at }));
  const both = toHtml(Plots({ curves: { label: "now", by_context: by(1024), by_users: by(1, 2, 3) } }));
  assert.match(both, /tokens\/s of one user over the context, now/);
  assert.match(both, /tokens\/s of all users over their number, now/);
  const text = toHtml(Plot({ title: "tokens/s", points: by(1024, 2048, 3000) }));
  assert.match(text, /<polyline points="48\.0,16\.0 256\.0,/, "the first is the highest");
  assert.equal(text.match(/<circle/g)?.length, 3);
  assert.match(text, />2k</);
  assert.match(text, />3000</);
});

test("users who are fastest together are counted where they are fewer than fit", () => {
  assert.doesNotMatch(toHtml(Row({ outcome: outcome() })), / with /);
  assert.match(toHtml(Row({ outcome: outcome({ fastest_users: 4 }) })), /99 with 4/);
});

test("several users at once are named, and many rows give their reasons in a few words", () => {
  assert.match(toHtml(Outcomes({ outcomes: [outcome({ at_once: 3 })] })), /3 users send one at once\./);
  const large = outcome({ fits: false, why: "1 GB is missing." });
  assert.doesNotMatch(toHtml(Outcomes({ outcomes: Array(5).fill(large) })), /now: 1 GB/);
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
