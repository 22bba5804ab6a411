// A conversation, and what becomes of it. Values in, values out.

const TITLE = 60;
const IDENTITY_BYTES = 8;

/** messages: {role: "user", content}, {role: "tool", call, content}, or an answer, see `answer.js`, with `problem`. */
export function begun() {
  return { id: identity(), title: "", at: Date.now(), messages: [] };
}

/** Not `crypto.randomUUID`, which pages of other machines without TLS have not. */
function identity() {
  const bytes = crypto.getRandomValues(new Uint8Array(IDENTITY_BYTES));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const isAnswer = (message) => message.role === "assistant";

/** With a message at its end; the first one of a person gives the title. */
export function withMessage(conversation, message) {
  const title = conversation.title || (message.role === "user" ? titled(message.content) : "");
  return { ...conversation, title, at: Date.now(), messages: [...conversation.messages, message] };
}

function titled(text) {
  const line = text.trim().split("\n")[0].trim();
  return line.length <= TITLE ? line : `${line.slice(0, TITLE - 1).trimEnd()}…`;
}

/** With another answer at its end. */
export function withAnswer(conversation, answer) {
  return { ...conversation, messages: [...conversation.messages.slice(0, -1), answer] };
}

/** Up to the last thing that was said to the model: what it answered is gone. */
export function beforeAnswer(conversation) {
  const last = conversation.messages.findLastIndex((message) => !isAnswer(message));
  return { ...conversation, messages: conversation.messages.slice(0, last + 1) };
}

/** With a person's message changed; what came behind it is gone. */
export function edited(conversation, place, content) {
  const before = conversation.messages.slice(0, place);
  return withMessage({ ...conversation, title: place === 0 ? "" : conversation.title, messages: before }, {
    role: "user",
    content,
  });
}

/** Calls of the last answer that have no result yet. */
export function openCalls(conversation) {
  const last = conversation.messages.findLastIndex(isAnswer);
  if (last < 0) return [];
  const given = new Set(conversation.messages.slice(last + 1).map((message) => message.call));
  return (conversation.messages[last].calls ?? []).filter((call) => !given.has(call.id));
}

/** As the server takes them. Answers that hold nothing are left out, and what a person then said twice is joined. */
export function requestMessages(conversation, system) {
  const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  for (const message of conversation.messages.map(asked)) {
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

function asked(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
  if (!isAnswer(message)) return { role: "user", content: message.content };
  const calls = (message.calls ?? []).map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  if (calls.length) return { role: "assistant", content: message.content || null, tool_calls: calls };
  return message.content ? { role: "assistant", content: message.content } : null;
}

/** As plain text, to be copied. */
export function asText(conversation) {
  return conversation.messages.map((message) => `${message.role}:\n${message.content}`).join("\n\n");
}
