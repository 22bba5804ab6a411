// Bars of a stage: the memory of each rank, and what the last second was used for.

/** @import { DeviceStatus, RankStatus, StageShares, StepStatus } from "../types.js" */

import { Bar } from "../components.js";
import { bytes, duration, percent } from "../format.js";
import { html } from "../vendor/preact.js";

/**
 * Render a rank and its memory.
 * @param {{
 *   rank: RankStatus, isOneOfMany: boolean, device: DeviceStatus | undefined, kvLimit: number, node: string
 * }} props
 */
export function Rank({ rank, isOneOfMany, device, kvLimit, node }) {
  const { weight_bytes: weights, kv_bytes: kv, device_bytes: held, peak_bytes: peak } = rank.used;
  const other = Math.max(0, held - weights - kv);
  const parts = [
    { name: "weights", value: weights, style: "weights", title: `weights: ${bytes(weights)}` },
    { name: "KV cache", value: kv, style: "kv", title: `KV cache: ${bytes(kv)}` },
    { name: "other", value: other, style: "working", title: `other: ${bytes(other)}` },
    {
      name: "KV cache limit",
      value: Math.max(0, kvLimit - kv),
      style: "room",
      title: `KV cache limit: ${bytes(kvLimit)}`,
    },
  ];
  const hardware = device && [device.device, device.dtype, device.blas].filter(Boolean).join(", ");
  const deviceLimit = device?.device_limit_bytes ? `, limit ${bytes(device.device_limit_bytes)}` : "";
  const label = `Memory of ${node}: weights ${bytes(weights)}, KV cache ${bytes(kv)}, KV cache limit ${bytes(kvLimit)}`;
  return html`<div class="rank">
    <p>
      <b>${node}</b> ${isOneOfMany && html`<span class="muted">rank ${rank.rank}</span>`}
      ${!rank.alive && html` <span class="state bad">worker lost</span>`}
    </p>
    ${hardware && html`<p class="muted">${hardware}</p>`}
    <${Bar} parts=${parts} label=${label} />
    <p class="muted figures">
      <span>weights ${bytes(weights)}</span>
      <span>KV cache ${bytes(kv)}${kvLimit ? ` of ${bytes(kvLimit)}` : ""}</span>
      <span title="Memory that MLX holds on its device">
        device ${bytes(held)}, peak ${bytes(peak)}${deviceLimit}
      </span>
    </p>
  </div>`;
}

/**
 * Render what a stage did in the last second, and how long its decode steps take.
 * @param {{ shares: StageShares, steps: StepStatus[] }} props
 */
export function StageTime({ shares, steps }) {
  const idle = Math.max(0, 1 - shares.compute - shares.link - shares.under_way);
  const parts = [
    { name: "computing", value: shares.compute, style: "compute" },
    { name: "waiting for other stages", value: shares.link, style: "link" },
    { name: "unfinished step", value: shares.under_way, style: "under-way" },
  ];
  const described = [...parts, { name: "idle", value: idle }].map(({ name, value }) => `${name} ${percent(value)}`);
  return html`<div class="time">
    <${Bar} parts=${parts} total=${1} label=${`In the last second: ${described.join(", ")}`} />
    <p class="muted figures">
      <span>${percent(shares.compute)} computing</span>
      <${StepTime} step=${steps.find((step) => step.measured_ms !== null)} />
    </p>
  </div>`;
}

/** @param {{ step: StepStatus | undefined }} props */
function StepTime({ step }) {
  if (!step || step.measured_ms === null) return null;
  const predicted = step.corrected_ms ? `, predicted ${duration(step.corrected_ms / 1000)}` : "";
  return html`<span>${duration(step.measured_ms / 1000)} per step${predicted}</span>`;
}
