// The machines, and what their memory is used for.

import { html } from "../vendor/preact.js";
import { bytes, counted, figures, rate } from "../format.js";
import { Bar, Legend, stageStyle } from "../parts.js";

export function Machines({ cluster, names }) {
  return html`<section class="panel" aria-label="Machines">
    <header><h2>Machines</h2><span class="muted">${active(cluster)}</span></header>
    <div class="machines">${cluster.nodes.map((node) => html`<${Machine} key=${node.id} node=${node} cluster=${cluster} name=${names.get(node.id)} />`)}</div>
    <${Legend}
      items=${[
        { name: "other programs", style: "others" },
        { name: "kept for them", style: "reserve" },
        { name: "free", style: "idle" },
      ]}
    />
    <${Links} cluster=${cluster} names=${names} />
  </section>`;
}

function active({ devices, nodes }) {
  const alive = devices.filter((device) => device.alive);
  const of = alive.length === devices.length ? "" : ` of ${devices.length}`;
  return `${alive.length}${of} ${devices.length === 1 ? "device" : "devices"} active on ${counted(nodes.filter((node) => node.state !== "gone").length, "machine")}`;
}

function Machine({ node, cluster, name }) {
  const isHere = node.state !== "gone";
  const workers = cluster.devices.filter((device) => device.node === node.id && isHere);
  const { memory, profile } = node;
  return html`<article class=${`machine ${node.state}`}>
    <h3>${name} ${node.is_head && html`<span class="tag">head</span>`} ${node.state !== "attending" && html`<span class="state bad">${node.state}</span>`}</h3>
    <p class="muted">${[node.address, profile && `${profile.device_name}, ${counted(profile.cores, "core")}`].filter(Boolean).join(", ") || "this machine"}</p>
    ${node.reason && html`<p>${node.reason}</p>`}
    <${Memory} memory=${memory} workers=${workers} name=${name} />
    <p class="figures">
      ${workers.length === 0 && html`<span class="muted">${node.state === "attending" ? "no layers here" : ""}</span>`}
      ${workers.map(
        (worker) => html`<span key=${`${worker.instance} ${worker.stage} ${worker.rank}`}>
          <i class=${`swatch ${stageStyle(worker.stage)}`} aria-hidden="true"></i>stage ${worker.stage}, ${bytes(taken(worker))}${worker.alive ? "" : ", lost"}
        </span>`,
      )}
    </p>
    ${profile && profile.rates.length > 0 && html`<p class="muted">${rates(profile)}</p>`}
  </article>`;
}

const rates = ({ rates: all }) =>
  all.map(({ weights, bytes_per_s: read, flops }) => `${weights}: reads ${rate(read)}, ${figures(flops / 1e9)} GFLOP/s`).join("; ");

/** What a worker takes of its device's memory: of a machine's, its whole process. */
const taken = (worker) => (worker.device === "gpu" ? worker.device_memory_bytes : worker.rss_bytes);

function Memory({ memory, workers, name }) {
  const { total, free, reserved } = known(memory, workers);
  if (!total) return null;
  const used = workers.reduce((sum, worker) => sum + taken(worker), 0);
  const others = free === null ? 0 : Math.max(0, total - free - used);
  const reserve = Math.max(0, Math.min(free ?? 0, reserved - others));
  const parts = [
    ...workers.map((worker) => ({
      name: `stage ${worker.stage} ${worker.instance} ${worker.rank}`,
      value: taken(worker),
      style: stageStyle(worker.stage),
      title: `stage ${worker.stage}: ${bytes(taken(worker))}`,
    })),
    { name: "other programs", value: others, style: "others", title: `other programs: ${bytes(others)}` },
    { name: "kept for them", value: reserve, style: "reserve", title: `kept for them: ${bytes(reserve)}` },
  ];
  const promised = memory?.promised_bytes ? `, ${bytes(memory.promised_bytes)} promised to plans` : "";
  return html`<${Bar} parts=${parts} total=${total} label=${`Memory of ${name}: ${bytes(free)} free of ${bytes(total)}`} />
    <p class="muted">${bytes(free)} free of ${bytes(total)}${promised}</p>`;
}

/** From the machine's profile; without one, as its workers find their device. What is free may be unknown: null. */
function known(memory, workers) {
  const limits = workers.map((worker) => worker.device_limit_bytes).filter(Boolean);
  const left = workers.map((worker) => worker.device_left_bytes).filter((count) => count !== null);
  const free = memory?.free_bytes ?? (left.length ? Math.min(...left) : null);
  const total = memory?.total_bytes ?? Math.max(0, ...limits);
  return { total, free: free === null ? null : Math.min(free, total), reserved: memory?.reserve_bytes ?? 0 };
}

function Links({ cluster, names }) {
  if (!cluster.links.length) return null;
  return html`<details>
    <summary>All links (${cluster.links.length})</summary>
    <div class="scroll" tabindex="0">
      <table>
        <thead><tr><th>from</th><th>to</th><th class="right">round trip</th><th class="right">throughput</th><th>use</th></tr></thead>
        <tbody>
          ${cluster.links.map(
            (link) => html`<tr key=${`${link.from} ${link.to}`}>
              <td>${names.get(link.from) ?? link.from}</td>
              <td>${names.get(link.to) ?? link.to}</td>
              ${link.problem
                ? html`<td colspan="2" class="state bad">${link.problem}</td>`
                : html`<td class="right">${figures(link.round_trip_us)} µs</td><td class="right">${rate(link.bytes_per_s)}</td>`}
              <td class="muted">${link.carries_activations ? (link.compresses ? "activations, compressed" : "activations") : "none"}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  </details>`;
}
