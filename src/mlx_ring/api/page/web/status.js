// The cluster's status as sentences.

/** @import { ClusterState, ClusterStatus, InstanceStatus, ServedModelStatus, StageStatus } from "./types.js" */
/** @import { Snapshot } from "./live.js" */

import { bytes, counted, percent } from "./format.js";

/** @typedef {"good" | "busy" | "bad"} Tone */
/** `key`: the same while only its figures change. `awaitsMachine`: another machine would help. @typedef {{
 *   key: string, tone: "note" | "busy" | "bad", text: string, awaitsMachine?: boolean
 * }} StatusNotice */

/**
 * Status of the whole cluster: `label` for the top bar, `notices` for the page.
 * @typedef {{ tone: Tone, label: string, notices: StatusNotice[] }} Status
 */

/**
 * Describe the cluster's status.
 * @param {Pick<Snapshot, "connection" | "state">} now
 * @returns {Status}
 */
export function describeStatus({ connection, state }) {
  if (connection === "locked") return { tone: "busy", label: "key needed", notices: [] };
  const isLost = connection === "lost";
  // The notices of a server that does not answer may be untrue by now: the one of the connection says so.
  if (isLost) return { tone: "bad", label: "offline", notices: [] };
  if (connection === "unfollowed") return { tone: "busy", label: "no live figures", notices: [] };
  if (state === null) return { tone: "busy", label: "connecting", notices: [] };
  return { ...describeCluster(state), notices: findNotices(state) };
}

/**
 * @param {ClusterState} state
 * @returns {{ tone: Tone, label: string }}
 */
function describeCluster({ cluster, draining }) {
  if (draining) return { tone: "busy", label: "shutting down" };
  const states = cluster.models.map((model) => model.state);
  if (states.includes("ready")) {
    // A drained machine has no layers because somebody wants it so.
    const isThere = cluster.nodes.every(({ state }) => state === "attending" || state === "drained");
    const isComplete = isThere && !states.includes("unavailable");
    return isComplete ? { tone: "good", label: "ready" } : { tone: "busy", label: "degraded" };
  }
  if (states.includes("loading") && cluster.missing_machines > 0) {
    return { tone: "busy", label: `waiting for ${counted(cluster.missing_machines, "machine")}` };
  }
  if (states.includes("loading")) return { tone: "busy", label: "loading" };
  if (states.includes("unavailable")) return { tone: "bad", label: "unavailable" };
  return { tone: "busy", label: "unloaded" };
}

/**
 * @param {ClusterState} state
 * @returns {StatusNotice[]}
 */
function findNotices(state) {
  if (state.draining) {
    // Models and machines end with the server, which is no failure of theirs.
    const text = "The server is shutting down. It finishes running requests and accepts no new ones.";
    return [{ key: "draining", tone: "busy", text }];
  }
  const { cluster } = state;
  const awaited = describeWait(cluster);
  // One notice for all models that wait for a machine.
  const models = cluster.models.filter((each) => !awaited || hasInstance(each, cluster) || each.state !== "loading");
  const ofModels = models.flatMap((model) => describeModel(model, cluster.instances));
  return [...(awaited ? [awaited] : []), ...ofModels, ...describeNodes(state)];
}

/**
 * @param {ServedModelStatus} model
 * @param {ClusterStatus} cluster
 */
function hasInstance({ model }, { instances }) {
  return instances.some((instance) => instance.model === model);
}

/**
 * Describe the wait for machines, before anything is loaded.
 * @param {ClusterStatus} cluster
 * @returns {StatusNotice | null}
 */
function describeWait({ missing_machines: missing, absent_nodes: absent, models }) {
  if (!missing) return null;
  const waiting = joinNames(models.filter(({ state }) => state === "loading").map(({ model }) => model));
  const text = `${waiting ? `Loading ${waiting}` : "The server"} waits for ${counted(missing, "more machine")}.`;
  if (!absent.length) return { key: "awaited", tone: "busy", text, awaitsMachine: true };
  const known = joinNames(absent);
  return {
    key: "awaited",
    tone: "busy",
    text:
      absent.length > 1
        ? `${text} ${known} are not connected yet: they join by themselves while mlx-ring runs there.`
        : `${text} ${known} is not connected yet: it joins by itself while mlx-ring runs there.`,
    awaitsMachine: true,
  };
}

/**
 * @param {ServedModelStatus} model
 * @param {InstanceStatus[]} allInstances
 * @returns {StatusNotice[]}
 */
