// Questions that were not sent yet, by conversation. This tab keeps them until it is closed, also over a reload.

/** @import { Conversation } from "./conversation.js" */

import { readStored, writeStored } from "../storage.js";

const STORED_DRAFTS = "mlx-ring.drafts";
/** Name of the draft for a conversation without messages: there is at most one. */
const NEW = "new";

/** Drafts of this tab. */
export class Drafts {
  /** @type {Map<string, string>} */
  #texts;

  constructor() {
    const stored = readStored(STORED_DRAFTS, "sessionStorage");
    this.#texts = new Map(Object.entries(stored ?? {}).map(([name, text]) => [name, String(text)]));
  }

  /**
   * Return the text that was written in a conversation, which may be empty.
   * @param {Conversation} conversation
   */
  get(conversation) {
    return this.#texts.get(nameOf(conversation)) ?? "";
  }

  /**
   * Keep what is written in a conversation.
   * @param {Conversation} conversation
   * @param {string} text
   */
  set(conversation, text) {
    this.#texts.set(nameOf(conversation), text);
    this.#store();
  }

  /**
   * Forget the draft of a conversation that is deleted, or without an id all of them.
   * @param {string} [id]
   */
  forget(id) {
    if (id === undefined) this.#texts.clear();
    else this.#texts.delete(id);
    this.#store();
  }

  #store() {
    const texts = [...this.#texts].filter(([, text]) => text !== "");
    writeStored(STORED_DRAFTS, texts.length ? Object.fromEntries(texts) : null, "sessionStorage");
  }
}

/** @param {Conversation} conversation */
function nameOf({ id, messages }) {
  return messages.length ? id : NEW;
}
