// Questions that were not sent yet, by conversation. This tab keeps them until it is closed, also over a reload.

/** @import { Conversation } from "./conversation.js" */

import { readStored, storedNames, writeStored } from "../storage.js";

/** Start of the names of stored drafts: each has its own, because one that a person writes may be long. */
const PREFIX = "mlx-ring.draft-";
/** Name of the draft for a conversation without messages: there is at most one. */
const NEW = "new";
/** Longest time for which a change is not stored. */
const WRITE_MS = 1000;

/** Drafts of this tab. */
export class Drafts {
  /** @type {Map<string, string>} */
  #texts = new Map();
  /** Names of drafts that have changed since they were stored. @type {Set<string>} */
  #changed = new Set();
  /** Names of drafts for which there was no room. @type {Set<string>} */
  #unstored = new Set();
  /** Ids of conversations that have drafts of their own, although they may have no messages. @type {Set<string>} */
  #begun = new Set();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #onRoom;

  /** @param {() => void} onRoom called if a draft is no longer stored for lack of room, or is again */
  constructor(onRoom) {
    this.#onRoom = onRoom;
    for (const name of storedNames(PREFIX, "sessionStorage")) {
      this.#texts.set(name.slice(PREFIX.length), String(readStored(name, "sessionStorage") ?? ""));
    }
  }

  /**
   * Return the text that was written in a conversation, which may be empty.
   * @param {Conversation} conversation
   */
  get(conversation) {
    return this.#texts.get(this.#nameOf(conversation)) ?? "";
  }

  /**
   * Keep what is written in a conversation.
   * @param {Conversation} conversation
   * @param {string} text
   */
  set(conversation, text) {
    this.#set(this.#nameOf(conversation), text);
  }

  /**
   * Return false if the browser had no room for what is written in a conversation.
   * @param {Conversation} conversation
   */
  isStored(conversation) {
    return !this.#unstored.has(this.#nameOf(conversation));
  }

  /**
   * Give a conversation that gets its first message the draft for one without messages, which the person sees there.
   * @param {Conversation} conversation
   */
  begin(conversation) {
    if (this.#nameOf(conversation) !== NEW) return;
    const text = this.get(conversation);
    this.#begun.add(conversation.id);
    this.#set(NEW, "");
    this.#set(conversation.id, text);
  }

  /**
   * Let a conversation without messages have a draft of its own, which is empty.
   * @param {string} id
   */
  separate(id) {
    this.#begun.add(id);
  }

  /**
   * Forget the draft of a conversation that is deleted, and return it.
   * @param {string} id
   */
  forget(id) {
    const text = this.#texts.get(id) ?? "";
    this.#set(id, "");
    return text;
  }

  /**
   * Forget the drafts of all conversations but these, and but that for one without messages.
   * @param {string[]} ids
   */
  keepOnly(ids) {
    const kept = new Set([NEW, ...ids]);
    for (const name of [...this.#texts.keys()]) if (!kept.has(name)) this.forget(name);
  }

  /** Forget all drafts. */
  clear() {
    for (const name of [...this.#texts.keys()]) this.forget(name);
  }

  /**
   * @param {string} name
   * @param {string} text
   */
  #set(name, text) {
    if (text) this.#texts.set(name, text);
    else if (!this.#texts.delete(name)) return;
    this.#changed.add(name);
    // A removal is quick, and makes room.
    if (!text) this.#writeOne(name);
    else this.#timer ??= setTimeout(() => this.write(), WRITE_MS);
  }

  /** Store what has changed, and what had no room before. */
  write() {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    for (const name of new Set([...this.#changed, ...this.#unstored])) this.#writeOne(name);
  }

  /** @param {string} name */
  #writeOne(name) {
    this.#changed.delete(name);
    const text = this.#texts.get(name);
    const isStored = writeStored(PREFIX + name, text ?? null, "sessionStorage") || text === undefined;
    // The older text would come back after a reload.
    if (!isStored) writeStored(PREFIX + name, null, "sessionStorage");
    if (isStored === !this.#unstored.has(name)) return;
    if (isStored) this.#unstored.delete(name);
    else this.#unstored.add(name);
    this.#onRoom();
  }

  /** @param {Conversation} conversation */
  #nameOf({ id, messages }) {
    return messages.length || this.#begun.has(id) ? id : NEW;
  }
}
