import assert from "node:assert/strict";
import { test } from "node:test";
import {
  EMPTY_ANSWER,
  searchConversations,
  withAnswersStopped,
  withEdit,
  withTitle,
} from "../../../src/mlx_ring/api/page/web/chat/conversation.js";
import { fileName, toJson, toMarkdown } from "../../../src/mlx_ring/api/page/web/chat/export.js";

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

test("answers of a restored conversation do not wait for ever", () => {
  const streaming = { ...CHAT, messages: [...CHAT.messages, { ...EMPTY_ANSWER, content: "Pa" }] };
  const ends = withAnswersStopped(streaming).messages.map((message) => "end" in message && message.end);
  assert.deepEqual(ends, [false, "stop", "tool_calls", false, "stopped"]);
});
