"""Content of `/cluster/status`. Pure.

Nodes come from the membership; instances come from plans, workers and measured steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from mlx_ring.api.ops.status import (
    EnergyStatus,
    GroupStatus,
    InstanceState,
    InstanceStatus,
    LeftOutStatus,
    LoadingStatus,
    NodeMemory,
    NodeState,
    NodeStatus,
    ProfileStatus,
    Promise,
    PromisedMemory,
    RankStatus,
    RateStatus,
    RecoveryStatus,
    StageMemory,
    StageStatus,
    StepTimeRatios,
    StreamStatus,
    UsedMemory,
    YieldingStatus,
)
from mlx_ring.cluster.membership import FormerMember, Member, Membership
from mlx_ring.cluster.quarantine import HungBackend, Quarantine
from mlx_ring.core.types import LayerRange, RankId
from mlx_ring.core.worker_status import WorkerInfo
from mlx_ring.engine.step_times import StepTimes, StreamPace
from mlx_ring.head.step_speeds import stage_times
from mlx_ring.host.energy import PartEnergy
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.yielding import Yielding
from mlx_ring.planner.forecast import Forecast
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import StepRatios
from mlx_ring.rpc.protos import agent_pb2


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The head's machines at this moment."""

    own: str
    """The head's node."""
    membership: Membership = field(default_factory=Membership)
    held: Mapping[str, Quarantine] = field(default_factory=dict[str, Quarantine])
    hung: Sequence[HungBackend] = ()
    missing: int = 0
    """Number of machines that must still join before anything is loaded."""
    enrolled: Collection[str] = ()
    """Nodes with a certificate of the cluster, connected or not."""
    own_energy: Sequence[PartEnergy] = ()
    """Energy of a single machine without a profile, which is no member."""
    own_yielding: Yielding | None = None
    """State of such a machine if it yields to its user."""

    @property
    def absent(self) -> list[str]:
        """Other enrolled nodes that are not connected: they left, have not rejoined yet, or are just joining."""
        return sorted({*self.enrolled} - {self.own} - self.membership.members.keys())


_FETCH = "fetch"


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Loading progress of one rank, in bytes. A total of 0 is not known yet."""

    phase: str = "starting"
    """Phase: `starting`, `fetch`, then the worker's own: `weights`, `kernels`, `warm-up`, `ready`."""
    bytes_fetched: int = 0
    """Bytes that its node fetched from other machines, for all ranks there."""
    bytes_to_fetch: int = 0
    bytes_loaded: int = 0
    """Bytes that the rank loaded into memory."""
    bytes_to_load: int = 0


class LoadingProgress:
    """Loading progress of all ranks of an instance."""

    def __init__(self) -> None:
        self._ranks: dict[RankId, RankProgress] = {}

    def record(self, progress: agent_pb2.StageProgress) -> None:
        """Record a report of a rank's loading."""
        rank, report = RankId(progress.stage, progress.rank), progress.progress
        before = self._ranks.get(rank, RankProgress())
        if report.phase == _FETCH:
            self._ranks[rank] = replace(
                before, phase=_FETCH, bytes_fetched=report.bytes_loaded, bytes_to_fetch=report.bytes_total
            )
            return
        self._ranks[rank] = replace(
            before,
            phase="ready" if report.ready else report.phase or before.phase,
            bytes_loaded=max(before.bytes_loaded, report.bytes_loaded),
            bytes_to_load=max(before.bytes_to_load, report.bytes_total),
        )

    def of(self, rank: RankId) -> RankProgress:
        """Return the progress of a rank; its phase is `group` while it joins its MLX group."""
        return self._ranks.get(rank, RankProgress())


@dataclass(frozen=True, slots=True)
class InstanceView:
    """Known state of one instance."""

    name: str
    model: str
    epoch: int
    state: InstanceState
    reason: str | None
    layers: int
    """Number of layers of the whole model."""
    ranges: Sequence[LayerRange]
    nodes: Sequence[Sequence[str]]
    """Nodes of each stage's ranks."""
    plan: Plan | None
    forecast: Forecast | None
    workers: Sequence[WorkerInfo]
    loading: LoadingProgress
    times: StepTimes
    recovery: RecoveryStatus | None = None


# ---- instances


def instance_status(view: InstanceView, ratios: Mapping[str, StepRatios]) -> InstanceStatus:
    """Return the status of an instance for `/cluster/status`; `ratios` are those of the nodes' steps."""
    return InstanceStatus(
        name=view.name,
        model=view.model,
        epoch=view.epoch,
        state=view.state,
        reason=view.reason,
        recovery=view.recovery,
        layers=view.layers,
        stages=[_stage(view, stage, ratios) for stage in range(len(view.ranges))],
        stream=_stream(view.forecast, view.times.stream),
        promise=_promise(view.plan, view.forecast),
        left_out=[
            LeftOutStatus(node=left.node, why=left.why) for left in (view.plan.left_out if view.plan else ())
        ],
        remarks=list(view.plan.remarks) if view.plan else [],
    )


