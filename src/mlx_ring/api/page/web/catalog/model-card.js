// One served model: its memory, its speed, and what it can do.

/** @import { ChatModel } from "../models.js" */
/** @import { ClusterStatus, DeviceStatus, InstanceStatus, ServedModelStatus } from "../types.js" */
/** @import { Job, ModelJobs } from "./model-jobs.js" */

import { Bar, Facts, Legend, Notice, onSingleClick, withCommands } from "../components.js";
import { bytes, counted, duration, figures, percent } from "../format.js";
import { nodeNames } from "../status.js";
import { html } from "../vendor/preact.js";
import { Prediction } from "./prediction.js";

/** @type {Record<ServedModelStatus["state"], string>} */
const TONES = { ready: "good", loading: "busy", unavailable: "bad", unloaded: "" };
/** @type {Record<Job["kind"], string>} */
const VERBS = { load: "Loading", unload: "Unloading", download: "Downloading" };
/** @type {Record<string, string>} Capabilities under the server's names */
const CAPABILITIES = { tools: "tool calls", thinking: "reasoning", embedding: "embeddings", vision: "images" };

/**
 * Render a model.
 * @param {{
 *   served: ServedModelStatus, model: ChatModel | undefined, cluster: ClusterStatus, bytesOnDisk: number | null,
 *   job: Job | undefined, jobs: ModelJobs, chat: (model: string) => void
 * }} props
 */
export function ModelCard({ served, model, cluster, bytesOnDisk, job, jobs, chat }) {
  const name = served.model;
  const instances = cluster.instances.filter((instance) => instance.model === name);
  const devices = cluster.devices.filter((device) => device.model === name);
  const rows = [
    ["memory", describeMemory(devices, instances, bytesOnDisk)],
    ["speed", describeSpeed(instances)],
    ["first token", describeFirstToken(instances)],
    ["context", model && counted(model.contextTokens, "token")],
    ["supports", model && describeCapabilities(model.capabilities)],
    ["runs on", describeMachines(devices, cluster)],
    ["also called", model?.aliases.join(", ")],
  ].filter(([, value]) => value);
  const hasFailed = served.reason && ["unloaded", "unavailable"].includes(served.state);
  const waits = served.state === "loading" && !instances.length && cluster.missing_machines > 0;
  const state = served.state === "unloaded" ? "not loaded" : waits ? "waiting" : served.state;
  return html`<article class="panel model" aria-label=${name}>
    <header>
      <h2>${name}</h2>
      <span class=${`state ${TONES[served.state]}`}>${state}</span>
      <${Actions} served=${served} job=${job} jobs=${jobs} chat=${chat} />
    </header>
    <${MemoryBar} name=${name} devices=${devices} />
    <${Facts} rows=${rows} />
    ${waits && html`<p class="muted">It waits for ${counted(cluster.missing_machines, "more machine")} to join.</p>`}
    ${served.state === "loading" && !waits && html`<${LoadProgress} instances=${instances} />`}
    ${hasFailed && html`<p class="muted">${served.reason}</p>`}
    <${JobProblem} name=${name} job=${job} jobs=${jobs} />
    ${served.state === "unloaded" && html`<${Prediction} model=${name} />`}
  </article>`;
}

/**
 * @param {{
 *   served: ServedModelStatus, job: Job | undefined, jobs: ModelJobs, chat: (model: string) => void
 * }} props
 */
function Actions({ served: { model, state }, job, jobs, chat }) {
  if (job?.isRunning) {
    return html`<span class="muted push" role="status">${VERBS[job.kind]} ${model}</span>`;
  }
  if (state === "loading") return null;
  const isLoaded = state !== "unloaded";
  const act = () => {
    jobs.dismissProblems();
    if (isLoaded) jobs.unload(model);
    else jobs.load(model);
  };
  return html`<span class="row push">
    ${
      state === "ready" &&
      html`<button type="button" class="primary" aria-label=${`Chat with ${model}`} onClick=${() => chat(model)}>
        Chat
      </button>`
    }
    <button
      type="button"
      aria-label=${`${isLoaded ? "Unload" : "Load"} ${model}`}
      onClick=${onSingleClick(act)}
    >${isLoaded ? "Unload" : "Load"}</button>
  </span>`;
}

/**
 * Render why the server refused a job, with a way to insist where there is one.
 * @param {{ name: string, job: Job | undefined, jobs: ModelJobs }} props
 */
export function JobProblem({ name, job, jobs }) {
  if (!job?.problem) return null;
  const canForce = job.kind === "unload" && job.isConflict;
  const meant = suggestions(job.problem);
  const buttons = html`<span class="row">
    ${meant.map(
      (other) => html`<button
        key=${other}
        type="button"
        onClick=${onSingleClick(() => {
          jobs.dismiss(name);
          if (job.loadsNext || job.kind === "load") jobs.add(other);
          else jobs.download(other);
        })}
      >${job.loadsNext || job.kind === "load" ? "Load" : "Download"} ${other}</button>`,
    )}
    ${
      canForce &&
      html`<button type="button" class="danger" onClick=${onSingleClick(() => jobs.unload(name, true))}>
        Unload and end its requests
      </button>`
    }
    <button type="button" class="quiet" onClick=${() => jobs.dismiss(name)}>Dismiss</button>
  </span>`;
  return html`<${Notice} tone="bad" action=${buttons}>${withCommands(job.problem)}</${Notice}>`;
}

