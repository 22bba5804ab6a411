// The notice of a lost connection, and the form for the API key.

/** @import { LiveCluster, Snapshot } from "./live.js" */

import { Notice, onValue, Ring } from "./components.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

/**
 * Render why the connection is lost and when the next attempt follows. Nothing while it is open.
 * @param {{ live: LiveCluster, now: Snapshot }} props
 */
export function ConnectionNotice({ live, now }) {
  const [, setTicks] = useState(0);
  const isLost = now.connection === "lost";
  useEffect(() => {
    if (!isLost) return undefined;
    const timer = setInterval(() => setTicks((count) => count + 1), 1000);
    return () => clearInterval(timer);
  }, [isLost]);
  if (!isLost) return null;
  const delayS = Math.max(0, Math.ceil(((now.retryAt ?? 0) - Date.now()) / 1000));
  const retry = html`<button type="button" onClick=${() => live.retry()}>Retry now</button>`;
  const problem = now.state?.draining ? "The server was shut down." : now.problem;
  return html`<${Notice} tone="bad" action=${retry}>
    ${problem} ${now.state ? "The values shown may be stale." : ""}
    ${delayS ? ` Retrying in ${delayS} s.` : " Retrying now."}
  </${Notice}>`;
}

/**
 * Render the form that asks for the API key.
 * @param {{ live: LiveCluster, problem: string | null }} props
 */
export function KeyForm({ live, problem }) {
  const [value, setValue] = useState("");
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  useLayoutEffect(() => field.current?.focus(), []);
  const key = value.trim();
  const canBeSent = /^[\x20-\xff]*$/.test(value);
  const onSubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    if (key && canBeSent) live.useKey(key);
  };
  return html`<form class="key panel" onSubmit=${onSubmit}>
    <${Ring} size=${48} />
    <h1>This server requires an API key</h1>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <label>
      <span>API key</span>
      <input
        type="password"
        autocomplete="off"
        spellcheck=${false}
        value=${value}
        onInput=${onValue(setValue)}
        ref=${field}
      />
    </label>
    ${!canBeSent && html`<p class="problem" role="alert">The key has characters that no header can carry.</p>`}
    <button type="submit" class="primary" disabled=${!key || !canBeSent}>Use this key</button>
    <p class="muted">The key is kept until you close this tab. It is sent only to this server.</p>
  </form>`;
}
