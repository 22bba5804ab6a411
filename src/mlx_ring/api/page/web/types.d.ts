// The server's data, as far as the page reads it. `/openapi.json` describes all fields.
// Only the type checker reads this file: browsers never load it.

// ---- GET /cluster/events

export interface ClusterState {
  /** The server's clock, in Unix seconds. */
  time: number;
  version: string;
  /** Unix seconds when the server started. */
  began: number;
  draining: boolean;
  cluster: ClusterStatus;
  cache: CacheStats;
  /** By instance. */
  pace: Record<string, Pace>;
  requests: RequestStatus[];
}

export interface PatchOperation {
  op: "add" | "remove" | "replace";
  path: string;
  value?: unknown;
}

export interface LogLine {
  number: number;
  unix_time_s: number;
  level: string;
  process: string;
  logger: string;
  text: string;
}

/** Rates of the last second. Null where nothing was measured. */
export interface Pace {
  tokens_per_s: number | null;
  prompt_tokens_per_s: number | null;
  stages: StageShares[];
}

/** Shares of the last second, from 0 to 1. */
export interface StageShares {
  stage: number;
  compute: number;
  link: number;
  under_way: number;
}

export interface RequestStatus {
  id: string;
  model: string;
  state: "waiting" | "reading" | "answering";
  prompt_tokens: number;
  cached_tokens: number;
  /** Prompt tokens after prefill. */
  read_tokens: number;
  tokens: number;
  age_s: number;
}

// ---- cluster

export interface ClusterStatus {
  model: string;
  nodes: NodeStatus[];
  instances: InstanceStatus[];
  devices: Device[];
  models: ModelStatus[];
  links: Link[];
}

export type ModelState = "ready" | "loading" | "unavailable" | "unloaded";

export interface ModelStatus {
  model: string;
  state: ModelState;
  reason: string | null;
  instances: { instance: string; running: number; waiting: number }[];
}

export interface NodeStatus {
  id: string;
  name: string;
  address: string | null;
  is_head: boolean;
  state: "attending" | "gone" | "quarantined";
  reason: string | null;
  quarantined_until: number | null;
  memory: NodeMemory | null;
  profile: NodeProfile | null;
}

export interface NodeMemory {
  total_bytes: number;
  reserve_bytes: number;
  promised_bytes: number | null;
  free_bytes: number | null;
}

export interface NodeProfile {
  device_name: string;
  cores: number;
  rates: { weights: string; bytes_per_s: number; flops: number }[];
}

export interface InstanceStatus {
  name: string;
  model: string;
  epoch: number;
  state: "loading" | "ready" | "unavailable";
  reason: string | null;
  layers: number;
  stages: StageStatus[];
  stream: { predicted_tokens_per_s: number | null; measured_tokens_per_s: number | null } | null;
  promise: { sequences: number; context_tokens: number; strategy: string | null } | null;
  left_out: { node: string; why: string }[];
  remarks: string[];
}

export interface StageStatus {
  stage: number;
  node: string;
  /** Half-open range: first layer, and the one after the last. */
  layers: [number, number];
  loading: LoadingStatus;
  ranks: RankStatus[];
  group: { backend: string; why: string } | null;
  times: { decode: StepStatus[] };
}

export interface LoadingStatus {
  phase: string;
  bytes_fetched: number;
  bytes_to_fetch: number;
  bytes_loaded: number;
  bytes_to_load: number;
}

export interface StepStatus {
  measured_ms: number | null;
  predicted_ms: number | null;
}

export interface RankStatus {
  rank: number;
  node: string;
  pid: number;
  alive: boolean;
  used: { weight_bytes: number; kv_bytes: number; device_bytes: number; peak_bytes: number };
}

/** A worker and its device. */
export interface Device {
  instance: string;
  node: string;
  stage: number;
  rank: number;
  device: string;
  dtype: string | null;
  blas: string | null;
  alive: boolean;
  device_memory_bytes: number;
  rss_bytes: number;
  device_limit_bytes: number | null;
  device_left_bytes: number | null;
}

export type Link = {
  from: string;
  to: string;
  carries_activations: boolean;
  compresses: boolean;
  why: string;
} & ({ problem: string } | { problem: null; round_trip_us: number; bytes_per_s: number });

// ---- caches

export interface CacheStats {
  kv_bytes: number;
  sequences: number;
  running: number;
  waiting: number;
  num_preemptions: number;
  prefix_cache: PrefixCache;
  speculation: { draft_tokens: number; acceptance: number | null } | null;
  workers: CacheWorker[];
}

export type PrefixCache = { enabled: boolean } & Partial<PrefixCounts>;

/** Counts of all instances. They are missing while no instance serves. */
export interface PrefixCounts {
  queries: number;
  hits: number;
  query_tokens: number;
  hit_tokens: number;
  entries: number;
  entry_tokens: number;
  evictions: number;
}

export interface CacheWorker {
  instance: string;
  stage: number;
  rank: number;
  limit_bytes?: number | null;
}

// ---- models and chat completions

export interface ModelEntry {
  id: string;
  capabilities?: string[];
  reasoning_efforts?: string[];
}

export interface CompletionChunk {
  choices?: { delta?: CompletionDelta; finish_reason?: string | null }[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens?: number } | null;
  } | null;
  performance?: { generation_tokens_per_second?: number | null } | null;
  error?: { message?: string; code?: string };
}

export interface CompletionDelta {
  content?: string | null;
  reasoning?: string | null;
  reasoning_content?: string | null;
  tool_calls?: ToolCallDelta[];
}

export interface ToolCallDelta {
  index?: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}
