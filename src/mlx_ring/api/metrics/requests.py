"""Metrics of requests and steps, by model and instance. Where vLLM has the same metric, it has vLLM's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mlx_ring.api.journal import Journal, JournalStats
from mlx_ring.api.middleware.telemetry import HttpMeter
from mlx_ring.api.service import ModelService, ServedInstance
from mlx_ring.core.engine_stats import Distribution, EngineStats, Meter
from mlx_ring.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    GroupStuck,
    NodeLost,
    NotReady,
    Overloaded,
    RepeatedLoss,
    RingError,
    StepFailed,
    WorkerLost,
    WorkerStuck,
)
from mlx_ring.core.types import WAYS, RankId

PREFIX = "mlx_ring_"
MODEL = ("model_name", "instance")
"""Labels of a replica. Its number stays the same when it is loaded again."""
RANK = (*MODEL, "stage", "rank", "node")

Labels = Sequence[str]
Samples = Iterable[tuple[Labels, float]]


def gauge(name: str, help_text: str, labels: Labels, samples: Samples) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def counter(name: str, help_text: str, labels: Labels, samples: Samples) -> Metric:
    """Create a counter. Its `name` has no `_total`, which is added on output."""
    family = CounterMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def histogram(
    name: str, help_text: str, labels: Labels, samples: Iterable[tuple[Labels, Distribution]]
) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, seen in samples:
        family.add_metric(values, _buckets(seen), seen.total)
    return family


def _buckets(seen: Distribution) -> list[tuple[str, float]]:
    """Return the cumulative count up to each bound."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*map(str, seen.bounds), "+Inf"), seen.counts, strict=True):
        below += count
        buckets.append((bound, below))
    return buckets


def by_error(
    counts: Iterable[tuple[Labels, Mapping[str, int]]], usual: Iterable[type[RingError]]
) -> list[tuple[Labels, int]]:
    """Return samples of counts by error, with 0 for the usual ones.

    Prometheus sees no growth in a series that starts with 1.
    """
    zeros = dict.fromkeys((error.__name__ for error in usual), 0)
    return [
        ((*labels, error), count) for labels, own in counts for error, count in (zeros | dict(own)).items()
    ]


def one_of(names: Iterable[str], is_one: str, labels: Labels) -> Samples:
    """Yield a sample for each possible state: 1 for the present one, 0 for the others."""
    for name in names:
        yield (*labels, name), float(name == is_one)


_REASONS = ("stop", "length", "abort", "error")
_FAILURES = (WorkerLost, NodeLost, WorkerStuck, GroupStuck, StepFailed, DeadlineExceeded)
_GIVEN_UP = (NotReady, RepeatedLoss, ContextExceeded, DeadlineExceeded)
_REFUSALS = (Overloaded, ContextExceeded, NotReady)
_TIMES = (
    ("time_to_first_token_seconds", "first_token_s", "Time from a request's arrival to its first token."),
    ("inter_token_latency_seconds", "between_tokens_s", "Time from one token of an answer to the next."),
    ("e2e_request_latency_seconds", "whole_s", "Time from a request's arrival to its answer's end."),
    ("request_queue_time_seconds", "queue_s", "Time from a request's arrival to its admission."),
    ("request_prefill_time_seconds", "prefill_s", "Time from a request's admission to its first token."),
    ("request_decode_time_seconds", "decode_s", "Time from the first token to the last."),
    ("request_inference_time_seconds", "inference_s", "Time from a request's admission to its last token."),
    (
        "request_pause_seconds",
        "pause_s",
        "Time from the loss of a request's instance until another one took over.",
    ),
    ("request_prompt_tokens", "prompt_lengths", "Tokens of prompts."),
    ("request_generation_tokens", "answer_lengths", "Tokens of answers."),
)
_COUNTS = (
    (
        "prefix_cache_queries",
        "cache_query_tokens",
        "Tokens of prompts that were looked up in the prefix cache.",
    ),
    ("prefix_cache_hits", "cache_hit_tokens", "Prompt tokens that the prefix cache supplied."),
    ("prefix_cache_evictions", "cache_evictions", "Sequences that the prefix cache evicted."),
    ("kv_disk_restored_tokens", "cache_restored_tokens", "Tokens whose KV came from the machines' disks."),
    (
        "kv_peer_restored_tokens",
        "cache_peer_tokens",
        "Restored tokens of which a machine has read KV from another one's disk.",
    ),
    (
        "kv_disk_saved_tokens",
        "cache_saved_tokens",
        "Tokens whose KV the machines were asked to save on their disks.",
    ),
    (
        "kv_moved_tokens",
        "cache_moved_tokens",
        "Tokens whose KV came from the workers of another instance, when requests moved.",
    ),
    ("num_preemptions", "preemptions", "Number of preemptions; a preempted request is computed again."),
    ("spec_decode_num_drafts", "drafts", "Times that draft tokens were proposed."),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Draft tokens that were proposed."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Draft tokens that were accepted."),
    (
        "resume_redrawn_tokens",
        "resume_redrawn",
        "Delivered tokens that were drawn again when an answer was resumed.",
    ),
    ("resume_disagreements", "resume_disagreements", "Those of them that differed from the delivered ones."),
    ("steps_failed", "steps_failed", "Steps that failed, wholly or in part."),
)
_RESUME_WAYS = ("kept", "replayed")
_RANK_TIMES = (
    ("stage_compute_seconds", "compute_us", "Time that a stage computed."),
    (
        "stage_link_wait_seconds",
        "link_wait_us",
        "Time that a stage waited for the previous stage's activations.",
    ),
    ("stage_link_send_seconds", "link_send_us", "Time that a stage sent to the next one."),
    (
        "stage_queue_seconds",
        "queue_us",
        "Time that arrived steps waited for the step before, beside the other times.",
    ),
    ("stage_idle_seconds", "idle_us", "Time that a stage had no step."),
)