/**
 * Return the names that a refusal suggests: those in quotes after "Did you mean".
 * @param {string} problem
 */
export function suggestions(problem) {
  const meant = problem.match(/Did you mean ([^?]*)\?/)?.[1] ?? "";
  return Array.from(meant.matchAll(/'([^']+)'/g), ([, name = ""]) => name);
}

/** @param {{ name: string, devices: DeviceStatus[] }} props */
function MemoryBar({ name, devices }) {
  if (!devices.length) return null;
  const { weights, kv, total } = memoryOf(devices);
  const parts = [
    { name: "weights", value: weights, style: "weights", title: `weights: ${bytes(weights)}` },
    { name: "KV cache", value: kv, style: "kv", title: `KV cache: ${bytes(kv)}` },
    { name: "other", value: total - weights - kv, style: "working", title: `other: ${bytes(total - weights - kv)}` },
  ];
  const label = `Memory of ${name}: ${bytes(weights)} of weights, ${bytes(kv)} of KV cache`;
  return html`<${Bar} parts=${parts} label=${label} />
    <${Legend} title="Memory" items=${parts.filter(({ value }) => value > 0)} />`;
}

/** @param {{ instances: InstanceStatus[] }} props */
function LoadProgress({ instances }) {
  const loadings = instances.flatMap((instance) => instance.stages.map((stage) => stage.loading));
  const total = loadings.reduce((sum, loading) => sum + loading.bytes_to_load, 0);
  const done = loadings.reduce((sum, loading) => sum + loading.bytes_loaded, 0);
  if (!total) return html`<p class="muted">Its machines are starting.</p>`;
  return html`<p>
    <progress value=${done} max=${total} aria-label="Weights loaded"></progress>
    <span class="muted"> ${percent(done / total)} of ${bytes(total)} of weights loaded</span>
  </p>`;
}

/** @param {DeviceStatus[]} devices */
function memoryOf(devices) {
  const sum = (/** @type {(device: DeviceStatus) => number} */ of) => devices.reduce((all, one) => all + of(one), 0);
  const weights = sum((device) => device.weight_bytes);
  const kv = sum((device) => device.kv_bytes);
  return {
    weights,
    kv,
    total: Math.max(
      weights + kv,
      sum((device) => device.device_memory_bytes),
    ),
  };
}

/**
 * Return what a model takes: of memory while it is loaded, else of the disk.
 * @param {DeviceStatus[]} devices
 * @param {InstanceStatus[]} instances
 * @param {number | null} bytesOnDisk
 */
export function describeMemory(devices, instances, bytesOnDisk) {
  if (!devices.length) return bytesOnDisk ? `${bytes(bytesOnDisk)} on disk, none in memory` : "";
  const { weights, kv, total } = memoryOf(devices);
  const planned = instances
    .flatMap(({ stages }) => stages.map((stage) => stage.memory.promised?.total_bytes ?? 0))
    .reduce((sum, each) => sum + each, 0);
  const prediction = planned ? `, predicted ${bytes(planned)} when full` : "";
  const processes = devices.reduce((sum, { device, rss_bytes: rss = 0 }) => sum + (device === "cpu" ? rss : 0), 0);
  const around = processes > total ? `; its processes take ${bytes(processes)} in all` : "";
  return `${bytes(total)}: ${bytes(weights)} of weights, ${bytes(kv)} of KV cache${prediction}${around}`;
}

/**
 * Return the speed of a single request, measured and predicted.
 * @param {InstanceStatus[]} instances
 */
export function describeSpeed(instances) {
  const { stream = null, promise = null } = instances.find((each) => each.stream ?? each.promise) ?? {};
  const { measured_tokens_per_s: measured = null, predicted_tokens_per_s: predicted = null } = stream ?? {};
  const parts = [];
  if (measured) parts.push(`${figures(measured)} tokens/s measured`);
  if (predicted) parts.push(`${figures(predicted)} tokens/s predicted`);
  if (promise?.tokens_per_s && promise.sequences > 1) {
    parts.push(`${figures(promise.tokens_per_s)} tokens/s predicted for ${promise.sequences} requests together`);
  }
  return parts.join(", ");
}

/** @param {InstanceStatus[]} instances */
function describeFirstToken(instances) {
  const promise = instances.find((each) => each.promise?.first_token_s)?.promise;
  if (!promise?.first_token_s) return "";
  return `${duration(promise.first_token_s)} predicted, with a prompt of ${counted(promise.prompt_tokens, "token")}`;
}

/** @param {string[]} capabilities */
function describeCapabilities(capabilities) {
  return ["chat", ...capabilities.flatMap((name) => CAPABILITIES[name] ?? [])].join(", ");
}

/**
 * @param {DeviceStatus[]} devices
 * @param {ClusterStatus} cluster
 */
function describeMachines(devices, cluster) {
  const names = nodeNames(cluster);
  return [...new Set(devices.map(({ node }) => names.get(node) ?? node))].join(", ");
}
