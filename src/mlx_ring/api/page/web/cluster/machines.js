// The machines, what their memory is used for, and the links between them.

/** @import { Moves } from "./proposal.js" */
/** @import { ClusterStatus, DeviceStatus, EnergyStatus, LinkStatus, NodeMemory, NodeStatus } from "../types.js" */
/** @import { ProfileStatus, ProposalStatus, YieldingStatus } from "../types.js" */

import { Bar, Facts, Legend, stageFill, TrustHint, withCommands } from "../components.js";
import { bytes, counted, duration, figures, rate } from "../format.js";
import { html } from "../vendor/preact.js";
import { explain, MoveButton } from "./proposal.js";

/** @type {Record<NodeStatus["state"], string>} */
const STATES = { attending: "", gone: "disconnected", quarantined: "quarantined", drained: "taken out of use" };

/** @type {Record<EnergyStatus["part"], string>} */
const PARTS = { cpu: "CPU", gpu: "GPU", memory: "memory" };

/** Begin of the plan's remark with the times of a request on one machine and on all. */
const ONE_MACHINE = "One machine alone is fastest";

/** @typedef {Map<string, string>} Names of nodes, by id */

/**
 * Render the panel of machines.
 * @param {{ cluster: ClusterStatus, names: Names, moves: Moves }} props
 */
export function Machines({ cluster, names, moves }) {
  return html`<section class="panel" aria-label="Machines">
    <header>
      <h2>Machines</h2>
      <span class="muted">${[countActive(cluster), describeEnergy(cluster)].filter(Boolean).join(", ")}</span>
    </header>
    <div class="machines">
      ${cluster.nodes.map(
        (node) => html`<${Machine}
          key=${node.id}
          node=${node}
          cluster=${cluster}
          name=${names.get(node.id)}
          moves=${moves}
        />`,
      )}
    </div>
    <${Legend}
      items=${[
        { name: "other programs", style: "others" },
        { name: "reserved for them", style: "reserve" },
        { name: "free", style: "idle" },
      ]}
    />
    <${Links} links=${cluster.links} names=${names} />
  </section>`;
}

/** @param {ClusterStatus} cluster */
function countActive({ devices, nodes }) {
  const active = devices.filter((device) => device.alive).length;
  const total = active === devices.length ? "" : ` of ${devices.length}`;
  const machines = nodes.filter((node) => node.state !== "gone").length;
  return `${active}${total} ${devices.length === 1 ? "worker" : "workers"} active on ${counted(machines, "machine")}`;
}

/**
 * Return the energy of the last minute per token. It is null while nothing is generated or a machine does not count.
 * @param {ClusterStatus} cluster
 */
export function describeEnergy({ joules_per_token: joules }) {
  return joules === null ? "" : `${figures(joules)} J per generated token`;
}

/** @param {{ node: NodeStatus, cluster: ClusterStatus, name: string, moves: Moves }} props */
function Machine({ node, cluster, name, moves }) {
  const { memory, reason, state } = node;
  const power = describePower(node.energy);
  const workers = state === "gone" ? [] : cluster.devices.filter((device) => device.node === node.id);
  const tone = state === "drained" ? "busy" : "bad";
  return html`<article class=${`machine ${state}`}>
    <h3>
      ${name} ${state !== "attending" && html`<span class=${`state ${tone}`}>${STATES[state]}</span>`}
    </h3>
    <p>${describeHardware(node, workers)}</p>
    <p>${describeRole(node, workers)}</p>
    ${reason && html`<p>${reason}</p><${TrustHint} text=${reason} />`}
    ${whyUnused(node, cluster, name).map(
      ({ text, proposal }) => html`<div key=${text} class="unused">
        <p>${withCommands(text)}</p>
        <${TrustHint} text=${text} />
        ${proposal && html`<${MoveButton} proposal=${proposal} moves=${moves} />`}
      </div>`,
    )}
    ${node.yielding && html`<p class="state busy">${describeYielding(node.yielding)}</p>`}
    <${Memory} memory=${memory} workers=${workers} name=${name} />
    ${power && html`<p class="muted">${power}</p>`}
    ${
      workers.length > 0 &&
      html`<p class="figures">
        ${workers.map(
          (worker) => html`<span key=${`${worker.instance} ${worker.stage} ${worker.rank}`}>
            <i class=${`swatch ${stageFill(worker.stage)}`} aria-hidden="true"></i>stage ${worker.stage}, ${" "}
            ${bytes(memoryOf(worker))}${worker.alive ? "" : ", lost"}
          </span>`,
        )}
      </p>`
    }
    <${MachineDetails} node=${node} workers=${workers} />
  </article>`;
}

/**
 * Return a machine's chip and memory. Without a profile its workers say what they know.
 * @param {NodeStatus} node
 * @param {DeviceStatus[]} workers
 */
