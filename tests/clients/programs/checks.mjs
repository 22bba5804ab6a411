// Shared code of the programs in JavaScript, as checks.py is for those in Python.
//     node with_CLIENT.mjs URL KEY MODEL FOUND
import assert from "node:assert/strict";
import { appendFileSync, writeFileSync } from "node:fs";

export const [URL, KEY, MODEL, FOUND] = process.argv.slice(2);
export const WRONG_KEY = "not-the-key";
export const QUESTION = "What is the capital of France?";
export const ANSWER = "The capital of France is Paris.";
export const WEATHER_QUESTION = "What is the weather in Paris?";
export const WEATHER_RESULT = '{"city": "Paris", "degrees": 21, "sky": "sunny"}';
export const WEATHER_ANSWER = "It is 21 degrees and sunny in Paris.";
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const LAMP_SCHEMA = {
  type: "object",
  properties: { room: { type: "string", enum: ["kitchen", "garden", "hall"] }, on: { type: "boolean" } },
  required: ["room", "on"],
  additionalProperties: false,
};
export const LAMP_REQUEST = "Describe a lamp.";

export const equal = assert.deepEqual;
export const expect = (condition, found) => assert.ok(condition, `found ${JSON.stringify(found)}`);

export const expectLamp = (text) => {
  const lamp = JSON.parse(text);
  equal(Object.keys(lamp).sort(), ["on", "room"]);
  expect(["kitchen", "garden", "hall"].includes(lamp.room) && typeof lamp.on === "boolean", lamp);
};

// Return the error that a promise is rejected with, which must be of this type.
export const rejected = async (kind, promise) => {
  const error = await promise.then(
    (value) => assert.fail(`${kind.name} was expected, and it returned ${JSON.stringify(value)}`),
    (reason) => reason,
  );
  expect(error instanceof kind, String(error));
  return error;
};

const checks = [];
export const check = (name, run) => checks.push([name, run]);

export const run = async () => {
  writeFileSync(FOUND, "");
  for (const [name, one] of checks) {
    const error = await one().then(
      () => null,
      (reason) => String(reason?.stack ?? reason),
    );
    appendFileSync(FOUND, `${JSON.stringify({ check: name, error })}\n`);
  }
};
