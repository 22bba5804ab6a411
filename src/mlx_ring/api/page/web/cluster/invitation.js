// The command that adds a machine: made once, shown wherever one is awaited, until a machine has joined.

/** @import { ClusterStatus, JoinCommands } from "../types.js" */

import { ApiError, request } from "../api.js";
import { BusyButton, Command, Notice } from "../components.js";
import { duration } from "../format.js";
import { nodeNames } from "../status.js";
import { html, useEffect, useState } from "../vendor/preact.js";

/**
 * What is known of the command. `known` are the nodes that had a certificate when it was made, and `away` those of them
 * that were not connected.
 * @typedef {object} Invited
 * @property {string[]} commands empty without one
 * @property {number} expiresAt in the browser's milliseconds
 * @property {string[]} known
 * @property {string[]} away
 * @property {string} problem
 * @property {boolean} isBusy
 */

/** @type {Invited} */
const NONE = { commands: [], expiresAt: 0, known: [], away: [], problem: "", isBusy: false };

/** The command of this page. It is kept while another view is open, and never stored. */
export class Invitation {
  now = NONE;
  /** @type {Set<(now: Invited) => void>} */
  #listeners = new Set();

  /**
   * Call a listener after every change. Return a function that unsubscribes it.
   * @param {(now: Invited) => void} listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /**
   * Ask for a token.
   * @param {ClusterStatus} cluster
   */
  async make(cluster) {
    this.#update({ isBusy: true, problem: "" });
    try {
      /** @type {JoinCommands} */
      const { commands, expires_in_s: lifeS } = await (await request("cluster/invite", { body: {} })).json();
      const known = [...cluster.nodes.map(({ id }) => id), ...cluster.absent_nodes];
      const away = known.filter((id) => !connected(cluster).includes(id));
      this.#update({ commands, expiresAt: Date.now() + 1000 * lifeS, known, away });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#update({ problem: error.message });
    } finally {
      this.#update({ isBusy: false });
    }
  }

  /** @param {Partial<Invited>} change */
  #update(change) {
    this.now = { ...this.now, ...change };
    for (const listener of this.#listeners) listener(this.now);
  }
}

/** @param {ClusterStatus} cluster */
function connected({ nodes }) {
  return nodes.filter(({ state }) => state !== "gone").map(({ id }) => id);
}

/**
 * Return what became of a command: machines that joined since, those of them that left, and ids of new ones that
 * are not connected yet. Members that came back are apart from them, because they need no command.
 * @param {Invited} invited
 * @param {ClusterStatus} cluster
 */
export function whatCame({ commands, known, away }, cluster) {
  if (!commands.length) return { joined: [], joining: [], left: [], back: [] };
  const names = nodeNames(cluster);
  const now = connected(cluster).map((id) => ({ id, name: names.get(id) ?? id }));
  return {
    joined: now.filter(({ id }) => !known.includes(id)).map(({ name }) => name),
    left: cluster.nodes
      .filter(({ id, state }) => state === "gone" && !known.includes(id))
      .map(({ id }) => names.get(id) ?? id),
    joining: cluster.absent_nodes.filter((id) => !known.includes(id)),
    back: now.filter(({ id }) => away.includes(id)).map(({ name }) => name),
  };
}

/**
 * Return how long a command still works.
 * @param {number} leftMs
 */
export function describeLife(leftMs) {
  if (leftMs <= 0) return "This command has expired: make another one.";
  const left =
    leftMs < 60_000 ? "less than a minute" : duration(60 * Math.ceil(leftMs / 60_000)).replace(/ 0 (min|s)$/, "");
  return `It works once, within ${left}. Keep it secret until then.`;
}

/**
 * Render the button that makes a command, the command, and what became of it.
 * @param {{
 *   invitation: Invitation, cluster: ClusterStatus,
 *   show?: (commands: string[]) => import("preact").ComponentChildren
 * }} props `show` renders the commands; without it they are a list
 */
export function Invite({ invitation, cluster, show = listCommands }) {
  const [invited, setInvited] = useState(invitation.now);
  const [, setTicks] = useState(0);
  useEffect(() => invitation.subscribe(setInvited), [invitation]);
  const { commands, expiresAt, problem, isBusy } = invited;
  useEffect(() => {
    if (!commands.length) return undefined;
    const timer = setInterval(() => setTicks((count) => count + 1), 1000);
    return () => clearInterval(timer);
  }, [commands]);
  const { joined, joining, left, back } = whatCame(invited, cluster);
  const leftMs = expiresAt - Date.now();
  const isOpen = commands.length > 0 && !joined.length && !joining.length && !left.length;
  return html`<div class="invite">
    ${joined.map((name) => html`<p key=${name} class="state good" role="status">${name} has joined.</p>`)}
    ${left.map((name) => html`<p key=${name} role="status">${name} has joined, and is disconnected now.</p>`)}
    ${joining.map(
      (id) => html`<p key=${id} class="state busy" role="status">
        ${id} is joining: it measures itself first, which takes a moment.
      </p>`,
    )}
    ${
      isOpen &&
      back.map(
        (name) => html`<p key=${name} role="status">
          ${name} is back. It was a member before and needs no command. This one still admits another machine, unless it
          was run on ${name}.
        </p>`,
      )
    }
    <p>
      <${BusyButton} isBusy=${isBusy} act=${() => invitation.make(cluster)}>
        ${commands.length ? "Make another command" : "Make a join command"}
      </${BusyButton}>
    </p>
    ${problem && html`<${Notice} tone="bad">${problem}</${Notice}>`}
    ${isOpen && html`<p>Run this on the other machine. <span class="muted">${describeLife(leftMs)}</span></p>`}
    ${isOpen && leftMs > 0 && show(commands)}
  </div>`;
}

/** @param {string[]} commands */
function listCommands(commands) {
  return commands.map((each, place) => html`<${Command} key=${each} command=${each} what=${`command ${place + 1}`} />`);
}
