import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";
import { AnswerMarks } from "../../../src/mlx_ring/api/page/web/chat/answer-marks.js";
import { MAX_STREAMS } from "../../../src/mlx_ring/api/page/web/chat/answer-slots.js";
import { EMPTY_ANSWER, editName, isAnswer } from "../../../src/mlx_ring/api/page/web/chat/conversation.js";
import { readParameters } from "../../../src/mlx_ring/api/page/web/chat/parameters.js";
import { ChatStore } from "../../../src/mlx_ring/api/page/web/chat/store.js";
import { createStream, settle, setUpBrowser } from "./support.js";

const NAME = "mlx-ring.chats";
const DELETED = "mlx-ring.deleted";
const { navigator } = globalThis;

afterEach(() => {
  mock.timers.reset();
  window.dispatchEvent(new Event("pagehide"));
  Object.defineProperty(globalThis, "navigator", { value: navigator, configurable: true });
});

/** @param {number} at @param {any[]} [messages] */
const chat = (at, messages = [{ role: "user", content: "?" }]) => ({ id: `c${at}`, title: `chat ${at}`, at, messages });

/** @param {any[]} chats stored before the page is opened */
function openStore(chats) {
  const { window } = setUpBrowser();
  Object.assign(globalThis, { requestAnimationFrame: setImmediate, cancelAnimationFrame: clearImmediate });
  localStorage.setItem(NAME, JSON.stringify(chats));
  const write = localStorage.setItem.bind(localStorage);
  /** @param {number} room of the storage, in characters */
  const limit = (room) => {
    localStorage.setItem = (name, value) => {
      if (value.length > room) throw new DOMException("full", "QuotaExceededError");
      write(name, value);
    };
  };
  /** What another tab stores. @param {any[]} value @param {string[]} [deleted] ids that it deleted */
  const storeElsewhere = (value, deleted = []) => {
    if (deleted.length) write(DELETED, JSON.stringify(deleted.map((id) => [id, Date.now()])));
    write(NAME, JSON.stringify(value));
    window.dispatchEvent(Object.assign(new Event("storage"), { key: NAME }));
  };
  /** What another tab says of a chat. @param {string} id @param {object | null} value */
  const mark = (id, value) => {
    if (value) write(`mlx-ring.chat-${id}`, JSON.stringify(value));
    else localStorage.removeItem(`mlx-ring.chat-${id}`);
    window.dispatchEvent(Object.assign(new Event("storage"), { key: `mlx-ring.chat-${id}` }));
  };
  return { store: new ChatStore(() => {}), limit, storeElsewhere, mark };
}

/** @returns {any[]} */
const stored = () => JSON.parse(localStorage.getItem(NAME) ?? "[]");
/** @param {ChatStore} store */
const ids = (store) => store.now.conversations.map(({ id }) => id);
const options = { model: "demo", parameters: readParameters() };

test("chats beyond the first hundred are counted as not stored, and stay in the list", () => {
  const { store } = openStore(Array.from({ length: 100 }, (_, place) => chat(100 - place)));
  mock.method(globalThis, "fetch", () => new Promise(() => {}));
  store.startNew();
  store.ask("One more", options);
  assert.deepEqual([store.now.conversations.length, store.now.unstored], [101, 1]);
  assert.equal(stored().filter(({ id }) => id).length, 100);
  store.delete("c1");
  assert.equal(store.now.unstored, 0);
});

test("a chat for which there was no room stays, and open, when another tab stores its own", () => {
  const { store, limit, storeElsewhere } = openStore([chat(3), chat(2), chat(1)]);
  limit(localStorage.getItem(NAME)?.length ?? 0);
  store.open("c3");
  store.rename("a much longer name");
  assert.deepEqual([ids(store), store.now.unstored], [["c3", "c2", "c1"], 1]);
  store.open("c1");
  storeElsewhere([chat(4), chat(3)], ["c2"]);
  assert.deepEqual([ids(store), store.now.open.id, store.now.unstored], [["c4", "c3", "c1"], "c1", 1]);
});

test("a chat that another tab could not store stays here, one that it deleted does not", () => {
  const { store, storeElsewhere } = openStore([chat(3), chat(2), chat(1)]);
  storeElsewhere([chat(4), chat(2), { unstored: ["c1"] }], ["c3"]);
  assert.deepEqual([ids(store), store.now.unstored], [["c4", "c2", "c1"], 1]);
  storeElsewhere([chat(4), chat(2), chat(1)]);
  assert.deepEqual([ids(store), store.now.unstored], [["c4", "c2", "c1"], 0]);
});

