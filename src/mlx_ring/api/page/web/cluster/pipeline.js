// An instance, drawn as tokens go through it: its stages, who computes them, and the ways between.

import { html } from "../vendor/preact.js";
import { bytes, counted, duration, figures, percent, rate } from "../format.js";
import { Bar, Legend, stageStyle } from "../parts.js";

const PHASES = {
  starting: "Its worker is starting.",
  fetch: "Its weights are being fetched.",
  weights: "Its weights are being loaded.",
  "warm-up": "It warms up.",
};

export function Pipeline({ instance, cluster, cache, pace, names }) {
  const told = cluster.models.flatMap((model) => model.instances).find((each) => each.instance === instance.name);
  return html`<section class="panel pipeline" aria-label=${`Pipeline of ${instance.model}`}>
    <header>
      <h2>${instance.model}</h2>
      <span class=${`state ${toneOf(instance.state)}`}>${instance.state === "ready" ? "ready" : instance.state}</span>
      <span class="muted">${instance.name}, epoch ${instance.epoch}, ${counted(instance.layers, "layer")}</span>
      ${told && html`<span class="muted">${figures(told.running, 4)} running, ${figures(told.waiting, 4)} waiting</span>`}
    </header>
    ${instance.state !== "ready" && instance.reason && html`<p>${instance.reason}</p>`}
    <${Layers} instance=${instance} />
    <div class="flow">
      ${instance.stages.map((stage, place) => [
        place > 0 && html`<${Way} key=${`way ${place}`} before=${instance.stages[place - 1]} after=${stage} links=${cluster.links} />`,
        html`<${Stage}
          key=${stage.stage}
          stage=${stage}
          devices=${cluster.devices.filter((device) => device.instance === instance.name && device.stage === stage.stage)}
          limits=${cache.workers.filter((worker) => worker.instance === instance.name && worker.stage === stage.stage)}
          shares=${pace?.stages.find((each) => each.stage === stage.stage)}
          names=${names}
        />`,
      ])}
    </div>
    <${Legend}
      items=${[
        { name: "weights", style: "weights" },
        { name: "KV held", style: "kv" },
        { name: "other", style: "working" },
        { name: "KV allowed", style: "room" },
        { name: "computing", style: "compute" },
        { name: "waiting for other stages", style: "link" },
        { name: "in a step that is not done", style: "under-way" },
        { name: "idle", style: "idle" },
      ]}
    />
    <${Promise_} instance=${instance} />
  </section>`;
}

const toneOf = (state) => ({ ready: "good", loading: "busy" })[state] ?? "bad";

/** All layers as a strip, in the colours of their stages. */
function Layers({ instance }) {
  return html`<div class="layers" role="img" aria-label=${instance.stages.map((stage) => `stage ${stage.stage} has layers ${stage.layers[0]} to ${stage.layers[1] - 1}`).join(", ")}>
    ${instance.stages.map(
      ({ stage, layers: [start, end] }) => html`<span key=${stage} class=${stageStyle(stage)} style=${{ flexGrow: end - start, flexBasis: 0 }}>
        <b>${end - start > 1 ? `${start}–${end - 1}` : start}</b>
      </span>`,
    )}
  </div>`;
}

function Stage({ stage, devices, limits, shares, names }) {
  const isLoading = stage.loading.phase in PHASES;
  return html`<article class=${`stage ${stageStyle(stage.stage)}-edge`}>
    <h3>Stage ${stage.stage}</h3>
    <p class="muted">layers ${stage.layers[0]} to ${stage.layers[1] - 1}, ${stage.layers[1] - stage.layers[0]} in all</p>
    ${isLoading && html`<${Loading} loading=${stage.loading} />`}
    ${stage.ranks.length === 0 && html`<p>${names.get(stage.node) ?? stage.node}</p>`}
    ${stage.ranks.map(
      (rank) => html`<${Rank}
        key=${rank.rank}
        rank=${rank}
        isOneOfMany=${stage.ranks.length > 1}
        device=${devices.find((device) => device.rank === rank.rank)}
        limit=${limits.find((worker) => worker.rank === rank.rank)?.limit_bytes ?? 0}
        node=${names.get(rank.node) ?? rank.node}
      />`,
    )}
    ${stage.group && html`<p class="muted" title=${stage.group.why}>joined by ${stage.group.backend}</p>`}
    ${shares && html`<${Time} shares=${shares} times=${stage.times} />`}
  </article>`;
}

function Loading({ loading }) {
  const isFetching = loading.phase === "fetch";
  const done = isFetching ? loading.bytes_fetched : loading.bytes_loaded;
  const total = isFetching ? loading.bytes_to_fetch : loading.bytes_to_load;
  return html`<p>
    ${PHASES[loading.phase]}
    ${total > 0 && html`<progress value=${done} max=${total}></progress> <span class="muted">${bytes(done)} of ${bytes(total)}</span>`}
  </p>`;
}