def _stage(view: InstanceView, stage: int, ratios: Mapping[str, StepRatios]) -> StageStatus:
    rank = RankId(stage, 0)
    worker = next((worker for worker in view.workers if (worker.stage, worker.rank) == rank), None)
    layers = view.ranges[stage]
    return StageStatus(
        stage=stage,
        node=view.nodes[stage][0],
        layers=(layers.start, layers.end),
        why=view.plan.stages[stage].why if view.plan else None,
        pid=worker.pid if worker else None,
        alive=worker.alive if worker else None,
        loading=_loading(view.loading, rank, worker),
        memory=StageMemory(
            promised=_promised(view.forecast, rank), used=_used(worker) if worker is not None else None
        ),
        ranks=[
            RankStatus(
                rank=worker.rank,
                node=worker.node,
                pid=worker.pid,
                alive=worker.alive,
                promised=_promised(view.forecast, RankId(stage, worker.rank)),
                used=_used(worker),
            )
            for worker in view.workers
            if worker.stage == stage
        ],
        group=GroupStatus(backend=worker.group.backend, why=worker.group.why)
        if worker and worker.group
        else None,
        times=stage_times(view.forecast, stage, view.times, ratios),
    )


def _loading(progress: LoadingProgress, rank: RankId, worker: WorkerInfo | None) -> LoadingStatus:
    """Return the loading status of a stage.

    A worker that an earlier head loaded reports only its phase and weights, not its progress.
    """
    loaded = progress.of(rank)
    is_adopted = worker is not None and loaded.phase == "starting"
    weights = worker.memory["weight_bytes"] if worker is not None and is_adopted else 0
    return LoadingStatus(
        phase=worker.phase if worker is not None and is_adopted and worker.phase else loaded.phase,
        bytes_fetched=loaded.bytes_fetched,
        bytes_to_fetch=loaded.bytes_to_fetch,
        bytes_loaded=loaded.bytes_loaded or weights,
        bytes_to_load=loaded.bytes_to_load or weights,
    )


def _promised(forecast: Forecast | None, rank: RankId) -> PromisedMemory | None:
    if forecast is None:
        return None
    memory = forecast.memory_of_ranks(rank.stage)[rank.rank]
    return PromisedMemory(
        weight_bytes=memory.weight_bytes,
        kv_bytes=memory.kv_bytes,
        working_bytes=memory.working_bytes,
        total_bytes=memory.total_bytes,
    )


def _used(worker: WorkerInfo) -> UsedMemory:
    return UsedMemory.model_validate(worker.memory)


def _stream(forecast: Forecast | None, pace: StreamPace | None) -> StreamStatus | None:
    if forecast is None and pace is None:
        return None
    context = 0 if forecast is None else forecast.demand.mean_context_tokens
    if pace is not None:
        context = pace.context_tokens
    return StreamStatus(
        predicted_tokens_per_s=None if forecast is None else 1.0 / forecast.token_s(context),
        measured_tokens_per_s=None if pace is None else 1e6 / max(1.0, pace.token_us),
        tokens=0 if pace is None else pace.tokens,
        context_tokens=context,
    )


def _promise(plan: Plan | None, forecast: Forecast | None) -> Promise | None:
    if forecast is None:
        return None
    prediction = plan.prediction if plan is not None else None
    return Promise(
        context_tokens=forecast.demand.context_tokens,
        sequences=forecast.demand.sequences,
        kv_bits=forecast.demand.kv_bits,
        strategy=plan.strategy if plan is not None else None,
        tokens_per_s=prediction.tokens_per_s if prediction is not None else None,
        first_token_s=prediction.first_token_s if prediction is not None else None,
        prompt_tokens=prediction.prompt_tokens if prediction is not None else None,
    )


# ---- nodes


def node_statuses(
    cluster_view: ClusterView,
    instances: Sequence[InstanceView],
    versions: Mapping[str, str],
    ratios: Mapping[str, StepRatios],
) -> list[NodeStatus]:
    """Return the status of all present and former nodes, the head's own first.

    The head's own machine is included even if it is not a member.

    Args:
        cluster_view: state of the head's machines.
        instances: all instances.
        versions: versions of this machine's packages, used if it is not a member.
        ratios: measured over predicted times of the nodes' steps.
    """
    membership = cluster_view.membership
    statuses = [_attending(cluster_view, member, instances) for member in membership.members.values()]
    statuses += [_former(cluster_view, node, was, instances) for node, was in membership.former.items()]
    if cluster_view.own not in {node.id for node in statuses}:
        statuses.append(_alone(cluster_view, instances, versions))
    statuses = [
        node.model_copy(
            update={"step_time_ratios": StepTimeRatios(**asdict(ratios.get(node.id, StepRatios())))}
        )
        for node in statuses
    ]
    return sorted(statuses, key=lambda node: (not node.is_head, node.state == "gone", node.id))


def _attending(cluster_view: ClusterView, member: Member, instances: Sequence[InstanceView]) -> NodeStatus:
    held, is_drained = cluster_view.held.get(member.node), member.node in cluster_view.membership.drained
    return _node(
        member,
        "drained" if is_drained else "attending" if held is None else "quarantined",
        is_head=member.node == cluster_view.own,
        reason=None if held is None else held.reason,
        since_s=member.since_s,
        until_s=None if held is None else held.until_s,
        instances=instances,
    )