@dataclass(frozen=True, slots=True)
class MeteredReplica:
    """Measurements of a replica of a model, loaded or not."""

    labels: Labels
    meter: Meter
    instance: ServedInstance | None
    stats: EngineStats | None
    """Statistics of the engine; None while it does not serve."""


def replicas_of(model: ModelService) -> Iterator[MeteredReplica]:
    """Yield each replica that the model has or had, with its own meter, whose place is the replica's number."""
    instances = {instance.meter: instance for instance in model.instances}
    for number, meter in enumerate(model.meters):
        instance = instances.get(meter)
        stats = None if instance is None or instance.error is not None else instance.engine.stats()
        yield MeteredReplica((model.model_id, str(number)), meter, instance, stats)


def request_families(replicas: Sequence[MeteredReplica], models: Sequence[ModelService]) -> Iterator[Metric]:
    """Yield the metrics of requests."""
    running = [(each.labels, 0 if each.stats is None else each.stats.scheduler.running) for each in replicas]
    # Requests that wait for an instance belong to no replica, and count for the first one.
    held: dict[tuple[str, ...], int] = {(model.model_id, "0"): len(model.held_requests) for model in models}
    waiting = [
        (
            each.labels,
            held.get(tuple(each.labels), 0) + (0 if each.stats is None else each.stats.scheduler.waiting),
        )
        for each in replicas
    ]
    yield gauge("num_requests_running", "Requests that are being computed.", MODEL, running)
    yield gauge(
        "num_requests_waiting", "Queued requests, including those that wait for an instance.", MODEL, waiting
    )
    yield gauge(
        "kv_cache_usage_perc",
        "Share of the KV memory that running requests use, from 0 to 1, on the fullest rank.",
        MODEL,
        [(each.labels, _kv_usage(each.stats)) for each in replicas],
    )
    for name, help_text, field in (
        ("prompt_tokens", "Tokens of prompts, including cached ones.", "prompt_tokens"),
        ("generation_tokens", "Tokens that were generated.", "generated_tokens"),
        ("requests_resumed", "Interrupted requests that another instance took over.", "resumed"),
        ("requests_moved", "Requests that another instance took over while both served.", "moved"),
    ):
        yield counter(
            name, help_text, MODEL, [(each.labels, getattr(each.meter, field)) for each in replicas]
        )
    yield counter(
        "request_success",
        "Requests that ended, by reason.",
        (*MODEL, "finished_reason"),
        [((*each.labels, why), each.meter.finished[why]) for each in replicas for why in _REASONS],
    )
    yield counter(
        "request_failures",
        "Requests that ended with an error, by its kind.",
        (*MODEL, "error"),
        by_error(((each.labels, each.meter.failed) for each in replicas), _FAILURES),
    )
    yield counter(
        "requests_given_up",
        "Interrupted requests that were not continued, by the kind of error.",
        (*MODEL, "why"),
        by_error(((each.labels, each.meter.given_up) for each in replicas), _GIVEN_UP),
    )
    yield counter(
        "requests_rejected",
        "Requests that were refused on arrival, by the kind of error.",
        ("model_name", "error"),
        by_error((((model.model_id,), model.rejected) for model in models), _REFUSALS),
    )
    for name, field, help_text in _TIMES:
        yield histogram(
            name, help_text, MODEL, [(each.labels, getattr(each.meter, field)) for each in replicas]
        )
    yield histogram(
        "recovery_seconds",
        "Times of the parts of a recovery from the loss of an instance. The first token comes within the replay.",
        (*MODEL, "part"),
        [((*each.labels, part), seen) for each in replicas for part, seen in each.meter.recovery_s.items()],
    )
    for name, field, help_text in (
        (
            "way_back_predicted_seconds",
            "way_predicted_s",
            "Predicted time of the ways back that were chosen and have ended.",
        ),
        ("way_back_taken_seconds", "way_taken_s", "Time that the ways back took which were chosen."),
    ):
        samples = [(each.labels, getattr(each.meter, field)) for each in replicas]
        yield histogram(
            name,
            help_text,
            (*MODEL, "way"),
            [((*labels, way), by_way[way]) for labels, by_way in samples for way in WAYS],
        )


