// The page: its top bar and the view that is shown.

/** @typedef {import("preact").ComponentChildren} Children */

import { apiKey } from "./api.js";
import { Catalog } from "./catalog/catalog.js";
import { ModelJobs } from "./catalog/model-jobs.js";
import { Chat } from "./chat/chat.js";
import { ChatStore } from "./chat/store.js";
import { Cluster } from "./cluster/cluster.js";
import { Notice, Ring } from "./components.js";
import { ConnectionNotice, KeyForm } from "./connection.js";
import { LiveCluster } from "./live.js";
import { useModels } from "./models.js";
import { describeStatus } from "./status.js";
import { ThemeSwitch, useTheme } from "./theme-switch.js";
import { html, render, useEffect, useErrorBoundary, useState } from "./vendor/preact.js";

const VIEWS = { chat: "Chat", models: "Models", cluster: "Cluster" };

const live = new LiveCluster();
const jobs = new ModelJobs();
const chats = new ChatStore((problem) => live.lock(problem));

function Page() {
  const [now, setNow] = useState(live.now);
  const view = useView();
  const { theme, choice } = useTheme();
  const models = useModels(now);
  useEffect(() => live.subscribe(setNow), []);
  const model = now.state?.cluster.model;
  useEffect(() => {
    document.title = model ? `${model} · mlx-ring` : "mlx-ring";
  }, [model]);
  const status = describeStatus(now);
  const requests = now.connection === "open" ? (now.state?.requests ?? []) : [];
  const isLocked = now.connection === "locked";

  return html`<a class="skip" href="#main" onClick=${focusMain}>Skip to content</a>
    <header class="head">
      <a class="brand" href="#chat" aria-label="mlx-ring"><${Ring} /> <span>mlx-ring</span></a>
      <nav aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([name, title]) => html`<a key=${name} href=${`#${name}`} aria-current=${name === view ? "page" : null}>
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
      <${ConnectionNotice} live=${live} now=${now} />
      ${isLocked ? html`<${KeyForm} live=${live} problem=${now.problem} />` : null}
      <${ErrorBoundary} key=${view}>
        ${!isLocked && view === "cluster" ? html`<${Cluster} now=${now} status=${status} theme=${theme} />` : null}
        ${
          !isLocked && view === "models"
            ? html`<${Catalog} now=${now} models=${models} status=${status} jobs=${jobs} />`
            : null
        }
        ${
          !isLocked && view === "chat"
            ? html`<${Chat} chats=${chats} models=${models} status=${status} requests=${requests} />`
            : null
        }
      </${ErrorBoundary}>
    </main>`;
}

/** Return the view that the address names. */
function useView() {
  const [view, setView] = useState(currentView);
  useEffect(() => {
    const onChange = () => setView(currentView());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return view;
}

function currentView() {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "chat";
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

const root = document.getElementById("page");
if (root) render(html`<${ErrorBoundary}><${Page} /></${ErrorBoundary}>`, root);
live.start();
