// An instance as tokens pass through it: its stages, their ranks, and the links between them.

/** @import { Moves } from "./proposal.js" */
/** @import { CacheStatistics, CacheWorker, ClusterStatus, DeviceStatus, InstanceStatus } from "../types.js" */
/** @import { LinkStatus, LoadingStatus, Rates, RankStatus, RecoveryStatus } from "../types.js" */
/** @import { StageShares, StageStatus } from "../types.js" */

import { Facts, Legend, stageColour, stageFill, TrustHint, withCommands } from "../components.js";
import { bytes, counted, duration, figures, rate } from "../format.js";
import { describeInstance } from "../status.js";
import { html } from "../vendor/preact.js";
import { Proposal } from "./proposal.js";
import { Rank, StageTime } from "./stage-bars.js";

/** @type {Record<string, string>} */
const PHASES = {
  starting: "Starting the worker.",
  fetch: "Fetching weights.",
  weights: "Loading weights.",
  kernels: "Compiling for this GPU.",
  "warm-up": "Warming up.",
};

const MEMORY_LEGEND = [
  { name: "weights", style: "weights" },
  { name: "KV cache", style: "kv" },
  { name: "other", style: "working" },
  { name: "KV cache limit", style: "room" },
];
const TIME_LEGEND = [
  { name: "computing", style: "compute" },
  { name: "waiting for other stages", style: "link" },
  { name: "unfinished step", style: "under-way" },
  { name: "idle", style: "idle" },
];

/** @typedef {Map<string, string>} Names of nodes, by id */

/**
 * Render an instance.
 * @param {{
 *   instance: InstanceStatus, cluster: ClusterStatus, cache: CacheStatistics, pace: Rates | undefined, names: Names,
 *   moves: Moves
 * }} props
 */
export function Pipeline({ instance, cluster, cache, pace, names, moves }) {
  const { name, model, state, reason, stages } = instance;
  const ofModel = cluster.instances.filter((each) => each.model === model);
  const title = describeInstance(instance, cluster.instances);
  const load = cluster.models.flatMap((each) => each.instances).find((each) => each.instance === name);
  const proposal = cluster.proposals.find((each) => each.instance === name);
  const isFirst = ofModel[0]?.name === name;
  const refusal = isFirst ? cluster.no_proposals.find((each) => each.model === model) : undefined;
  return html`<section class="panel pipeline" aria-label=${`Pipeline of ${title}`}>
    <header>
      <h2>${model}</h2>
      <span class=${`state ${{ ready: "good", loading: "busy", unavailable: "bad" }[state]}`}>${state}</span>
      ${ofModel.length > 1 && html`<span class="muted">${title.replace(` of ${model}`, "")}</span>`}
      <span class="muted">${describeSplit(instance)}</span>
      ${
        load &&
        html`<span class="muted">${figures(load.running, 4)} running, ${figures(load.waiting, 4)} waiting</span>`
      }
    </header>
    ${instance.recovery && html`<p>${recovering(instance.recovery)}</p>`}
    ${state !== "ready" && reason && html`<p>${reason}</p><${TrustHint} text=${reason} />`}
    ${proposal && html`<${Proposal} proposal=${proposal} moves=${moves} />`}
    ${refusal && html`<p class="muted">${refusal.why}</p>`}
    <${Layers} stages=${stages} />
    <div class="flow">
      ${stages.map((stage, place) => {
        const before = stages[place - 1];
        return [
          before &&
            html`<${StageLink} key=${`link ${place}`} before=${before} after=${stage} links=${cluster.links} />`,
          html`<${Stage}
            key=${stage.stage}
            stage=${stage}
            devices=${ofStage(cluster.devices, name, stage)}
            workers=${ofStage(cache.workers, name, stage)}
            shares=${pace?.stages.find((each) => each.stage === stage.stage)}
            names=${names}
          />`,
        ];
      })}
    </div>
    <${Legend} title="Memory" items=${MEMORY_LEGEND} />
    <${Legend} title="Last second" items=${TIME_LEGEND} />
    <${Remarks} instance=${instance} />
    <details>
      <summary>Details</summary>
      <${Facts} rows=${detailsOf(instance)} />
    </details>
  </section>`;
}

/** @param {InstanceStatus} instance */
function describeSplit({ layers, stages }) {
  const workers = stages.reduce((sum, { ranks }) => sum + Math.max(1, ranks.length), 0);
  const parts = [counted(layers, "layer"), counted(stages.length, "stage"), counted(workers, "worker")];
  return `${parts[0]} in ${parts[1]}${workers === stages.length ? "" : `, with ${parts[2]}`}`;
}

/**
 * Return what only logs, metrics and the API name.
 * @param {InstanceStatus} instance
 * @returns {string[][]}
 */
export function detailsOf({ name, epoch, stages }) {
  const workers = stages.flatMap(({ ranks }) => ranks.map(({ pid, node }) => `${pid} on ${node}`));
  return [
    ["name in logs and metrics", name],
    ["epoch", `${figures(epoch, 9)}. It grows each time its workers are put together anew.`],
    ...(workers.length ? [["worker processes", workers.join(", ")]] : []),
    ...stages.flatMap(({ stage, group }) =>
      group ? [[`group of stage ${stage}`, `MLX's ${group.backend}: ${group.why}`]] : [],
    ),
  ];
}

