import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import {
  describeMissing,
  followAddress,
  openAddressed,
  readAddress,
} from "../../../src/mlx_ring/api/page/web/address.js";
import { ChatStore } from "../../../src/mlx_ring/api/page/web/chat/store.js";
import { setUpBrowser } from "./support.js";

/** What the page wrote into the history. @type {string[]} */
let written;

beforeEach(() => {
  setUpBrowser();
  written = [];
  const events = new EventTarget();
  const location = { hash: "#chat" };
  const write =
    (/** @type {string} */ kind) => (/** @type {any} */ _, /** @type {any} */ __, /** @type {string} */ to) => {
      location.hash = to;
      written.push(`${kind} ${to}`);
    };
  const globals = {
    location,
    history: { pushState: write("push"), replaceState: write("replace") },
    addEventListener: events.addEventListener.bind(events),
    removeEventListener: events.removeEventListener.bind(events),
    dispatchEvent: events.dispatchEvent.bind(events),
  };
  for (const [name, value] of Object.entries(globals)) {
    Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
  }
});

/** @param {string[]} names of the stored chats, the newest first */
function openStore(names) {
  const chats = names.map((id, place) => ({
    id,
    title: id,
    at: 9 - place,
    messages: [{ role: "user", content: "?" }],
  }));
  localStorage.setItem("mlx-ring.chats", JSON.stringify(chats));
  const store = new ChatStore(() => {});
  openAddressed(store);
  return store;
}

/** The person goes to an address; the browser's event comes later. @param {string} hash */
function goTo(hash) {
  location.hash = hash;
  return () => dispatchEvent(new Event("hashchange"));
}

test("the address names a view, and in Chat a conversation", () => {
  assert.deepEqual(readAddress("#models"), { view: "models", chat: null });
  assert.deepEqual(readAddress("#models/x"), { view: "models", chat: null });
  assert.deepEqual(readAddress("#chat/x"), { view: "chat", chat: "x" });
  for (const hash of ["", "#", "#chat", "#chat/", "#none"]) {
    assert.deepEqual(readAddress(hash), { view: "chat", chat: null });
  }
});

test("a page that is opened without a chat's name shows the newest, and writes its address", () => {
  followAddress(openStore(["b", "a"]), () => {});
  assert.deepEqual(written, ["replace #chat/b"]);
});

test("a change of a chat does not undo an address that the person has just chosen", () => {
  const store = openStore(["b", "a"]);
  followAddress(store, () => {});
  const arrive = goTo("#chat/a");
  store.rename("other");
  assert.equal(location.hash, "#chat/a");
  arrive();
  assert.deepEqual([store.now.open.id, location.hash, written.length], ["a", "#chat/a", 1]);
});

test("another chat is another entry, and takes the entry of a deleted one", () => {
  const store = openStore(["b", "a"]);
  followAddress(store, () => {});
  store.startNew();
  store.open("a");
  store.delete("a");
  assert.deepEqual(written, ["replace #chat/b", "push #chat", "push #chat/a", "replace #chat/b"]);
});

test("a chat that the browser does not have leaves its address until a question is asked", () => {
  const store = openStore(["b"]);
  const unfollow = followAddress(store, () => {});
  goTo("#chat/none")();
  assert.deepEqual([store.now.missing, store.now.open.messages.length, location.hash], ["none", 0, "#chat/none"]);
  goTo("#chat/b")();
  assert.deepEqual([store.now.missing, store.now.open.id], [null, "b"]);
  unfollow();
  goTo("#chat/none")();
  assert.equal(store.now.open.id, "b");
});

test("the address follows again after a chat that the browser does not have", () => {
  const store = openStore(["b"]);
  followAddress(store, () => {});
  goTo("#chat/none")();
  store.open("b");
  assert.deepEqual([location.hash, written.at(-1)], ["#chat/b", "push #chat/b"]);
  goTo("#chat/none")();
  goTo("#chat")();
  assert.deepEqual([store.now.missing, location.hash], [null, "#chat"]);
  goTo("#chat/none")();
  store.startNew();
  assert.deepEqual([store.now.missing, location.hash], [null, "#chat"]);
});

test("a chat that the browser does not have is named by ids of the stored form alone", () => {
  assert.match(describeMissing("0123456789abcdef"), /^This browser has no chat 0123456789abcdef\. /);
  for (const id of ["a".repeat(5000), "<img src=x>", "%00", ".."]) {
    assert.match(describeMissing(id), /^The address names no chat\. /);
  }
});

test("other views leave the open chat as it is", () => {
  const store = openStore(["b", "a"]);
  followAddress(store, () => {});
  goTo("#models")();
  store.open("a");
  assert.deepEqual([store.now.open.id, location.hash, written.length], ["a", "#models", 1]);
});
