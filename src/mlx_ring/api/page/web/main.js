// The page: its top bar and the view that is shown.

/** @typedef {import("preact").ComponentChildren} Children */
/** @import { View } from "./address.js" */
/** @import { Snapshot } from "./live.js" */
/** @import { Status } from "./status.js" */

import { openAddressed, useAddress } from "./address.js";
import { apiKey } from "./api.js";
import { Catalog } from "./catalog/catalog.js";
import { ModelJobs } from "./catalog/model-jobs.js";
import { Chat } from "./chat/chat.js";
import { storeModel } from "./chat/model-choice.js";
import { ChatStore } from "./chat/store.js";
import { Cluster } from "./cluster/cluster.js";
import { Invitation, Invite } from "./cluster/invitation.js";
import { Moves } from "./cluster/proposal.js";
import { Notice, Ring, TrustHint, withCommands } from "./components.js";
import { ConnectionNotice, KeyForm } from "./connection.js";
import { LiveCluster } from "./live.js";
import { useModels } from "./models.js";
import { describeStatus } from "./status.js";
import { ThemeSwitch, useTheme } from "./theme-switch.js";
import { html, render, useEffect, useErrorBoundary, useState } from "./vendor/preact.js";

/** @type {Record<View, string>} */
const VIEWS = { chat: "Chat", models: "Models", cluster: "Cluster" };

const live = new LiveCluster();
const jobs = new ModelJobs();
const chats = new ChatStore((problem) => live.lock(problem));
const invitation = new Invitation();
const moves = new Moves();

/** Kinds of notices that each view shows: a model that is not loaded has its own place on the others. */
const NOTICES = { chat: ["busy", "bad"], models: ["busy", "bad"], cluster: ["note", "busy", "bad"] };

function Page() {
  const [now, setNow] = useState(live.now);
  const { view, chat, title } = useAddress(chats);
  const { theme, choice } = useTheme();
  const models = useModels(now);
  useEffect(() => live.subscribe(setNow), []);
  const model = now.state?.cluster.model;
  useEffect(() => {
    // The browser's history shows it for each chat.
    document.title = [title, model, "mlx-ring"].filter(Boolean).join(" · ");
  }, [title, model]);
  const status = describeStatus(now);
  const notices = html`<${StatusNotices} status=${status} now=${now} tones=${NOTICES[view]} />`;
  const isLost = now.connection === "lost";
  const isStale = isLost || now.connection === "unfollowed";
  const isLocked = now.connection === "locked";

  return html`<a class="skip" href="#main" onClick=${focusMain}>Skip to content</a>
    <header class="head">
      <a class="brand" href=${chat} aria-label="mlx-ring"><${Ring} /> <span>mlx-ring</span></a>
      <nav aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([name, title]) => html`<a
            key=${name}
            href=${name === "chat" ? chat : `#${name}`}
            aria-current=${name === view ? "page" : null}
          >
            ${title}
          </a>`,
        )}
      </nav>
      <p class="status" role="status">
        <i class=${`dot ${status.tone}`} aria-hidden="true"></i> <span>${status.label}</span>
      </p>
      ${
        apiKey.get() &&
        !isLocked &&
        html`<button type="button" class="quiet" onClick=${() => live.useKey("")}>Forget key</button>`
      }
      <${ThemeSwitch} choice=${choice} />
    </header>
    <main id="main" tabindex="-1">
      <${ConnectionNotice} live=${live} now=${now} showsState=${view !== "chat"} />
      ${isLocked ? html`<${KeyForm} live=${live} problem=${now.problem} />` : null}
      <${ErrorBoundary} key=${view}>
        ${
          !isLocked &&
          view !== "chat" &&
          html`<div class=${isStale ? "stale" : ""} inert=${isLost}>
            ${
              view === "cluster"
                ? html`<${Cluster}
                    now=${now}
                    notices=${notices}
                    theme=${theme}
                    invitation=${invitation}
                    moves=${moves}
                  />`
                : html`<${Catalog} now=${now} models=${models} notices=${notices} jobs=${jobs} chat=${chatWith} />`
            }
          </div>`
        }
        ${
          !isLocked &&
          view === "chat" &&
          html`<${Chat} chats=${chats} live=${now} models=${models} jobs=${jobs} notices=${notices} />`
        }
      </${ErrorBoundary}>
    </main>`;
}

/**
 * Render what the status reports. Where a machine is awaited, the command for it can be made at once.
 * @param {{ status: Status, now: Snapshot, tones: string[] }} props
 */
function StatusNotices({ status, now, tones }) {
  const invite = now.state && html`<${Invite} invitation=${invitation} cluster=${now.state.cluster} />`;
  return status.notices
    .filter(({ tone }) => tones.includes(tone))
    .map(
      ({ key, tone, text, awaitsMachine }) => html`<${Notice}
        key=${key}
        tone=${tone}
        action=${awaitsMachine ? invite : html`<${TrustHint} text=${text} />`}
      >${withCommands(text)}</${Notice}>`,
    );
}

/**
 * Open the chat with a model. A conversation with another model stays as it is.
 * @param {string} model
 */
function chatWith(model) {
  storeModel(model);
  if (chats.now.open.messages.length) chats.startNew();
  chats.picks.set(chats.now.open.id, model);
  location.hash = "#chat";
}

/**
 * Move the focus, but leave the address, whose hash names the view.
 * @param {MouseEvent} event
 */
function focusMain(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

/**
 * Render the children, or a notice if that fails. A server that was updated may send what this page cannot read.
 * @param {{ children?: Children }} props
 */
function ErrorBoundary({ children }) {
  const [error] = useErrorBoundary((cause) => console.error(cause));
  if (!error) return children;
  const reload = html`<button type="button" onClick=${() => location.reload()}>Reload page</button>`;
  return html`<${Notice} tone="bad" action=${reload}>
    This view cannot be displayed (${error.message}). The server may run another version than this page.
  </${Notice}>`;
}

// The browser would leave the page to show a file that is dropped on it.
for (const name of /** @type {const} */ (["dragover", "drop"])) {
  addEventListener(name, (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
}

openAddressed(chats);
const root = document.getElementById("page");
if (root) render(html`<${ErrorBoundary}><${Page} /></${ErrorBoundary}>`, root);
live.start();
