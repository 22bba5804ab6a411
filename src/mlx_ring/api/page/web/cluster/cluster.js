// The cluster as it is.

import { html } from "../vendor/preact.js";
import { bytes, duration, figures, percent } from "../format.js";
import { Notice } from "../parts.js";
import { nodeNames } from "../words.js";
import { Cache } from "./cache.js";
import { Charts, total } from "./charts.js";
import { Logs } from "./logs.js";
import { Machines } from "./machines.js";
import { Pipeline } from "./pipeline.js";
import { Requests } from "./requests.js";

export function Cluster({ live, standing, theme }) {
  const { state, points, lines } = live;
  if (state === null) return html`<div class="cluster"><p class="muted waiting">Waiting for the server's first word.</p></div>`;
  const { cluster, cache, requests, pace } = state;
  const names = nodeNames(cluster);
  const first = cluster.instances[0];
  return html`<div class="cluster">
    ${standing.notices.map(({ tone, text }) => html`<${Notice} key=${text} tone=${tone}>${text}</${Notice}>`)}
    <${Strip} state=${state} />
    ${cluster.instances.length === 0 && html`<section class="panel"><p class="muted">No model is loaded.</p></section>`}
    ${cluster.instances.map(
      (instance) => html`<${Pipeline} key=${instance.name} instance=${instance} cluster=${cluster} cache=${cache} pace=${pace[instance.name]} names=${names} />`,
    )}
    <${Charts}
      points=${points}
      instance=${first?.name}
      isOneOfMany=${cluster.instances.length > 1}
      stages=${first ? first.stages.map((stage) => stage.stage) : []}
      theme=${theme}
    />
    <${Machines} cluster=${cluster} names=${names} />
    <div class="halves">
      <${Requests} requests=${requests} cache=${cache} several=${cluster.models.length > 1} />
      <${Cache} cache=${cache} />
    </div>
    <${Logs} lines=${lines} />
    <p class="muted about">mlx-ring ${state.version}, up for ${duration(Math.max(0, state.time - state.began))}</p>
  </div>`;
}

/** The few numbers that say most. */
function Strip({ state: { cache, cluster, pace } }) {
  const { prefix_cache: prefix } = cache;
  const device = cluster.devices.reduce((all, each) => all + each.device_memory_bytes, 0);
  const figuresShown = [
    ["tokens per second", figures(total(pace, "tokens_per_s"))],
    ["running", figures(cache.running, 5)],
    ["waiting", figures(cache.waiting, 5)],
    ["prefix hits", prefix.queries ? percent(prefix.hits / prefix.queries) : "–"],
    ["KV held", bytes(cache.kv_bytes)],
    ["device memory", bytes(device)],
  ];
  return html`<dl class="strip" aria-label="At a glance">
    ${figuresShown.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}
