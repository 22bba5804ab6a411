import assert from "node:assert/strict";
import { beforeEach, describe, test } from "node:test";
import * as panel from "../../../src/mlx_ring/api/page/web/chat/parameters.js";
import { setUpBrowser } from "./support.js";

const { findProblem, readParameters, requestFields, storeParameters, summarize } = panel;

beforeEach(() => void setUpBrowser());

/** @param {Partial<import("../../../src/mlx_ring/api/page/web/chat/parameters.js").Parameters>} [more] */
const parameters = (more = {}) => ({ ...readParameters(), ...more });

test("empty fields leave everything to the model", () => {
  assert.deepEqual(requestFields(parameters()), {});
  assert.equal(findProblem(parameters()), null);
  assert.equal(summarize(parameters()), "");
});

test("every field is in the request under its name", () => {
  const all = parameters({
    temperature: "0.5",
    topP: " 0.9 ",
    maxTokens: "40",
    seed: "7",
    effort: "high",
    tools: '[{"type":"function"}]',
    system: "Be brief.",
  });
  assert.deepEqual(requestFields(all), {
    temperature: 0.5,
    top_p: 0.9,
    max_completion_tokens: 40,
    seed: 7,
    reasoning_effort: "high",
    tools: [{ type: "function" }],
  });
  assert.equal(summarize(all), "system prompt, temperature 0.5, top-p 0.9, max tokens 40, seed 7, tools");
});

describe("a problem names the field, its value and what is allowed", () => {
  const cases = /** @type {const} */ ([
    ["temperature", "warm", "Temperature is warm. Enter a number from 0 to 2."],
    ["temperature", "2.1", "Temperature is 2.1. Enter a number from 0 to 2."],
    ["topP", "-0.1", "Top-p is -0.1. Enter a number from 0 to 1."],
    ["maxTokens", "0", "Max tokens is 0. Enter a whole number from 1 to 1073741824."],
    ["maxTokens", "1.5", "Max tokens is 1.5. Enter a whole number from 1 to 1073741824."],
    ["seed", "Infinity", "Seed is Infinity. Enter a whole number from 0 to 9007199254740991."],
    ["tools", "{}", "Tools must be a JSON list in the OpenAI API's format."],
  ]);
  for (const [field, text, problem] of cases) {
    test(`${field}: ${text}`, () => assert.equal(findProblem(parameters({ [field]: text })), problem));
  }

  test("tools that are not JSON", () => {
    assert.match(findProblem(parameters({ tools: "[" })) ?? "", /^Tools are not valid JSON: /);
  });
});

test("zero is a value", () => {
  assert.deepEqual(requestFields(parameters({ temperature: "0", seed: "0" })), { temperature: 0, seed: 0 });
});

test("stored parameters are read again, and empty fields are not stored", () => {
  storeParameters(parameters({ seed: "7" }));
  assert.equal(readParameters().seed, "7");
  storeParameters(parameters({ seed: "" }));
  assert.equal(localStorage.getItem("mlx-ring.parameters"), null);
});
