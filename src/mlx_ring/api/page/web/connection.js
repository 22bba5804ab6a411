// The notice of a lost connection, and the form for the API key.

/** @import { LiveCluster, Snapshot } from "./live.js" */
/** @import { ClusterStatus } from "./types.js" */

import { apiKey } from "./api.js";
import { Command, Notice, onValue, Ring } from "./components.js";
import { timeOfDay } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

const USUAL_PORT = "8100";

/**
 * What the page knows of the server's start.
 * @typedef {Pick<ClusterStatus, "models" | "urls" | "nodes" | "join_refusal" | "program"> &
 *   { options?: string[] }} Started
 */

/**
 * Return the command that starts this server: its models, and the options with which it was started. A server of
 * another version may not name its options: then those that the page knows.
 * @param {Started} cluster
 * @param {{ nodes?: number, opens?: boolean, port?: string, hasKey?: boolean }} [options] `nodes`: another number of
 *   machines; `opens`: other machines and phones shall reach it
 */
export function startCommand(
  cluster,
  { nodes = 0, opens = false, port = location.port, hasKey = apiKey.get() !== "" } = {},
) {
  const given = cluster.options ?? [];
  /** @type {Map<string, (value: string) => string>} */
  const changes = new Map([["--port", (value) => (value === "0" && port) || value]]);
  if (nodes) changes.set("--nodes", () => String(nodes));
  if (opens) changes.set("--host", () => "0.0.0.0");
  // A server of another version may lack a field, and this notice stands outside the views.
  const isOpen = opens || cluster.urls?.length > 0;
  const known = [
    { option: nodesOption(cluster, nodes), names: ["--nodes"], isNew: nodes > 0 },
    { option: port && port !== USUAL_PORT && `--port ${port}`, names: ["--port"], isNew: false },
    { option: isOpen && "--host 0.0.0.0", names: ["--host"], isNew: opens },
    { option: (hasKey || opens) && "--api-key KEY", names: ["--api-key", "--api-key-file"], isNew: opens && !hasKey },
  ];
  // A file of settings has the old ones already.
  const fromFile = given.includes("--config");
  const added = known.filter(({ names, isNew }) => !names.some((name) => given.includes(name)) && (isNew || !fromFile));
  return [
    // A server of another version may not name its program.
    `${quoted(cluster.program ?? "mlx-ring")} serve`,
    // A server of another version may lack the name to start with.
    ...cluster.models.map(({ model, start_name: name = model }) => quoted(name)),
    ...given.map((word, place) => quoted(changes.get(given[place - 1] ?? "")?.(word) ?? word)),
    ...added.map(({ option }) => option),
  ]
    .filter(Boolean)
    .join(" ");
}

/**
 * @param {Pick<ClusterStatus, "nodes" | "join_refusal">} cluster
 * @param {number} nodes
 */
function nodesOption(cluster, nodes) {
  const connected = cluster.nodes.filter(({ state }) => state !== "gone").length;
  const count = nodes || (cluster.join_refusal === null ? Math.max(2, connected) : 0);
  return count && `--nodes ${count}`;
}

/**
 * Render the command that starts the server, and what is missing in it.
 * @param {{ cluster: ClusterStatus, nodes?: number, opens?: boolean }} props as for `startCommand`
 */
export function StartCommand({ cluster, nodes = 0, opens = false }) {
  const command = startCommand(cluster, { nodes, opens });
  return html`<${Command} command=${command} />
    <p class="muted">${whatIsMissing(cluster, command)}</p>`;
}

/**
 * Return what a person must add to the command that starts the server.
 * @param {{ options?: string[] }} cluster
 * @param {string} command
 */
export function whatIsMissing({ options }, command) {
  if (!options) return "Add the other options with which it was started.";
  const words = command.split(" ");
  const left = ["KEY", "PASSWORD", "URL", "FILE", "DIR"].filter((each) => words.includes(each));
  const own = left.length ? `Put your own in place of ${inWords(left)}. ` : "";
  const urls = words.some((word) => word.includes("://")) ? "Addresses may lack a path, user or password. " : "";
  return `${own}${urls}Run it in the same folder and with the same environment variables as before.`;
}

/** @param {string[]} words */
function inWords(words) {
  return words.join(", ").replace(/, (?=[^,]*$)/, " and ");
}

/**
 * Quote a word for a shell, if it needs that.
 * @param {string} word
 */
function quoted(word) {
  return /^[\w./:@+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/**
 * Render why the connection is lost, how to start the server again, and when the next attempt follows. Without live
 * figures alone, render why. Nothing while it is open.
 * @param {{ live: LiveCluster, now: Snapshot, showsState: boolean }} props `showsState`: the view shows the last state
 */
export function ConnectionNotice({ live, now, showsState }) {
  const [, setTicks] = useState(0);
  const isLost = now.connection === "lost";
  useEffect(() => {
    if (!isLost) return undefined;
    const timer = setInterval(() => setTicks((count) => count + 1), 1000);
    return () => clearInterval(timer);
  }, [isLost]);
  if (!isLost && now.connection !== "unfollowed") return null;
  const delayS = Math.max(0, Math.ceil(((now.retryAt ?? 0) - Date.now()) / 1000));
  const retry = html`<button type="button" onClick=${() => live.retry()}>Reconnect</button>`;
  const problem = now.state?.draining ? "The server was shut down." : now.problem;
  const next = delayS ? `Next attempt in ${delayS} s.` : "Connecting.";
  const shown = now.state && showsState ? ` Below is the state of ${timeOfDay(now.state.time)}.` : "";
  if (!isLost) {
    return html`<${Notice} action=${retry}>
      Live figures are missing, but chats work. ${problem}${shown}
    </${Notice}>`;
  }
  return html`<${Notice} tone="bad" action=${retry}>
      ${problem} ${next}${shown}
    </${Notice}>
    ${now.state && html`<${StartAgain} cluster=${now.state.cluster} />`}`;
}

/** @param {{ cluster: ClusterStatus }} props */
function StartAgain({ cluster }) {
  return html`<details class="start-again" open=${!matchMedia("(max-width: 40rem)").matches}>
    <summary>Command that starts it again, on its machine</summary>
    <${StartCommand} cluster=${cluster} />
  </details>`;
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