test("a chat that was asked for is opened when it comes back, unless a person writes a question", () => {
  const { store, storeElsewhere } = openStore([chat(1)]);
  store.open("c2");
  assert.equal(store.now.missing, "c2");
  storeElsewhere([chat(3), chat(1)]);
  assert.deepEqual([store.now.missing, store.now.open.messages.length], ["c2", 0]);
  store.drafts.set(store.now.open, "Why");
  storeElsewhere([chat(2), chat(1)]);
  assert.deepEqual([store.now.missing, store.now.open.messages.length], ["c2", 0]);
  store.drafts.set(store.now.open, "");
  storeElsewhere([chat(2), chat(1)]);
  assert.deepEqual([store.now.missing, store.now.open.id], [null, "c2"]);
});

test("each result of a tool is stored, also while others are missing", () => {
  const calls = ["a", "b"].map((id) => ({ id, name: id, arguments: "{}" }));
  const { store } = openStore([
    chat(1, [
      { role: "user", content: "?" },
      { ...EMPTY_ANSWER, calls, end: "tool_calls" },
    ]),
  ]);
  store.addResult(/** @type {any} */ (calls[0]), "line one\nline two", options);
  assert.equal(stored()[0].messages[2].content, "line one\nline two");
});

/** A store whose only chat receives an answer, of which a first word has arrived. */
async function openStreaming() {
  const page = openStore([chat(1)]);
  const { store } = page;
  const stream = createStream();
  mock.method(globalThis, "fetch", async (/** @type {URL} */ _, /** @type {any} */ { signal }) => {
    signal.addEventListener("abort", () => stream.abort());
    return stream.response;
  });
  store.ask("More?", options);
  await settle();
  await stream.write('data: {"id":"x","choices":[{"delta":{"content":"Hi"}}]}\n\n');
  await settle();
  assert.equal(store.now.open.messages[2]?.content, "Hi");
  return { ...page, stream, contents: () => stored()[0]?.messages.map((/** @type {any} */ { content }) => content) };
}

for (const [how, left] of /** @type {[string, any[]][]} */ ([
  ["alone", [chat(2)]],
  ["with all others", []],
])) {
  test(`a chat that another tab deletes ${how} stays deleted when its answer ends or the page is closed`, async () => {
    const { store, storeElsewhere, stream } = await openStreaming();
    storeElsewhere(left, ["c1"]);
    assert.deepEqual([ids(store), store.now.running.size], [left.map(({ id }) => id), 0]);
    await settle();
    window.dispatchEvent(new Event("pagehide"));
    assert.deepEqual(stored(), left);
    assert.equal(localStorage.getItem("mlx-ring.chat-c1"), null);
    await assert.rejects(stream.write("data: more"));
  });
}

test("a copy of a chat in which an answer streams has answers that ended", async () => {
  const { store, stream } = await openStreaming();
  store.branch(3);
  assert.deepEqual([store.now.open.messages[2]?.content, ends(store.now.open)], ["Hi", ["stopped"]]);
  assert.equal(store.now.running.has(store.now.open.id), false);
  store.open("c1");
  assert.deepEqual(ends(store.now.open), [null]);
  await stream.write(DONE);
  await settle();
  assert.deepEqual(ends(store.now.open), ["stop"]);
});

/** @param {any} chat */
const ends = ({ messages }) => messages.filter(isAnswer).map((/** @type {any} */ { end }) => end);

test("a chat that another tab renames, and stores as it was before the answer, keeps both when that ends", async () => {
  const { store, storeElsewhere, stream, contents } = await openStreaming();
  storeElsewhere([{ ...stored()[0], title: "Renamed", isNamed: true }]);
  assert.deepEqual([store.now.open.title, store.now.open.messages[2]?.content], ["Renamed", "Hi"]);
  storeElsewhere([{ ...chat(1), title: "Again" }]);
  await stream.write(DONE);
  await settle();
  assert.deepEqual([stored()[0].title, contents()], ["Again", ["?", "More?", "HiHi"]]);
});

/**
 * Open the page in another tab, with a store of its own. `report` tells a tab that the list has changed.
 * @param {ChatStore} store
 */
function openOther(store) {
  const own = window;
  const elsewhere = new EventTarget();
  Object.assign(globalThis, { window: elsewhere });
  const other = new ChatStore(() => {});
  Object.assign(globalThis, { window: own });
  /** @param {ChatStore} to @param {string | null} [key] */
  const report = (to, key = NAME) =>
    void (to === store ? own : elsewhere).dispatchEvent(Object.assign(new Event("storage"), { key }));
  return { other, report };
}

