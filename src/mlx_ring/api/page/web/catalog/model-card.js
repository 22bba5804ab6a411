// One served model: its memory, its speed, and what it can do.

/** @import { ChatModel } from "../models.js" */
/** @import { ClusterStatus, DeviceStatus, InstanceStatus, ServedModelStatus } from "../types.js" */
/** @import { Job, ModelJobs } from "./model-jobs.js" */

import { Bar, Facts, Legend, Notice, onSingleClick, TrustHint, useFocus, withCommands } from "../components.js";
import { bytes, counted, duration, figures, percent } from "../format.js";
import { nodeNames } from "../status.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
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
  const [mayConfirm, setConfirming] = useState(false);
  const isConfirming = mayConfirm && !job?.isRunning && !["unloaded", "loading"].includes(served.state);
  const name = served.model;
  const requests = countRequests(served);
  const unload = () => {
    jobs.dismissEnded();
    if (requests) setConfirming(true);
    else jobs.unload(name);
  };
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
      <${Actions} served=${served} job=${job} jobs=${jobs} chat=${chat} unload=${isConfirming ? null : unload} />
    </header>
    ${
      isConfirming &&
      html`<${ConfirmUnload}
        name=${name}
        requests=${requests}
        close=${(/** @type {boolean} */ isSure) => {
          setConfirming(false);
          if (isSure) jobs.unload(name, requests > 0);
        }}
      />`
    }
    <${JobEnd} name=${name} job=${job} cluster=${cluster} jobs=${jobs} chat=${chat} />
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
 *   served: ServedModelStatus, job: Job | undefined, jobs: ModelJobs, chat: (model: string) => void,
 *   unload: (() => void) | null
 * }} props `unload` is null while a person is asked to confirm it
 */
function Actions({ served: { model, state }, job, jobs, chat, unload }) {
  if (job?.isRunning) {
    return html`<span class="row push"><${RunningJob} name=${model} job=${job} jobs=${jobs} /></span>`;
  }
  if (state === "loading") return null;
  const isLoaded = state !== "unloaded";
  const load = () => {
    jobs.dismissEnded();
    jobs.load(model);
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
      disabled=${isLoaded && !unload}
      onClick=${onSingleClick(isLoaded ? (unload ?? (() => {})) : load)}
    >${isLoaded ? "Unload" : "Load"}</button>
  </span>`;
}

/**
 * Return what a job of a model does now.
 * @param {string} name
 * @param {Pick<Job, "kind" | "waitsFor">} job
 */
export function describeRunning(name, { kind, waitsFor }) {
  return waitsFor ? `${name} waits for the load of ${waitsFor}` : `${VERBS[kind]} ${name}`;
}

/**
 * Render what a job of a model does now, with the way to cancel a load that waits.
 * @param {{ name: string, job: Job, jobs: ModelJobs }} props
 */
export function RunningJob({ name, job, jobs }) {
  const cancel = html`<button
    type="button"
    class="quiet"
    aria-label=${`Cancel the load of ${name}`}
    onClick=${onSingleClick(() => jobs.cancelLoad(name))}
  >Cancel</button>`;
  return html`<span class="muted" role="status">${describeRunning(name, job)}</span> ${job.waitsFor && cancel}`;
}

/**
 * Return the number of a model's requests that run or wait.
 * @param {Pick<ServedModelStatus, "instances">} served
 */
export function countRequests({ instances }) {
  return instances.reduce((sum, { running, waiting }) => sum + running + waiting, 0);
}

/**
 * Return the question before an unload, and the name of the button that does it.
 * @param {string} name
 * @param {number} requests
 */
export function askToUnload(name, requests) {
  if (!requests) return { question: `${name} has no requests any more.`, button: `Unload ${name}` };
  const cut = counted(requests, "request");
  return {
    question: `Unloading ${name} cuts off ${cut} that ${requests === 1 ? "runs or waits" : "run or wait"}.`,
    button: `Unload and end ${cut}`,
  };
}

/**
 * Ask before an unload that cuts requests off. The focus begins on the way back, where Escape leads too.
 * @param {{ name: string, requests: number, close: (isSure: boolean) => void }} props
 */
function ConfirmUnload({ name, requests, close }) {
  const focused = useFocus();
  const { question, button } = askToUnload(name, requests);
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") close(false);
  };
  const buttons = html`<span class="row" role="group" aria-label=${`Unload ${name}?`} onKeyDown=${onKeyDown}>
    <button type="button" class="danger" onClick=${onSingleClick(() => close(true))}>${button}</button>
    <button type="button" class="quiet" ref=${focused} onClick=${() => close(false)}>Cancel</button>
  </span>`;
  return html`<${Notice} action=${buttons}>${question}</${Notice}>`;
}

/**
 * Render that a load or an unload has ended well, with what a person may want next. Nothing once the model's state has
 * changed again.
 * @param {{
 *   name: string, job: Job | undefined, cluster: ClusterStatus, jobs: ModelJobs, chat: (model: string) => void
 * }} props `name` is that of the job
 */
export function JobEnd({ name, job, cluster, jobs, chat }) {
  const text = describeEnd(name, job, cluster);
  const wasShown = useRef(/** @type {Job | undefined} */ (undefined));
  useEffect(() => {
    if (text) wasShown.current = job;
    else if (job && wasShown.current === job) jobs.dismiss(name);
  });
  if (!job || !text) return null;
  const { kind, served } = job;
  const begin = () => {
    jobs.dismiss(name);
    if (kind === "load") chat(served);
    else jobs.load(served);
  };
  return html`<${Ended}
    text=${text}
    next=${kind === "load" ? "Chat with it" : "Undo"}
    begin=${begin}
    dismiss=${() => jobs.dismiss(name)}
  />`;
}

/** @param {{ text: string, next: string, begin: () => void, dismiss: () => void }} props */
function Ended({ text, next, begin, dismiss }) {
  const focused = useFocus({ onlyIfLost: true });
  const buttons = html`<span class="row">
    <button type="button" onClick=${onSingleClick(begin)}>${next}</button>
    <button type="button" class="quiet" ref=${focused} onClick=${dismiss}>Dismiss</button>
  </span>`;
  return html`<${Notice} action=${buttons}>${text}</${Notice}>`;
}

/**
 * Return how a load or an unload ended. Empty if it has not, or if the model's state has changed since.
 * @param {string} name
 * @param {Job | undefined} job
 * @param {ClusterStatus} cluster
 */
export function describeEnd(name, job, cluster) {
  const state = job?.served && cluster.models.find(({ model }) => model === job.served)?.state;
  if (!job || job.isRunning || !state) return "";
  if (job.kind === "unload" && state === "unloaded") return `${name} is unloaded. The next request loads it again.`;
  if (job.kind !== "load" || state !== "ready") return "";
  const devices = cluster.devices.filter(({ model }) => model === job.served);
  const place = describeMachines(devices, cluster);
  const alias = job.served === name ? "" : ` as ${job.served}`;
  return `${name} is loaded${alias}${place && `, on ${place}`}. It took ${duration(job.seconds)}.`;
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
    ${
      job.isTooLarge &&
      html`<button type="button" onClick=${onSingleClick(() => jobs.download(name, false, true))}>
        Download all the same
      </button>`
    }
    <button type="button" class="quiet" onClick=${() => jobs.dismiss(name)}>Dismiss</button>
  </span>`;
  return html`<${Notice} tone="bad" action=${buttons}>${withCommands(job.problem)}</${Notice}>
    <${TrustHint} text=${job.problem} />`;
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
