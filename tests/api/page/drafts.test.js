import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";
import { newConversation } from "../../../src/mlx_ring/api/page/web/chat/conversation.js";
import { Drafts } from "../../../src/mlx_ring/api/page/web/chat/drafts.js";
import { readParameters } from "../../../src/mlx_ring/api/page/web/chat/parameters.js";
import { ChatStore } from "../../../src/mlx_ring/api/page/web/chat/store.js";
import { setUpBrowser } from "./support.js";

const PREFIX = "mlx-ring.draft-";
const LIST = "mlx-ring.chats";
const DELETED = "mlx-ring.deleted";

/** @param {number} at @returns {any} */
const chat = (at) => ({ id: `c${at}`, title: "", at, messages: [{ role: "user", content: "?" }] });
const [one, two] = [chat(1), chat(2)];
/** @param {string} id @returns {string | null} */
const stored = (id) => JSON.parse(sessionStorage.getItem(PREFIX + id) ?? "null");
const leave = () => window.dispatchEvent(new Event("pagehide"));

/**
 * Return drafts that are stored when the page is left, as the store of chats does it.
 * @param {() => void} onRoom
 */
function draftsUntilLeft(onRoom) {
  const drafts = new Drafts(onRoom);
  window.addEventListener("pagehide", () => drafts.write());
  return drafts;
}

afterEach(() => {
  mock.timers.reset();
  leave();
});

test("each draft is stored by itself, once a second and when the page is left, and read after a reload", () => {
  setUpBrowser();
  mock.timers.enable({ apis: ["setTimeout"] });
  const drafts = draftsUntilLeft(() => {});
  const write = mock.method(sessionStorage, "setItem");
  for (const text of ["H", "He", "Hel"]) drafts.set(one, text);
  assert.equal(write.mock.callCount(), 0);
  mock.timers.tick(1000);
  assert.deepEqual(
    write.mock.calls.map(({ arguments: given }) => given),
    [[`${PREFIX}c1`, '"Hel"']],
  );
  drafts.set(one, "Hello");
  drafts.set(two, "Bye");
  drafts.set(newConversation(), "New");
  leave();
  assert.equal(write.mock.callCount(), 4);
  const again = draftsUntilLeft(() => {});
  assert.deepEqual(
    [one, two, newConversation()].map((each) => again.get(each)),
    ["Hello", "Bye", "New"],
  );
  again.set(one, "");
  assert.deepEqual([stored("c1"), stored("c2")], [null, "Bye"]);
});

test("a draft without room removes what was stored, which is said once until there is room again", () => {
  setUpBrowser();
  const onRoom = mock.fn();
  const drafts = draftsUntilLeft(onRoom);
  drafts.set(one, "short");
  leave();
  const write = sessionStorage.setItem.bind(sessionStorage);
  sessionStorage.setItem = (name, value) => {
    if (value.length > 10) throw new DOMException("full", "QuotaExceededError");
    write(name, value);
  };
  for (const text of ["much too long", "much too long a text"]) {
    drafts.set(one, text);
    leave();
  }
  assert.deepEqual([stored("c1"), drafts.isStored(one), drafts.isStored(two)], [null, false, true]);
  assert.equal(onRoom.mock.callCount(), 1);
  drafts.set(one, "less");
  leave();
  assert.deepEqual([stored("c1"), drafts.isStored(one), onRoom.mock.callCount()], ["less", true, 2]);
});

/** @param {any[]} chats */
function openStore(...chats) {
  setUpBrowser();
  Object.assign(globalThis, { requestAnimationFrame: setImmediate, cancelAnimationFrame: clearImmediate });
  localStorage.setItem(LIST, JSON.stringify(chats));
  mock.method(globalThis, "fetch", () => new Promise(() => {}));
  return new ChatStore(() => {});
}

const options = { model: "demo", parameters: readParameters() };

test("a text beside which an example is asked belongs to its chat, and not to the next new one", () => {
  const store = openStore();
  const { open } = store.now;
  store.drafts.set(open, "My own question");
  store.ask("An example", options);
  assert.equal(store.drafts.get(store.now.open), "My own question");
  // The field may still know the conversation as it was.
  store.drafts.set(open, "");
  assert.equal(store.drafts.get(store.now.open), "");
  store.startNew();
  assert.equal(store.drafts.get(store.now.open), "");
  leave();
  assert.deepEqual([stored("new"), stored(open.id)], [null, null]);
});

test("a first question that is asked in a copy leaves the draft of a new chat", () => {
  const store = openStore(one);
  store.drafts.set(newConversation(), "Later");
  store.branch(0);
  store.ask("Changed?", options);
  assert.equal(store.drafts.get(store.now.open), "");
  store.startNew();
  assert.equal(store.drafts.get(store.now.open), "Later");
  leave();
});

test("a chat that is deleted and restored keeps its draft", () => {
  const store = openStore(two, one);
  store.drafts.set(one, "Unsent");
  store.delete("c1");
  leave();
  assert.deepEqual([store.drafts.get(one), stored("c1")], ["", null]);
  store.restore();
  assert.equal(store.drafts.get(store.now.open), "Unsent");
});

test("drafts of chats that another tab deletes, or deleted before a reload, are forgotten", () => {
  const store = openStore(two, one);
  store.drafts.set(one, "Unsent");
  store.drafts.set(two, "Kept");
  store.drafts.set(newConversation(), "New");
  leave();
  localStorage.setItem(DELETED, JSON.stringify([["c1", Date.now()]]));
  localStorage.setItem(LIST, JSON.stringify([two]));
  window.dispatchEvent(Object.assign(new Event("storage"), { key: LIST }));
  assert.deepEqual(
    [one, two].map((each) => store.drafts.get(each)),
    ["", "Kept"],
  );
  assert.deepEqual([stored("c1"), stored("c2"), stored("new")], [null, "Kept", "New"]);
  localStorage.setItem(DELETED, JSON.stringify([["c2", Date.now()]]));
  new ChatStore(() => {});
  assert.deepEqual([stored("c2"), stored("new")], [null, "New"]);
});
