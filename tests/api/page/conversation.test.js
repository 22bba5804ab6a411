import assert from "node:assert/strict";
import { describe, test } from "node:test";
import * as conversations from "../../../src/mlx_ring/api/page/web/chat/conversation.js";
import { describeEnd, describeFailed, Versions } from "../../../src/mlx_ring/api/page/web/chat/message.js";
import { endAnswers } from "../../../src/mlx_ring/api/page/web/chat/stored-chats.js";
import { toHtml } from "./support.js";

/** @import { AnswerMessage, Message } from "../../../src/mlx_ring/api/page/web/chat/conversation.js" */

const { EMPTY_ANSWER, canContinue, isCutOff, joinAnswers, newConversation, openCalls, versionsOf, versionSteps } =
  conversations;
const { requestMessages, withAnswer, withEdit, withMessage, withVersion } = conversations;

/** @param {string} content @returns {Message} */
const user = (content) => ({ role: "user", content });
/** @param {string} content @param {Partial<AnswerMessage>} [more] @returns {AnswerMessage} */
const answer = (content, more = {}) => ({ ...EMPTY_ANSWER, content, end: "stop", ...more });
/** @param {string} call @returns {Message} */
const result = (call) => ({ role: "tool", call, name: call, content: `result of ${call}` });
const CALLS = ["a", "b"].map((id) => ({ id, name: id, arguments: "{}" }));

/** @param {Message[]} messages */
const conversation = (...messages) => messages.reduce(withMessage, newConversation());

test("each conversation has its own id", () => {
  assert.notEqual(newConversation().id, newConversation().id);
  assert.match(newConversation().id, /^[0-9a-f]{16}$/);
});

describe("the title", () => {
  test("is the first line of the first question", () => {
    assert.equal(conversation(user("\n  One \nTwo"), user("Three")).title, "One");
  });

  test("is shortened to 60 characters", () => {
    const { title } = conversation(user("a".repeat(100)));
    assert.deepEqual([title.length, title.at(-1)], [60, "…"]);
  });

  test("changes only with the first question", () => {
    const before = conversation(user("One"), answer("1"), user("Two"));
    assert.equal(withEdit(before, 2, "Three").title, "One");
    assert.equal(withEdit(before, 0, "Three").title, "Three");
  });
});

test("an edited question removes all later messages", () => {
  const edited = withEdit(conversation(user("One"), answer("1"), user("Two"), answer("2")), 2, "Three");
  assert.deepEqual(edited.messages, [user("One"), answer("1"), user("Three")]);
});

