// The address of the page: its view, and in Chat the conversation. Each of them is an entry of the browser's history.

/** @import { Conversation } from "./chat/conversation.js" */
/** @import { ChatState, ChatStore } from "./chat/store.js" */

import { useEffect, useState } from "./vendor/preact.js";

/** @typedef {"chat" | "models" | "cluster"} View */

/**
 * Read the view, and in Chat the conversation's id. It is null for one without messages.
 * @param {string} hash
 * @returns {{ view: View, chat: string | null }}
 */
export function readAddress(hash) {
  const [name, chat = ""] = hash.replace(/^#/, "").split("/");
  const view = name === "models" || name === "cluster" ? name : "chat";
  return { view, chat: (view === "chat" && chat) || null };
}

/**
 * Return the address of a conversation. All without messages have the same one. A page that is opened there shows the
 * newest conversation.
 * @param {Pick<Conversation, "id" | "messages">} conversation
 */
export function chatAddress({ id, messages }) {
  return messages.length ? `#chat/${id}` : "#chat";
}

/**
 * Return why the conversation that the address names is not shown.
 * @param {string} id
 */
export function describeMissing(id) {
  const named = /^[\w-]{1,40}$/.test(id) ? `This browser has no chat ${id}.` : "The address names no chat.";
  return `${named} It was deleted, or another browser has it: chats are stored only in the browser that asked.`;
}

/**
 * Open the conversation that the address names when the page is opened. Without a name, the newest one stays.
 * @param {ChatStore} chats
 */
export function openAddressed(chats) {
  const { chat } = readAddress(location.hash);
  if (chat !== null) chats.open(chat);
}

/**
 * Keep the address and the open conversation alike. Return a function that ends this.
 *
 * Another conversation is another entry of the history. It replaces the entry of one that was deleted, and that of the
 * empty conversation from which it began.
 * @param {ChatStore} chats
 * @param {() => void} onChange called after the person went to another address
 */
export function followAddress(chats, onChange) {
  let before = chats.now.open;
  // An address to which the person goes stands before its event. Only a change of the conversation may replace it.
  let written = "";
  const write = (/** @type {ChatState} */ { open, conversations, missing }) => {
    const wasLeft = open.id !== before.id && (!before.messages.length || conversations.some(isSame(before)));
    before = open;
    const address = chatAddress(open);
    const { view } = readAddress(location.hash);
    if (missing !== null) written = location.hash;
    if (view !== "chat" || missing !== null || address === written) return;
    written = address;
    if (location.hash === address) return;
    history[wasLeft ? "pushState" : "replaceState"](null, "", address);
  };
  const onHash = () => {
    const { view, chat } = readAddress(location.hash);
    const { open, missing } = chats.now;
    written = location.hash;
    if (chat !== null) chats.open(chat);
    else if (view === "chat" && (open.messages.length || missing !== null)) chats.startNew();
    write(chats.now);
    onChange();
  };
  write(chats.now);
  addEventListener("hashchange", onHash);
  const unsubscribe = chats.subscribe(write);
  return () => {
    removeEventListener("hashchange", onHash);
    unsubscribe();
  };
}

/**
 * @param {Conversation} one
 * @returns {(other: Conversation) => boolean}
 */
const isSame =
  ({ id }) =>
  (other) =>
    other.id === id;

/**
 * Return the view that the address names, and the open conversation's address. Its title is empty in other views.
 * @param {ChatStore} chats
 */
export function useAddress(chats) {
  const [view, setView] = useState(() => readAddress(location.hash).view);
  const [chat, setChat] = useState(() => chatAddress(chats.now.open));
  const [title, setTitle] = useState(chats.now.open.title);
  const onChats = (/** @type {ChatState} */ { open }) => {
    setChat(chatAddress(open));
    setTitle(open.title);
  };
  useEffect(() => chats.subscribe(onChats), [chats]);
  useEffect(() => followAddress(chats, () => setView(readAddress(location.hash).view)), [chats]);
  return { view, chat, title: view === "chat" ? title : "" };
}
