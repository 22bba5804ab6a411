"""Nodes and instances in `/cluster/status`. A field's docstring is its description in `/openapi.json`."""

from __future__ import annotations

from math import isinf
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, create_model

from mlx_ring.api.openapi import DescribedModel
from mlx_ring.core.worker_status import MEMORY
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.replan import Comparison, needs_pause, pause_s, stages_of

NodeState = Literal["attending", "gone", "quarantined", "drained"]
InstanceState = Literal["loading", "ready", "unavailable"]
RecoveryPhase = Literal["planning", "loading", "replaying"]
Bytes = Annotated[int, Field(ge=0)]


class _Status(DescribedModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


# ---- nodes


class RateStatus(_Status):
    """Measured speed of a node with one kind of weights."""

    weights: str
    """Kind of weights: a dtype, or `4-bit` and the like for quantized ones."""
    bytes_per_s: float
    """Bytes of weights per second, read for one token at a time."""
    flops: float
    """Operations per second in products of many rows, as in prefill."""


class ProfileStatus(_Status):
    """Measurements of a node when it joined."""

    device: str
    """`cpu` or `gpu`."""
    device_name: str
    cores: int
    computes_in: str
    """Type that half-precision weights get when they are loaded; empty if they keep theirs."""
    rates: list[RateStatus]


class NodeMemory(_Status):
    """Memory of a node, in bytes."""

    total_bytes: Bytes
    """Usable memory of the device, within the limits of containers."""
    limited_by: str
    utilization: float
    """Share of the total that its owner grants to plans: `--memory-utilization`."""
    reserve_bytes: Bytes
    """Memory left to other programs: the rest of the total."""
    usable_bytes: Bytes
    """Memory that plans may fill: the total minus the reserve."""
    promised_bytes: Bytes | None
    """Predicted memory of all stages on the node; null without a plan."""
    used_bytes: Bytes
    """Resident memory of the node's workers."""
    free_bytes: Bytes | None
    """Free memory in the machine's last report; null before the first one."""


class StepTimeRatios(_Status):
    """Measured over predicted time of a node's steps, between 0.5 and 2; 1 before enough steps."""

    decode: float = 1.0
    prefill: float = 1.0
    overhead_s: float = 0.0
    """Seconds that a decode step of a stage takes beside computing, as the next plan counts; 0 before enough steps."""
    alone_s: float | None = None
    """The same of a stage with all layers; null if it is not known to differ."""


class EnergyStatus(_Status):
    """Energy of a part of a node, as its own counter says."""

    part: Literal["cpu", "gpu", "memory"]
    """`gpu` is all GPUs of the node."""
    joules: float
    """Energy since its agent started; without a cluster, since the head started."""
    watts: float | None
    """Mean power of the last seconds; null at the first reading."""


class YieldingStatus(_Status):
    """State of a machine that yields to its user."""

    reason: str
    """Such as `other programs use 1.6 of 2 cores`."""
    speed_share: float
    """Share of its speed that plans count."""
    memory_share: float
    """Share of its memory that plans count."""
    priority: str
    """Means that lowers its workers' priority, such as `autogroup nice 10`; empty if nothing can."""


class NodeStatus(_Status):
    """A machine of the cluster."""

    id: str
    """Id of the node; without a cluster, the machine's name."""
    name: str
    address: str | None
    """Address that the head sees; null without a cluster."""
    is_head: bool
    """True for the node that runs the head."""
    state: NodeState
    """`quarantined` means connected, but excluded from plans for a time. `drained` means until it leaves or is readmitted."""
    reason: str | None
    """Reason why the node was lost or quarantined."""
    since: int | None
    """Unix seconds when the state began; in quarantine, when the node connected."""
    quarantined_until: int | None
    """Unix seconds."""
    stages: list[str]
    """Stages on the node, as `instance/stage`; empty if it is unused."""
    memory: NodeMemory | None
    """Null without a profile of the node."""
    profile: ProfileStatus | None
    energy: list[EnergyStatus] = Field(default=[])
    """Parts that count their energy; empty if none does, or if the agent may not read the counters."""
    step_time_ratios: StepTimeRatios = StepTimeRatios()
    yielding: YieldingStatus | None = None
    """Null if the node does not yield to its user."""
    trusted: list[str]
    """Interfaces, with addresses, on which the owner allows MLX's collectives; or the reason why one is missing."""
    versions: dict[str, str]
    """Versions of packages, by name."""


# ---- instances


class LoadingStatus(_Status):
    """Progress of a worker. A total of 0 is not known yet."""

    phase: str
    """`starting`, `fetch`, `weights`, `kernels`, `warm-up`, `ready`, or what the worker reports."""
    bytes_fetched: Bytes
    """Bytes that the node downloaded from others. The node's first stage reports them for all its stages."""
    bytes_to_fetch: Bytes
    bytes_loaded: Bytes
    bytes_to_load: Bytes


class PromisedMemory(_Status):
    """Predicted memory of a stage, in bytes."""

    weight_bytes: Bytes
    kv_bytes: Bytes
    """KV of the promised sequences at the promised context length."""
    working_bytes: Bytes
    """Activations of a chunk, scores over the vocabulary."""
    total_bytes: Bytes


_KEPT_NAMES = {
    "device_memory_bytes": "device_bytes",
    "peak_memory_bytes": "peak_bytes",
    "rss_bytes": "resident_bytes",
}
"""Names here of fields of `WorkerMemory`, where they differ. Clients know them."""
_USED: dict[str, Any] = {
    _KEPT_NAMES.get(name, name): (Bytes, Field(validation_alias=name, description=metric.help))
    for name, metric in MEMORY.items()
}


class UsedMemory(create_model("UsedMemory", __base__=_Status, **_USED)):
    """Memory in the report of a stage's worker, in bytes."""


class StageMemory(_Status):
    """Predicted and used memory of a stage."""

    promised: PromisedMemory | None
    """Null without a profile."""
    used: UsedMemory | None
    """Null before the worker starts."""


class StepStatus(_Status):
    """Similar steps of a stage. Measured times are medians of the last ones, in milliseconds."""

    rows: int
    """Sequences in the step."""
    tokens: int
    """Tokens of all rows together."""
    context_tokens: int
    """Median number of tokens before a row, for which the prediction is made."""
    steps: int
    """Number of measured steps."""
    measured_ms: float | None
    """Time from the last input's arrival to the answer; null before the first measurement."""
    predicted_ms: float | None
    """By the machine's profile; null without one."""
    corrected_ms: float | None
    """The prediction with the node's `step_time_ratios`, as the next plan counts; null without a profile."""
    link_wait_ms: float
    """Time spent waiting for the previous stage; not part of `measured_ms`."""
    link_send_ms: float
    """Time spent sending to the next stage; not part of `measured_ms`."""


class StageTimesStatus(_Status):
    """Times of a stage's steps. Only comparable steps are counted."""

    decode: list[StepStatus]
    """Decode steps by rows: one token for each, without speculative decoding."""
    prefill: list[StepStatus]
    """Prefill steps by tokens: chunks of one prompt alone."""


class RankStatus(_Status):
    """One worker of a stage."""

    rank: int
    node: str
    pid: int
    alive: bool
    promised: PromisedMemory | None
    """Null without a profile."""
    used: UsedMemory


class GroupStatus(_Status):
    """MLX group that joins the workers of a stage, or the stages of an instance."""

    backend: str
    """MLX's name of the backend."""
    why: str


class StageStatus(_Status):
    """Half-open range of layers on a node. Fields of a single worker are those of the first."""

    stage: int
    node: str
    layers: tuple[int, int]
    """`[start, end)`."""
    why: str | None
    """Reason that the plan gives; null without a plan."""
    pid: int | None
    alive: bool | None
    loading: LoadingStatus
    memory: StageMemory
    ranks: list[RankStatus]
    """Running workers of the stage. Several workers share its layers."""
    group: GroupStatus | None
    """Null if MLX joins no workers."""
    times: StageTimesStatus
    """Before the first measurement only the prediction for one row, with 0 steps."""


class StreamStatus(_Status):
    """Speed of a single stream without speculative decoding."""

    predicted_tokens_per_s: float | None
    measured_tokens_per_s: float | None
    tokens: int
    """Number of measured tokens."""
    context_tokens: int
    """Median context length of these tokens, for which the prediction is made."""


class Promise(_Status):
    """Capacity that the plan reserves memory for, and its predicted speed."""

    context_tokens: int
    sequences: int
    kv_bits: int
    strategy: str | None
    """Null without a plan."""
    tokens_per_s: float | None
    """Predicted speed of all promised sequences together."""
    first_token_s: float | None
    """Predicted time to first token of a prompt of `prompt_tokens`."""
    prompt_tokens: int | None


class LeftOutStatus(_Status):
    """Node without layers in the plan."""

    node: str
    why: str


class RecoveryStatus(_Status):
    """Recovery after the loss of an instance, until interrupted requests continue."""

    phase: RecoveryPhase
    """`planning` ends old workers and places the model, `replaying` computes interrupted requests again."""
    elapsed_s: float
    """Seconds since the loss was noticed."""
    remaining_s: float | None
    """Expected seconds, from the last load and recovery; null if unknown, or if it already takes longer."""


class InstanceStatus(_Status):
    """Plan that is loaded or being loaded."""

    name: str
    model: str
    epoch: int
    state: InstanceState
    reason: str | None
    recovery: RecoveryStatus | None
    """Null if no recovery is in progress."""
    layers: int
    stages: list[StageStatus]
    stream: StreamStatus | None
    """Null if nothing was predicted or measured."""
    promise: Promise | None
    """Null without a profile."""
    left_out: list[LeftOutStatus]
    remarks: list[str]
    """Remarks of the plan."""


class HungBackendStatus(_Status):
    """A backend of MLX whose groups hung although all their workers answered."""

    backend: str
    nodes: list[str] | None
    """Nodes of the two ranks, twice the same on one machine; null for groups of more ranks, which blame the backend."""
    hangs: int
    """Number of times since the head started."""
    reason: str
    """Reason of the last time."""
    barred_until: int | None
    """Unix time until which plans avoid it; null if they do not."""


class PlannedStage(_Status):
    """Stage of a split."""

    nodes: list[str]
    """Machines of its ranks."""
    layers: tuple[int, int]
    """First layer, and the one after the last."""


class PlannedSplit(_Status):
    """Split of the layers, and its predicted speed on the machines as they are now."""

    stages: list[PlannedStage]
    tokens_per_s: float
    """Speed of a stream, with the usual number of requests at once."""
    first_token_s: float
    """Time to first token of the usual prompt."""
    request_s: float
    """Time of the usual request."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the split of a plan."""
        stages = [
            PlannedStage(nodes=[name for name, _ in ranks], layers=(span.start, span.end))
            for span, ranks in stages_of(plan)
        ]
        each = plan.prediction
        times = {"first_token_s": each.first_token_s, "request_s": each.request_s}
        return cls(stages=stages, tokens_per_s=1 / each.token_s, **times)


class ProposalStatus(_Status):
    """Better split of the layers of a model, or of one of its replicas."""

    model: str
    instance: str
    """Instance of the replica that would move."""
    way: Literal["beside", "ranges", "after"]
    """`beside` needs no pause. In one, workers change to what they gained (`ranges`), or all is loaded (`after`)."""
    why: str | None
    """Reason why answers would pause."""
    gain: float | None
    """Relative gain in speed: with 0.25, the same takes 1.25 times as long now. Null if the memory no longer suffices now."""
    load_s: float | None
    """Longest time that a load took."""
    fetch_s: float = 0.0
    """Predicted seconds in which machines fetch weights that they do not have. Nothing is gained until the move's end."""
    pause_s: float | None
    """Predicted pause of answers, until the other split serves. Null if it is unknown."""
    needs_pause: bool
    """True if the move needs `pause`, because answers would pause for long."""
    gained_bytes: int | None
    """With `ranges`, bytes of weights that workers load."""
    loaded: PlannedSplit | None
    """Present split. Null if the machines no longer have the memory that it counts on."""
    planned: PlannedSplit
    unused: list[str] = Field(default=[])
    """Machines without layers that need no gain: they have lost theirs, or replicas share another machine instead."""
    is_due: bool
    """True once it has been better for long enough, so that the move pays."""

    @classmethod
    def of(cls, model: str, instance: str, found: Comparison, load_s: float | None, *, is_due: bool) -> Self:
        """Return the status of a better split; `load_s` is the longest time that a load took, if there was one."""
        return cls(
            model=model,
            instance=instance,
            way=found.way,
            why=found.why or None,
            gain=None if isinf(found.gain) else found.gain,
            load_s=load_s,
            fetch_s=found.fetch_s,
            pause_s=pause_s(found, load_s),
            needs_pause=needs_pause(found, load_s),
            gained_bytes=sum(change.gained_bytes for change in found.changes) if found.changes else None,
            loaded=None if found.loaded is None else PlannedSplit.of(found.loaded),
            planned=PlannedSplit.of(found.planned),
            unused=list(found.unused),
            is_due=is_due,
        )


class NoProposalStatus(_Status):
    """Model on several machines for which no better split is looked for."""

    model: str
    why: str
    """Sentence with the reason."""


class ClusterParts(_Status):
    """Nodes and instances of the cluster."""

    nodes: list[NodeStatus] = Field(default=[])
    """Machines that are connected, excluded, or were lost since the head started."""
    missing_machines: int = 0
    """Number of machines that must still join before anything is loaded."""
    absent_nodes: list[str] = Field(default=[])
    """Ids of machines with a certificate of this cluster that are not connected. One that is just joining is among them."""
    instances: list[InstanceStatus] = Field(default=[])
    hung_backends: list[HungBackendStatus] = Field(default=[])
    proposals: list[ProposalStatus] = Field(default=[])
    """Better splits to which a move pays, unless `--replan` is `off`."""
    no_proposals: list[NoProposalStatus] = Field(default=[])
    """Models for which none is looked for, with the reason."""
    joules_per_token: float | None = None
    """Energy of nodes per generated token, in the last minute. Null without tokens, or if a device's energy is unknown."""