function describeModel({ model, state, reason }, allInstances) {
  const instances = allInstances.filter((instance) => instance.model === model);
  if (state === "loading" || instances.some((instance) => instance.state === "loading")) {
    const text = instances.length
      ? `${model} is loading: ${loadingProgress(instances)}`
      : (reason ?? `${model} is loading.`);
    return [{ key: `loading ${model}`, tone: "busy", text }];
  }
  if (state === "unavailable") {
    return [{ key: `unavailable ${model}`, tone: "bad", text: `${model} is unavailable. ${reason ?? ""}` }];
  }
  if (state === "unloaded") {
    const failure = reason ? ` The last load failed: ${reason}` : "";
    const text = `${model} is not loaded. The next request loads it.${failure}`;
    return [{ key: `unloaded ${model}`, tone: "note", text }];
  }
  return instances
    .filter((instance) => instance.state === "unavailable")
    .map((instance) => ({
      key: `unavailable instance ${instance.name}`,
      tone: "bad",
      text: `${capitalized(describeInstance(instance, allInstances))} is unavailable. ${
        instance.reason ?? ""
      } Other replicas serve its requests.`,
    }));
}

/** @param {string} text */
const capitalized = (text) => `${text[0]?.toUpperCase() ?? ""}${text.slice(1)}`;

/**
 * Return an instance's name for people: its model's, and which replica it is where there are several.
 * @param {Pick<InstanceStatus, "name" | "model"> | undefined} instance
 * @param {Pick<InstanceStatus, "name" | "model">[]} all
 */
export function describeInstance(instance, all) {
  const own = all.filter(({ model }) => model === instance?.model);
  const place = own.findIndex(({ name }) => name === instance?.name);
  return own.length > 1 ? `replica ${place + 1} of ${instance?.model}` : (instance?.model ?? "");
}

/** @param {InstanceStatus[]} instances */
function loadingProgress(instances) {
  const loadings = instances.flatMap((instance) => instance.stages.map((stage) => stage.loading));
  const total = loadings.reduce((sum, loading) => sum + loading.bytes_to_load, 0);
  if (!total) return "its machines are starting.";
  const done = loadings.reduce((sum, loading) => sum + loading.bytes_loaded, 0);
  return `${percent(done / total)} of ${bytes(total)} of weights loaded.`;
}

/**
 * Describe nodes that are missing or quarantined. Times are the server's: the browser's clock may differ.
 * @param {ClusterState} state
 * @returns {StatusNotice[]}
 */
function describeNodes({ cluster, time }) {
  const names = nodeNames(cluster);
  return cluster.nodes.flatMap((node) => {
    /** @type {StatusNotice[]} */
    const notices = [];
    const cause = node.reason ? `: ${node.reason}` : ".";
    const name = names.get(node.id) ?? node.id;
    if (node.state === "gone")
      notices.push({ key: `ended ${node.id}`, tone: "bad", text: `${name} is disconnected${cause}` });
    if (node.state === "quarantined") {
      const minutes = Math.max(1, Math.round(((node.quarantined_until ?? time) - time) / 60));
      const text = `${name} is quarantined for ${counted(minutes, "minute")}${cause}`;
      notices.push({ key: `quarantined ${node.id}`, tone: "busy", text });
    }
    return notices;
  });
}

/**
 * Return where a model runs. Empty if it is not loaded.
 * @param {ClusterStatus} cluster
 * @param {string | null} model
 */
export function describePlacement(cluster, model) {
  const instances = cluster.instances.filter((each) => each.model === model);
  const instance = instances.at(0);
  if (!instance) return "";
  const names = nodeNames(cluster);
  const nodes = new Set(instances.flatMap(({ stages: own }) => own.flatMap(stageNodes)));
  const machines = joinNames([...nodes].map((id) => names.get(id) ?? id));
  if (instances.length > 1) return `It runs on ${machines}, in ${instances.length} replicas.`;
  const stages = instance.stages.length;
  const layers = counted(instance.layers, "layer");
  const split = stages > 1 ? `with ${layers} in ${stages} stages` : `with all ${layers} in one stage`;
  return `It runs on ${machines}, ${split}.`;
}

/**
 * Return a display name for each node's id. Machines that share a name keep their ids.
 * @param {Pick<ClusterStatus, "nodes">} cluster
 * @returns {Map<string, string>}
 */
export function nodeNames({ nodes }) {
  const count = new Map();
  for (const { name } of nodes) count.set(name, (count.get(name) ?? 0) + 1);
  return new Map(nodes.map(({ id, name }) => [id, count.get(name) > 1 ? id : name]));
}

/** @param {StageStatus} stage */
function stageNodes(stage) {
  return stage.ranks.length ? stage.ranks.map((rank) => rank.node) : [stage.node];
}

/** @param {string[]} names */
function joinNames(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}
