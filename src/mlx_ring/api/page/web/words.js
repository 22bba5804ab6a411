// How things stand, in words.

import { bytes, counted, percent } from "./format.js";

/** Of the whole: `tone` is "good", "busy" or "bad"; `short` for a corner, `notices` for the page: {tone, text}. */
export function standing({ connection, state, trouble }) {
  if (state === null) {
    if (connection === "lost") return { tone: "bad", short: "not reached", notices: [], where: "" };
    return { tone: "busy", short: "connecting", notices: [], where: "" };
  }
  const { tone, short } = connection === "lost" ? { tone: "bad", short: "connection lost" } : overall(state);
  const ending = state.draining ? [{ tone: "busy", text: "The server is shutting down: it finishes what it has, and takes nothing new." }] : [];
  return { tone, short, notices: [...ending, ...ofModels(state), ...ofNodes(state)], where: where(state), trouble };
}

function overall({ cluster, draining }) {
  if (draining) return { tone: "busy", short: "shutting down" };
  const states = cluster.models.map((model) => model.state);
  if (states.includes("ready")) {
    const isWhole = cluster.nodes.every((node) => node.state === "attending") && !states.includes("unavailable");
    return isWhole ? { tone: "good", short: "ready" } : { tone: "busy", short: "ready, not whole" };
  }
  if (states.includes("loading")) return { tone: "busy", short: "loading" };
  if (states.includes("unavailable")) return { tone: "bad", short: "cannot answer" };
  return { tone: "busy", short: "not loaded" };
}

function ofModels({ cluster }) {
  return cluster.models.flatMap((model) => {
    const instances = cluster.instances.filter((instance) => instance.model === model.model);
    const isLoading = model.state === "loading" || instances.some((instance) => instance.state === "loading");
    if (isLoading && !instances.length) return [{ tone: "busy", text: model.reason ?? `${model.model} is being loaded.` }];
    if (isLoading) return [{ tone: "busy", text: `${model.model} is being loaded: ${howFar(instances)}` }];
    if (model.state === "unavailable") return [{ tone: "bad", text: `${model.model} cannot answer. ${model.reason ?? ""}` }];
    if (model.state === "unloaded") {
      const why = model.reason ? ` It was not loaded before: ${model.reason}` : "";
      return [{ tone: "note", text: `${model.model} is not loaded; the next question to it loads it.${why}` }];
    }
    return instances
      .filter((instance) => instance.state === "unavailable")
      .map((instance) => ({ tone: "bad", text: `${instance.name} is lost. ${instance.reason ?? ""} Others answer.` }));
  });
}

function howFar(instances) {
  const loadings = instances.flatMap((instance) => instance.stages.map((stage) => stage.loading));
  const total = loadings.reduce((sum, loading) => sum + loading.bytes_to_load, 0);
  if (!total) return "its machines are getting ready.";
  const done = loadings.reduce((sum, loading) => sum + loading.bytes_loaded, 0);
  return `${percent(done / total)} of ${bytes(total)} of weights are there.`;
}

/** By the server's clock: the browser's may be another. */
function ofNodes({ cluster, time }) {
  const names = nodeNames(cluster);
  return cluster.nodes.flatMap((node) => {
    const why = node.reason ? `: ${node.reason}` : ".";
    if (node.state === "gone") return [{ tone: "bad", text: `${names.get(node.id)} is gone${why}` }];
    if (node.state === "quarantined") {
      const minutes = Math.max(1, Math.round((node.quarantined_until - time) / 60));
      return [{ tone: "busy", text: `${names.get(node.id)} is left out for ${counted(minutes, "minute")}${why}` }];
    }
    return [];
  });
}

function where({ cluster }) {
  const [instance] = cluster.instances;
  if (!instance) return "";
  const names = nodeNames(cluster);
  const nodes = [...new Set(instance.stages.flatMap((stage) => rankNodes(stage)))].map((id) => names.get(id) ?? id);
  const stages = instance.stages.length;
  const split = stages > 1 ? `its ${instance.layers} layers split over ${stages} stages` : `all ${instance.layers} layers in one stage`;
  return `It runs on ${listed(nodes)}, ${split}.`;
}

/** Of nodes by their ids: two machines of one name keep them. */
export function nodeNames({ nodes }) {
  const count = new Map();
  for (const { name } of nodes) count.set(name, (count.get(name) ?? 0) + 1);
  return new Map(nodes.map(({ id, name }) => [id, count.get(name) > 1 ? id : name]));
}

export function rankNodes(stage) {
  return stage.ranks.length ? stage.ranks.map((rank) => rank.node) : [stage.node];
}

function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}
