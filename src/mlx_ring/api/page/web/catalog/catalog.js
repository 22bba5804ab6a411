// The models view: what is served, what is on the disk, and a form that adds more.

/** @import { Snapshot } from "../live.js" */
/** @import { ChatModel } from "../models.js" */
/** @typedef {import("preact").ComponentChildren} Children */
/** @import { ClusterStatus, DiskModel, DiskModels, InterruptedPull, PullStatus } from "../types.js" */
/** @import { Job, Jobs, ModelJobs } from "./model-jobs.js" */

import { isAbort, request } from "../api.js";
import { onSingleClick, onValue } from "../components.js";
import { bytes, percent } from "../format.js";
import { readDisk } from "../models.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { JobEnd, JobProblem, ModelCard, RunningJob } from "./model-card.js";
import { Prediction, Recommendations } from "./prediction.js";

/** Time between two looks at the disk, for downloads that other programs began. */
const LOOK_MS = 15_000;

/**
 * Render the models view.
 * @param {{
 *   now: Snapshot, models: ChatModel[], notices: Children, jobs: ModelJobs, chat: (model: string) => void
 * }} props `chat` opens the chat with a model
 */
export function Catalog({ now: { state, connection }, models, notices, jobs, chat }) {
  const [running, setRunning] = useState(jobs.now);
  useEffect(() => jobs.subscribe(setRunning), [jobs]);
  const served = state?.cluster.models ?? [];
  const sizes = useSizes(served.map(({ model }) => model).join("\n"));
  const ended = Object.keys(running).filter((name) => !running[name]?.isRunning);
  const disk = useDisk(jobs, connection === "open", [...served.map(({ model }) => model), ...ended].join("\n"));
  if (state === null) {
    return html`<div class="cluster"><p class="muted waiting">Waiting for the server.</p></div>`;
  }
  const names = served.map(({ model }) => model);
  const known = new Set([...names, ...models.flatMap(({ aliases }) => aliases)]);
  const onDisk = disk.models.filter(({ name }) => !known.has(name));
  // The load of a model on the disk shows where it was asked for.
  const inRow = new Set(onDisk.map(({ name }) => name).filter((name) => running[name]?.kind === "load"));
  return html`<div class="cluster catalog">
    ${notices}
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
          chat=${chat}
        />`,
      )}
    </div>
    <${AddModel}
      jobs=${jobs}
      running=${Object.entries(running).filter(([name]) => !names.includes(name) && !inRow.has(name))}
      others=${jobs.others(disk.pulls)}
      cluster=${state.cluster}
      chat=${chat}
    />
    <${OnDisk}
      models=${onDisk}
      interrupted=${disk.interrupted}
      running=${running}
      jobs=${jobs}
    />
  </div>`;
}

/**
 * Render the form that adds a model, the jobs of models that are not served yet, and downloads of other programs.
 * @param {{
 *   jobs: ModelJobs, running: [name: string, job: Job][], others: PullStatus[], cluster: ClusterStatus,
 *   chat: (model: string) => void
 * }} props
 */
function AddModel({ jobs, running, others, cluster, chat }) {
  const [text, setText] = useState("");
  const name = text.trim();
  const onSubmit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    if (name) act(() => jobs.add(name));
  };
  /** A new action replaces the problem of the one before. @param {() => void} begin */
  const act = (begin) => {
    jobs.dismissEnded();
    begin();
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
          placeholder="qwen3:8b"
          autocomplete="off"
          autocapitalize="off"
          spellcheck=${false}
        />
      </label>
      <button type="submit" class="primary" disabled=${!name}>Load</button>
      <button type="button" disabled=${!name} onClick=${onSingleClick(() => act(() => jobs.download(name)))}>
        Download
      </button>
    </form>
    ${running.map(
      ([model, job]) => html`<${AddedJob}
        key=${model}
        name=${model}
        job=${job}
        jobs=${jobs}
        cluster=${cluster}
        chat=${chat}
      />`,
    )}
    ${others.map((pull) => html`<${OtherPull} key=${pull.model} pull=${pull} jobs=${jobs} />`)}
    <p class="muted">
      A short name such as qwen3:8b, a Hugging Face id, a built-in name such as demo-moe, or a folder or GGUF file on
      the machine that runs this server. Loading downloads what is missing.
    </p>
    <${Prediction} key=${name} model=${name} />
    <${Recommendations} load=${(/** @type {string} */ model) => act(() => jobs.add(model))} />
  </section>`;
}

/** @param {{ pull: PullStatus, jobs: ModelJobs }} props */
function OtherPull({ pull, jobs }) {
  const { model, done_bytes: done, total_bytes: total } = pull;
  return html`<p class="row">
    <span>${model} is downloaded for another client. ${total > 0 && describeProgress(done, total)}</span>
    <button type="button" onClick=${onSingleClick(() => jobs.join(pull))}>Follow</button>
  </p>`;
}

