"""Metrics of models, instances, workers, nodes and links."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.metrics_core import Metric

from mlx_ring.api.context import workers_of
from mlx_ring.api.metrics.requests import (
    MODEL,
    RANK,
    Labels,
    MeteredReplica,
    by_error,
    counter,
    gauge,
    one_of,
)
from mlx_ring.api.ops.status import ClusterParts, HungBackendStatus, NodeState, NodeStatus
from mlx_ring.api.service import LinkInfo, ModelService, State
from mlx_ring.core.errors import GroupStuck, LinkLost, NodeLost, WorkerLost, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.core.worker_status import MEMORY, LinkUse, WorkerInfo
from mlx_ring.rpc.backends import BACKENDS

_LOSSES = (WorkerLost, NodeLost, LinkLost, WorkerStuck, GroupStuck)


class LinkCounts:
    """Totals of the links' traffic. A worker's own counts restart with its process; these continue."""

    def __init__(self) -> None:
        self._last: dict[Labels, tuple[int, Sequence[int]]] = {}
        """The worker's process and last report, by link."""
        self.total: dict[Labels, list[int]] = {}

    def update(self, link: Labels, pid: int, use: LinkUse) -> None:
        """Add the growth since the worker's last report."""
        now = (use.frames, use.tensor_bytes, use.sent_bytes)
        before, counted = self._last.get(link, (pid, (0, 0, 0)))
        if before != pid or now[0] < counted[0]:
            counted = (0, 0, 0)
        total = self.total.setdefault(link, [0, 0, 0])
        for place, (value, seen) in enumerate(zip(now, counted, strict=True)):
            total[place] += value - seen
        self._last[link] = (pid, now)


def instance_families(replicas: Sequence[MeteredReplica], models: Sequence[ModelService]) -> Iterator[Metric]:
    """Yield the metrics of models and their instances.

    A number that another replica has replaced is no instance that is down, so it has no `instance_up`.
    """
    loaded = {model.model_id for model in models if model.instances}
    yield gauge(
        "model_state",
        "1 for the current state of a model.",
        ("model_name", "state"),
        [sample for model in models for sample in one_of(get_args(State), model.state, (model.model_id,))],
    )
    yield gauge(
        "instance_up",
        "Whether an instance answers requests.",
        MODEL,
        [
            (each.labels, float(each.stats is not None))
            for each in replicas
            if each.instance is not None or each.labels[0] not in loaded
        ],
    )
    yield gauge(
        "instance_info",
        "Constant 1, labelled with an instance's name and epoch.",
        (*MODEL, "name", "epoch"),
        [
            ((*each.labels, each.instance.info.name, str(each.instance.info.epoch)), 1.0)
            for each in replicas
            if each.instance is not None
        ],
    )
    yield counter(
        "instance_starts",
        "Times that an instance began to serve: the first, and after each loss.",
        MODEL,
        [(each.labels, each.meter.loads) for each in replicas],
    )
    yield counter(
        "instance_losses",
        "Times that an instance was lost or could not be loaded, by the kind of error.",
        (*MODEL, "error"),
        by_error(((each.labels, each.meter.losses) for each in replicas), _LOSSES),
    )


Workers = Sequence[tuple[Labels, WorkerInfo]]


def workers_now(replicas: Sequence[MeteredReplica]) -> Workers:
    """Return every worker with its labels."""
    return [
        ((*each.labels, str(worker.stage), str(worker.rank), worker.node), worker)
        for each in replicas
        if each.instance is not None
        for worker in workers_of(each.instance)
    ]


def worker_families(
    replicas: Sequence[MeteredReplica], workers: Workers, links: LinkCounts
) -> Iterator[Metric]:
    """Yield the metrics of the workers' memory and links."""
    for field, metric in MEMORY.items():
        held = [(labels, worker.memory_by_name[field]) for labels, worker in workers]
        yield gauge(metric.name, metric.help, RANK, held)
    limits = [
        ((*each.labels, str(place.stage), str(place.rank), _node(workers, each, place)), use)
        for each in replicas
        if each.stats is not None
        for place, use in each.stats.cache.ranks.items()
    ]
    yield gauge(
        "worker_kv_limit_bytes",
        "Limit of a worker's KV memory.",
        RANK,
        [(labels, use.limit_bytes) for labels, use in limits],
    )
    yield gauge(
        "worker_kv_kept_bytes",
        "Part of a worker's KV that is kept from ended requests: as accounted in whole blocks, up to all that it holds.",
        RANK,
        [(labels, min(use.kept_bytes, use.held_bytes)) for labels, use in limits],
    )
    for labels, worker in workers:
        # Workers count only links that may compress.
        if worker.sends is not None and worker.sends.frames:
            links.update(labels, worker.pid, worker.sends)
    for place, (name, help_text) in enumerate(
        (
            ("link_frames", "Tensors sent to the next stage on another machine."),
            ("link_tensor_bytes", "Their bytes."),
            ("link_sent_bytes", "Bytes of these tensors on the network."),
        )
    ):
        yield counter(
            name, help_text, RANK, [(labels, total[place]) for labels, total in links.total.items()]
        )


