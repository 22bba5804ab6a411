"""Rows of panels of the Grafana dashboard, with their queries."""

from __future__ import annotations

from dataclasses import dataclass

PICKED_MODEL = 'model_name=~"$model"'
PICKED = f'{PICKED_MODEL},instance=~"$instance"'
"""Label matchers for the variables at the top."""
Query = tuple[str, str]
"""PromQL and legend."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    maximum: float | None = None


def value(name: str, labels: str = PICKED) -> str:
    return f"mlx_ring_{name}{{{labels}}}"


def per_second(name: str, by: str, labels: str = PICKED) -> str:
    return f"sum by ({by}) (rate(mlx_ring_{name}_total{{{labels}}}[$__rate_interval]))"


def quantile(part: float, name: str, by: str = "model_name", labels: str = PICKED) -> str:
    rates = f"sum by ({by}, le) (rate(mlx_ring_{name}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({part}, {rates})"


def mean(name: str, by: str = "model_name") -> str:
    sums, counts = (
        f"sum by ({by}) (rate(mlx_ring_{name}_{part}{{{PICKED}}}[$__rate_interval]))"
        for part in ("sum", "count")
    )
    return f"{sums} / {counts}"


def quantiles(title: str, name: str, description: str, unit: str = "s") -> Panel:
    queries = tuple(
        (quantile(part, name), f"{{{{model_name}}}} p{round(100 * part)}") for part in (0.5, 0.95, 0.99)
    )
    return Panel(title, unit, queries, description)


def ratio(of: str, to: str) -> str:
    return f"{per_second(of, 'model_name')} / {per_second(to, 'model_name')}"


MODEL, RANK = "{{model_name}}", "{{model_name}} {{instance}}, stage {{stage}} rank {{rank}} on {{node}}"
BY_RANK = "model_name, instance, stage, rank, node"
"""Labels of a rank. Several models and replicas may have ranks of the same number on a node."""

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Overview",
        (
            Panel(
                "Running",
                "short",
                ((f"sum({value('num_requests_running')})", ""),),
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "Waiting",
                "short",
                ((f"sum({value('num_requests_waiting')})", ""),),
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "Tokens per second",
                "short",
                ((f"sum(rate(mlx_ring_generation_tokens_total{{{PICKED}}}[$__rate_interval]))", ""),),
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "KV cache usage",
                "percentunit",
                ((f"max({value('kv_cache_usage_perc')})", ""),),
                kind="stat",
                width=4,
                height=4,
                maximum=1,
            ),
            Panel(
                "First token, p95",
                "s",
                ((quantile(0.95, "time_to_first_token_seconds"), MODEL),),
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "Instances up",
                "short",
                ((f"sum({value('instance_up')})", ""),),
                kind="stat",
                width=4,
                height=4,
            ),
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "Running and waiting",
                "short",
                (
                    (f"sum by (model_name) ({value('num_requests_running')})", f"{MODEL} running"),
                    (f"sum by (model_name) ({value('num_requests_waiting')})", f"{MODEL} waiting"),
                ),
            ),
            Panel(
                "Finished requests, by reason",
                "reqps",
                ((per_second("request_success", "finished_reason"), "{{finished_reason}}"),),
                stacked=True,
            ),
            Panel(
                "Rejected and failed requests",
                "reqps",
                (
                    (per_second("requests_rejected", "error", PICKED_MODEL), "rejected: {{error}}"),
                    (per_second("request_failures", "error"), "failed: {{error}}"),
                ),
            ),
            Panel(
                "Interrupted and moved requests",
                "short",
                (
                    (per_second("requests_resumed", "model_name"), f"{MODEL} resumed"),
                    (per_second("requests_moved", "model_name"), f"{MODEL} moved"),
                    (per_second("resumed_tokens", "way"), "tokens {{way}}"),
                    (per_second("requests_given_up", "why"), "given up: {{why}}"),
                    (per_second("resume_redrawn_tokens", "model_name"), f"{MODEL} tokens drawn again"),
                    (per_second("resume_disagreements", "model_name"), f"{MODEL} of them different"),
                ),
                "Per second. Their instance was lost.",
            ),
            quantiles(
                "Pause of interrupted requests",
                "request_pause_seconds",
                "From the loss of an instance until another one took over.",
            ),
            Panel(
                "Recovery time by part",
                "s",
                ((mean("recovery_seconds", "model_name, part"), f"{MODEL} {{{{part}}}}"),),
                "Mean. The first token comes within the replay.",
            ),
            Panel(
                "Ways back: predicted and taken time",
                "s",
                (
                    (mean("way_back_predicted_seconds", "model_name, way"), f"{MODEL} {{{{way}}}} predicted"),
                    (mean("way_back_taken_seconds", "model_name, way"), f"{MODEL} {{{{way}}}} taken"),
                ),
                "Mean, by the way that was chosen.",
            ),
            quantiles(
                "Time to first token", "time_to_first_token_seconds", "From arrival to the first token."
            ),
            quantiles(
                "Inter-token latency", "inter_token_latency_seconds", "Time between two tokens of a response."
            ),
            quantiles(
                "End-to-end latency",
                "e2e_request_latency_seconds",
                "From arrival to the end of the response.",
            ),
            Panel(
                "Request time by phase",
                "s",
                tuple(
                    (mean(f"request_{part}_time_seconds"), f"{MODEL} {part}")
                    for part in ("queue", "prefill", "decode", "inference")
                ),
                "Mean. Inference is prefill plus decode.",
            ),
            Panel(
                "Tokens",
                "short",
                (
                    (per_second("prompt_tokens", "model_name"), f"{MODEL} prompts"),
                    (per_second("generation_tokens", "model_name"), f"{MODEL} responses"),
                ),
                "Per second.",
            ),
            Panel(
                "Lengths, p50 and p95",
                "short",
                tuple(
                    (quantile(part, f"request_{what}_tokens"), f"{MODEL} {what} p{round(100 * part)}")
                    for what in ("prompt", "generation")
                    for part in (0.5, 0.95)
                ),
            ),
        ),
    ),
    (
        "KV cache and speculative decoding",
        (
            Panel(
                "KV cache usage",
                "percentunit",
                ((value("kv_cache_usage_perc"), f"{MODEL} {{{{instance}}}}"),),
                "By running requests. The prefix cache does not count, because it can be evicted.",
                maximum=1,
            ),
            Panel(
                "Prefix cache hit rate",
                "percentunit",
                ((ratio("prefix_cache_hits", "prefix_cache_queries"), MODEL),),
                "Share of all prompt tokens.",
                maximum=1,
            ),
            Panel(
                "Preemptions and evictions",
                "short",
                (
                    (per_second("num_preemptions", "model_name"), f"{MODEL} preempted requests"),
                    (per_second("prefix_cache_evictions", "model_name"), f"{MODEL} evicted sequences"),
                ),
                "Per second.",
            ),
            Panel(
                "KV on disk and from other workers",
                "short",
                (
                    (per_second("kv_disk_restored_tokens", "model_name"), f"{MODEL} restored tokens"),
                    (
                        per_second("kv_peer_restored_tokens", "model_name"),
                        f"{MODEL} of them from other machines",
                    ),
                    (per_second("kv_disk_saved_tokens", "model_name"), f"{MODEL} saved tokens"),
                    (per_second("kv_moved_tokens", "model_name"), f"{MODEL} tokens moved between workers"),
                ),
                "Per second.",
            ),
            Panel(
                "Journal",
                "bytes",
                ((value("journal_bytes", ""), "size"),),
            ),
            Panel(
                "Answers in the journal",
                "short",
                (
                    (value("journal_answers", ""), "{{state}}"),
                    ("increase(mlx_ring_journal_continued_total[$__rate_interval])", "continued"),
                    ("increase(mlx_ring_journal_lost_total[$__rate_interval])", "lost"),
                ),
            ),
            Panel(
                "Draft acceptance rate",
                "percentunit",
                ((ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"), MODEL),),
                maximum=1,
            ),
            Panel(
                "Drafts",
                "short",
                ((per_second("spec_decode_num_drafts", "model_name"), MODEL),),
                "Per second.",
            ),
            Panel(
                "KV cache by worker",
                "bytes",
                (
                    (value("worker_kv_bytes"), f"total, {RANK}"),
                    (value("worker_kv_kept_bytes"), f"prefix cache, {RANK}"),
                    (value("worker_kv_limit_bytes"), f"limit, {RANK}"),
                ),
            ),
        ),
    ),
    (
        "Stages",
        (
            Panel(
                "Rank time by activity",
                "percentunit",
                tuple(
                    (per_second(f"stage_{part}_seconds", BY_RANK), f"{part.replace('_', ' ')}, {RANK}")
                    for part in ("compute", "link_wait", "link_send", "idle")
                ),
                "Seconds per second. The parts add up to one for each rank.",
                width=12,
            ),
            Panel(
                "Step time",
                "s",
                tuple(
                    (
                        f"{per_second(f'stage_{part}_seconds', BY_RANK)} / {per_second('stage_steps', BY_RANK)}",
                        f"{part.replace('_', ' ')}, {RANK}",
                    )
                    for part in ("compute", "link_wait", "link_send", "queue")
                ),
                "Mean.",
                width=12,
            ),
            Panel("Steps", "ops", ((per_second("stage_steps", BY_RANK), RANK),), width=12),
            Panel("Failed steps", "ops", ((per_second("steps_failed", "model_name"), MODEL),), width=12),
        ),
    ),
    (
        "Memory",
        (
            Panel(
                "By node",
                "bytes",
                tuple(
                    (value(f"node_memory_{what}_bytes", ""), f"{what}, {{{{node}}}}")
                    for what in ("limit", "free", "used", "weight", "kv")
                ),
                width=12,
            ),
            Panel(
                "By worker",
                "bytes",
                tuple(
                    (value(f"worker_{what}_bytes"), f"{what}, {RANK}")
                    for what in ("weight", "device", "peak", "resident")
                ),
                width=12,
            ),
        ),
    ),
    (
        "Cluster",
        (
            Panel(
                "Nodes", "short", ((f"{value('node_state', '')} == 1", "{{node}} {{state}}"),), kind="table"
            ),
            Panel(
                "Models",
                "short",
                ((f"{value('model_state', PICKED_MODEL)} == 1", "{{model_name}} {{state}}"),),
                kind="table",
            ),
            Panel(
                "Instances", "short", ((value("instance_info"), "{{name}}, epoch {{epoch}}"),), kind="table"
            ),
            Panel(
                "Instance starts and losses",
                "short",
                (
                    (
                        f"increase({value('instance_starts_total')}[$__rate_interval])",
                        f"{MODEL} {{{{instance}}}} started",
                    ),
                    (
                        f"increase({value('instance_losses_total')}[$__rate_interval])",
                        f"{MODEL} {{{{instance}}}} lost: {{{{error}}}}",
                    ),
                ),
            ),
            Panel(
                "Hung groups",
                "short",
                (
                    (f"increase({value('group_hangs_total', '')}[$__rate_interval])", "{{backend}} hung"),
                    (value("backend_barred", ""), "{{backend}} barred: {{nodes}}"),
                ),
            ),
            Panel(
                "Steps: measured over predicted time",
                "short",
                ((value("step_time_ratio", ""), "{{node}} {{kind}}"),),
            ),
            Panel(
                "Machines that yield to their users",
                "percentunit",
                (
                    (value("node_yields", ""), "{{node}} yields"),
                    (value("node_speed_share", ""), "{{node}}, share of its speed"),
                ),
                "1 while a node yields, and the share of its speed that plans count.",
                maximum=1.0,
            ),
            Panel(
                "Power",
                "watt",
                ((value("node_power_watts", ""), "{{node}} {{part}}"),),
                "Only of parts that count their energy.",
                stacked=True,
            ),
            Panel(
                "Energy in each minute",
                "joule",
                (("increase(mlx_ring_node_energy_joules_total{}[1m])", "{{node}} {{part}}"),),
                stacked=True,
            ),
            Panel(
                "Energy per generated token",
                "joule",
                ((value("energy_per_token_joules", ""), ""),),
                "All nodes that compute, during the last minute.",
            ),
            Panel(
                "Links: round trip",
                "s",
                ((value("link_round_trip_seconds", ""), "{{source}} to {{target}}"),),
            ),
            Panel(
                "Links: throughput",
                "Bps",
                ((value("link_bytes_per_second", ""), "{{source}} to {{target}}"),),
            ),
            Panel("Links up", "short", ((value("link_up", ""), "{{source}} to {{target}}"),), maximum=1),
            Panel(
                "Activations to other machines",
                "Bps",
                (
                    (per_second("link_tensor_bytes", BY_RANK), f"uncompressed, {RANK}"),
                    (per_second("link_sent_bytes", BY_RANK), f"sent, {RANK}"),
                ),
            ),
            Panel("Frames to other machines", "ops", ((per_second("link_frames", BY_RANK), RANK),)),
        ),
    ),
    (
        "HTTP and the head",
        (
            Panel(
                "Requests",
                "reqps",
                (
                    (
                        per_second("http_requests", "method, route, status", ""),
                        "{{method}} {{route}} {{status}}",
                    ),
                ),
            ),
            Panel(
                "Duration, p95",
                "s",
                (
                    (
                        quantile(0.95, "http_request_duration_seconds", "route, status", ""),
                        "{{route}} {{status}}",
                    ),
                ),
            ),
            Panel("Requests in progress", "short", ((value("http_requests_in_progress", ""), ""),)),
            Panel("Memory of the head", "bytes", (('process_resident_memory_bytes{job=~"$job"}', ""),)),
            Panel(
                "CPU of the head",
                "percentunit",
                (('rate(process_cpu_seconds_total{job=~"$job"}[$__rate_interval])', ""),),
            ),
            Panel("Tasks of the head", "short", ((value("head_tasks", ""), ""),)),
            Panel("Uptime", "s", ((value("uptime_seconds", ""), ""),), kind="stat"),
            Panel("Version", "short", ((value("build_info", ""), "{{version}}"),), kind="table"),
        ),
    ),
)