/** @param {RecoveryStatus} recovery */
function recovering({ phase, elapsed_s, remaining_s }) {
  const left = remaining_s === null ? "" : `, about ${duration(remaining_s)} left`;
  return `Recovering from a loss: ${phase} after ${duration(elapsed_s)}${left}.`;
}

/**
 * @template {{ instance: string, stage: number }} T
 * @param {T[]} all
 * @param {string} instance
 * @param {StageStatus} stage
 */
function ofStage(all, instance, { stage }) {
  return all.filter((each) => each.instance === instance && each.stage === stage);
}

/** @param {StageStatus} stage */
function layerRange({ layers: [start, end] }) {
  return `layers ${start} to ${end - 1}`;
}

/** @param {{ stages: StageStatus[] }} props */
function Layers({ stages }) {
  const label = stages.map((stage) => `stage ${stage.stage} has ${layerRange(stage)}`).join(", ");
  return html`<div class="layers" role="img" aria-label=${label}>
    ${stages.map(
      ({ stage, layers: [start, end] }) => html`<span
        key=${stage}
        class=${stageFill(stage)}
        style=${{ flexGrow: end - start, flexBasis: 0 }}
      ><b>${end - start > 1 ? `${start}–${end - 1}` : start}</b></span>`,
    )}
  </div>`;
}

/**
 * @param {{
 *   stage: StageStatus, devices: DeviceStatus[], workers: CacheWorker[], shares: StageShares | undefined, names: Names
 * }} props
 */
function Stage({ stage, devices, workers, shares, names }) {
  const { layers, ranks, loading, times } = stage;
  const isOneOfMany = ranks.length > 1;
  return html`<article class=${`stage ${stageColour(stage.stage)}`}>
    <h3>Stage ${stage.stage}</h3>
    <p class="muted">${layerRange(stage)}, ${layers[1] - layers[0]} in total</p>
    ${loading.phase in PHASES && html`<${Loading} loading=${loading} />`}
    ${ranks.length === 0 && html`<p>${names.get(stage.node) ?? stage.node}</p>`}
    ${ranks.map(
      (/** @type {RankStatus} */ rank) => html`<${Rank}
        key=${rank.rank}
        rank=${rank}
        isOneOfMany=${isOneOfMany}
        device=${devices.find((device) => device.rank === rank.rank)}
        kvLimit=${workers.find((worker) => worker.rank === rank.rank)?.limit_bytes ?? 0}
        node=${names.get(rank.node) ?? rank.node}
      />`,
    )}
    ${shares && html`<${StageTime} shares=${shares} steps=${times.decode} />`}
  </article>`;
}

/** @param {{ loading: LoadingStatus }} props */
function Loading({ loading }) {
  const isFetching = loading.phase === "fetch";
  const done = isFetching ? loading.bytes_fetched : loading.bytes_loaded;
  const total = isFetching ? loading.bytes_to_fetch : loading.bytes_to_load;
  return html`<p>
    ${PHASES[loading.phase]}
    ${
      total > 0 &&
      html` <progress value=${done} max=${total}></progress>
      <span class="muted">${bytes(done)} of ${bytes(total)}</span>`
    }
  </p>`;
}

/** @param {{ before: StageStatus, after: StageStatus, links: LinkStatus[] }} props */
function StageLink({ before, after, links }) {
  const source = before.ranks[0]?.node ?? before.node;
  const target = after.ranks[0]?.node ?? after.node;
  const link = links.find((each) => each.from === source && each.to === target);
  return html`<div class="stage-link">
    <i aria-hidden="true"></i>
    <p>${source === target ? html`<span class="muted">same machine</span>` : measurement(link)}</p>
  </div>`;
}

/** @param {LinkStatus | undefined} link */
function measurement(link) {
  if (!link) return html`<span class="muted">not measured</span>`;
  if (link.problem !== null) return html`<span class="state bad">${link.problem}</span>`;
  return html`<span>${duration(link.round_trip_us / 1e6)}</span><span>${rate(link.bytes_per_s)}</span>
    ${link.compresses && html`<span class="muted" title=${link.why}>compressed</span>`}`;
}

/** @param {{ instance: InstanceStatus }} props */
function Remarks({ instance: { stream, promise, left_out: leftOut, remarks } }) {
  const lines = [];
  const { measured_tokens_per_s: measured = null, predicted_tokens_per_s: predicted = null } = stream ?? {};
  const prediction = predicted ? ` (predicted: ${figures(predicted)})` : "";
  if (measured) lines.push(`A single request decodes ${figures(measured)} tokens/s${prediction}.`);
  else if (predicted) lines.push(`Predicted for a single request: ${figures(predicted)} tokens/s.`);
  if (promise) {
    const { sequences, context_tokens: tokens, strategy } = promise;
    const by = strategy ? ` (${strategy})` : "";
    lines.push(`Planned for ${counted(sequences, "sequence")} of ${figures(tokens, 7)} tokens${by}.`);
  }
  lines.push(...leftOut.map(({ node, why }) => `${node} has no layers: ${why}`), ...remarks);
  if (!lines.length) return null;
  return html`<ul class="remarks">${lines.map((line) => html`<li key=${line}>${withCommands(line)}</li>`)}</ul>
    <${TrustHint} text=${lines.join(" ")} />`;
}
