// The conversations of this browser, and the answers that stream into them.

/** @import { ToolCall } from "./completion.js" */
/** @import { AnswerMessage, Conversation, Message } from "./conversation.js" */
/** @import { Picks } from "./model-choice.js" */
/** @import { Parameters } from "./parameters.js" */

import { ApiError } from "../api.js";
import { AnswerMarks, isMark } from "./answer-marks.js";
import { takeSlot } from "./answer-slots.js";
import { endOf, streamCompletion } from "./completion.js";
import {
  branchOf,
  EMPTY_ANSWER,
  editName,
  hasText,
  isAnswer,
  joinAnswers,
  newConversation,
  openCalls,
  randomId,
  requestMessages,
  withAnswer,
  withAnswersStopped,
  withEdit,
  withMessage,
  withTitle,
  withVersion,
} from "./conversation.js";
import { Drafts } from "./drafts.js";
import { chosenFields, requestFields } from "./parameters.js";
import { endAnswers, isChats, StoredChats, sortNewestFirst } from "./stored-chats.js";
import { throttle } from "./throttle.js";

/** Largest number of stored conversations. */
export const MAX_CONVERSATIONS = 100;
/** Time between two looks for tabs that have crashed while they received an answer. */
const SWEEP_MS = 5000;

/**
 * @typedef {object} ChatState
 * @property {Conversation[]} conversations newest first
 * @property {Conversation} open the conversation on the screen
 * @property {Set<string>} running ids of conversations with an answer that streams
 * @property {Set<string>} elsewhere ids of conversations with an answer that streams into another tab
 * @property {Conversation | null} deleted the last deleted conversation, which can be restored
 * @property {boolean} isStored false if the browser had no room for the last change
 * @property {string | null} missing id of a conversation that was asked for, and that this browser does not have
 * @property {number} unstored number of older conversations that are not stored
 */

/** @typedef {{ model: string | null, parameters: Parameters }} AskOptions */

/**
 * An answer that is requested again, or continued, and the messages after it, which stay.
 * @typedef {{ before: AnswerMessage | null, later: Message[], continues: boolean }} Again
 */

/** @type {Again} */
const FIRST_TRY = { before: null, later: [], continues: false };

