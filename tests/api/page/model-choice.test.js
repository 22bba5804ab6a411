import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { keyAction } from "../../../src/mlx_ring/api/page/web/chat/composer.js";
import { EMPTY_ANSWER } from "../../../src/mlx_ring/api/page/web/chat/conversation.js";
import {
  findModel,
  isMissing,
  ModelSelect,
  wantedModel,
} from "../../../src/mlx_ring/api/page/web/chat/model-choice.js";
import { readParameters } from "../../../src/mlx_ring/api/page/web/chat/parameters.js";
import { ChatStore } from "../../../src/mlx_ring/api/page/web/chat/store.js";
import { modelsKey } from "../../../src/mlx_ring/api/page/web/models.js";
import { createStream, settle, setUpBrowser, toHtml } from "./support.js";

/** @type {any[]} */
const MODELS = [
  { id: "demo", aliases: ["d"] },
  { id: "other", aliases: [] },
];
/** @param {any[]} messages @returns {any} */
const chat = (...messages) => ({ id: "1", messages });
const answered = (/** @type {string | null} */ model) => ({ ...EMPTY_ANSWER, end: "stop", model });

test("a conversation keeps its model, also one that the server does not have any more, until another is chosen", () => {
  const moe = chat(answered("other"), answered("demo-moe"));
  const none = new Map();
  assert.equal(wantedModel(moe, none, "other", MODELS), "demo-moe");
  assert.equal(wantedModel(moe, new Map([["1", "demo"]]), "other", MODELS), "demo");
  const picks = new Map([
    ["1", "other"],
    ["2", "demo"],
  ]);
  assert.equal(wantedModel(moe, picks, "other", MODELS), "other");
  assert.equal(wantedModel(chat(), none, "gone", []), "gone");
  assert.equal(wantedModel(chat(), none, "gone", MODELS), "demo");
  assert.equal(wantedModel(chat(), none, "other", MODELS), "other");
  assert.equal(wantedModel(chat(answered(null)), none, null, MODELS), "demo");
  assert.equal(wantedModel(chat(), none, null, []), null);
});

test("a model is missing only if the server's list is known and lacks it under all names", () => {
  assert.deepEqual(
    ["demo", "d", "demo-moe", null].map((name) => isMissing(MODELS, name)),
    [false, false, true, false],
  );
  assert.equal(isMissing([], "demo-moe"), false);
  assert.equal(findModel(MODELS, "d")?.id, "demo");
});

test("models are read again once one is loaded or unloaded, or loaded again, and not with each figure", () => {
  /** @param {string} state @param {number[]} epochs @param {number} [running] @returns {any} */
  const cluster = (state, epochs, running = 0) => ({
    models: [{ model: "demo", state, instances: epochs.map((epoch) => ({ instance: "demo-1", epoch, running })) }],
  });
  const keys = [cluster("loading", []), cluster("ready", [1]), cluster("ready", [2]), cluster("unloaded", [])];
  assert.equal(new Set([undefined, ...keys].map(modelsKey)).size, 5);
  assert.equal(modelsKey(cluster("ready", [1], 3)), modelsKey(cluster("ready", [1])));
});

test("keys that an input method takes neither send nor stop, also in Safari after the composition has ended", () => {
  /** @param {string} key @param {object} [more] */
  const act = (key, more = {}) =>
    keyAction({ key, shiftKey: false, isComposing: false, keyCode: 0, ...more }, { isRunning: true, hasTouch: false });
  assert.deepEqual([act("Enter"), act("Escape"), act("a")], ["send", "stop", null]);
  assert.equal(act("Enter", { shiftKey: true }), null);
  for (const key of ["Enter", "Escape"]) {
    assert.equal(act(key, { isComposing: true }), null);
    assert.equal(act(key, { keyCode: 229 }), null);
  }
});

/** @param {string} content @param {string | null} [end] */
const event = (content, end = null) =>
  `data: ${JSON.stringify({ id: "x", model: "demo", choices: [{ delta: { content }, finish_reason: end }] })}\n\n`;

/** @param {any[]} messages stored in the open conversation */
function openStore(messages) {
  setUpBrowser();
  Object.assign(globalThis, { requestAnimationFrame: setImmediate, cancelAnimationFrame: clearImmediate });
  localStorage.setItem("mlx-ring.chats", JSON.stringify([{ id: "1", title: "t", at: 1, messages }]));
  const stream = createStream();
  const fetch = mock.method(globalThis, "fetch", async () => stream.response);
  const body = () => JSON.parse(/** @type {any} */ (fetch.mock.calls.at(-1)).arguments[1].body);
  return { store: new ChatStore(() => {}), stream, body };
}

const question = { role: "user", content: "Which?" };
const cut = { ...EMPTY_ANSWER, content: "Half of", end: "cut", model: "demo" };
const options = { model: "demo", parameters: { ...readParameters(), temperature: "2" } };
/** @param {ChatStore} store */
const contents = (store) => store.now.open.messages.map(({ content }) => content);

test("a retry in the middle keeps the text until the new one begins, and the messages after it", async () => {
  const { store, stream, body } = openStore([question, cut, question, cut]);
  store.retry(1, options);
  await settle();
  assert.deepEqual(contents(store), ["Which?", "Half of", "Which?", "Half of"]);
  assert.deepEqual(body().messages, [question]);
  await stream.write(`${event("Whole", "stop")}data: [DONE]\n\n`);
  await settle();
  assert.deepEqual(contents(store), ["Which?", "Whole", "Which?", "Half of"]);
  const { parameters, askedAt, end } = /** @type {any} */ (store.now.open.messages[1]);
  assert.deepEqual([parameters, typeof askedAt, end], [{ temperature: 2 }, "number", "stop"]);
});

test("an answer continues where it was cut off", async () => {
  const { store, stream, body } = openStore([question, cut]);
  store.continue(options);
  await settle();
  assert.deepEqual(body().messages, [question, { role: "assistant", content: "Half of" }]);
  assert.deepEqual([body().continue_final_message, body().add_generation_prompt], [true, false]);
  await stream.write(`${event(" it", "stop")}data: [DONE]\n\n`);
  await settle();
  assert.deepEqual(contents(store), ["Which?", "Half of it"]);
});

test("a question that reached no server says so, and a retry without a server loses nothing", async () => {
  const { store } = openStore([question, cut]);
  mock.method(globalThis, "fetch", async () => {
    throw new TypeError("Failed to fetch");
  });
  store.retry(1, options);
  await settle();
  assert.deepEqual(contents(store), ["Which?", "Half of"]);
  assert.equal(/** @type {any} */ (store.now.open.messages[1]).end, "cut");
  store.ask("And?", options);
  await settle();
  assert.equal(/** @type {any} */ (store.now.open.messages[3]).end, "unreached");
});

test("a model is called unloaded only while the server lists its models", () => {
  const options = (/** @type {any[]} */ models) => {
    const shown = toHtml(ModelSelect({ models, onDisk: [], wanted: "demo", setModel: () => {} }));
    return Array.from(shown.matchAll(/<option [^>]*>([^<]*)/g), ([, text]) => text);
  };
  assert.deepEqual(options([]), ["demo", "More models…"]);
  assert.deepEqual(options([{ id: "other", aliases: [], note: "" }]), ["other", "demo (not loaded)", "More models…"]);
});
