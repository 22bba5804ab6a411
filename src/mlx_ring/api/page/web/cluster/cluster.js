// The cluster view.

/** @import { Snapshot } from "../live.js" */
/** @typedef {import("preact").ComponentChildren} Children */
/** @import { Invitation } from "./invitation.js" */
/** @import { Moves } from "./proposal.js" */
/** @import { ClusterState } from "../types.js" */

import { bytes, duration, figures, percent } from "../format.js";
import { nodeNames } from "../status.js";
import { html } from "../vendor/preact.js";
import { AddMachine, OtherDevices } from "./add-machine.js";
import { Cache, prefixHitRate } from "./cache.js";
import { Charts, totalPace } from "./charts.js";
import { Logs } from "./logs.js";
import { Machines } from "./machines.js";
import { Pipeline } from "./pipeline.js";
import { MoveOutcomes } from "./proposal.js";
import { Requests } from "./requests.js";
import { WhatIf } from "./what-if.js";

/**
 * Render the cluster view.
 * @param {{ now: Snapshot, notices: Children, theme: string, invitation: Invitation, moves: Moves }} props
 */
export function Cluster({ now: { state, points, lines }, notices, theme, invitation, moves }) {
  if (state === null) {
    return html`<div class="cluster"><p class="muted waiting">Waiting for the server.</p></div>`;
  }
  const { cluster, cache, requests, pace } = state;
  const names = nodeNames(cluster);
  const hasSeveralModels = cluster.models.length > 1;
  return html`<div class="cluster">
    ${notices}
    <${MoveOutcomes} moves=${moves} />
    <${Summary} state=${state} />
    ${cluster.instances.length === 0 && html`<section class="panel"><p class="muted">No model is loaded.</p></section>`}
    ${cluster.instances.map(
      (instance) => html`<${Pipeline}
        key=${instance.name}
        instance=${instance}
        cluster=${cluster}
        cache=${cache}
        pace=${pace[instance.name]}
        names=${names}
        moves=${moves}
      />`,
    )}
    <${Charts} points=${points} instances=${cluster.instances} theme=${theme} />
    <${Machines} cluster=${cluster} names=${names} moves=${moves} />
    <${AddMachine} cluster=${cluster} invitation=${invitation} />
    <${OtherDevices} cluster=${cluster} />
    <${WhatIf} />
    <div class="halves">
      <${Requests} requests=${requests} cache=${cache} showsModel=${hasSeveralModels} />
      <${Cache} cache=${cache} />
    </div>
    <${Logs} lines=${lines} />
    <p class="muted about">
      mlx-ring ${state.version}, uptime ${duration(Math.max(0, state.time - state.began))}
    </p>
  </div>`;
}

/** @param {{ state: ClusterState }} props */
function Summary({ state: { cache, cluster, pace } }) {
  const deviceBytes = cluster.devices.reduce((all, each) => all + each.device_memory_bytes, 0);
  const entries = [
    ["tokens per second", figures(totalPace(pace, "tokens_per_s"))],
    ["running", figures(cache.running, 5)],
    ["waiting", figures(cache.waiting, 5)],
    ["prefix cache hits", percent(prefixHitRate(cache.prefix_cache))],
    ["KV cache", bytes(cache.kv_bytes)],
    ["device memory", bytes(deviceBytes)],
  ];
  return html`<dl class="summary" aria-label="Summary">
    ${entries.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}
