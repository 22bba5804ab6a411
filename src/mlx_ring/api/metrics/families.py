"""Families of metrics, as Prometheus' client writes them, with names and labels of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mlx_ring.core.errors import RingError
from mlx_ring.engine.meters import Distribution

PREFIX = "mlx_ring_"
MODEL = ("model_name", "instance")
"""A replica of a model: its number stays, whatever is loaded again."""
RANK = (*MODEL, "stage", "rank", "node")

Labels = Sequence[str]
Told = Iterable[tuple[Labels, float]]


def gauge(name: str, about: str, labels: Labels, told: Told) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, about, labels=labels)
    for values, value in told:
        family.add_metric(values, value)
    return family


def counter(name: str, about: str, labels: Labels, told: Told) -> Metric:
    """`name` without the `_total` that it is written with."""
    family = CounterMetricFamily(PREFIX + name, about, labels=labels)
    for values, value in told:
        family.add_metric(values, value)
    return family


def histogram(name: str, about: str, labels: Labels, told: Iterable[tuple[Labels, Distribution]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, about, labels=labels)
    for values, seen in told:
        family.add_metric(values, _buckets(seen), seen.total)
    return family


def _buckets(seen: Distribution) -> list[tuple[str, float]]:
    """How many lie up to each bound, those below it included."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*map(str, seen.bounds), "+Inf"), seen.counts, strict=True):
        below += count
        buckets.append((bound, below))
    return buckets


def from_nothing(counts: Mapping[str, int], usual: Sequence[type[RingError]]) -> Mapping[str, int]:
    """Counts by error, 0 for the usual ones: of a series that begins with 1, Prometheus sees no growth."""
    return dict.fromkeys((error.__name__ for error in usual), 0) | dict(counts)


def one_of(names: Iterable[str], is_one: str, labels: Labels) -> Told:
    """A state, as a series for each that there can be: 1 for the one that is, 0 for the others."""
    for name in names:
        yield (*labels, name), float(name == is_one)