function describeHardware({ profile, memory }, workers) {
  const { total } = knownMemory(memory, workers);
  const chip = profile?.device_name ?? [...new Set(workers.map(({ device }) => device.toUpperCase()))].join(" and ");
  return [chip, total > 0 && `${bytes(total)} of memory`].filter(Boolean).join(", ") || "Hardware not reported";
}

/**
 * Return what a machine does.
 * @param {NodeStatus} node
 * @param {DeviceStatus[]} workers
 */
export function describeRole(node, workers) {
  const models = [...new Set(workers.map(({ model }) => model))];
  const parts = models.map((model) => {
    const own = workers.filter((worker) => worker.model === model);
    const share = own.some(({ rank }) => rank !== own[0]?.rank) ? "a share of " : "";
    return `${share}${layerRanges(own).join(" and ")} of ${model}`;
  });
  const computes = parts.length ? `computes ${parts.join(", ")}` : "computes no layers";
  return node.is_head ? `Head: serves the API and ${computes}` : `${computes[0]?.toUpperCase()}${computes.slice(1)}`;
}

/**
 * Return the ranges of layers of workers. Those that follow each other are one.
 * @param {DeviceStatus[]} workers
 */
function layerRanges(workers) {
  /** @type {number[][]} */
  const ranges = [];
  for (const [start = 0, end = 0] of workers.map(({ layers }) => layers).sort(([one = 0], [two = 0]) => one - two)) {
    const last = ranges.at(-1);
    if (last && start <= (last[1] ?? 0)) last[1] = Math.max(end, last[1] ?? 0);
    else ranges.push([start, end]);
  }
  return ranges.map(([start = 0, end = 0]) => (end - start > 1 ? `layers ${start} to ${end - 1}` : `layer ${start}`));
}

/**
 * Return why each loaded model does not use a connected machine, and the proposal that would change it.
 * @param {NodeStatus} node
 * @param {Pick<ClusterStatus, "instances" | "proposals">} cluster
 * @param {string} name
 * @returns {{ text: string, proposal: ProposalStatus | null }[]}
 */
export function whyUnused(node, { instances, proposals }, name) {
  if (node.state !== "attending") return [];
  /** @type {(model: string) => { text: string, proposal: ProposalStatus | null }[]} */
  const describe = (model) => {
    const own = instances.filter((each) => each.model === model);
    if (own.some(({ name: instance }) => node.stages.some((stage) => stage.startsWith(`${instance}/`)))) return [];
    if (own.every(({ state }) => state === "loading")) return [];
    const proposal = proposals.find((each) => each.model === model);
    const isIn = proposal?.planned.stages.some(({ nodes }) => nodes.includes(node.id) || nodes.includes(name));
    if (proposal && isIn) {
      const { title, details } = explain(proposal);
      const { loaded, planned } = proposal;
      const before = loaded ? `, instead of ${duration(loaded.request_s)}` : "";
      const times = ` A request then takes ${duration(planned.request_s)}${before}.`;
      return [{ text: `Not used by ${model} yet. ${title} ${details}${times}`, proposal }];
    }
    const left = own.flatMap((each) => each.left_out).find((each) => each.node === node.id || each.node === name);
    const speed = own[0]?.stream?.predicted_tokens_per_s;
    // The plan compares the times of a request on one machine and on all, where that is why it leaves others out.
    const compared = left && own[0]?.remarks.find((remark) => remark.startsWith(ONE_MACHINE));
    const predicted = speed ? `Predicted without it: ${figures(speed)} tokens/s.` : "";
    const now = compared ? ` ${compared.replace(/\.( .*)?$/, "")}.` : predicted && ` ${predicted}`;
    const text = left
      ? `Not used by ${model}: ${left.why}.${now}`
      : `Not used by ${model}: it joined after ${model} was loaded, and no faster split with it is known yet.${now}`;
    return [{ text, proposal: null }];
  };
  return [...new Set(instances.map(({ model }) => model))].flatMap(describe);
}

/** @param {{ node: NodeStatus, workers: DeviceStatus[] }} props */
function MachineDetails({ node: { address, id, memory, profile, stages, versions }, workers }) {
  const rows = [
    ["id", id],
    ["address", address ?? "this machine only"],
    ["cores", profile && figures(profile.cores, 5)],
    ...(profile?.rates ?? []).map(describeRate),
    [
      "computes with",
      [...new Set(workers.map(({ blas, dtype }) => [dtype, blas].filter(Boolean).join(", ")))].join("; "),
    ],
    ["reserved", memory && `${bytes(memory.reserve_bytes)} for other programs`],
    ["planned", memory?.promised_bytes ? `${bytes(memory.promised_bytes)} for all its stages` : null],
    ["stages in logs and metrics", stages.join(", ")],
    [
      "versions",
      Object.entries(versions)
        .map(([name, number]) => `${name} ${number}`)
        .join(", "),
    ],
  ].filter(([, value]) => value);
  return html`<details>
    <summary>Details</summary>
    <${Facts} rows=${rows} />
  </details>`;
}