def _former(
    cluster_view: ClusterView, node: str, was: FormerMember, instances: Sequence[InstanceView]
) -> NodeStatus:
    """Return the status of a former node without its memory, because nothing can use that memory."""
    status = _node(
        was.member,
        "gone",
        is_head=node == cluster_view.own,
        reason=was.reason,
        since_s=was.since_s,
        until_s=None,
        instances=instances,
    )
    return status.model_copy(update={"memory": None})


def _node(
    member: Member,
    state: NodeState,
    *,
    is_head: bool,
    reason: str | None,
    since_s: float,
    until_s: float | None,
    instances: Sequence[InstanceView],
) -> NodeStatus:
    return NodeStatus(
        id=member.node,
        name=member.machine,
        address=member.host or None,
        is_head=is_head,
        state=state,
        reason=reason,
        since=int(since_s) or None,
        quarantined_until=None if until_s is None else int(until_s),
        stages=_stages_on(member.node, instances),
        memory=_memory(member, instances),
        profile=_profile(member.profile),
        energy=[] if state == "gone" else _energy(member.energy),
        yielding=None if state == "gone" else _yielding(member.yielding),
        trusted=[*map(str, member.trusted), *([member.trusted_problem] if member.trusted_problem else [])],
        versions=dict(member.versions),
    )


def _alone(
    cluster_view: ClusterView, instances: Sequence[InstanceView], versions: Mapping[str, str]
) -> NodeStatus:
    """Return the status of the head's own machine when it has no profile."""
    own = cluster_view.own
    return NodeStatus(
        id=own,
        name=own,
        address=None,
        is_head=True,
        state="attending",
        reason=None,
        since=None,
        quarantined_until=None,
        stages=_stages_on(own, instances),
        memory=None,
        profile=None,
        energy=_energy(cluster_view.own_energy),
        yielding=_yielding(cluster_view.own_yielding),
        trusted=[],
        versions=dict(versions),
    )


def computing_energy(
    cluster_view: ClusterView, instances: Sequence[InstanceView]
) -> dict[str, Sequence[PartEnergy] | None]:
    """Return the energy of every node that computes; None if it does not count that of the device that it computes on."""
    counted: dict[str, Sequence[PartEnergy]] = {cluster_view.own: cluster_view.own_energy}
    counted |= {node: member.energy for node, member in cluster_view.membership.members.items()}
    devices = {(worker.node, worker.device) for view in instances for worker in view.workers}
    silent = {node for node, kind in devices if kind not in {each.part for each in counted.get(node, ())}}
    return {node: None if node in silent else counted[node] for node, _ in devices}


def _energy(parts: Sequence[PartEnergy]) -> list[EnergyStatus]:
    return [EnergyStatus(part=used.part, joules=used.joules, watts=used.watts) for used in parts]


def _yielding(state: Yielding | None) -> YieldingStatus | None:
    return None if state is None else YieldingStatus(**asdict(state))


def _stages_on(node: str, instances: Sequence[InstanceView]) -> list[str]:
    return [
        f"{view.name}/{stage}"
        for view in instances
        for stage, places in enumerate(view.nodes)
        if node in places
    ]


def _memory(member: Member, instances: Sequence[InstanceView]) -> NodeMemory:
    total = member.profile.memory_bytes
    usable = int(total * member.memory_utilization)
    promised = [
        nbytes
        for view in instances
        for stage in range(len(view.ranges))
        for nbytes in _promised_on(view, stage, member.node)
    ]
    used = [
        worker.memory["rss_bytes"]
        for view in instances
        for worker in view.workers
        if worker.node == member.node
    ]
    return NodeMemory(
        total_bytes=total,
        limited_by=member.profile.memory_limited_by,
        utilization=member.memory_utilization,
        reserve_bytes=total - usable,
        usable_bytes=usable,
        promised_bytes=sum(promised) if promised or not _stages_on(member.node, instances) else None,
        used_bytes=sum(used),
        free_bytes=member.memory_free_bytes or None,
    )


def _promised_on(view: InstanceView, stage: int, node: str) -> list[int]:
    """Return the promised bytes of a stage's ranks on a node; empty if none are there or known."""
    if node not in view.nodes[stage]:
        return []
    if view.plan is not None:
        return [rank.memory_bytes for rank in view.plan.stages[stage].ranks if rank.node == node]
    if view.forecast is None:
        return []
    each = zip(view.forecast.memory_of_ranks(stage), view.nodes[stage], strict=True)
    return [memory.total_bytes for memory, place in each if place == node]


def _profile(profile: MachineProfile) -> ProfileStatus:
    return ProfileStatus(
        device=profile.device,
        device_name=profile.device_name,
        cores=profile.cores,
        computes_in=profile.computes_in,
        rates=[
            RateStatus(weights=rate.weights, bytes_per_s=rate.bandwidth, flops=rate.flops)
            for rate in profile.rates
        ],
    )
