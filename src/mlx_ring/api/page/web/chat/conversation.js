// A conversation and its changes, as pure functions.

/** @import { Completion, Figures, ToolCall } from "./completion.js" */

const MAX_TITLE = 60;
const ID_BYTES = 8;
/** End of the title of a conversation that was copied. */
const BRANCH = " (branch)";

/** @typedef {{ role: "user", content: string }} UserMessage */
/** @typedef {{ role: "tool", call: string, name: string, content: string }} ToolMessage */

/**
 * The model's answer. `end` is a finish reason, "stopped", "cut", "unreached", "error" or "unknown"; null while it
 * streams. `key` finds the answer among the messages. `kept` is there while the next try has no text yet: the former
 * answer is shown, whose id and end these are. `failed` is how the next try ended without a text. `isQueued` is true
 * while other answers of this browser must end first. `earlier` and `later` are the other versions of an answer that
 * was requested again, without versions of their own.
 * @typedef {Omit<Completion, "figures" | "model"> & {
 *   role: "assistant", figures: Partial<Figures>, problem: string | null, model?: string | null, askedAt?: number,
 *   parameters?: Record<string, unknown>, isQueued?: boolean, key?: string,
 *   kept?: Pick<Completion, "id" | "end">, failed?: { end: string | null, problem: string | null },
 *   earlier?: AnswerMessage[], later?: AnswerMessage[]
 * }} AnswerMessage
 */

/** @typedef {UserMessage | ToolMessage | AnswerMessage} Message */

/**
 * Conversation. `isNamed` is true once the person has named it.
 * @typedef {{ id: string, title: string, at: number, messages: Message[], isNamed?: boolean }} Conversation
 */

/** @type {AnswerMessage} */
export const EMPTY_ANSWER = {
  role: "assistant",
  id: "",
  content: "",
  reasoning: "",
  calls: [],
  end: null,
  isPaused: false,
  figures: {},
  problem: null,
};

/**
 * Return an empty conversation.
 * @returns {Conversation}
 */
export function newConversation() {
  return { id: randomId(), title: "", at: Date.now(), messages: [] };
}

/** Return a random id. Browsers deny `crypto.randomUUID` to pages of other machines without TLS. */
export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(ID_BYTES));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Return true if a message is the model's answer.
 * @param {Message} message
 * @returns {message is AnswerMessage}
 */
export function isAnswer(message) {
  return message.role === "assistant";
}

/**
 * Append a message. The first question becomes the title.
 * @param {Conversation} conversation
 * @param {Message} message
 * @returns {Conversation}
 */
export function withMessage(conversation, message) {
  const title = conversation.title || (message.role === "user" ? titleOf(message.content) : "");
  return { ...conversation, title, at: Date.now(), messages: [...conversation.messages, message] };
}

/**
 * Give a conversation another title. An empty one is that of its first question.
 * @param {Conversation} conversation
 * @param {string} title
 * @returns {Conversation}
 */
export function withTitle(conversation, title) {
  const name = titleOf(title);
  const first = conversation.messages.find((message) => message.role === "user");
  return { ...conversation, title: name || titleOf(first?.content ?? ""), isNamed: name !== "" };
}

/**
 * Mark the answers that still stream as stopped.
 * @param {Conversation} conversation
 * @returns {Conversation}
 */
export function withAnswersStopped(conversation) {
  /** @type {(message: Message) => Message} */
  const stopped = (message) => (isAnswer(message) ? withEnd(message, "stopped") : message);
  return { ...conversation, messages: conversation.messages.map(stopped) };
}

/**
 * End an answer that streams. A former one that is still shown gets its own end back.
 * @param {AnswerMessage} answer
 * @param {string} end
 * @returns {AnswerMessage}
 */
export function withEnd(answer, end) {
  if (answer.end !== null) return answer;
  const { kept = { end }, ...rest } = answer;
  return { ...rest, ...kept };
}

/**
 * Return the conversations that hold a text in their title or messages, in any case of letters.
 * @param {Conversation[]} conversations
 * @param {string} text
 */
export function searchConversations(conversations, text) {
  const wanted = text.trim().toLocaleLowerCase();
  const holds = (/** @type {string} */ one) => one.toLocaleLowerCase().includes(wanted);
  return conversations.filter(
    ({ title, messages }) => !wanted || holds(title) || messages.some((each) => textsOf(each).some(holds)),
  );
}