const storedIds = () => stored().map(({ id }) => id);

test("a new chat and its answer stay when another tab stores its list before it knows of them", async () => {
  const { store, storeElsewhere } = openStore([chat(1)]);
  const { other, report } = openOther(store);
  const fetched = mock.method(globalThis, "fetch", () => new Promise(() => {}));
  store.startNew();
  store.ask("New?", options);
  await settle();
  const { id } = store.now.open;
  other.rename("Renamed");
  assert.deepEqual(storedIds(), [id, "c1"]);
  assert.deepEqual([ids(other), other.now.open.title], [[id, "c1"], "Renamed"]);
  report(store);
  // A list that lacks the chat is no deletion, and is completed.
  storeElsewhere([{ ...chat(1), title: "Again" }]);
  const { signal } = /** @type {any} */ (fetched.mock.calls[0]).arguments[1];
  assert.deepEqual([store.now.running.size, signal.aborted, store.now.open.id], [1, false, id]);
  assert.deepEqual([storedIds(), stored()[1].title], [[id, "c1"], "Again"]);
});

test("two tabs that change a chat before they know of each other keep both changes", () => {
  const { store } = openStore([chat(1)]);
  const { other, report } = openOther(store);
  mock.method(globalThis, "fetch", () => new Promise(() => {}));
  store.ask("More?", options);
  other.rename("Renamed");
  assert.deepEqual([stored()[0].title, stored()[0].messages.length], ["Renamed", 3]);
  report(store);
  assert.deepEqual([store.now.open.title, store.now.open.messages.length], ["Renamed", 3]);
  store.rename("Named here");
  const later = { ...stored()[0], title: "Named there", at: Date.now() + 1 };
  localStorage.setItem(NAME, JSON.stringify([later]));
  report(store);
  assert.equal(store.now.open.title, "Named there");
});

test("a chat that one tab deletes stays deleted in the list of another, until the deletion is undone", () => {
  const { store } = openStore([chat(2), chat(1)]);
  const { other, report } = openOther(store);
  store.delete("c1");
  other.rename("Renamed");
  assert.deepEqual([storedIds(), ids(other)], [["c2"], ["c2"]]);
  store.restore();
  report(other);
  assert.deepEqual(
    [ids(store), ids(other)],
    [
      ["c2", "c1"],
      ["c2", "c1"],
    ],
  );
  assert.equal(localStorage.getItem(DELETED), null);
  store.deleteAll();
  other.rename("Again");
  assert.deepEqual([ids(other), localStorage.getItem(NAME)], [[], null]);
});

test("deletions are forgotten by number and age, and are stored once there is room", () => {
  const { store, limit } = openStore([chat(1)]);
  const now = Date.now();
  const old = Array.from({ length: 600 }, (_, place) => [`d${place}`, place < 300 ? now - 40 * 24 * 3600e3 : now]);
  localStorage.setItem(DELETED, JSON.stringify([...old, ...old.slice(300).map(([id]) => [`${id}x`, now]), "other"]));
  store.delete("c1");
  const deleted = JSON.parse(localStorage.getItem(DELETED) ?? "[]");
  assert.deepEqual([deleted.length, deleted[499][0], deleted[0][0]], [500, "c1", "d401"]);
  const full = openStore([chat(2), chat(1)]);
  full.limit(0);
  full.store.delete("c1");
  assert.deepEqual([ids(full.store), localStorage.getItem(DELETED)], [["c2"], null]);
  full.limit(1e6);
  full.store.rename("Renamed");
  assert.equal(JSON.parse(localStorage.getItem(DELETED) ?? "[]")[0][0], "c1");
  limit(1e6);
});

test("chats go from all tabs when a person clears the browser's storage", async () => {
  const { store } = await openStreaming();
  localStorage.removeItem(NAME);
  window.dispatchEvent(Object.assign(new Event("storage"), { key: null }));
  await settle();
  assert.deepEqual([ids(store), store.now.open.messages, store.now.running.size], [[], [], 0]);
  assert.equal(localStorage.getItem(NAME), null);
});