describe("an answer that is requested again", () => {
  const before = answer("Half of", { end: "cut", reasoning: "Hm.", model: "demo", figures: { tokens: 2 } });
  const none = answer("", { end: null, id: "2" });

  test("keeps the former text until the new one begins", () => {
    const { content, reasoning, kept, end, id } = joinAnswers(none, before, false);
    assert.deepEqual([content, reasoning, kept, end, id], ["Half of", "Hm.", { id: "", end: "cut" }, null, "2"]);
    const begun = answer("W", { end: null });
    assert.deepEqual(joinAnswers(begun, before, false), { ...begun, earlier: [before] });
  });

  test("keeps all versions, of which any can be shown", () => {
    /** @type {any} */
    let chat = { ...newConversation(), messages: [user("?"), answer("1")] };
    const tryAgain = (/** @type {string} */ text, /** @type {any} */ change = {}) => {
      const again = joinAnswers({ ...EMPTY_ANSWER, content: text, end: "stop", ...change }, chat.messages[1], false);
      chat = { ...chat, messages: [chat.messages[0], again] };
    };
    const texts = () => versionsOf(chat.messages[1]).map(({ content }) => content);
    tryAgain("2");
    chat = withVersion(chat, 1, 0);
    assert.deepEqual([chat.messages[1].content, texts()], ["1", ["1", "2"]]);
    tryAgain("3");
    assert.deepEqual([chat.messages[1].content, texts()], ["3", ["1", "2", "3"]]);
    chat = withVersion(chat, 1, 1);
    tryAgain("", { end: "unreached" });
    assert.deepEqual([chat.messages[1].content, texts()], ["2", ["1", "2", "3"]], "a try without a text is none");
    for (const number of [-1, 3]) assert.equal(withVersion(chat, 1, number), chat);
    assert.equal(withVersion(chat, 0, 0), chat, "a question has no versions");
    assert.ok(versionsOf(chat.messages[1]).every((each) => !("earlier" in each) && !("later" in each)));
  });

  test("keeps its other versions while it is continued", () => {
    const chosen = { ...answer("Half", { end: "stopped" }), earlier: [answer("1")], later: [answer("3")] };
    const { content, earlier, later } = joinAnswers(answer(" and half", { end: "stop" }), chosen, true);
    assert.deepEqual([content, earlier, later], ["Half and half", chosen.earlier, chosen.later]);
  });

  for (const end of ["cut", "unreached", "stopped"]) {
    test(`stays as it was if the new try ends without a text: ${end}`, () => {
      const { failed, ...shown } = joinAnswers({ ...none, end, askedAt: 2, parameters: { seed: 1 } }, before, false);
      assert.deepEqual(shown, { ...before, earlier: [], later: [] });
      assert.equal(failed?.end, end === "stopped" ? undefined : end);
    });
  }

  test("shows why the next try has no text, until another version is shown or asked for", () => {
    const refused = joinAnswers({ ...none, end: "error", problem: "Too long." }, before, false);
    assert.deepEqual([refused.content, refused.end, refused.problem], ["Half of", "cut", null]);
    const why = [refused.failed, ...["unreached", "cut", "stop"].map((end) => ({ end, problem: null }))];
    assert.deepEqual(
      why.map((failed) => failed && describeFailed(failed)),
      [
        "Too long.",
        "The server could not be reached, so there is no other answer.",
        "The connection broke before another answer began.",
        "The model wrote no other answer.",
      ],
    );
    assert.equal("failed" in joinAnswers(none, refused, false), false);
    const { earlier = [] } = joinAnswers(answer("Whole"), refused, false);
    assert.deepEqual(earlier, [before], "the failed try leaves no trace in the former answer");
  });

  test("gets its own end back if the page is closed, or the chat is copied, before the next try has a text", () => {
    const whole = answer("Whole", { id: "1" });
    const chat = { ...newConversation(), messages: [joinAnswers(none, whole, false), answer("", { end: null })] };
    const ends = (/** @type {any} */ { messages: [first, second] }) => {
      assert.equal("kept" in first, false);
      return [first.content, first.id, first.end, second.end];
    };
    assert.deepEqual(ends(endAnswers(chat)), ["Whole", "1", "stop", "unknown"]);
    assert.deepEqual(ends(conversations.withAnswersStopped(chat)), ["Whole", "1", "stop", "stopped"]);
  });

  test("lets a person step over versions that call tools, once their results may follow", () => {
    const call = answer("", { calls: CALLS });
    const versions = { earlier: [answer("1"), call], later: [answer("4")] };
    assert.deepEqual(versionSteps(answer("3", versions), true), { earlier: 1, later: 3 });
    assert.deepEqual(versionSteps(answer("3", versions), false), { earlier: 0, later: 3 });
    assert.deepEqual(versionSteps({ ...call, ...versions }, false), { earlier: null, later: null });
    /** @param {boolean} isLast @param {string} [refusalOfVersions] */
    const shown = (isLast, refusalOfVersions = "") => {
      const message = answer("2", { earlier: [call], later: [answer("3")] });
      return toHtml(Versions({ message, isLast, showVersion: () => {}, refusalOfVersions }));
    };
    assert.doesNotMatch(shown(true), /aria-disabled|calls tools/);
    assert.match(shown(false), /aria-label="Earlier version" aria-disabled="true" title="A version that calls tools/);
    assert.match(shown(true, "Wait."), /(aria-disabled="true" title="Wait\.".*){2}/);
  });

  test("is followed by the new text if the model continues it", () => {
    const { content, reasoning, end } = joinAnswers(answer(" a word", { end: "stop" }), before, true);
    assert.deepEqual([content, reasoning, end], ["Half of a word", "Hm.", "stop"]);
  });

  test("counts the tokens and the time of both parts if the model continues it", () => {
    const [first, next] = [{ tokens: 400, promptTokens: 20, tokensPerS: 40, firstTokenS: 1 }, { tokensPerS: 20 }];
    /** @param {object} figures @param {object} [known] */
    const joined = (figures, known = first) =>
      joinAnswers(answer("", { figures }), answer("Half", { figures: known }), true).figures;
    const whole = joined({ ...next, tokens: 100, promptTokens: 421, firstTokenS: 9 });
    assert.deepEqual(whole, { ...first, tokens: 500, tokensPerS: 500 / 15 });
    assert.deepEqual(joined({ tokens: null, firstTokenS: null }), first);
    assert.deepEqual(joined({ tokens: 3, promptTokens: 421 }, {}), { tokens: 3, promptTokens: 421 });
  });

  test("says that it was not continued if the server could not be reached, because it has text", () => {
    assert.match(describeEnd(answer("Half", { end: "unreached" })), /was not continued/);
    assert.match(describeEnd(answer("", { end: "unreached" })), /there is no answer/);
    assert.equal(describeEnd(answer("Whole")), "");
  });

  test("has nothing to keep if it was empty", () => {
    assert.equal(joinAnswers(none, answer("", { end: "unreached" }), false), none);
    assert.equal(joinAnswers(none, null, false), none);
  });
});

test("answers that a person or the model ended are not cut off, and only text that ended early continues", () => {
  const ends = ["cut", "unreached", "error", "unknown", "stopped", "length", "stop", null];
  assert.deepEqual(
    ends.filter((end) => isCutOff(answer("a", { end }))),
    ends.slice(0, 4),
  );
  assert.deepEqual(
    ends.filter((end) => canContinue(answer("a", { end }))),
    ends.slice(0, 6),
  );
  assert.equal(canContinue(answer("", { end: "cut", reasoning: "Hm." })), false);
  assert.equal(canContinue(answer("a", { end: "cut", calls: CALLS })), false);
});

test("an answer replaces the previous one without changing the old conversation", () => {
  const [empty, full] = [answer("", { key: "k" }), answer("1", { key: "k" })];
  const before = conversation(user("One"), answer("0"), empty, user("Two"));
  assert.deepEqual(withAnswer(before, full).messages, [user("One"), answer("0"), full, user("Two")]);
  assert.deepEqual(before.messages, [user("One"), answer("0"), empty, user("Two")]);
  assert.deepEqual(withAnswer(before, answer("1", { key: "other" })), before);
});

test("tool calls are open until each has its result", () => {
  const called = conversation(user("One"), answer("", { calls: CALLS }));
  assert.deepEqual(openCalls(called), CALLS);
  assert.deepEqual(openCalls(withMessage(called, result("a"))), CALLS.slice(1));
  assert.deepEqual(openCalls(conversation(...called.messages, result("b"), result("a"))), []);
  assert.deepEqual(openCalls(conversation(user("One"))), []);
});

describe("a request", () => {
  test("starts with the system prompt, if there is one", () => {
    const one = { role: "user", content: "One" };
    assert.deepEqual(requestMessages(conversation(user("One")), " Be brief. "), [
      { role: "system", content: "Be brief." },
      one,
    ]);
    assert.deepEqual(requestMessages(conversation(user("One")), " \n"), [one]);
  });

  test("leaves out empty answers and joins the questions around them", () => {
    const history = conversation(user("One"), answer("", { end: "error" }), user("Two"), answer("2"), user("Three"));
    assert.deepEqual(requestMessages(history, ""), [
      { role: "user", content: "One\n\nTwo" },
      { role: "assistant", content: "2" },
      { role: "user", content: "Three" },
    ]);
  });

  test("leaves out reasoning", () => {
    const history = conversation(user("One"), answer("1", { reasoning: "Hmm." }));
    assert.deepEqual(requestMessages(history, "").at(-1), { role: "assistant", content: "1" });
  });

  test("includes tool calls with their results", () => {
    const history = conversation(user("One"), answer("", { calls: CALLS.slice(0, 1) }), result("a"));
    assert.deepEqual(requestMessages(history, "").slice(1), [
      {
        role: "assistant",
        content: null,
        tool_calls: [{ id: "a", type: "function", function: { name: "a", arguments: "{}" } }],
      },
      { role: "tool", tool_call_id: "a", content: "result of a" },
    ]);
  });
});
