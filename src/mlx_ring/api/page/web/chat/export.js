// A conversation as a file: Markdown to read, JSON for programs.

/** @import { Conversation, Message } from "./conversation.js" */

import { isAnswer, versionsOf } from "./conversation.js";

const MAX_NAME = 60;
/** Ends of answers that are not complete. @type {Record<string, string>} */
const ENDS = {
  cut: "cut off",
  unknown: "cut off",
  unreached: "not answered",
  error: "failed",
  stopped: "stopped",
  length: "token limit reached",
};
/** Time for which a saved file can be read. Browsers begin to read it after the click. */
const SAVE_MS = 30_000;

/**
 * Return a conversation as Markdown.
 * @param {Conversation} conversation
 */
export function toMarkdown({ title, at, messages }) {
  const head = [`# ${title || "Untitled"}`, `Last change: ${minute(at)}`];
  return `${[...head, ...messages.map(messageToMarkdown)].join("\n\n")}\n`;
}

/**
 * Return a file of several conversations as Markdown.
 * @param {Conversation[]} conversations
 */
export function allToMarkdown(conversations) {
  return conversations.map(toMarkdown).join("\n---\n\n");
}

/**
 * Return a moment in UTC: "2030-01-02 00:00 UTC".
 * @param {number} at in milliseconds
 */
function minute(at) {
  return `${new Date(at).toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

/**
 * Return a message as Markdown. All versions of an answer follow each other, the one that is shown last.
 * @param {Message} message
 */
function messageToMarkdown(message) {
  if (!isAnswer(message)) return versionToMarkdown(message, "");
  const [versions, number] = [versionsOf(message), message.earlier?.length ?? 0];
  if (versions.length === 1) return versionToMarkdown(message, "");
  const order = [...versions.keys()].filter((each) => each !== number);
  return [...order, number]
    .map((place) => versionToMarkdown(versions[place] ?? message, `version ${place + 1} of ${versions.length}`))
    .join("\n\n");
}

/**
 * @param {Message} message
 * @param {string} version which one of an answer it is; empty if there is one alone
 */
function versionToMarkdown(message, version) {
  if (message.role === "user") return `## Question\n\n${message.content}`;
  if (!isAnswer(message)) return `## Result of ${message.name}\n\n${fenced(message.content)}`;
  const cut = ENDS[message.end ?? "unknown"];
  const notes = [version, cut].filter(Boolean).join(", ");
  const parts = [`## Answer${message.model ? ` of ${message.model}` : ""}${notes ? ` (${notes})` : ""}`];
  const { parameters = {}, askedAt } = message;
  const facts = Object.entries(parameters).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  if (askedAt) facts.unshift(minute(askedAt));
  if (facts.length) parts.push(`*${facts.join(", ")}*`);
  if (message.reasoning) parts.push(quoted(message.reasoning.trim()));
  if (message.content) parts.push(message.content);
  for (const call of message.calls) parts.push(`Call of \`${call.name}\`:`, fenced(call.arguments, "json"));
  if (message.problem) parts.push(`*${message.problem}*`);
  return parts.join("\n\n");
}

/** @param {string} text */
function quoted(text) {
  return text
    .split("\n")
    .map((line) => `> ${line}`.trimEnd())
    .join("\n");
}

/**
 * Put text between fences that are longer than any in it.
 * @param {string} text
 */
export function fenced(text, language = "") {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/**
 * Return a conversation as JSON. Its messages are in the OpenAI API's format, with the model and the counts beside.
 * @param {Conversation} conversation
 */
export function toJson(conversation) {
  return `${JSON.stringify(contentOf(conversation), null, 2)}\n`;
}

/**
 * Return a list of conversations as JSON, each as in the file of a single one.
 * @param {Conversation[]} conversations
 */
export function allToJson(conversations) {
  return `${JSON.stringify(conversations.map(contentOf), null, 2)}\n`;
}

/** @param {Conversation} conversation */
function contentOf({ title, at, messages }) {
  return { title, updated_at: new Date(at).toISOString(), messages: messages.map(messageToJson) };
}

/**
 * @param {Message} message
 * @returns {Record<string, unknown>}
 */
function messageToJson(message) {
  const { role, content } = message;
  if (message.role === "tool") return { role, tool_call_id: message.call, name: message.name, content };
  if (!isAnswer(message)) return { role, content };
  const { reasoning, calls, end, model, figures, parameters, askedAt, earlier = [], later = [] } = message;
  const toolCalls = calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  return {
    role,
    content,
    ...(reasoning && { reasoning_content: reasoning }),
    ...(toolCalls.length && { tool_calls: toolCalls }),
    finish_reason: end,
    ...(model && { model }),
    ...(askedAt && { asked_at: new Date(askedAt).toISOString() }),
    ...(parameters && { parameters }),
    ...(figures.tokens && { usage: { prompt_tokens: figures.promptTokens, completion_tokens: figures.tokens } }),
    ...(earlier.length && { earlier_versions: earlier.map(messageToJson) }),
    ...(later.length && { later_versions: later.map(messageToJson) }),
  };
}

/**
 * Return a file's name for a title: its letters and digits, of any script.
 * @param {string} title
 * @param {string} suffix
 */
export function fileName(title, suffix) {
  const name = title
    .toLocaleLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-+|-+$/g, "");
  return `${name.slice(0, MAX_NAME) || "chat"}.${suffix}`;
}

/**
 * Save a text as a file in the browser's folder of downloads.
 * @param {string} name
 * @param {string} type
 * @param {string} text
 */
export function saveFile(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), SAVE_MS);
}