/**
 * Render the models that can be loaded without a download, and those whose download was interrupted.
 * @param {{ models: DiskModel[], interrupted: InterruptedPull[], running: Jobs, jobs: ModelJobs }} props
 */
function OnDisk({ models, interrupted, running, jobs }) {
  const waiting = interrupted.filter(({ name }) => !running[name]);
  if (!models.length && !waiting.length) return null;
  return html`<section class="panel on-disk" aria-label="On the disk">
    <header><h2>On the disk</h2></header>
    <ul>
      ${models.map(
        ({ name, short_names: shortNames, source, weight_bytes: weights }) => html`<li key=${name}>
          <span class="grow">
            <span class="name">${name}</span>
            <span class="muted">${[...shortNames, source, bytes(weights)].join(", ")}</span>
          </span>
          ${
            running[name]?.kind === "load" && running[name]?.isRunning
              ? html`<${RunningJob} name=${name} job=${running[name]} jobs=${jobs} />`
              : html`<button
                  type="button"
                  aria-label=${`Load ${name}`}
                  disabled=${running[name]?.isRunning}
                  onClick=${onSingleClick(() => {
                    jobs.dismissEnded();
                    jobs.load(name);
                  })}
                >Load</button>`
          }
          ${running[name]?.kind === "load" && html`<${JobProblem} name=${name} job=${running[name]} jobs=${jobs} />`}
        </li>`,
      )}
      ${waiting.map(
        ({ name, bytes: done }) => html`<li key=${name}>
          <span class="grow">
            <span class="name">${name}</span>
            <span class="muted">incomplete, ${bytes(done)} so far</span>
          </span>
          <button
            type="button"
            aria-label=${`Continue the download of ${name}`}
            onClick=${onSingleClick(() => jobs.download(name))}
          >Continue</button>
        </li>`,
      )}
    </ul>
  </section>`;
}

/**
 * @param {{
 *   name: string, job: Job, jobs: ModelJobs, cluster: ClusterStatus, chat: (model: string) => void
 * }} props
 */
function AddedJob({ name, job, jobs, cluster, chat }) {
  if (job.problem) return html`<${JobProblem} name=${name} job=${job} jobs=${jobs} />`;
  if (job.kind !== "download" && !job.isRunning) {
    return html`<${JobEnd} name=${name} job=${job} cluster=${cluster} jobs=${jobs} chat=${chat} />`;
  }
  if (job.kind !== "download") return html`<p class="row"><${RunningJob} name=${name} job=${job} jobs=${jobs} /></p>`;
  if (!job.isRunning) {
    return html`<p class="row" role="status">
      ${name} is downloaded.
      <button type="button" onClick=${onSingleClick(() => jobs.load(name))}>Load it</button>
      <button type="button" class="quiet" onClick=${() => jobs.dismiss(name)}>Dismiss</button>
    </p>`;
  }
  const { status = "", done_bytes: done = 0, total_bytes: total = 0 } = job.progress ?? {};
  return html`<div class="download">
    <p>
      Downloading ${name}${job.loadsNext && " to load it"}
      ${" "}<span class="muted" role="status">${status === "verifying" && "Comparing checksums"}</span>
    </p>
    ${
      total > 0 &&
      html`<p>
        <progress value=${done} max=${total} aria-label=${`Download of ${name}`}></progress>
        <span class="muted figures">${describeProgress(done, total)}</span>
      </p>`
    }
    <button type="button" class="quiet" onClick=${onSingleClick(() => jobs.cancel(name))}>Cancel download</button>
  </div>`;
}

/**
 * @param {number} done
 * @param {number} total
 */
function describeProgress(done, total) {
  return `${percent(done / total)}, ${bytes(done)} of ${bytes(total)}`;
}

/**
 * Return the models on the disk and the downloads in progress, which `jobs` follows. They are read from time to time,
 * and at once when the connection or the names of served models and ended jobs change.
 * @param {ModelJobs} jobs
 * @param {boolean} isOpen
 * @param {string} names
 */
function useDisk(jobs, isOpen, names) {
  const [disk, setDisk] = useState(/** @type {DiskModels} */ ({ models: [], pulls: [], interrupted: [] }));
  useEffect(() => {
    if (!isOpen) return undefined;
    const abort = new AbortController();
    const look = async () => {
      const read = await readDisk(abort.signal);
      if (!read || abort.signal.aborted) return;
      setDisk(read);
      jobs.follow(read.pulls);
    };
    look();
    const timer = setInterval(look, LOOK_MS);
    return () => {
      clearInterval(timer);
      abort.abort();
    };
  }, [jobs, isOpen, names]);
  return disk;
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
