// All conversations of this browser, and the answers that are on their way.

import { ApiError } from "../api.js";
import { kept } from "../parts.js";
import { answering } from "./answer.js";
import { beforeAnswer, begun, edited, isAnswer, openCalls, requestMessages, withAnswer, withMessage } from "./conversation.js";
import { fieldsOf } from "./parameters.js";

const KEPT = "mlx-ring.chats";
const MOST = 100;
const NOTHING = { role: "assistant", content: "", reasoning: "", calls: [], end: null, figures: {}, problem: null };

/**
 * `now` holds:
 *   conversations: the newest first; open: the one that is shown; running: ids of those that are being answered
 *   isKept: whether this browser had room for the last change
 */
export class Chats {
  /** What is written and not sent yet. */
  draft = "";
  #listeners = new Set();
  #running = new Map();
  #locked;

  /** `locked` is told the sentence with which the server asks for a key. */
  constructor(locked) {
    this.#locked = locked;
    const conversations = read();
    this.now = { conversations, open: conversations[0] ?? begun(), running: new Set(), isKept: true };
    // An answer that is cut off by closing the page is kept as far as it came. Nobody is left to be told of the connection.
    window.addEventListener("pagehide", () => {
      if (this.#running.size) this.#keep();
      this.#running.clear();
    });
    window.addEventListener("storage", ({ key }) => (key === KEPT || key === null) && this.#heed());
  }

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  begin() {
    this.#tell({ open: begun() });
  }

  show(id) {
    const found = this.now.conversations.find((conversation) => conversation.id === id);
    if (found) this.#tell({ open: found });
  }

  remove(id) {
    this.stop(id);
    const conversations = this.now.conversations.filter((conversation) => conversation.id !== id);
    const open = this.now.open.id === id ? (conversations[0] ?? begun()) : this.now.open;
    this.#tell({ conversations, open });
    this.#keep();
  }

  clear() {
    for (const id of this.#running.keys()) this.stop(id);
    this.#tell({ conversations: [], open: begun() });
    this.#keep();
  }

  ask(text, options) {
    this.#answer(withMessage(this.now.open, { role: "user", content: text }), options);
  }

  retry(options) {
    this.#answer(beforeAnswer(this.now.open), options);
  }

  edit(place, text, options) {
    this.#answer(edited(this.now.open, place, text), options);
  }

  /** What a tool gave. The model goes on when every call has its result. */
  giveResult(call, text, options) {
    const conversation = withMessage(this.now.open, { role: "tool", call: call.id, name: call.name, content: text });
    if (openCalls(conversation).length) this.#put(conversation);
    else this.#answer(conversation, options);
  }

  stop(id = this.now.open.id) {
    this.#running.get(id)?.abort();
  }

  async #answer(conversation, { model, parameters }) {
    const { id } = conversation;
    const abort = new AbortController();
    this.#running.get(id)?.abort();
    this.#running.set(id, abort);
    let answer = { ...NOTHING, model };
    let whole = withMessage(conversation, answer);
    const drawn = throttled(() => this.#put(withAnswer(whole, answer)));
    this.#put(whole);
    this.#keep();
    try {
      const messages = requestMessages(conversation, parameters.system);
      const body = { ...(model ? { model } : {}), messages, ...fieldsOf(parameters) };
      for await (const grown of answering(body, abort.signal)) {
        answer = { ...answer, ...grown };
        drawn.soon();
      }
    } catch (error) {
      answer = { ...answer, ...this.#ending(error, abort) };
    }
    drawn.cancel();
    if (this.#running.get(id) === abort) {
      this.#running.delete(id);
      whole = withAnswer(whole, answer);
      this.#put(whole);
      this.#keep();
    }
  }

  #ending(error, abort) {
    if (abort.signal.aborted) return { end: "stopped" };
    if (error instanceof ApiError && error.status === 401) this.#locked(error.message);
    if (!(error instanceof ApiError)) console.error(error);
    const problem = error instanceof ApiError ? error.message : "The page could not read the answer.";
    return { end: "error", problem };
  }

  /** The conversation as it is now; one that was removed meanwhile stays away. */
  #put(conversation) {
    const isNew = conversation.id === this.now.open.id;
    const others = this.now.conversations.filter((other) => other.id !== conversation.id);
    if (others.length === this.now.conversations.length && !isNew) return;
    const open = isNew ? conversation : this.now.open;
    this.#tell({ conversations: newestFirst([conversation, ...others]), open });
  }

  /** Another tab has changed what is kept: it stays, and what is being answered here does too. */
  #heed() {
    const running = this.now.conversations.filter(({ id }) => this.#running.has(id));
    const others = read().filter(({ id }) => !this.#running.has(id));
    const conversations = newestFirst([...running, ...others]);
    const { open } = this.now;
    const found = conversations.find(({ id }) => id === open.id);
    this.#tell({ conversations, open: found ?? (open.messages.length ? begun() : open) });
  }

  #keep() {
    let conversations = this.now.conversations.slice(0, MOST);
    // Where there is little room the oldest go.
    while (!kept.write(KEPT, conversations.length ? conversations : null)) {
      if (conversations.length < 2) return this.#tell({ isKept: false });
      conversations = conversations.slice(0, Math.floor(conversations.length / 2));
    }
    return this.#tell({ isKept: true });
  }

  #tell(change) {
    this.now = { ...this.now, ...change, running: new Set(this.#running.keys()) };
    for (const listener of this.#listeners) listener(this.now);
  }
}

const newestFirst = (conversations) => conversations.sort((one, two) => two.at - one.at);

/** Another version of the page may have kept them in another form: what cannot be drawn is left out. */
function read() {
  const found = kept.read(KEPT);
  const speaks = (message) => typeof message?.role === "string" && typeof message.content === "string";
  const whole = ({ id, messages }) => typeof id === "string" && Array.isArray(messages) && messages.every(speaks);
  return Array.isArray(found) ? found.filter((each) => whole(each ?? {})).map(ended) : [];
}

/** What was being answered when the page was closed is no longer; where another tab is at it, that one tells its end. */
function ended(conversation) {
  const messages = conversation.messages.map((message) =>
    isAnswer(message) ? { ...NOTHING, ...message, end: message.end ?? "unknown" } : message,
  );
  return { ...conversation, messages };
}

/** Draws once a frame at most; in a tab that is not seen a few times a second. */
function throttled(draw) {
  let frame = 0;
  let timer = 0;
  const cancel = () => {
    cancelAnimationFrame(frame);
    clearTimeout(timer);
    frame = timer = 0;
  };
  const run = () => {
    cancel();
    draw();
  };
  const soon = () => {
    if (frame) return;
    frame = requestAnimationFrame(run);
    timer = setTimeout(run, 250);
  };
  return { soon, cancel };
}
