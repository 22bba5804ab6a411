// The list of conversations.

/** @import { Conversation } from "./conversation.js" */
/** @import { ChatState, ChatStore } from "./store.js" */

import { chatAddress } from "../address.js";
import { onSingleClick, onValue, useFocus, useReturningFocus } from "../components.js";
import { html, useState } from "../vendor/preact.js";
import { searchConversations } from "./conversation.js";
import { allToJson, allToMarkdown, fileName, saveFile } from "./export.js";

/** Number of conversations from which they can be searched. */
const FEW = 2;

/**
 * Render the list of conversations. On a narrow screen it opens and closes.
 * @param {{ now: ChatState, chats: ChatStore }} props
 */
export function History({ now, chats }) {
  const [isOpen, setOpen] = useState(false);
  const [isConfirming, setConfirming] = useState(false);
  const [search, setSearch] = useState("");
  const deleteAll = useReturningFocus(isConfirming);
  const count = now.conversations.length;
  const found = count < FEW ? now.conversations : searchConversations(now.conversations, search);
  const closeAfter = (/** @type {() => void} */ act) => () => {
    act();
    setOpen(false);
    setConfirming(false);
  };
  return html`<aside class=${`conversations${isOpen ? " open" : ""}`} aria-label="Conversations">
    <div class="row">
      <button type="button" onClick=${closeAfter(() => chats.startNew())}>New chat</button>
      <button type="button" class="quiet narrow-only" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
        ${count ? `History (${count})` : "History"}
      </button>
    </div>
    <div class="history">
      ${
        count >= FEW &&
        html`<label>
          <span class="visually-hidden">Search chats</span>
          <input type="search" placeholder="Search chats" value=${search} onInput=${onValue(setSearch)} />
        </label>`
      }
      ${
        now.deleted &&
        html`<p class="row undo" role="status">
          <span class="grow">Deleted ${now.deleted.title || "Untitled"}</span>
          <button type="button" onClick=${onSingleClick(closeAfter(() => chats.restore()))}>Undo</button>
        </p>`
      }
      ${found.length < count && html`<p class="muted" role="status">${found.length} of ${count} chats</p>`}
      <ul>
        ${found.map(
          (conversation) => html`<${Entry}
            key=${conversation.id}
            conversation=${conversation}
            isOpen=${conversation.id === now.open.id}
            isRunning=${now.running.has(conversation.id)}
            onOpen=${closeAfter(() => chats.open(conversation.id))}
            remove=${() => chats.delete(conversation.id)}
          />`,
        )}
      </ul>
      <p class="muted">Conversations are stored only in this browser.</p>
      ${
        count > 0 &&
        !isConfirming &&
        html`<p class="all">
          <button type="button" class="quiet" onClick=${() => exportAll(now.conversations)}>Export all</button>
          <button type="button" class="quiet" ref=${deleteAll} onClick=${() => setConfirming(true)}>Delete all</button>
        </p>`
      }
      ${
        count > 0 &&
        isConfirming &&
        html`<p>
        <button type="button" class="danger" onClick=${onSingleClick(closeAfter(() => chats.deleteAll()))}>
          Delete permanently
        </button>
        <${CancelButton} act=${() => setConfirming(false)} />
      </p>`
      }
    </div>
  </aside>`;
}

/**
 * Render the button that has the focus while a deletion awaits confirmation.
 * @param {{ act: () => void }} props
 */
function CancelButton({ act }) {
  const button = useFocus();
  return html`<button type="button" class="quiet" ref=${button} onClick=${act}>Cancel</button>`;
}

/**
 * Save all conversations as a Markdown file and a JSON file.
 * @param {Conversation[]} conversations
 */
function exportAll(conversations) {
  saveFile(fileName("all chats", "md"), "text/markdown", allToMarkdown(conversations));
  saveFile(fileName("all chats", "json"), "application/json", allToJson(conversations));
}

/**
 * @param {{
 *   conversation: Conversation, isOpen: boolean, isRunning: boolean, onOpen: () => void, remove: () => void
 * }} props
 */
function Entry({ conversation, isOpen, isRunning, onOpen, remove }) {
  const title = conversation.title || "Untitled";
  return html`<li class=${isOpen ? "current" : ""}>
    <a
      class="title"
      href=${chatAddress(conversation)}
      dir="auto"
      aria-current=${isOpen ? "true" : null}
      onClick=${(/** @type {MouseEvent} */ event) => isPlain(event) && onOpen()}
    >
      ${isRunning ? html`<i class="dot busy" role="img" aria-label="streaming"></i>` : null}${title}
    </a>
    <button
      type="button"
      class="quiet"
      aria-label=${`Delete ${title}`}
      title="Delete"
      onClick=${onSingleClick(remove)}
    >×</button>
  </li>`;
}

/**
 * Return true for a click that opens a link here: not in a new tab or window, and not as a download.
 * @param {Pick<MouseEvent, "altKey" | "ctrlKey" | "metaKey" | "shiftKey">} event
 */
function isPlain({ altKey, ctrlKey, metaKey, shiftKey }) {
  return !(altKey || ctrlKey || metaKey || shiftKey);
}
