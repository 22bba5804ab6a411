// Conversations as this browser stores them.

/** @import { Conversation, Message } from "./conversation.js" */

import { readStored } from "../storage.js";
import { EMPTY_ANSWER, isAnswer } from "./conversation.js";

/** Name of the stored list. */
export const STORED_CHATS = "mlx-ring.chats";

/**
 * Read the stored conversations. Those that another version of the page stored in another form are left out.
 * @returns {Conversation[]}
 */
export function readConversations() {
  const stored = readStored(STORED_CHATS);
  return Array.isArray(stored) ? stored.filter(isConversation).map(endAnswers) : [];
}

/**
 * Read the ids of conversations that the tab which stored the others left out.
 * @returns {string[]}
 */
export function readUnstored() {
  const stored = readStored(STORED_CHATS);
  return Array.isArray(stored) ? stored.flatMap((each) => (Array.isArray(each?.unstored) ? each.unstored : [])) : [];
}

/**
 * @param {any} value
 * @returns {value is Conversation}
 */
function isConversation(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) return false;
  return value.messages.every(
    (/** @type {any} */ message) => typeof message?.role === "string" && typeof message.content === "string",
  );
}

/**
 * Mark answers without an end: the page was closed while they streamed, or another tab still receives them.
 * @param {Conversation} conversation
 * @returns {Conversation}
 */
function endAnswers(conversation) {
  /** @type {(message: Message) => Message} */
  const ended = (message) =>
    isAnswer(message) ? { ...EMPTY_ANSWER, ...message, end: message.end ?? "unknown" } : message;
  return { ...conversation, messages: conversation.messages.map(ended) };
}