/** @param {ProfileStatus["rates"][number]} measured */
function describeRate({ weights, bytes_per_s: read, flops }) {
  return [weights, `${rate(read)} of weights, ${figures(flops / 1e9)} GFLOP/s`];
}

/**
 * Return what a worker takes of its device's memory. On a CPU this is the whole process.
 * @param {DeviceStatus} worker
 */
function memoryOf(worker) {
  return worker.device === "gpu" ? worker.device_memory_bytes : worker.rss_bytes;
}

/** @param {{ memory: NodeMemory | null, workers: DeviceStatus[], name: string }} props */
function Memory({ memory, workers, name }) {
  const { total, free, reserved } = knownMemory(memory, workers);
  if (!total) return null;
  const used = workers.reduce((sum, worker) => sum + memoryOf(worker), 0);
  const others = free === null ? 0 : Math.max(0, total - free - used);
  const reserve = Math.max(0, Math.min(free ?? 0, reserved - others));
  const parts = [
    ...workers.map((worker) => ({
      name: `stage ${worker.stage} ${worker.instance} ${worker.rank}`,
      value: memoryOf(worker),
      style: stageFill(worker.stage),
      title: `stage ${worker.stage}: ${bytes(memoryOf(worker))}`,
    })),
    { name: "other programs", value: others, style: "others", title: `other programs: ${bytes(others)}` },
    { name: "reserved", value: reserve, style: "reserve", title: `reserved for other programs: ${bytes(reserve)}` },
  ];
  const freeText = `${bytes(free)} free of ${bytes(total)}`;
  return html`<${Bar} parts=${parts} total=${total} label=${`Memory of ${name}: ${freeText}`} />
    <p class="muted">${freeText}</p>`;
}

/**
 * Return the power of a machine's parts that count it.
 * @param {EnergyStatus[]} energy
 */
export function describePower(energy) {
  const counted = energy.filter(({ watts }) => watts !== null);
  const parts = counted.map(({ part, watts }) => `${PARTS[part]} ${figures(watts)} W`);
  return parts.length ? `Power: ${parts.join(", ")}` : "";
}

/**
 * Return why a machine yields to its user, and what plans count of it.
 * @param {YieldingStatus} yielding
 */
export function describeYielding({ reason, speed_share: speed, memory_share: memory }) {
  const counted = [
    speed < 1 && `${figures(100 * speed)} % of its speed`,
    memory < 1 && `${figures(100 * memory)} % of its memory`,
  ].filter(Boolean);
  const plans = counted.length ? `; plans count ${counted.join(" and ")}` : "";
  return `yields to its user: ${reason}${plans}`;
}

/**
 * Return a machine's memory, from its profile or else from its workers' devices. Free memory may be unknown.
 * @param {NodeMemory | null} memory
 * @param {DeviceStatus[]} workers
 */
function knownMemory(memory, workers) {
  const limits = workers.map((worker) => worker.device_limit_bytes ?? 0);
  const left = workers.map((worker) => worker.device_left_bytes).filter((count) => count !== null);
  const free = memory?.free_bytes ?? (left.length ? Math.min(...left) : null);
  const total = memory?.total_bytes ?? Math.max(0, ...limits);
  return { total, free: free === null ? null : Math.min(free, total), reserved: memory?.reserve_bytes ?? 0 };
}

/** @param {{ links: LinkStatus[], names: Names }} props */
function Links({ links, names }) {
  if (!links.length) return null;
  return html`<details>
    <summary>All links (${links.length})</summary>
    <div class="scroll" tabindex="0">
      <table>
        <thead>
          <tr>
            <th>from</th>
            <th>to</th>
            <th class="right">round trip</th>
            <th class="right">throughput</th>
            <th>use</th>
          </tr>
        </thead>
        <tbody>
          ${links.map((link) => html`<${LinkRow} key=${`${link.from} ${link.to}`} link=${link} names=${names} />`)}
        </tbody>
      </table>
    </div>
  </details>`;
}

/** @param {{ link: LinkStatus, names: Names }} props */
function LinkRow({ link, names }) {
  const use = link.carries_activations ? `activations${link.compresses ? ", compressed" : ""}` : "none";
  return html`<tr>
    <td>${names.get(link.from) ?? link.from}</td>
    <td>${names.get(link.to) ?? link.to}</td>
    ${
      link.problem === null
        ? html`<td class="right">${figures(link.round_trip_us)} µs</td>
            <td class="right">${rate(link.bytes_per_s)}</td>`
        : html`<td colspan="2" class="state bad">${link.problem}</td>`
    }
    <td class="muted">${use}</td>
  </tr>`;
}
