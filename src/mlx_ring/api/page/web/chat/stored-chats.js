// Conversations as this browser stores them, in one list for all tabs.
//
// A tab joins its conversations with the list before it writes, because another tab may have written meanwhile. A
// conversation that the list lacks is therefore not deleted. Deletions are stored by themselves, for a while.

/** @import { Conversation, Message } from "./conversation.js" */

import { readStored, writeStored } from "../storage.js";
import { EMPTY_ANSWER, isAnswer, withEnd, withStreaming } from "./conversation.js";

/** Name of the stored list. */
const STORED_CHATS = "mlx-ring.chats";
/** Name of the stored deletions. */
const DELETED_CHATS = "mlx-ring.deleted";
/** Largest number of stored deletions. */
const MAX_DELETED = 500;
/** Age at which a deletion is forgotten: no tab sleeps as long. */
const DELETED_MS = 30 * 24 * 3600 * 1000;

/**
 * Conversations of this tab and of the others.
 * @typedef {object} Joined
 * @property {Conversation[]} conversations newest first
 * @property {string[]} missing ids of those that the stored list lacks
 * @property {Set<string>} unstored ids that the tab which stored the list left out
 * @property {Set<string>} deleted ids that any tab deleted
 */

/**
 * Return true if a storage event is about conversations.
 * @param {string | null} name
 */
export function isChats(name) {
  return name === null || name === STORED_CHATS || name === DELETED_CHATS;
}

/** The stored list, and what a tab last read or wrote of it. */
export class StoredChats {
  /**
   * Conversations as last read or written, with their stored text.
   * @type {Map<string, { chat: Conversation, text: string }>}
   */
  #known = new Map();
  /** Deletions for which there was no room yet, with their times. @type {Map<string, number>} */
  #deleted = new Map();

  /**
   * Join the conversations of this tab with what others stored and deleted since.
   * @param {Conversation[]} own
   * @param {(id: string) => boolean} isRunning whether an answer streams into a conversation of this tab
   * @returns {Joined}
   */
  join(own, isRunning) {
    const list = readList();
    const deleted = new Set([...readDeleted().keys(), ...this.#deleted.keys()]);
    const rest = new Map(own.filter(({ id }) => !deleted.has(id)).map((each) => [each.id, each]));
    const joined = list.filter(isConversation).filter(({ id }) => !deleted.has(id));
    const stored = joined.map((each) => {
      const mine = rest.get(each.id);
      rest.delete(each.id);
      return this.#joinOne(each, mine, isRunning(each.id));
    });
    const unstored = new Set(list.flatMap((each) => (Array.isArray(each?.unstored) ? each.unstored : [])));
    return {
      conversations: sortNewestFirst([...rest.values(), ...stored]),
      missing: [...rest.keys()],
      unstored,
      deleted,
    };
  }

  /**
   * @param {Conversation} stored
   * @param {Conversation | undefined} own
   * @param {boolean} isRunning
   */
  #joinOne(stored, own, isRunning) {
    const text = JSON.stringify(stored);
    const before = this.#known.get(stored.id);
    if (own && before?.text === text) return own;
    const other = endAnswers(stored);
    this.#known.set(stored.id, { chat: other, text });
    if (own && isRunning) return withStreaming(other, own);
    return own && before && own !== before.chat ? joinChanges(before.chat, own, other) : other;
  }

  /**
   * Write the list. Return false where there is no room.
   * @param {Conversation[]} conversations
   * @param {string[]} unstored ids of those that are left out
   */
  write(conversations, unstored) {
    const isEmpty = !conversations.length && !unstored.length;
    const list = [...conversations, ...(unstored.length ? [{ unstored }] : [])];
    if (!writeStored(STORED_CHATS, isEmpty ? null : list)) return false;
    for (const chat of conversations) this.#known.set(chat.id, { chat, text: JSON.stringify(chat) });
    if (this.#deleted.size) this.delete([]);
    return true;
  }

  /**
   * Let no tab keep conversations. Call `write` next.
   * @param {string[]} ids
   */
  delete(ids) {
    for (const id of ids) this.#deleted.set(id, Date.now());
    if (writeDeleted(new Map([...readDeleted(), ...this.#deleted]))) this.#deleted.clear();
  }

  /**
   * Undo a deletion. Call `write` next.
   * @param {string} id
   */
  restore(id) {
    const deleted = readDeleted();
    this.#deleted.delete(id);
    if (deleted.delete(id)) writeDeleted(deleted);
  }
}

/** @param {Conversation[]} conversations */
export function sortNewestFirst(conversations) {
  return conversations.sort((one, two) => two.at - one.at);
}

/**
 * Mark answers without an end: the page was closed while they streamed, or another tab still receives them.
 * @param {Conversation} conversation
 * @returns {Conversation}
 */
export function endAnswers(conversation) {
  /** @type {(message: Message) => Message} */
  const ended = (message) => (isAnswer(message) ? withEnd({ ...EMPTY_ANSWER, ...message }, "unknown") : message);
  return { ...conversation, messages: conversation.messages.map(ended) };
}

/**
 * Join two changes of a conversation. Of two that changed the messages, the later one stays.
 * @param {Conversation} before
 * @param {Conversation} own
 * @param {Conversation} other
 * @returns {Conversation}
 */
function joinChanges(before, own, other) {
  const isRenamed = own.title !== before.title || own.isNamed !== before.isNamed;
  const { title, isNamed = false } = isRenamed ? own : other;
  const { at, messages } = own.messages === before.messages || other.at > own.at ? other : own;
  return { ...other, title, isNamed, at, messages };
}

/** @returns {any[]} */
function readList() {
  const stored = readStored(STORED_CHATS);
  return Array.isArray(stored) ? stored : [];
}

/**
 * Read the deletions: their times by the conversation's id, the oldest first.
 * @returns {Map<string, number>}
 */
function readDeleted() {
  const stored = readStored(DELETED_CHATS);
  const isDeletion = (/** @type {any} */ each) =>
    typeof each?.[0] === "string" && typeof each[1] === "number" && Date.now() - each[1] < DELETED_MS;
  return new Map(Array.isArray(stored) ? stored.filter(isDeletion) : []);
}

/** @param {Map<string, number>} deleted */
function writeDeleted(deleted) {
  return writeStored(DELETED_CHATS, deleted.size ? [...deleted].slice(-MAX_DELETED) : null);
}

/**
 * Return true for a conversation. One that another version of the page stored in another form is left out.
 * @param {any} value
 * @returns {value is Conversation}
 */
function isConversation(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) return false;
  return value.messages.every(
    (/** @type {any} */ message) => typeof message?.role === "string" && typeof message.content === "string",
  );
}
