// The models that accept questions.

/** @import { ClusterStatus, DiskModels, Model, ServedModelStatus } from "./types.js" */
/** @import { Snapshot } from "./live.js" */

import { ApiError, isAbort, request } from "./api.js";
import { answers } from "./live.js";
import { useEffect, useState } from "./vendor/preact.js";

/**
 * Served model. `note` says why it may answer late, `contextTokens` is the limit of prompt and answer together.
 * @typedef {object} ChatModel
 * @property {string} id
 * @property {string[]} aliases
 * @property {string[]} efforts
 * @property {string[]} capabilities
 * @property {boolean} hasTools
 * @property {number} contextTokens
 * @property {ServedModelStatus["state"]} state
 * @property {string} note
 */

/**
 * Return a text that changes whenever the server may list its models otherwise: a load can change their context.
 * @param {Pick<ClusterStatus, "models"> | undefined} cluster
 */
export function modelsKey(cluster) {
  const models = cluster?.models ?? [];
  return JSON.stringify(
    models.map(({ model, state, instances }) => [
      model,
      state,
      instances.map(({ instance, epoch }) => [instance, epoch]),
    ]),
  );
}

/**
 * Return the models that accept questions. They are read again when the cluster's models or their instances change.
 * Without live figures they are read at each attempt to get them.
 * @param {Snapshot} now
 * @returns {ChatModel[]}
 */
export function useModels({ state, connection, retryAt }) {
  const [models, setModels] = useState(/** @type {Omit<ChatModel, "note" | "state">[]} */ ([]));
  const current = state?.cluster.models ?? [];
  const key = connection === "unfollowed" ? retryAt : modelsKey(state?.cluster);
  const isOpen = answers(connection);
  useEffect(() => {
    if (!isOpen) return undefined;
    const abort = new AbortController();
    readModels(abort.signal).then((read) => read && setModels(read));
    return () => abort.abort();
  }, [key, isOpen]);
  return models.map((model) => {
    // Without live figures, nothing is known of the state, and the last one may be old.
    const known = connection === "unfollowed" ? undefined : current.find((each) => each.model === model.id);
    const state = known?.state ?? "ready";
    const note = state === "ready" ? "" : state === "unloaded" ? "not loaded" : state;
    return { ...model, state, note };
  });
}

/**
 * Return the names of models on the disk. They are read when `key` changes.
 * @param {boolean} isOpen whether the server answers
 * @param {string} key
 */
export function useDiskNames(isOpen, key) {
  const [names, setNames] = useState(/** @type {string[]} */ ([]));
  useEffect(() => {
    if (!isOpen) return undefined;
    const abort = new AbortController();
    readDisk(abort.signal).then((disk) => disk && setNames(disk.models.map(({ name }) => name)));
    return () => abort.abort();
  }, [isOpen, key]);
  return names;
}

/**
 * Return the models on the disk and the downloads in progress; null if the server does not answer.
 * @param {AbortSignal} [signal]
 * @returns {Promise<DiskModels | null>}
 */
export async function readDisk(signal) {
  try {
    return await (await request("cluster/models", signal ? { signal } : {})).json();
  } catch (error) {
    // The connection's notice says what is wrong.
    if (!(error instanceof ApiError) && !isAbort(error)) throw error;
    return null;
  }
}

/** @param {AbortSignal} signal */
async function readModels(signal) {
  try {
    const response = await request("v1/models", { signal });
    /** @type {{ data: Model[] }} */
    const { data } = await response.json();
    return data.map(({ id, aliases = [], reasoning_efforts: efforts = [], features = [], max_model_len }) => ({
      id,
      aliases,
      efforts,
      capabilities: features,
      hasTools: features.includes("tools"),
      contextTokens: max_model_len,
    }));
  } catch (error) {
    // The connection's notice already says that the server does not answer.
    if (!(error instanceof ApiError) && !isAbort(error)) throw error;
    return null;
  }
}