def _kv_usage(stats: EngineStats | None) -> float:
    if stats is None:
        return 0.0
    uses = [
        (use.used_bytes - use.kept_bytes) / use.limit_bytes
        for use in stats.cache.ranks.values()
        if use.limit_bytes
    ]
    return min(1.0, max(uses, default=0.0))


def step_families(replicas: Sequence[MeteredReplica]) -> Iterator[Metric]:
    """Yield the metrics of steps and of the ranks' time."""
    counts = [(each.labels, each.meter.counts()) for each in replicas]
    for name, field, help_text in _COUNTS:
        yield counter(name, help_text, MODEL, [(labels, values[field]) for labels, values in counts])
    yield counter(
        "resumed_tokens",
        "Known tokens of resumed requests. Way `replayed`: every stage computed them again. Way `kept`: stages behind "
        "the lost one kept their KV.",
        (*MODEL, "way"),
        [((*labels, way), values[f"resume_{way}"]) for labels, values in counts for way in _RESUME_WAYS],
    )
    ranks = [
        (_rank_labels(each.labels, place, node), totals)
        for each in replicas
        for (place, node), totals in each.meter.ranks().items()
    ]
    yield counter(
        "stage_steps", "Steps that were answered.", RANK, [(labels, totals.steps) for labels, totals in ranks]
    )
    for name, field, help_text in _RANK_TIMES:
        yield counter(
            name, help_text, RANK, [(labels, getattr(totals, field) / 1e6) for labels, totals in ranks]
        )


def _rank_labels(labels: Labels, place: RankId, node: str) -> Labels:
    return (*labels, str(place.stage), str(place.rank), node)


def journal_families(journal: Journal | None) -> Iterator[Metric]:
    """Yield the metrics of kept answers, which are 0 without a journal."""
    stats = JournalStats() if journal is None else journal.stats()
    states = {"running": stats.running, "suspended": stats.suspended, "ended": stats.ended}
    yield gauge("journal_bytes", "Size of the journal's contents on the disk.", (), [((), stats.bytes)])
    yield gauge(
        "journal_answers",
        "Answers that the journal keeps, by state. A suspended one continues when a client asks for it.",
        ("state",),
        [((state,), count) for state, count in states.items()],
    )
    yield counter(
        "journal_continued",
        "Kept answers that continued, for a client that came back or with another head.",
        (),
        [((), stats.continued)],
    )
    yield counter(
        "journal_lost",
        "Answers that the disk could not keep.",
        (),
        [((), stats.lost)],
    )


def http_families(meter: HttpMeter) -> Iterator[Metric]:
    """Yield the metrics of HTTP requests."""
    labels = ("method", "route", "status")
    yield counter("http_requests", "Requests over HTTP.", labels, meter.requests.items())
    yield histogram(
        "http_request_duration_seconds",
        "From a request's arrival to the last byte of its answer.",
        labels,
        meter.seconds.items(),
    )
    yield gauge(
        "http_requests_in_progress", "Requests that are being answered.", (), [((), meter.in_progress)]
    )
