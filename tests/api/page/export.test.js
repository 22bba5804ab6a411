import assert from "node:assert/strict";
import { mock, test } from "node:test";
import {
  EMPTY_ANSWER,
  searchConversations,
  withAnswersStopped,
  withEdit,
  withTitle,
} from "../../../src/mlx_ring/api/page/web/chat/conversation.js";
import * as exports from "../../../src/mlx_ring/api/page/web/chat/export.js";
import { ChatStore } from "../../../src/mlx_ring/api/page/web/chat/store.js";
import { setUpBrowser } from "./support.js";

const { allToJson, allToMarkdown, fileName, saveFile, toJson, toMarkdown } = exports;
const ANSWER = { ...EMPTY_ANSWER, content: "*Paris*.", reasoning: "Hm.\n\nSo.", end: "stop", model: "demo" };
const CALL = { id: "c1", name: "look", arguments: '{"a": "```"}' };
/** @type {any} */
const CHAT = {
  id: "1",
  title: "Capitals",
  at: Date.UTC(2030, 0, 2),
  messages: [
    { role: "user", content: "Which?" },
    ANSWER,
    { ...EMPTY_ANSWER, calls: [CALL], end: "tool_calls", figures: { tokens: 5, promptTokens: 9 } },
    { role: "tool", call: "c1", name: "look", content: "sunny" },
  ],
};

test("the Markdown holds questions, reasoning, answers, calls and results", () => {
  assert.equal(
    toMarkdown(CHAT),
    [
      "# Capitals",
      "Last change: 2030-01-02 00:00 UTC",
      "## Question",
      "Which?",
      "## Answer of demo",
      "> Hm.\n>\n> So.",
      "*Paris*.",
      "## Answer",
      "Call of `look`:",
      '````json\n{"a": "```"}\n````',
      "## Result of look",
      "```\nsunny\n```\n",
    ].join("\n\n"),
  );
});

test("the export says when and with which parameters a question was asked, and that an answer was cut off", () => {
  const parameters = { temperature: 2, system: "Be brief." };
  const cut = { ...ANSWER, reasoning: "", end: "cut", askedAt: Date.UTC(2030, 0, 2, 3, 4), parameters };
  /** @type {any} */
  const chat = { ...CHAT, messages: [cut] };
  assert.ok(
    toMarkdown(chat).includes(
      '## Answer of demo (cut off)\n\n*2030-01-02 03:04 UTC, temperature 2, system "Be brief."*\n\n*Paris*.',
    ),
  );
  const { finish_reason, asked_at, parameters: exported } = JSON.parse(toJson(chat)).messages[0];
  assert.deepEqual([finish_reason, asked_at, exported], ["cut", "2030-01-02T03:04:00.000Z", parameters]);
});

test("all chats are exported into one file of each kind", () => {
  const other = { ...CHAT, title: "Other" };
  assert.equal(allToMarkdown([CHAT, other]), `${toMarkdown(CHAT)}\n---\n\n${toMarkdown(other)}`);
  assert.deepEqual(
    JSON.parse(allToJson([CHAT, other])),
    [CHAT, other].map((chat) => JSON.parse(toJson(chat))),
  );
});

test("the JSON holds messages that the API accepts", () => {
  const { title, updated_at, messages } = JSON.parse(toJson(CHAT));
  assert.deepEqual([title, updated_at], ["Capitals", "2030-01-02T00:00:00.000Z"]);
  assert.deepEqual(messages[1], {
    role: "assistant",
    content: "*Paris*.",
    reasoning_content: "Hm.\n\nSo.",
    finish_reason: "stop",
    model: "demo",
  });
  assert.equal(messages[2].tool_calls[0].id, messages[3].tool_call_id);
  assert.deepEqual(messages[2].usage, { prompt_tokens: 9, completion_tokens: 5 });
});

test("a file is named by the letters of any script", () => {
  assert.equal(fileName("Größe/東京: ../etc?", "md"), "größe-東京-etc.md");
  assert.equal(fileName("../..", "json"), "chat.json");
});

