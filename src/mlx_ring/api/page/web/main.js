// The page: its head, which view is shown, and what stands in the way of showing any.

import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/preact.js";
import { ApiError, key, request } from "./api.js";
import { Chat } from "./chat/chat.js";
import { Chats } from "./chat/chats.js";
import { Cluster } from "./cluster/cluster.js";
import { Live } from "./live.js";
import { Notice, Ring } from "./parts.js";
import { standing } from "./words.js";

const THEMES = { "": "system", light: "light", dark: "dark" };
const THEME = "mlx-ring.theme";
const VIEWS = { chat: "Chat", cluster: "Cluster" };

const live = new Live();
const chats = new Chats((message) => live.lock(message));

function Page() {
  const [now, setNow] = useState(live.now);
  const [view, setView] = useState(viewOf);
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "");
  const isDark = usesDark(theme);
  const models = useModels(now);
  useEffect(() => live.subscribe(setNow), []);
  useEffect(() => {
    const changed = () => setView(viewOf());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const stands = standing(now);
  useEffect(() => {
    document.title = now.state ? `${now.state.cluster.model} · mlx-ring` : "mlx-ring";
  }, [now.state?.cluster.model]);

  return html`<a class="skip" href="#main" onClick=${toMain}>To the content</a>
    <header class="head">
      <a class="brand" href="#chat" aria-label="mlx-ring"><${Ring} /> <span>mlx-ring</span></a>
      <nav aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([name, title]) => html`<a key=${name} href=${`#${name}`} aria-current=${name === view ? "page" : null}>${title}</a>`,
        )}
      </nav>
      <p class="standing" role="status"><i class=${`dot ${now.connection === "locked" ? "busy" : stands.tone}`} aria-hidden="true"></i>
        <span>${now.connection === "locked" ? "key needed" : stands.short}</span></p>
      ${key.get() && now.connection !== "locked" && html`<button type="button" class="quiet" onClick=${() => live.useKey("")}>Forget key</button>`}
      <button type="button" class="quiet theme" onClick=${() => setTheme(nextTheme(theme))} aria-label=${`Colours: ${THEMES[theme]}. Change them.`} title=${`Colours: ${THEMES[theme]}`}>
        <${Shade} theme=${theme} />
      </button>
    </header>
    <main id="main" tabindex="-1">
      <${Connection} now=${now} />
      ${now.connection === "locked" ? html`<${KeyForm} trouble=${now.trouble} />` : null}
      <${Drawn} key=${view}>
        ${now.connection !== "locked" && view === "cluster" ? html`<${Cluster} live=${now} standing=${stands} theme=${String(isDark)} />` : null}
        ${now.connection !== "locked" && view === "chat" ? html`<${Chat} chats=${chats} models=${models} standing=${stands} />` : null}
      </${Drawn}>
    </main>`;
}

/** What is in it, or that it cannot be drawn: a server that was renewed meanwhile may tell what this page does not know. */
function Drawn({ children }) {
  const [error] = useErrorBoundary((trouble) => console.error(trouble));
  if (!error) return children;
  const again = html`<button type="button" onClick=${() => location.reload()}>Load the page again</button>`;
  return html`<${Notice} tone="bad" action=${again}>
    This cannot be drawn (${error.message}). The server may be of another version than this page.
  </${Notice}>`;
}

const viewOf = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "chat");

/** The hash is the view's. */
function toMain(event) {
  event.preventDefault();
  document.querySelector("#main").focus();
}

/** The models that can be asked, with what is known of them. They are asked for again when the cluster's list changes. */
function useModels({ state, connection }) {
  const [told, setTold] = useState([]);
  const known = state?.cluster.models ?? [];
  const names = known.map(({ model }) => model).join("\n");
  useEffect(() => {
    if (connection !== "open") return undefined;
    const abort = new AbortController();
    readModels(abort.signal).then((models) => models && setTold(models));
    return () => abort.abort();
  }, [names, connection === "open"]);
  return told.map((model) => {
    const now = known.find((each) => each.model === model.id);
    return { ...model, note: !now || now.state === "ready" ? "" : now.state === "unloaded" ? "not loaded" : now.state };
  });
}

async function readModels(signal) {
  try {
    const { data } = await (await request("v1/models", { signal })).json();
    return data.map(({ id, reasoning_efforts: efforts = [], capabilities = [] }) => ({ id, efforts, hasTools: capabilities.includes("tools") }));
  } catch (error) {
    if (!(error instanceof ApiError) && error.name !== "AbortError") throw error;
    return null;
  }
}

/** What is wrong with the connection, and when it is tried again. */
function Connection({ now }) {
  const [, tick] = useState(0);
  const isLost = now.connection === "lost";
  useEffect(() => {
    if (!isLost) return undefined;
    const timer = setInterval(() => tick((count) => count + 1), 1000);
    return () => clearInterval(timer);
  }, [isLost]);
  if (!isLost) return null;
  const inS = Math.max(0, Math.ceil((now.retryAt - Date.now()) / 1000));
  return html`<${Notice} tone="bad" action=${html`<button type="button" onClick=${() => live.retry()}>Try now</button>`}>
    ${now.trouble} ${now.state ? "What is shown may be old." : ""} ${inS ? `It is tried again in ${inS} s.` : "It is tried again now."}
  </${Notice}>`;
}

function KeyForm({ trouble }) {
  const [value, setValue] = useState("");
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const isPlain = /^[\x20-\xff]*$/.test(value);
  const onSubmit = (event) => {
    event.preventDefault();
    if (value.trim() && isPlain) live.useKey(value.trim());
  };
  return html`<form class="key panel" onSubmit=${onSubmit}>
    <${Ring} size=${48} />
    <h1>This server asks for an API key</h1>
    ${trouble && html`<p class="problem" role="alert">${trouble}</p>`}
    <label>
      <span>API key</span>
      <input type="password" autocomplete="off" spellcheck=${false} value=${value} onInput=${(event) => setValue(event.target.value)} ref=${field} />
    </label>
    ${!isPlain && html`<p class="problem" role="alert">The key has characters that cannot be sent in a header.</p>`}
    <button type="submit" class="primary" disabled=${!value.trim() || !isPlain}>Use this key</button>
    <p class="muted">It is kept until this tab is closed, and sent to this server alone.</p>
  </form>`;
}

// ---- light and dark

function nextTheme(theme) {
  const next = { "": "light", light: "dark", dark: "" }[theme];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  try {
    if (next) localStorage.setItem(THEME, next);
    else localStorage.removeItem(THEME);
  } catch {
    // A browser that keeps nothing forgets it with the page.
  }
  return next;
}

function usesDark(theme) {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [system, setSystem] = useState(query.matches);
  useEffect(() => {
    const changed = () => setSystem(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return theme ? theme === "dark" : system;
}

function Shade({ theme }) {
  const half = { "": "M8 2a6 6 0 0 1 0 12z", light: "", dark: "M8 2a6 6 0 0 1 0 12a6 6 0 0 1 0-12z" }[theme];
  return html`<svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
    <circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" /><path d=${half} fill="currentColor" />
  </svg>`;
}

render(html`<${Drawn}><${Page} /></${Drawn}>`, document.querySelector("#page"));
live.start();