test("a page that the browser shows again takes what other tabs changed, and looks for marks again", async () => {
  const { store, mark } = openStore([chat(1)]);
  mock.timers.enable({ apis: ["setTimeout", "setInterval"] });
  mark("c1", { tab: "other", at: Date.now() });
  window.dispatchEvent(new Event("pagehide"));
  localStorage.setItem(NAME, JSON.stringify([chat(2), chat(1)]));
  localStorage.setItem("mlx-ring.chat-c2", JSON.stringify({ tab: "other", at: Date.now() }));
  localStorage.removeItem("mlx-ring.chat-c1");
  window.dispatchEvent(new Event("pageshow"));
  assert.deepEqual(ids(store), ["c1"]);
  window.dispatchEvent(Object.assign(new Event("pageshow"), { persisted: true }));
  assert.deepEqual([ids(store), [...store.now.elsewhere]], [["c2", "c1"], ["c2"]]);
  localStorage.removeItem("mlx-ring.chat-c2");
  mock.timers.tick(5000);
  mock.timers.reset();
  await settle();
  assert.equal(store.now.elsewhere.size, 0);
});

test("an answer that leaving the page cut off is shown as such when the browser shows the page again", async () => {
  const { store, contents } = await openStreaming();
  window.dispatchEvent(new Event("pagehide"));
  window.dispatchEvent(Object.assign(new Event("pageshow"), { persisted: true }));
  await settle();
  const answer = /** @type {any} */ (store.now.open.messages[2]);
  assert.deepEqual([answer.content, answer.end, store.now.running.size], ["Hi", "unknown", 0]);
  assert.deepEqual(contents(), ["?", "More?", "Hi"]);
});

test("an answer goes to its message, though another tab has removed one before it", async () => {
  const { storeElsewhere, stream, contents } = await openStreaming();
  storeElsewhere([{ ...stored()[0], messages: stored()[0].messages.slice(1) }]);
  await stream.write(DONE);
  await settle();
  assert.deepEqual(contents(), ["More?", "HiHi"]);
});

test("a chat for which another tab has no room keeps its answer that streams", async () => {
  const { store, storeElsewhere, stream, contents } = await openStreaming();
  storeElsewhere([chat(9), { unstored: ["c1"] }]);
  await stream.write(DONE);
  await settle();
  assert.deepEqual(ids(store).sort(), ["c1", "c9"]);
  assert.deepEqual(contents(), ["?", "More?", "HiHi"]);
});

test("nothing is asked in a chat while another tab receives an answer there", async () => {
  const calls = ["a", "b"].map((id) => ({ id, name: id, arguments: "{}" }));
  const messages = [
    { role: "user", content: "?" },
    { ...EMPTY_ANSWER, calls, end: "tool_calls" },
  ];
  const { store, mark } = openStore([chat(1, messages)]);
  const fetched = mock.method(globalThis, "fetch", () => new Promise(() => {}));
  mark("c1", { tab: "other", at: Date.now() });
  assert.deepEqual([...store.now.elsewhere], ["c1"]);
  const tries = [
    store.ask("More?", options),
    store.retry(1, options),
    store.edit(0, "Other?", options),
    store.addResult(/** @type {any} */ (calls[0]), "one", options),
  ];
  await settle();
  assert.deepEqual([tries, fetched.mock.callCount()], [[false, false, false, false], 0]);
  assert.deepEqual(stored()[0].messages, messages);
  store.startNew();
  assert.equal(store.ask("Elsewhere?", options), true);
  store.open("c1");
  mark("c1", null);
  assert.deepEqual([store.now.elsewhere.size, store.ask("More?", options)], [0, true]);
});

test("a mark that its tab no longer renews expires, without a lock at once", async () => {
  const { store, mark } = openStore([chat(1)]);
  mock.method(globalThis, "fetch", () => new Promise(() => {}));
  const marks = new AnswerMarks("this");
  Object.defineProperty(globalThis, "navigator", { value: {}, configurable: true });
  mark("c1", { tab: "other", at: Date.now() - 20_000 });
  await marks.sweep(["c1"]);
  assert.equal(marks.isElsewhere("c1"), true);
  const held = [{ name: "mlx-ring.chat-c1" }];
  const value = { locks: { query: async () => ({ held }), request: async () => {} } };
  Object.defineProperty(globalThis, "navigator", { value, configurable: true });
  await marks.sweep(["c1"]);
  assert.equal(marks.isElsewhere("c1"), true);
  held.pop();
  await marks.sweep(["c1"]);
  assert.equal(marks.isElsewhere("c1"), false);
  mark("c1", { tab: "other", at: Date.now() - 80_000 });
  assert.equal(store.ask("More?", options), true);
});

test("the deletion of a chat can be undone after a question, and a change of a question is kept until it is sent", () => {
  const { store } = openStore([chat(2), chat(1)]);
  mock.method(globalThis, "fetch", () => new Promise(() => {}));
  store.delete("c1");
  store.ask("More?", options);
  assert.equal(store.now.deleted?.id, "c1");
  store.edits.set(editName(store.now.open, 0), "Changed").set(editName(store.now.open, 1), "Later");
  store.edit(0, "Changed", options);
  assert.equal(store.edits.size, 0);
});