/** Conversations of this browser. */
export class ChatStore {
  /** Questions that were not sent yet. */
  drafts = new Drafts(() => this.#update({}));
  /** Models that were chosen for conversations. @type {Picks} */
  picks = new Map();
  /** Questions that are being changed, by conversation and place. @type {Map<string, string>} */
  edits = new Map();
  /** @type {ChatState} */
  now;
  /** @type {Set<(now: ChatState) => void>} */
  #listeners = new Set();
  /** @type {Map<string, AbortController>} */
  #running = new Map();
  /** Ids of conversations that this tab or another one could not store. @type {Set<string>} */
  #unstored = new Set();
  /** Draft of the conversation that was deleted last. */
  #deletedDraft = "";
  #stored = new StoredChats();
  #marks = new AnswerMarks(randomId());
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #sweeper;
  #onKeyRequired;

  /** @param {(problem: string) => void} onKeyRequired called if the server refuses the API key */
  constructor(onKeyRequired) {
    this.#onKeyRequired = onKeyRequired;
    const { conversations } = this.#stored.join([], () => false);
    const open = conversations[0] ?? newConversation();
    const [running, elsewhere] = [new Set(), new Set()];
    this.now = { conversations, open, running, elsewhere, deleted: null, missing: null, isStored: true, unstored: 0 };
    this.drafts.keepOnly(conversations.map(({ id }) => id));
    this.#readMarks();
    window.addEventListener("pagehide", () => this.#leave());
    // A page in the browser's cache gets no events about changes.
    window.addEventListener("pageshow", ({ persisted }) => {
      if (persisted) this.#onChangeInOtherTab();
    });
    window.addEventListener("storage", ({ key }) => {
      if (key === null) this.#forgetStored();
      if (isChats(key)) this.#onChangeInOtherTab();
      else if (isMark(key)) this.#readMarks();
    });
  }

  /**
   * Call a listener after every change. Return a function that unsubscribes it.
   * @param {(now: ChatState) => void} listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /** Open an empty conversation. */
  startNew() {
    this.#update({ open: newConversation() });
  }

  /**
   * Open a conversation, or an empty one if this browser does not have it.
   * @param {string} id
   */
  open(id) {
    const found = this.now.conversations.find((conversation) => conversation.id === id);
    if (this.now.open.id !== id) this.#update({ open: found ?? newConversation(), missing: found ? null : id });
  }

  /**
   * Delete a conversation.
   * @param {string} id
   */
  delete(id) {
    this.stop(id);
    this.#deletedDraft = this.drafts.forget(id);
    const found = this.now.conversations.find((conversation) => conversation.id === id);
    const conversations = this.now.conversations.filter((conversation) => conversation.id !== id);
    const open = this.now.open.id === id ? (conversations[0] ?? newConversation()) : this.now.open;
    this.#update({ conversations, open, deleted: found ? withAnswersStopped(found) : null });
    this.#stored.delete([id]);
    this.#store();
  }

  /** Restore the conversation that was deleted last, and open it. */
  restore() {
    const { deleted, conversations } = this.now;
    if (!deleted) return;
    this.#stored.restore(deleted.id);
    this.drafts.set(deleted, this.#deletedDraft);
    this.#update({ conversations: sortNewestFirst([deleted, ...conversations]), open: deleted, deleted: null });
    this.#store();
  }

  /**
   * Name the open conversation. An empty title is that of its first question.
   * @param {string} title
   */
  rename(title) {
    const { open, conversations } = this.now;
    const renamed = withTitle(open, title);
    this.#update({ conversations: conversations.map((each) => (each.id === open.id ? renamed : each)), open: renamed });
    this.#store();
  }

  /** Delete all conversations. */
  deleteAll() {
    this.#takeOthers();
    this.drafts.clear();
    for (const id of this.#running.keys()) this.stop(id);
    this.#stored.delete(this.now.conversations.map(({ id }) => id));
    this.#update({ conversations: [], open: newConversation(), deleted: null });
    this.#store();
  }

  /**
   * Ask a question in the open conversation. Return false if another tab receives an answer there, as all that ask do.
   * @param {string} text
   * @param {AskOptions} options
   */
  ask(text, options) {
    const { open } = this.now;
    if (!this.#answer(withMessage(open, { role: "user", content: text }), options)) return false;
    this.drafts.begin(open);
    return true;
  }

  /**
   * Request an answer again. Its text stays until the new one begins, and the messages after it stay.
   * @param {number} place
   * @param {AskOptions} options
   */
  retry(place, options) {
    return this.#again(place, options, false);
  }

  /**
   * Show another version of an answer.
   * @param {number} place
   * @param {number} number of the version, from 0
   */
  showVersion(place, number) {
    const { open } = this.now;
    if (this.#running.has(open.id) || this.#isElsewhere(open.id)) return;
    this.#put(withVersion(open, place, number));
    this.#store();
  }

  /**
   * Let the model continue the last answer, which ended early.
   * @param {AskOptions} options
   */
  continue(options) {
    return this.#again(this.now.open.messages.length - 1, options, true);
  }

  /**
   * @param {number} place
   * @param {AskOptions} options
   * @param {boolean} continues
   */
  #again(place, options, continues) {
    const { open } = this.now;
    const before = open.messages[place];
    if (!before || !isAnswer(before)) return false;
    const [asked, later] = [open.messages.slice(0, place), open.messages.slice(place + 1)];
    return this.#answer({ ...open, messages: asked }, options, { before, later, continues });
  }

  /**
   * Change a question and ask it again.
   * @param {number} place
   * @param {string} text
   * @param {AskOptions} options
   */
  edit(place, text, options) {
    const { open } = this.now;
    if (!this.#answer(withEdit(open, place, text), options)) return false;
    for (let later = place; later < open.messages.length; later += 1) this.edits.delete(editName(open, later));
    return true;
  }

  /**
   * Copy the first messages of the open conversation into a new one, and open that.
   * @param {number} count
   */
  branch(count) {
    const copy = branchOf(this.now.open, count);
    const picked = this.picks.get(this.now.open.id);
    if (picked !== undefined) this.picks.set(copy.id, picked);
    this.drafts.separate(copy.id);
    this.#update({ open: copy });
    if (!copy.messages.length) return;
    this.#put(copy);
    this.#store();
  }

  /**
   * Add a tool's result. The model continues when every call has one.
   * @param {ToolCall} call
   * @param {string} text
   * @param {AskOptions} options
   */
  addResult(call, text, options) {
    const conversation = withMessage(this.now.open, { role: "tool", call: call.id, name: call.name, content: text });
    if (!openCalls(conversation).length) return this.#answer(conversation, options);
    if (this.#isElsewhere(conversation.id)) return false;
    this.#put(conversation);
    this.#store();
    return true;
  }

  /** Stop the answer of a conversation. */
  stop(id = this.now.open.id) {
    this.#running.get(id)?.abort();
  }

  /**
   * @param {Conversation} conversation
   * @param {AskOptions} options
   * @param {Again} again
   */
  #answer(conversation, options, again = FIRST_TRY) {
    if (this.#isElsewhere(conversation.id)) return false;
    this.#stream(conversation, options, again);
    return true;
  }

  /**
   * @param {Conversation} conversation
   * @param {AskOptions} options
   * @param {Again} again
   */
  async #stream(conversation, { model, parameters }, { before, later, continues }) {
    const { id } = conversation;
    const abort = new AbortController();
    this.#running.get(id)?.abort();
    this.#running.set(id, abort);
    /** @type {AnswerMessage} */
    let answer = {
      ...EMPTY_ANSWER,
      key: randomId(),
      model,
      askedAt: Date.now(),
      parameters: chosenFields(parameters),
    };
    const shown = () => joinAnswers(answer, before, continues);
    const prompt = withMessage(conversation, shown());
    const asked = { ...prompt, messages: [...prompt.messages, ...later] };
    const render = throttle(() => this.#putAnswer(id, shown()));
    this.#marks.begin(id);
    this.#put(asked);
    this.#store();
    const show = (/** @type {Partial<AnswerMessage>} */ change) => {
      answer = { ...answer, ...change };
      render.soon();
    };
    const takeTurn = async () => {
      const release = await takeSlot(abort.signal, () => show({ isQueued: true }));
      show({ isQueued: false });
      return release;
    };
    try {
      const messages = requestMessages(continues ? prompt : conversation, parameters.system);
      const way = continues ? { continue_final_message: true, add_generation_prompt: false } : {};
      const body = { ...(model ? { model } : {}), messages, ...requestFields(parameters), ...way };
      for await (const completion of streamCompletion(body, abort.signal, takeTurn)) {
        show({ ...completion, model: completion.model ?? model });
      }
    } catch (error) {
      const hasBegun = answer.id !== "" || hasText(answer);
      answer = { ...answer, isQueued: false, ...endOf(error, abort.signal.aborted, hasBegun) };
      if (error instanceof ApiError && error.status === 401) this.#onKeyRequired(error.message);
    }
    render.cancel();
    this.#takeOthers();
    if (this.#running.get(id) === abort) {
      this.#running.delete(id);
      this.#putAnswer(id, shown());
      this.#store();
      this.#marks.end(id);
    }
  }

  /**
   * Replace a conversation. One that was deleted meanwhile stays deleted.
   * @param {Conversation} conversation
   */
  #put(conversation) {
    const isOpen = conversation.id === this.now.open.id;
    const others = this.now.conversations.filter((other) => other.id !== conversation.id);
    if (others.length === this.now.conversations.length && !isOpen) return;
    const open = isOpen ? conversation : this.now.open;
    this.#update({ conversations: sortNewestFirst([conversation, ...others]), open });
  }

  /**
   * Put an answer into the newest version of its conversation, which this tab or another may have changed since the
   * question.
   * @param {string} id
   * @param {AnswerMessage} answer
   */
  #putAnswer(id, answer) {
    const { conversations, open } = this.now;
    const conversation = open.id === id ? open : conversations.find((each) => each.id === id);
    if (conversation) this.#put(withAnswer(conversation, answer));
  }

  /** Take what another tab changed, and store again what it did not know of. */
  #onChangeInOtherTab() {
    const isComplete = this.#takeOthers();
    if (!isComplete) this.#store();
    this.#readMarks();
  }

  /**
   * Take what other tabs stored and deleted. Answers that stream in this tab continue, and what was not stored stays.
   * Return false if the stored list lacks conversations for which it has room.
   */
  #takeOthers() {
    const { conversations: own, open, missing: wanted } = this.now;
    const { conversations, missing, unstored, deleted } = this.#stored.join(own, (id) => this.#running.has(id));
    for (const id of [...this.#running.keys()]) if (deleted.has(id)) this.#drop(id);
    this.#unstored = new Set(missing.filter((id) => this.#unstored.has(id) || unstored.has(id)));
    // The one that was asked for may have come back, but a person who types stays.
    const id = wanted !== null && !this.drafts.get(open) ? wanted : open.id;
    const found = conversations.find((each) => each.id === id);
    const shown = found ?? (open.messages.length ? newConversation() : open);
    this.drafts.keepOnly([shown, ...conversations].map(({ id }) => id));
    this.#update({ conversations, open: shown, unstored: this.#unstored.size });
    return missing.length === this.#unstored.size;
  }

  /** Forget what was stored, because a person has cleared the browser's storage. */
  #forgetStored() {
    const conversations = this.now.conversations.filter(({ id }) => this.#unstored.has(id));
    for (const id of [...this.#running.keys()]) if (!this.#unstored.has(id)) this.#drop(id);
    const isKept = conversations.some(({ id }) => id === this.now.open.id);
    this.drafts.keepOnly(conversations.map(({ id }) => id));
    this.#update({ conversations, open: isKept ? this.now.open : newConversation() });
  }

  /** End the answers of a page that is closed or left, and store what arrived. The browser may show it again. */
  #leave() {
    if (this.#running.size) this.#store();
    const left = [...this.#running];
    const end = (/** @type {Conversation} */ each) => (this.#running.has(each.id) ? endAnswers(each) : each);
    const [conversations, open] = [this.now.conversations.map(end), end(this.now.open)];
    this.#running.clear();
    for (const [, abort] of left) abort.abort();
    this.#marks.endAll();
    clearTimeout(this.#sweeper);
    this.#update({ conversations, open });
    this.drafts.write();
  }

  /**
   * End the answer of a conversation that another tab deleted.
   * @param {string} id
   */
  #drop(id) {
    this.#running.get(id)?.abort();
    this.#running.delete(id);
    this.#marks.end(id);
  }

  /**
   * Return true if another tab receives an answer in a conversation.
   * @param {string} id
   */
  #isElsewhere(id) {
    this.#readMarks();
    return this.#marks.isElsewhere(id);
  }

  /** Read where other tabs receive answers, and look again while any does: it may have crashed. */
  #readMarks() {
    const ids = this.now.conversations.map(({ id }) => id).filter((id) => this.#marks.isElsewhere(id));
    if (ids.join() !== [...this.now.elsewhere].join()) this.#update({ elsewhere: new Set(ids) });
    clearTimeout(this.#sweeper);
    if (!ids.length) return;
    this.#sweeper = setTimeout(async () => {
      await this.#marks.sweep(ids);
      this.#readMarks();
    }, SWEEP_MS);
  }

  /** Store the conversations, joined with what other tabs stored before their changes were handled here. */
  #store() {
    this.#takeOthers();
    const { conversations } = this.now;
    // Without room for all, the oldest are left out, one after the other. Other tabs that have them keep them.
    for (let count = Math.min(conversations.length, MAX_CONVERSATIONS); count > 0; count -= 1) {
      const unstored = conversations.slice(count).map(({ id }) => id);
      if (!this.#stored.write(conversations.slice(0, count), unstored)) continue;
      this.#unstored = new Set(unstored);
      return this.#update({ isStored: true, unstored: unstored.length });
    }
    this.#unstored = new Set(conversations.map(({ id }) => id));
    return this.#update({ isStored: !conversations.length && this.#stored.write([], []), unstored: 0 });
  }

  /** @param {Partial<ChatState>} change */
  #update(change) {
    const { open = this.now.open } = change;
    const missing = open.id === this.now.open.id && !open.messages.length ? this.now.missing : null;
    this.now = { ...this.now, missing, ...change, running: new Set(this.#running.keys()) };
    for (const listener of this.#listeners) listener(this.now);
  }
}