def _node(workers: Workers, replica: MeteredReplica, place: RankId) -> str:
    for labels, worker in workers:
        if labels[:2] == replica.labels and (worker.stage, worker.rank) == place:
            return worker.node
    return ""


def node_families(nodes: Sequence[NodeStatus], workers: Workers) -> Iterator[Metric]:
    """Yield the metrics of the nodes' state and memory."""
    yield gauge(
        "node_state",
        "1 for the current state of a node.",
        ("node", "state"),
        [sample for node in nodes for sample in one_of(get_args(NodeState), node.state, (node.id,))],
    )
    ratios = {
        (node.id, kind): ratio
        for node in nodes
        for kind, ratio in node.step_time_ratios.model_dump(exclude={"overhead_s", "alone_s"}).items()
    }
    yield gauge(
        "step_time_ratio",
        "Measured over predicted time of a node's steps, by their kind; 1 before enough steps.",
        ("node", "kind"),
        [*ratios.items()],
    )
    present = [node for node in nodes if node.state != "gone"]
    yielding = {node.id: node.yielding for node in present if node.yielding is not None}
    yield gauge(
        "node_yields",
        "1 while a node yields to its user, else 0.",
        ("node",),
        [((node.id,), float(node.id in yielding)) for node in present],
    )
    yield gauge(
        "node_speed_share",
        "Share of a node's speed that its user leaves, as plans count it.",
        ("node",),
        [((node.id,), yielding[node.id].speed_share if node.id in yielding else 1.0) for node in present],
    )
    here = [worker for _, worker in workers]
    limits = {worker.node: worker.memory_bytes for worker in here if worker.memory_bytes}
    free = {worker.node: worker.memory_left_bytes for worker in here if worker.memory_bytes}
    for node in nodes:
        if node.memory is not None:
            limits[node.id] = node.memory.total_bytes
            if node.memory.free_bytes is not None:
                free[node.id] = node.memory.free_bytes
    used = _by_node(here, "rss_bytes")
    weights, kv = _by_node(here, "weight_bytes"), _by_node(here, "kv_bytes")
    for name, help_text, values in (
        ("limit", "Usable memory of a node's device.", limits),
        ("free", "Free memory of a node's device.", free),
        ("used", "Resident memory of a node's workers.", used),
        ("weight", "Weights that a node's workers hold.", weights),
        ("kv", "Keys and values that a node's workers hold.", kv),
    ):
        yield gauge(
            f"node_memory_{name}_bytes",
            help_text,
            ("node",),
            [((node.id,), values[node.id]) for node in nodes if node.id in values],
        )


def energy_families(cluster: ClusterParts) -> Iterator[Metric]:
    """Yield the metrics of the nodes' energy, as far as they count it."""
    uses = [((node.id, used.part), used) for node in cluster.nodes for used in node.energy]
    yield counter(
        "node_energy_joules",
        "Energy of a part of a node, by its own counter.",
        ("node", "part"),
        [(labels, used.joules) for labels, used in uses],
    )
    yield gauge(
        "node_power_watts",
        "Mean power of a part of a node during the last seconds.",
        ("node", "part"),
        [(labels, used.watts) for labels, used in uses if used.watts is not None],
    )
    each = cluster.joules_per_token
    yield gauge(
        "energy_per_token_joules",
        "Energy of the computing nodes per generated token, during the last minute.",
        (),
        [] if each is None else [((), each)],
    )


def backend_families(hung: Sequence[HungBackendStatus]) -> Iterator[Metric]:
    """Yield the metrics of MLX backends whose groups hung."""
    counts: Counter[str] = Counter(dict.fromkeys(BACKENDS, 0))
    for each in hung:
        counts[each.backend] += each.hangs
    yield counter(
        "group_hangs",
        "Times that a group of workers hung although all of them answered, by MLX's backend.",
        ("backend",),
        [((backend,), count) for backend, count in counts.items()],
    )
    yield gauge(
        "backend_barred",
        "1 while plans avoid a backend of MLX between two nodes, 0 afterwards; without nodes: everywhere.",
        ("backend", "nodes"),
        [((each.backend, " ".join(each.nodes or ())), float(each.barred_until is not None)) for each in hung],
    )


def _by_node(workers: Sequence[WorkerInfo], field: str) -> Mapping[str, int]:
    held: defaultdict[str, int] = defaultdict(int)
    for worker in workers:
        held[worker.node] += worker.memory_by_name[field]
    return held


def link_families(links: Sequence[LinkInfo]) -> Iterator[Metric]:
    """Yield the measurements of links between nodes."""
    labels = ("source", "target")
    works = [link for link in links if not link.problem]
    yield gauge(
        "link_up",
        "1 if one node reaches another, else 0.",
        labels,
        [((link.source, link.target), float(not link.problem)) for link in links],
    )
    yield gauge(
        "link_round_trip_seconds",
        "Round trip from one node to another.",
        labels,
        [((link.source, link.target), link.round_trip_s) for link in works],
    )
    yield gauge(
        "link_bytes_per_second",
        "Throughput from one node to another.",
        labels,
        [((link.source, link.target), link.bytes_per_s) for link in works],
    )