/** @param {ChatStore} store @param {number} count */
async function askMany(store, count) {
  const streams = Array.from({ length: count }, createStream);
  let asked = 0;
  mock.method(globalThis, "fetch", async (/** @type {URL} */ _, /** @type {any} */ { signal }) => {
    const stream = streams[asked];
    asked += 1;
    signal.addEventListener("abort", () => stream?.abort());
    return /** @type {any} */ (stream).response;
  });
  /** @type {string[]} */
  const chats = [];
  for (let place = 0; place < count; place += 1) {
    store.startNew();
    store.ask(`Question ${place}`, options);
    chats.push(store.now.open.id);
    await settle();
  }
  /** @param {number} place @returns {any} */
  const answer = (place) => store.now.conversations.find(({ id }) => id === chats[place])?.messages[1];
  return { streams, chats, answer, asked: () => asked };
}

const DONE = 'data: {"id":"x","choices":[{"delta":{"content":"Hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n';

for (const locks of ["locks of all tabs", "no locks", "locks that the browser refuses"]) {
  test(`answers beyond the limit wait, and say so, until others end: ${locks}`, async () => {
    const { store } = openStore([]);
    const refusal = { locks: { request: async () => Promise.reject(new DOMException("no", "SecurityError")) } };
    mock.method(console, "warn", () => {});
    const value = locks === "no locks" ? {} : locks === "locks of all tabs" ? fakeLocks() : refusal;
    Object.defineProperty(globalThis, "navigator", { value, configurable: true });
    const { streams, chats, answer, asked } = await askMany(store, MAX_STREAMS + 2);
    assert.equal(asked(), MAX_STREAMS);
    assert.deepEqual([answer(0).isQueued, answer(MAX_STREAMS).isQueued], [false, true]);
    store.stop(chats[MAX_STREAMS]);
    await settle();
    assert.deepEqual([answer(MAX_STREAMS).end, answer(MAX_STREAMS).isQueued], ["stopped", false]);
    assert.equal(asked(), MAX_STREAMS);
    await streams[0]?.write(DONE);
    await settle();
    assert.deepEqual([answer(0).end, asked()], ["stop", MAX_STREAMS + 1]);
    for (const id of chats) store.stop(id);
    await settle();
    assert.equal(store.now.running.size, 0);
    const next = await askMany(store, MAX_STREAMS);
    assert.equal(next.asked(), MAX_STREAMS);
    for (const id of next.chats) store.stop(id);
    await settle();
  });
}

test("questions that wait for their models let others be asked", async () => {
  const { store } = openStore([]);
  Object.defineProperty(globalThis, "navigator", { value: {}, configurable: true });
  const { chats, answer } = await askMany(store, 0);
  let asked = 0;
  mock.method(globalThis, "fetch", async () => {
    asked += 1;
    if (asked > MAX_STREAMS) return new Response(DONE);
    const error = { code: "not_ready", message: "The model is being loaded." };
    return new Response(JSON.stringify({ error }), { status: 503 });
  });
  for (let place = 0; place <= MAX_STREAMS; place += 1) {
    store.startNew();
    store.ask("?", options);
    chats.push(store.now.open.id);
    await settle();
  }
  assert.deepEqual([answer(0).waitsFor, answer(0).end], ["The model is being loaded.", null]);
  assert.equal(answer(MAX_STREAMS).end, "stop");
  for (const id of chats) store.stop(id);
  await settle();
  assert.equal(store.now.running.size, 0);
});

/** The Web Locks API, as far as the page uses it. */
function fakeLocks() {
  /** @type {Map<string, (() => void)[]>} those that wait, by the name of a lock that is held */
  const held = new Map();
  /** @param {string} name @param {any} options @param {(lock: object | null) => unknown} act */
  const request = async (name, { ifAvailable = false, signal }, act) => {
    if (held.has(name)) {
      if (ifAvailable) return void act(null);
      await new Promise((go, refuse) => {
        const queue = held.get(name) ?? [];
        const turn = () => go(undefined);
        queue.push(turn);
        signal.addEventListener("abort", () => {
          if (queue.includes(turn)) queue.splice(queue.indexOf(turn), 1);
          refuse(signal.reason);
        });
      });
    } else held.set(name, []);
    await act({ name });
    const next = held.get(name)?.shift();
    if (next) next();
    else held.delete(name);
  };
  return { locks: { request } };
}
