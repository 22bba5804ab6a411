// The models view: what is served, and a form that adds more.

/** @import { Snapshot } from "../live.js" */
/** @import { ChatModel } from "../models.js" */
/** @import { Status } from "../status.js" */
/** @import { Job, ModelJobs } from "./model-jobs.js" */

import { isAbort, request } from "../api.js";
import { Notice, onSingleClick, onValue } from "../components.js";
import { bytes, percent } from "../format.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { JobProblem, ModelCard } from "./model-card.js";
import { totalProgress } from "./model-jobs.js";
import { Prediction } from "./prediction.js";

/**
 * Render the models view.
 * @param {{ now: Snapshot, models: ChatModel[], status: Status, jobs: ModelJobs }} props
 */
export function Catalog({ now: { state }, models, status, jobs }) {
  const [running, setRunning] = useState(jobs.now);
  useEffect(() => jobs.subscribe(setRunning), [jobs]);
  const served = state?.cluster.models ?? [];
  const sizes = useSizes(served.map(({ model }) => model).join("\n"));
  if (state === null) {
    return html`<div class="cluster"><p class="muted waiting">Waiting for the server.</p></div>`;
  }
  const names = served.map(({ model }) => model);
  return html`<div class="cluster catalog">
    ${status.notices
      .filter(({ tone }) => tone === "bad")
      .map(({ tone, text }) => html`<${Notice} key=${text} tone=${tone}>${text}</${Notice}>`)}
    <div class="models">
      ${served.map(
        (each) => html`<${ModelCard}
          key=${each.model}
          served=${each}
          model=${models.find(({ id }) => id === each.model)}
          cluster=${state.cluster}
          bytesOnDisk=${sizes[each.model] ?? null}
          job=${running[each.model]}
          jobs=${jobs}
        />`,
      )}
    </div>
    <${AddModel} jobs=${jobs} running=${Object.entries(running).filter(([name]) => !names.includes(name))} />
  </div>`;
}

/**
 * Render the form that adds a model, and the jobs of models that are not served yet.
 * @param {{ jobs: ModelJobs, running: [name: string, job: Job][] }} props
 */
function AddModel({ jobs, running }) {
  const [text, setText] = useState("");
  const name = text.trim();
  const onSubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    if (name) jobs.load(name);
  };
  return html`<section class="panel add-model" aria-label="Add a model">
    <header><h2>Add a model</h2></header>
    <form onSubmit=${onSubmit}>
      <label class="grow">
        <span>Name</span>
        <input
          type="text"
          value=${text}
          onInput=${onValue(setText)}
          placeholder="mlx-community/Qwen3-0.6B-4bit"
          autocomplete="off"
          autocapitalize="off"
          spellcheck=${false}
        />
      </label>
      <button type="submit" class="primary" disabled=${!name}>Load</button>
      <button type="button" disabled=${!name} onClick=${onSingleClick(() => jobs.download(name))}>Download</button>
    </form>
    <p class="muted">
      A Hugging Face id, a built-in name such as demo-moe, or a folder or GGUF file on the head's machine. Loading
      downloads what is missing.
    </p>
    <${Prediction} key=${name} model=${name} />
    ${running.map(([model, job]) => html`<${AddedJob} key=${model} name=${model} job=${job} jobs=${jobs} />`)}
  </section>`;
}

/** @param {{ name: string, job: Job, jobs: ModelJobs }} props */
function AddedJob({ name, job, jobs }) {
  if (job.problem) return html`<${JobProblem} name=${name} job=${job} jobs=${jobs} />`;
  if (job.kind !== "download") return html`<p role="status">Loading ${name}</p>`;
  if (!job.isRunning) {
    return html`<p class="row" role="status">
      ${name} is downloaded.
      <button type="button" onClick=${onSingleClick(() => jobs.load(name))}>Load it</button>
      <button type="button" class="quiet" onClick=${() => jobs.dismiss(name)}>Dismiss</button>
    </p>`;
  }
  const { completed, total } = totalProgress(job.progress ?? { status: "", parts: {} });
  return html`<div class="download">
    <p>Downloading ${name} <span class="muted" role="status">${job.progress?.status}</span></p>
    ${
      total > 0 &&
      html`<p>
        <progress value=${completed} max=${total} aria-label=${`Download of ${name}`}></progress>
        <span class="muted figures">${percent(completed / total)}, ${bytes(completed)} of ${bytes(total)}</span>
      </p>`
    }
    <button type="button" class="quiet" onClick=${onSingleClick(() => jobs.cancel(name))}>Cancel download</button>
  </div>`;
}

/**
 * Return the models' sizes on disk in bytes. They are read again when the list of names changes.
 * @param {string} names
 */
function useSizes(names) {
  const [sizes, setSizes] = useState(/** @type {Record<string, number>} */ ({}));
  useEffect(() => {
    if (!names) return undefined;
    const abort = new AbortController();
    readSizes(abort.signal).then(setSizes, (error) => {
      // The cards do without sizes; the connection's notice says what is wrong.
      if (!isAbort(error)) setSizes({});
    });
    return () => abort.abort();
  }, [names]);
  return sizes;
}

/** @param {AbortSignal} signal */
async function readSizes(signal) {
  const response = await request("api/tags", { signal });
  /** @type {{ models: { name: string, size: number }[] }} */
  const { models } = await response.json();
  return Object.fromEntries(models.map(({ name, size }) => [name, size]));
}
