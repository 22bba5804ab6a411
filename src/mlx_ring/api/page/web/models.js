// The models that accept questions.

/** @import { Model } from "./types.js" */
/** @import { Snapshot } from "./live.js" */

import { ApiError, isAbort, request } from "./api.js";
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
 * @property {string} note
 */

/**
 * Return the models that accept questions. They are read again when the cluster's list changes.
 * @param {Snapshot} now
 * @returns {ChatModel[]}
 */
export function useModels({ state, connection }) {
  const [models, setModels] = useState(/** @type {Omit<ChatModel, "note">[]} */ ([]));
  const current = state?.cluster.models ?? [];
  const names = current.map(({ model }) => model).join("\n");
  const isOpen = connection === "open";
  useEffect(() => {
    if (!isOpen) return undefined;
    const abort = new AbortController();
    readModels(abort.signal).then((read) => read && setModels(read));
    return () => abort.abort();
  }, [names, isOpen]);
  return models.map((model) => {
    const state = current.find((each) => each.model === model.id)?.state ?? "ready";
    const note = state === "ready" ? "" : state === "unloaded" ? "not loaded" : state;
    return { ...model, note };
  });
}

/** @param {AbortSignal} signal */
async function readModels(signal) {
  try {
    const response = await request("v1/models", { signal });
    /** @type {{ data: Model[] }} */
    const { data } = await response.json();
    return data.map(({ id, aliases = [], reasoning_efforts: efforts = [], capabilities = [], max_model_len }) => ({
      id,
      aliases,
      efforts,
      capabilities,
      hasTools: capabilities.includes("tools"),
      contextTokens: max_model_len,
    }));
  } catch (error) {
    // The connection's notice already says that the server does not answer.
    if (!(error instanceof ApiError) && !isAbort(error)) throw error;
    return null;
  }
}
