"""What `/cluster/status` says of nodes and instances. A field's docstring is its line in `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NodeState = Literal["attending", "gone", "quarantined"]
InstanceState = Literal["loading", "ready", "unavailable"]
Bytes = Annotated[int, Field(ge=0)]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


# ---- nodes


class RateStatus(_Said):
    """How fast a node was found to be with weights of one kind."""

    weights: str
    """Kind of weights: a dtype, or `4-bit` and the like for quantized ones."""
    bytes_per_s: float
    """Of weights, read for one token at a time."""
    flops: float
    """A second, in products of many rows, as prompts have them."""


class ProfileStatus(_Said):
    """What was measured of a node when it joined."""

    device: str
    """`cpu` or `gpu`."""
    device_name: str
    cores: int
    computes_in: str
    """What half precision becomes when it is loaded; empty where it stays as it is."""
    rates: list[RateStatus]


class NodeMemory(_Said):
    """A node's memory. Bytes."""

    total_bytes: Bytes
    """Of the device, that may be used at all: limits of containers count."""
    limited_by: str
    utilization: float
    """The share of the total that its owner grants to plans: `--memory-utilization`."""
    reserve_bytes: Bytes
    """Left to others: the rest."""
    usable_bytes: Bytes
    """That plans may fill: the total less the reserve."""
    promised_bytes: Bytes | None
    """Of all stages here, as plans count them; null where no plan does."""
    used_bytes: Bytes
    """Resident memory of the workers here."""
    free_bytes: Bytes | None
    """Of the machine, as it said last; null where it has said nothing."""


class NodeStatus(_Said):
    """A machine of the cluster."""

    id: str
    """Its id; on one machine alone, its name."""
    name: str
    address: str | None
    """Where the head sees it; null for a machine alone."""
    is_head: bool
    """Whether the head runs on it."""
    state: NodeState
    """`quarantined`: it attends, and is left out of plans for a while."""
    reason: str | None
    """Why it is gone or quarantined."""
    since: int | None
    """When its state began, Unix seconds; of one in quarantine, when it came."""
    quarantined_until: int | None
    """Unix seconds."""
    stages: list[str]
    """That it has, as `instance/stage`. Empty: it is there and unused."""
    memory: NodeMemory | None
    """Null where no profile is kept."""
    profile: ProfileStatus | None
    trusted: list[str]
    """Interfaces with their addresses on which its owner lets MLX's collectives go to other machines, or why one is not there."""
    versions: dict[str, str]
    """Of packages, by name."""


# ---- instances


class LoadingStatus(_Said):
    """How far a worker is. A total of 0 is not known yet."""

    phase: str
    """`starting`, `fetch`, `weights`, `warm-up`, `ready`, or what the worker says."""
    bytes_fetched: Bytes
    """By the node, from others: told for the node's first stage, and of all its stages."""
    bytes_to_fetch: Bytes
    bytes_loaded: Bytes
    bytes_to_load: Bytes


class PromisedMemory(_Said):
    """What the plan counts for a stage. Bytes."""

    weight_bytes: Bytes
    kv_bytes: Bytes
    """Of the sequences and the context that the instance promises."""
    working_bytes: Bytes
    """Activations of a chunk, scores over the vocabulary."""
    total_bytes: Bytes


class UsedMemory(_Said):
    """What a stage's worker says that it holds. Bytes."""

    weight_bytes: Bytes
    kv_bytes: Bytes
    device_bytes: Bytes = Field(validation_alias="device_memory_bytes")
    """Held by MLX, weights and KV included."""
    peak_bytes: Bytes = Field(validation_alias="peak_memory_bytes")
    """The most that MLX held at any time."""
    resident_bytes: Bytes = Field(validation_alias="rss_bytes")
    """Of the whole process."""


class StageMemory(_Said):
    """Promised and used."""

    promised: PromisedMemory | None
    """Null where no profile tells."""
    used: UsedMemory | None
    """Null before there is a worker."""


class StepStatus(_Said):
    """Steps of a stage that are alike. Measured times are medians of the last ones; milliseconds."""

    rows: int
    """Sequences in the step."""
    tokens: int
    """Of all rows together."""
    context_tokens: int
    """That a row had before it: the median; the prediction is for just that."""
    steps: int
    """That were counted."""
    measured_ms: float | None
    """From all inputs being there to the answer; null while none was measured."""
    predicted_ms: float | None
    """Null where no profile tells."""
    link_wait_ms: float
    """Spent waiting for the stage before, which is not in `measured_ms`; ..."""
    link_send_ms: float
    """... nor is handing on to the next stage."""


class StageTimesStatus(_Said):
    """Only steps that can be compared are counted."""

    decode: list[StepStatus]
    """By rows: one token for each, without drafts."""
    prefill: list[StepStatus]
    """By tokens: chunks that one prompt has to itself."""


class RankStatus(_Said):
    """One worker of a stage."""

    rank: int
    node: str
    pid: int
    alive: bool
    promised: PromisedMemory | None
    """Null where no profile tells."""
    used: UsedMemory


class GroupStatus(_Said):
    """What joins a stage's workers, or the stages, where they share layers or links are collectives."""

    backend: str
    """MLX's name for it."""
    why: str


class StageStatus(_Said):
    """A half-open range of layers, on a node. What is told of one worker is told of the first."""

    stage: int
    node: str
    layers: tuple[int, int]
    """`[start, end)`."""
    why: str | None
    """The plan's reason; null where there is no plan."""
    pid: int | None
    alive: bool | None
    loading: LoadingStatus
    memory: StageMemory
    ranks: list[RankStatus]
    """Every worker of the stage that is there; several share its layers."""
    group: GroupStatus | None
    """Null where MLX joins no workers."""
    times: StageTimesStatus
    """While nothing was measured, the prediction for one row stands alone, with 0 steps."""


class StreamStatus(_Said):
    """One stream that has the pipeline to itself, without drafts."""

    predicted_tokens_per_s: float | None
    measured_tokens_per_s: float | None
    tokens: int
    """That were counted."""
    context_tokens: int
    """Behind which they came: the median. The prediction is for just that."""


class Promise(_Said):
    """What memory was counted for, and what the plan expects of it."""

    context_tokens: int
    sequences: int
    kv_bits: int
    strategy: str | None
    """Null where there is no plan."""
    tokens_per_s: float | None
    """Of all promised sequences together."""
    first_token_s: float | None
    """Of a prompt of `prompt_tokens`."""
    prompt_tokens: int | None


class LeftOutStatus(_Said):
    """A node that the plan gives no layers."""

    node: str
    why: str


class InstanceStatus(_Said):
    """A plan that is loaded, or being loaded."""

    name: str
    model: str
    epoch: int
    state: InstanceState
    reason: str | None
    layers: int
    stages: list[StageStatus]
    stream: StreamStatus | None
    """Null where nothing was predicted nor measured."""
    promise: Promise | None
    """Null where no profile tells."""
    left_out: list[LeftOutStatus]
    remarks: list[str]
    """The plan's."""


class ClusterParts(_Said):
    """Who there is, and what they serve."""

    nodes: list[NodeStatus] = []
    """Every machine that attends, is left out or has gone since the head started."""
    instances: list[InstanceStatus] = []