/**
 * Return the text of a message, and those of an answer's other versions.
 * @param {Message} message
 */
function textsOf(message) {
  return isAnswer(message) ? versionsOf(message).map(({ content }) => content) : [message.content];
}

/** @param {string} text */
function titleOf(text) {
  const line = (text.trim().split("\n")[0] ?? "").trim();
  return line.length <= MAX_TITLE ? line : `${line.slice(0, MAX_TITLE - 1).trimEnd()}…`;
}

/**
 * Replace the answer that has the same key, if there is one.
 * @param {Conversation} conversation
 * @param {AnswerMessage} answer
 * @returns {Conversation}
 */
export function withAnswer(conversation, answer) {
  const place = placeOf(conversation, answer);
  return place < 0 ? conversation : { ...conversation, messages: conversation.messages.with(place, answer) };
}

/**
 * Return a conversation as another tab stored it, with the answer that streams into this tab.
 * @param {Conversation} stored
 * @param {Conversation} own with that answer
 * @returns {Conversation}
 */
export function withStreaming(stored, own) {
  const answer = own.messages.filter(isAnswer).find(({ end }) => end === null);
  if (answer && placeOf(stored, answer) >= 0) return withAnswer(stored, answer);
  // The other tab stored the version of before the question.
  const { title, isNamed = false } = stored;
  return { ...own, title, isNamed };
}

/**
 * @param {Conversation} conversation
 * @param {AnswerMessage} answer
 */
function placeOf({ messages }, { key }) {
  return messages.findIndex((message) => isAnswer(message) && message.key === key && key !== undefined);
}

/**
 * Return true if an answer says anything.
 * @param {AnswerMessage} answer
 */
export function hasText({ content, reasoning, calls }) {
  return Boolean(content || reasoning || calls.length);
}

/**
 * Return true if something other than the model or the person ended an answer.
 * @param {AnswerMessage} answer
 */
export function isCutOff({ end }) {
  return end !== null && ["cut", "unreached", "error", "unknown"].includes(end);
}

/**
 * Return true if the model can continue an answer: it ended early, and has text after its reasoning.
 * @param {AnswerMessage} answer
 */
export function canContinue({ content, calls, end }) {
  return content !== "" && !calls.length && end !== null && !["stop", "tool_calls"].includes(end);
}

/**
 * Return all versions of an answer in the order of their requests, without versions of their own.
 * @param {AnswerMessage} answer
 * @returns {AnswerMessage[]}
 */
export function versionsOf({ earlier = [], later = [], failed: _, ...shown }) {
  return [...earlier, shown, ...later];
}

/**
 * Return a conversation that shows another version of an answer.
 * @param {Conversation} conversation
 * @param {number} place of the answer
 * @param {number} number of the version, from 0
 * @returns {Conversation}
 */
export function withVersion(conversation, place, number) {
  const answer = conversation.messages[place];
  if (!answer || !isAnswer(answer)) return conversation;
  const versions = versionsOf(answer);
  const wanted = versions[number];
  if (!wanted) return conversation;
  const shown = { ...wanted, earlier: versions.slice(0, number), later: versions.slice(number + 1) };
  return { ...conversation, at: Date.now(), messages: conversation.messages.with(place, shown) };
}

/**
 * Return the numbers of the next versions before and after the one that is shown; null where there is none. Results of
 * tools belong to the calls of one version, so only the last message may get or lose calls.
 * @param {AnswerMessage} answer
 * @param {boolean} isLast whether no message follows
 */
export function versionSteps(answer, isLast) {
  const versions = versionsOf(answer);
  const number = answer.earlier?.length ?? 0;
  const isOpen = (/** @type {number} */ each) =>
    isLast || !(versions[each]?.calls.length || versions[number]?.calls.length);
  const numbers = [...versions.keys()].filter(isOpen);
  return {
    earlier: numbers.findLast((each) => each < number) ?? null,
    later: numbers.find((each) => each > number) ?? null,
  };
}

/**
 * Return the answer to show while the server answers once more: the former text, until the new one begins. Then the
 * former text is an earlier version.
 * @param {AnswerMessage} answer so far
 * @param {AnswerMessage | null} before the former answer
 * @param {boolean} continues whether the new text follows the former one
 * @returns {AnswerMessage}
 */