test("a name stays when the first question changes, until it is emptied", () => {
  const named = withTitle(CHAT, "  My chat\nmore ");
  assert.equal(named.title, "My chat");
  assert.equal(withEdit(named, 0, "Where?").title, "My chat");
  const emptied = withTitle(named, "  ");
  assert.equal(emptied.title, "Which?");
  assert.equal(withEdit(emptied, 0, "Where?").title, "Where?");
});

test("a search finds titles and messages in any case of letters", () => {
  const other = { ...CHAT, id: "2", title: "Straße", messages: [] };
  const find = (/** @type {string} */ text) => searchConversations([CHAT, other], text).map(({ id }) => id);
  assert.deepEqual([find("PARIS"), find("straß"), find(" "), find("none")], [["1"], ["2"], ["1", "2"], []]);
});

test("a search and both exports have all versions of an answer, and the Markdown the shown one last", () => {
  const versions = { earlier: [{ ...ANSWER, content: "Rome." }], later: [{ ...ANSWER, content: "Oslo.", end: "cut" }] };
  /** @type {any} */
  const chat = { ...CHAT, messages: [{ ...ANSWER, ...versions }] };
  for (const text of ["rome", "paris", "OSLO"]) assert.deepEqual(searchConversations([chat], text), [chat]);
  const lines = toMarkdown(chat).split("\n");
  assert.deepEqual(
    lines.filter((line) => line.startsWith("##") || /^[\w*]+\.$/.test(line) || line === "*Paris*."),
    [
      "## Answer of demo (version 1 of 3)",
      "Rome.",
      "## Answer of demo (version 3 of 3, cut off)",
      "Oslo.",
      "## Answer of demo (version 2 of 3)",
      "*Paris*.",
    ],
  );
  const [{ content, earlier_versions, later_versions }] = JSON.parse(toJson(chat)).messages;
  assert.deepEqual([content, earlier_versions[0].content, later_versions[0].content], ["*Paris*.", "Rome.", "Oslo."]);
});

test("answers of a restored conversation do not wait for ever", () => {
  const streaming = { ...CHAT, messages: [...CHAT.messages, { ...EMPTY_ANSWER, content: "Pa" }] };
  const ends = withAnswersStopped(streaming).messages.map((message) => "end" in message && message.end);
  assert.deepEqual(ends, [false, "stop", "tool_calls", false, "stopped"]);
});

test("a saved file can still be read after the click that saves it", () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const revoked = mock.method(URL, "revokeObjectURL", () => {});
  const { document } = setUpBrowser();
  const link = { click: mock.fn(() => assert.equal(revoked.mock.callCount(), 0)), href: "" };
  Object.assign(document, { createElement: () => link });
  saveFile("a.md", "text/markdown", "text");
  assert.equal(link.click.mock.callCount(), 1);
  assert.equal(revoked.mock.callCount(), 0);
  mock.timers.runAll();
  assert.deepEqual(revoked.mock.calls[0]?.arguments, [link.href]);
  mock.timers.reset();
});

test("a browser without room for all chats keeps all but the oldest, and the page knows how many are missing", () => {
  setUpBrowser();
  const chats = ["d", "c", "b", "a"].map((id, place) => ({ id, title: id, at: 9 - place, messages: [] }));
  localStorage.setItem("mlx-ring.chats", JSON.stringify(chats));
  const store = new ChatStore(() => {});
  const setItem = localStorage.setItem.bind(localStorage);
  let room = JSON.stringify(chats).length - 5;
  localStorage.setItem = (name, value) => {
    if (value.length > room) throw new DOMException("full", "QuotaExceededError");
    setItem(name, value);
  };
  store.rename("D");
  const stored = () =>
    JSON.parse(localStorage.getItem("mlx-ring.chats") ?? "[]").flatMap((/** @type {any} */ { id }) => id ?? []);
  assert.deepEqual(stored(), ["d", "c", "b"]);
  assert.deepEqual([store.now.isStored, store.now.unstored, store.now.conversations.length], [true, 1, 4]);
  room = 10;
  store.rename("E");
  assert.equal(store.now.isStored, false);
  room = 10_000;
  store.rename("F");
  assert.deepEqual([store.now.isStored, store.now.unstored, stored().length], [true, 0, 4]);
});
