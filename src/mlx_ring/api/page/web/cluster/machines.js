// The machines, and what their memory is used for.

import { html } from "../vendor/preact.js";
import { bytes, counted, figures, rate } from "../format.js";
import { Bar, Legend, stageStyle } from "../parts.js";

export function Machines({ cluster, names }) {
  return html`<section class="panel" aria-label="Machines">
    <header><h2>Machines</h2><span class="muted">${active(cluster)}</span></header>
    <div class="machines">${cluster.nodes.map((node) => html`<${Machine} key=${node.id} node=${node} cluster=${cluster} name=${names.get(node.id)} />`)}</div>
    ${cluster.nodes.some((node) => node.memory) &&
    html`<${Legend}
      items=${[
        { name: "a stage's worker", style: "stage-0" },
        { name: "others", style: "others" },
        { name: "kept for others", style: "reserve" },
        { name: "free", style: "idle" },
      ]}
    />`}
    <${Links} cluster=${cluster} names=${names} />
  </section>`;
}

function active({ devices, nodes }) {
  const alive = devices.filter((device) => device.alive);
  const of = alive.length === devices.length ? "" : ` of ${devices.length}`;
  return `${alive.length}${of} ${devices.length === 1 ? "device" : "devices"} active on ${counted(nodes.filter((node) => node.state !== "gone").length, "machine")}`;
}

function Machine({ node, cluster, name }) {
  const workers = cluster.devices.filter((device) => device.node === node.id);
  const { memory, profile } = node;
  return html`<article class=${`machine ${node.state}`}>
    <h3>${name} ${node.is_head && html`<span class="tag">head</span>`} ${node.state !== "attending" && html`<span class="state bad">${node.state}</span>`}</h3>
    <p class="muted">${[node.address, profile && `${profile.device_name}, ${counted(profile.cores, "core")}`].filter(Boolean).join(", ") || "this machine"}</p>
    ${node.reason && html`<p>${node.reason}</p>`}
    ${memory && html`<${Memory} memory=${memory} workers=${workers} name=${name} />`}
    <p class="figures">
      ${workers.length === 0 && html`<span class="muted">${node.state === "attending" ? "no layers here" : ""}</span>`}
      ${workers.map(
        (worker) => html`<span key=${`${worker.instance} ${worker.stage} ${worker.rank}`}>
          <i class=${`swatch ${stageStyle(worker.stage)}`} aria-hidden="true"></i>stage ${worker.stage}, ${bytes(worker.rss_bytes)}${worker.alive ? "" : ", lost"}
        </span>`,
      )}
    </p>
    ${profile && profile.rates.length > 0 && html`<p class="muted">${rates(profile)}</p>`}
  </article>`;
}

const rates = ({ rates: all }) =>
  all.map(({ weights, bytes_per_s: read, flops }) => `${weights}: reads ${rate(read)}, ${figures(flops / 1e9)} GFLOP/s`).join("; ");

function Memory({ memory, workers, name }) {
  const free = memory.free_bytes ?? Math.max(0, memory.total_bytes - memory.used_bytes);
  const others = Math.max(0, memory.total_bytes - free - memory.used_bytes);
  const reserve = Math.max(0, Math.min(free, memory.reserve_bytes - others));
  const parts = [
    ...workers.map((worker) => ({
      name: `stage ${worker.stage} ${worker.instance} ${worker.rank}`,
      value: worker.rss_bytes,
      style: stageStyle(worker.stage),
      title: `stage ${worker.stage}: ${bytes(worker.rss_bytes)}`,
    })),
    { name: "others", value: others, style: "others", title: `others: ${bytes(others)}` },
    { name: "kept for others", value: reserve, style: "reserve", title: `kept for others: ${bytes(reserve)}` },
  ];
  const promised = memory.promised_bytes ? `, ${bytes(memory.promised_bytes)} promised to plans` : "";
  return html`<${Bar} parts=${parts} total=${memory.total_bytes} label=${`Memory of ${name}: ${bytes(free)} free of ${bytes(memory.total_bytes)}`} />
    <p class="muted">${bytes(free)} free of ${bytes(memory.total_bytes)}${promised}</p>`;
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