function Rank({ rank, isOneOfMany, device, limit, node }) {
  const { weight_bytes: weights, kv_bytes: kv, device_bytes: held, peak_bytes: peak } = rank.used;
  const parts = [
    { name: "weights", value: weights, style: "weights", title: `weights: ${bytes(weights)}` },
    { name: "KV held", value: kv, style: "kv", title: `KV held: ${bytes(kv)}` },
    { name: "other", value: Math.max(0, held - weights - kv), style: "working", title: `other: ${bytes(Math.max(0, held - weights - kv))}` },
    { name: "KV allowed", value: Math.max(0, limit - kv), style: "room", title: `KV allowed: ${bytes(limit)}` },
  ];
  return html`<div class="rank">
    <p>
      <b>${node}</b> ${isOneOfMany && html`<span class="muted">rank ${rank.rank}</span>`}
      ${!rank.alive && html` <span class="state bad">worker lost</span>`}
    </p>
    ${device && html`<p class="muted">${[device.device, device.dtype, device.blas].filter(Boolean).join(", ")}, worker ${rank.pid}</p>`}
    <${Bar} parts=${parts} label=${`Memory of ${node}: ${bytes(weights)} of weights, ${bytes(kv)} of KV, ${bytes(limit)} of KV allowed`} />
    <p class="muted figures">
      <span>weights ${bytes(weights)}</span><span>KV ${bytes(kv)}${limit ? ` of ${bytes(limit)}` : ""}</span>
      <span title="held by MLX on its device now, and the most so far">device ${bytes(held)}, peak ${bytes(peak)}${device?.device_limit_bytes ? `, of ${bytes(device.device_limit_bytes)}` : ""}</span>
    </p>
  </div>`;
}

/** What the stage did in the last second, and how long its steps take. */
function Time({ shares, times }) {
  const idle = Math.max(0, 1 - shares.compute - shares.link - shares.under_way);
  const decode = times.decode.filter((steps) => steps.measured_ms !== null).at(0);
  const said = `computing ${percent(shares.compute)}, waiting for other stages ${percent(shares.link)}, in a step that is not done ${percent(shares.under_way)}, idle ${percent(idle)}`;
  return html`<div class="time">
    <${Bar}
      parts=${[
        { name: "computing", value: shares.compute, style: "compute" },
        { name: "waiting for other stages", value: shares.link, style: "link" },
        { name: "in a step that is not done", value: shares.under_way, style: "under-way" },
      ]}
      total=${1}
      label=${`In the last second: ${said}`}
    />
    <p class="muted figures">
      <span>${percent(shares.compute)} computing</span>
      ${decode && html`<span>${duration(decode.measured_ms / 1000)} a step${decode.predicted_ms ? `, planned ${duration(decode.predicted_ms / 1000)}` : ""}</span>`}
    </p>
  </div>`;
}

/** From a stage to the next: what was measured of the link, where it leads to another machine. */
function Way({ before, after, links }) {
  const [source, target] = [before.ranks[0]?.node ?? before.node, after.ranks[0]?.node ?? after.node];
  const link = links.find((each) => each.from === source && each.to === target);
  return html`<div class="way">
    <i aria-hidden="true"></i>
    <p>${source === target ? html`<span class="muted">same machine</span>` : link ? html`<${Measured} link=${link} />` : html`<span class="muted">not measured</span>`}</p>
  </div>`;
}

function Measured({ link }) {
  if (link.problem) return html`<span class="state bad">${link.problem}</span>`;
  return html`<span>${duration(link.round_trip_us / 1e6)}</span><span>${rate(link.bytes_per_s)}</span>
    ${link.compresses && html`<span class="muted" title=${link.why}>compressed</span>`}`;
}

function Promise_({ instance: { stream, promise, left_out: leftOut, remarks } }) {
  const lines = [];
  if (stream?.measured_tokens_per_s) {
    const planned = stream.predicted_tokens_per_s ? `, planned ${figures(stream.predicted_tokens_per_s)}` : "";
    lines.push(`A single stream gets ${figures(stream.measured_tokens_per_s)} tokens/s${planned}.`);
  } else if (stream?.predicted_tokens_per_s) {
    lines.push(`A single stream should get ${figures(stream.predicted_tokens_per_s)} tokens/s.`);
  }
  if (promise) lines.push(`Planned for ${counted(promise.sequences, "sequence")} of ${figures(promise.context_tokens, 7)} tokens${promise.strategy ? ` (${promise.strategy})` : ""}.`);
  lines.push(...leftOut.map(({ node, why }) => `${node} has no layers: ${why}`), ...remarks);
  return lines.length ? html`<ul class="remarks">${lines.map((line) => html`<li key=${line}>${line}</li>`)}</ul>` : null;
}