export function joinAnswers(answer, before, continues) {
  if (!before || !hasText(before)) return answer;
  const { earlier = [], later = [], failed: _, ...former } = before;
  if (continues) {
    return {
      ...answer,
      earlier,
      later,
      content: before.content + answer.content,
      reasoning: before.reasoning + answer.reasoning,
      figures: joinFigures(before.figures, answer.figures),
    };
  }
  if (hasText(answer)) return { ...answer, earlier: versionsOf(before) };
  const { key, id, end, problem, isPaused, isQueued = false, waitsFor = "" } = answer;
  const shown = { ...former, ...(key ? { key } : {}), earlier, later };
  if (end === null) {
    return { ...shown, id, end, isPaused, isQueued, waitsFor, kept: { id: former.id, end: former.end } };
  }
  // An end without a new text leaves the former answer as it was. A person who stopped the try needs no reason.
  return end === "stopped" ? shown : { ...shown, failed: { end, problem } };
}

/**
 * Return the figures of an answer that was continued. Its prompt and first token are those of its beginning.
 * @param {Partial<Figures>} before
 * @param {Partial<Figures>} after of what followed
 * @returns {Partial<Figures>}
 */
function joinFigures(before, after) {
  if (!after.tokens) return before;
  // Nothing was counted of the beginning, which is a part of the prompt now.
  if (!before.tokens) return after;
  const tokens = before.tokens + after.tokens;
  if (!before.tokensPerS || !after.tokensPerS) return { ...before, tokens, tokensPerS: null };
  const seconds = before.tokens / before.tokensPerS + after.tokens / after.tokensPerS;
  return { ...before, tokens, tokensPerS: tokens / seconds };
}

/**
 * Change a question and remove the messages after it.
 * @param {Conversation} conversation
 * @param {number} place
 * @param {string} content
 * @returns {Conversation}
 */
export function withEdit(conversation, place, content) {
  const messages = conversation.messages.slice(0, place);
  const title = place === 0 && !conversation.isNamed ? "" : conversation.title;
  return withMessage({ ...conversation, title, messages }, { role: "user", content });
}

/**
 * Return a new conversation with the first messages of another one.
 * @param {Conversation} conversation
 * @param {number} count
 * @returns {Conversation}
 */
export function branchOf({ title, messages }, count) {
  const copy = newConversation();
  if (!count) return copy;
  const name = `${titleOf(title).slice(0, MAX_TITLE - BRANCH.length)}${BRANCH}`;
  const copied = { ...copy, title: title.endsWith(BRANCH) ? title : name, isNamed: true };
  // An answer that streams does so into the other conversation alone.
  return withAnswersStopped({ ...copied, messages: messages.slice(0, count) });
}

/**
 * Return the name under which a change of the question at a place is kept.
 * @param {Conversation} conversation
 * @param {number} place
 */
export function editName({ id }, place) {
  return `${id}/${place}`;
}

/**
 * Return the calls of the last answer that have no result yet.
 * @param {Conversation} conversation
 * @returns {ToolCall[]}
 */
export function openCalls({ messages }) {
  const last = messages.findLastIndex(isAnswer);
  const answer = messages[last];
  if (!answer || !isAnswer(answer)) return [];
  const answered = new Set(messages.slice(last + 1).map((message) => message.role === "tool" && message.call));
  return answer.calls.filter((call) => !answered.has(call.id));
}

/**
 * Return the messages of the request. Empty answers are left out, and the questions around them joined.
 * @param {Conversation} conversation
 * @param {string} system
 */
export function requestMessages(conversation, system) {
  /** @type {Record<string, unknown>[]} */
  const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  for (const message of conversation.messages.map(requestMessage)) {
    const last = messages.at(-1);
    if (message === null) continue;
    if (message.role === "user" && last?.role === "user") {
      messages[messages.length - 1] = { role: "user", content: `${last.content}\n\n${message.content}` };
    } else {
      messages.push(message);
    }
  }
  return messages;
}

/**
 * @param {Message} message
 * @returns {Record<string, unknown> | null}
 */
function requestMessage(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
  if (!isAnswer(message)) return { role: "user", content: message.content };
  const calls = message.calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  if (calls.length) return { role: "assistant", content: message.content || null, tool_calls: calls };
  return message.content ? { role: "assistant", content: message.content } : null;
}
