"""Profiles of a model, of machines and of the links between them, as the planner reads them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.types import CHUNK_TOKENS, LONG_CHUNK_TOKENS, CpuWeights
from mlx_ring.host.machine_profile import MachineProfile, StepCosts, WeightRate
from mlx_ring.models.tensor_shares import TensorSizes
from mlx_ring.rpc.link_profile import ETHERNET, LOCAL, UNREACHABLE, LinkProfile

# ---- CPU quotas of containers

# Linux grants a control group a quota in each period (`cpu.max`; Turner, Rao and Rao, 2010: "CPU bandwidth control for
# CFS"). A group that has used up its quota waits for the next period. A stage that finds its quota unused computes at full
# speed at first; one that computes all the time gets its share on average. A step's duration depends on both its length
# and the load.

Seconds = NDArray[np.float64]
_MOMENTS = 8
"""Number of moments in a period at which a step may begin, for averaging."""


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """Part of the time that the computing threads may use."""

    share: float
    """Share between 0 and 1, both excluded."""
    period_s: float

    def clock_s(self, computing_s: Seconds) -> Seconds:
        """Return the wall-clock seconds of a computation that finds the quota unused, averaged over its start."""
        moments = (np.arange(_MOMENTS) + 0.5) / _MOMENTS * self.period_s
        return np.mean([self._from(moment, computing_s) for moment in moments], axis=0)

    def _from(self, moment_s: float, computing_s: Seconds) -> Seconds:
        quota, to_end = self.share * self.period_s, self.period_s - moment_s
        rest = computing_s - min(quota, to_end)
        # The last quota is used from the beginning of its period.
        whole = np.ceil(rest / quota) - 1
        return np.where(rest <= 0, computing_s, to_end + whole * (self.period_s - quota) + rest)

    def steady_s(self, computing_s: Seconds) -> Seconds:
        """Return the wall-clock seconds of a computation on a machine that computes all the time."""
        return computing_s / self.share


def lone_stream(
    clock_s: Sequence[float],
    steady_s: Sequence[float],
    around_s: float,
    machines: Sequence[str] | None = None,
) -> tuple[list[float], float]:
    """Return the seconds of each stage, and the seconds from token to token, for a single stream.

    A stage has its whole quota again when the next token arrives, unless the other stages together are too fast for that.
    It then sets the pace.

    Args:
        clock_s: seconds by stage, with an unused quota.
        steady_s: seconds by stage, if it computes all the time.
        around_s: seconds of all hops.
        machines: machine of each stage; stages of one machine share its quota. By default each has its own.
    """
    unhindered = sum(clock_s) + around_s
    owners = machines or list(map(str, range(len(steady_s))))
    totals: dict[str, float] = defaultdict(float)
    for owner, steady in zip(owners, steady_s, strict=True):
        totals[owner] += steady
    slowest = max(totals, key=totals.__getitem__)
    late = max(0.0, totals[slowest] - unhindered)
    times = [
        clock + late * steady / totals[slowest] if owner == slowest else clock
        for owner, clock, steady in zip(owners, clock_s, steady_s, strict=True)
    ]
    return times, unhindered + late


# ---- machines, models and links


@dataclass(frozen=True, slots=True)
class StepRatios:
    """Measured over predicted time of a machine's steps, by their kind, and what the time of their stage leaves out."""

    decode: float = 1.0
    prefill: float = 1.0
    overhead_s: float = 0.0
    """Seconds that each decode step of a stage takes beside computing: messages, scheduling, and waits for a core."""
    alone_s: float | None = None
    """The same of a stage with all layers, which sends no activations; None if it is not known to differ."""

    @property
    def whole_overhead_s(self) -> float:
        """Seconds that a decode step of a stage with all layers takes beside computing."""
        return self.overhead_s if self.alone_s is None else self.alone_s


EXPERTS_SPREAD = 0.65
"""Power of a number of tokens that use as many experts together as tokens whose experts are drawn by lot; measured of others."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Sizes of one layer."""

    weight_bytes: int
    read_bytes: int
    """Weights that one token reads; only some of the experts in a mixture of experts."""
    flops_per_token: int
    kv_bytes_per_token: int = 0
    kv_bytes_per_sequence: int = 0
    """KV bytes that do not depend on the length: a recurrent state, or the full window of a sliding layer."""
    query_width: int = 0
    """Numbers in the queries of one token, which are compared with each token before it; 0 if unknown."""
    score_width: int = 0
    """Numbers in the queries and weighted values of one token of a prompt, all heads together; 0 if unknown."""
    index_width: int = 0
    """Numbers in the queries of an indexer, which are compared with every token before; 0 without one."""
    window: int | None = None
    """Maximum number of tokens that attention reads back."""
    expert_share: float = 0.0
    """Share of the experts that one token uses; 0 if unknown, or without experts."""
    attention_bytes: int = 0
    """Weights of attention, which ranks share by heads."""
    whole_bytes: int = 0
    """Weights that every rank holds whole: norms and the router of experts."""

    @property
    def has_experts(self) -> bool:
        return self.read_bytes < self.weight_bytes

    @property
    def has_state(self) -> bool:
        """True if it keeps a recurrent state in place of keys and values."""
        return self.kv_bytes_per_sequence > 0 and not self.kv_bytes_per_token and self.window is None

    def read_by(self, rows: int) -> float:
        """Return the bytes of weights that a step of `rows` tokens reads.

        All tokens share attention, norms and shared experts. Of `E` experts, with `k` for each token, they use
        `E (1 - (1 - k/E)^drawn)`. Some experts are preferred, so that `drawn` is `rows^EXPERTS_SPREAD`.
        """
        share = self.expert_share or self.read_bytes / max(1, self.weight_bytes)
        unread = (1 - share) ** (rows**EXPERTS_SPREAD - 1)
        return self.weight_bytes - (self.weight_bytes - self.read_bytes) * unread


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Sizes of a model. The first stage also has the embedding, the last also the output head."""

    name: str
    layers: tuple[LayerProfile, ...]
    embedding_bytes: int
    head_bytes: int
    is_tied: bool
    """True if the head is the embedding, so that a stage with both holds it once."""
    hidden_size: int
    vocabulary: int
    context_tokens: int
    """Maximum context of the model."""
    weights: str = "bfloat16"
    """Kind of the weights, as named by `WeightRate`."""
    has_byte_scales: bool = False
    """True if the weights are quantized with a scale of 8 bits for each group: kernels take such layers by single operations."""
    number_bytes: int = 2
    """Size of one number between stages, and in an unquantized KV cache."""
    quantizes_kv: bool = True
    """False if its attention cannot use a quantized KV cache."""
    batches: bool = True
    """False if each row of a decode step gets a forward pass of its own, unless all are equally long."""
    widest: int = 0
    """Largest number of inputs of a product; 0 if unknown."""
    routed: int = 0
    """Numbers that a token's experts take and give, with those between."""
    widened: ModelProfile | None = None
    """Sizes after half precision was loaded as float32; None if they do not change."""
    with_scales: ModelProfile | None = None
    """Sizes like `widened`, but with scales of quantized weights as they are stored; None if none are quantized."""
    dequantized: ModelProfile | None = None
    """Sizes with quantized weights as float32, except an embedding that is no head; None if none are quantized."""
    shared: TensorSizes | None = None
    """Parts of a layer that ranks can share; None if its layers cannot be split."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.ends_bytes(is_first=True, is_last=True) + sum(layer.weight_bytes for layer in self.layers)

    @property
    def is_quantized(self) -> bool:
        return _quantized_bits(self.weights) is not None

    def ends_bytes(self, *, is_first: bool, is_last: bool) -> int:
        """Return the bytes of embedding and head on a stage; one with both keeps a tied table once."""
        if is_first and is_last and self.is_tied:
            return max(self.embedding_bytes, self.head_bytes)
        return self.embedding_bytes * is_first + self.head_bytes * is_last


UNMEASURED = StepCosts(
    step_s=0.3e-3, layer_s=0.0, quantized_layer_s=0.0, draw_s=0.0, logit_s=0.0, attention_s=0.0
)
"""Costs of a machine known by its data sheet only: Python, launches and frames."""


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Profile of one machine."""

    name: str
    memory_bytes: int
    """Memory that its accelerator may use."""
    bandwidth: float
    """Bytes per second that it reads from memory."""
    flops: float
    """Operations per second in large products of the dtype that it computes in."""
    reserve_share: float = 0.1
    """Share of its memory that stays free for other programs."""
    rates: tuple[WeightRate, ...] = ()
    """Measured rates by kind of weights; other kinds use the two numbers above."""
    costs: StepCosts = UNMEASURED
    widens: bool = False
    """True if it loads half precision as float32, as on a CPU."""
    keeps_scales: bool = False
    """True if it does not widen scales of quantized weights, because native kernels take them as they are stored."""
    cpu_weights: CpuWeights = "quantized"
    """Form of quantized weights; `auto` is float32 where they fit into its memory."""
    process_bytes: int = 0
    """Memory that the processes of mlx-ring hold before any weights."""
    cpu_quota: CpuQuota | None = None
    """Quota of the computing threads, if they have less than all of the time. Rates and costs refer to time within the quota."""
    trusted: bool = False
    """True if its owner named an interface for collectives, which are neither encrypted nor authenticated."""
    experts_pace: float = 1.0
    """Speed of products with experts that have very many rows each, relative to other products."""
    experts_rows: float = 0.0
    """Rows of an expert at which its products have half of that speed, because small ones leave units idle."""
    activation_s: float = 0.0
    """Seconds that a layer takes beside products, for each token of a prompt and number of the hidden size."""
    vector_s: float = 0.0
    """Seconds of an operation for each row after the first of a step, in kernels for single rows; 0 if they share it."""
    scan_s: float = 0.0
    """Seconds of a recurrent state's update, for each token of a prompt and byte of the state."""
    narrow: float = 0.0
    """Hidden size at which a prompt's products have half of their speed, because small ones leave units idle."""
    prompt_s: float = 0.0
    """Seconds for each prompt beside its computation: template, tokens and the way to the engine."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens of a prompt that its engine computes at once."""
    long_chunk_tokens: int = 0
    """Most tokens of a prompt alone that its engine computes at once, where that is fast; 0: no more than usual."""
    layers_ahead: float = 0.0
    """Share of a stage's layers whose activations exist at the same time, because they are allocated long before."""
    is_measured: bool = False
    """True if its rates and costs were measured on it."""
    workers_at_once: int = 1
    """Number of workers that can compute at the same time without slowing each other down."""
    ratios: StepRatios = StepRatios()
    """Measured times of its steps over what all of the above predicts. They include the share below."""
    speed_share: float = 1.0
    """Share of its speed that its user leaves it."""
    nearest_chip: str = ""
    """Chip whose efficiencies are assumed, if the machine is described by numbers; empty for any other machine."""

    @property
    def usable_bytes(self) -> int:
        """Memory that plans may use."""
        return int(self.memory_bytes * (1 - self.reserve_share))

    def pace(self, layer: LayerProfile, rows: int, hidden_size: int) -> float:
        """Return the speed of a layer's products in a prompt's chunk of this many rows, relative to large products."""
        wide = hidden_size / (hidden_size + self.narrow)
        if not layer.has_experts:
            return wide
        each = rows * layer.expert_share
        return wide * self.experts_pace * (each / (each + self.experts_rows) if each else 1.0)

    def rate(self, weights: str) -> WeightRate:
        """Return the rate for a kind of weights; for unmeasured quantized ones that of the nearest number of bits."""
        bits = _quantized_bits(weights)
        measured = {kind: rate for rate in self.rates if (kind := _quantized_bits(rate.weights)) is not None}
        if bits is not None and measured:
            return min(measured.items(), key=lambda item: (abs(item[0] - bits), item[1].bandwidth))[1]
        for rate in self.rates:
            if rate.weights == weights:
                return rate
        return WeightRate(weights=weights, bandwidth=self.bandwidth, row_s=0.0, spread=0.0, flops=self.flops)


@cache
def _quantized_bits(weights: str) -> int | None:
    """Return the bits of a kind such as `4-bit`; None for other kinds."""
    number, _, rest = weights.partition("-")
    return int(number) if rest == "bit" and number.isdigit() else None


LAYERS_AHEAD_WITH_CUDA = 0.26
"""From memory measured on an H200 with MLX 0.32.4: 0.23 with 16 layers of 1.2 B weights in all, 0.26 with 36 of 8 B."""


@dataclass(frozen=True)
class ClusterProfile:
    """Machines in the given order, the head's first, and the links between them."""

    nodes: tuple[NodeProfile, ...]
    links: Mapping[frozenset[str], LinkProfile] = field(default_factory=dict[frozenset[str], LinkProfile])
    usual_link: LinkProfile = ETHERNET

    def link(self, one: str, other: str) -> LinkProfile:
        """Return the link between two machines."""
        if one == other:
            return LOCAL
        return self.links.get(frozenset((one, other)), self.usual_link)

    @cached_property
    def link_tables(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of an empty message, and bandwidth in bytes per second, from machine to machine."""
        names = [node.name for node in self.nodes]
        links = [[self.link(one, other) for other in names] for one in names]
        return (
            np.array([[link.round_trip_s / 2 for link in row] for row in links], float),
            np.array([[link.bandwidth for link in row] for row in links], float),
        )

    def in_reach(self, least: int) -> ClusterProfile:
        """Leave machines out until all others reach each other, but keep at least some number of them.

        Each time, the one with the most broken links is left out, and of several the last.
        """
        nodes = self.nodes
        while len(nodes) > least:
            broken = [sum(self.link(one.name, other.name) == UNREACHABLE for other in nodes) for one in nodes]
            worst = max(range(len(nodes)), key=lambda place: (broken[place], place))
            if not broken[worst]:
                break
            nodes = (*nodes[:worst], *nodes[worst + 1 :])
        return replace(self, nodes=nodes)

    def trusts(self, one: NodeProfile, other: NodeProfile) -> bool:
        """Return True if collectives may run between two machines: on a trusted link, or with a trusted interface on each."""
        link = self.link(one.name, other.name)
        return link != UNREACHABLE and (link.trusted or (one.trusted and other.trusted))


class LayerKinds:
    """Distinct kinds of a model's layers."""

    def __init__(self, model: ModelProfile) -> None:
        self.model = model
        # Most layers are the same object, whose fields need not be compared again.
        objects = {id(layer): layer for layer in model.layers}
        places = {layer: place for place, layer in enumerate(dict.fromkeys(objects.values()))}
        place_of = {key: places[layer] for key, layer in objects.items()}
        self.kinds = tuple(places)
        self.index: NDArray[np.intp] = np.array([place_of[id(layer)] for layer in model.layers])

    def by_layer(self, values: Sequence[float]) -> Seconds:
        """Return for every layer the value of its kind."""
        return np.array(values, dtype=np.float64)[self.index]


class LoadedForms:
    """Forms in which machines hold a model's weights."""

    def __init__(self, model: ModelProfile) -> None:
        self._stored = LayerKinds(model)
        self._widened = self._stored if model.widened is None else LayerKinds(model.widened)
        self._with_scales = self._widened if model.with_scales is None else LayerKinds(model.with_scales)
        self._dequantized = None if model.dequantized is None else LayerKinds(model.dequantized)

    def on(self, node: NodeProfile) -> tuple[LayerKinds, ...]:
        """Return the forms that a machine may hold, the preferred one first and the smallest last."""
        widened = self._with_scales if node.keeps_scales else self._widened
        stored = widened if node.widens else self._stored
        if self._dequantized is None or node.cpu_weights == "quantized":
            return (stored,)
        return (self._dequantized,) if node.cpu_weights == "float32" else (self._dequantized, stored)


def measured_node(
    profile: MachineProfile,
    name: str,
    *,
    reserve_share: float = 0.1,
    memory_cap: int | None = None,
    beside_bytes: int | None = None,
    cpu_weights: CpuWeights = "quantized",
) -> NodeProfile:
    """Return the planner's profile of a measured machine.

    Args:
        profile: measured profile.
        name: name of the node.
        reserve_share: share of its memory that stays free for other programs.
        memory_cap: bytes that plans may use, if less than the machine has.
        beside_bytes: memory of mlx-ring's other processes there; an agent's by default.
        cpu_weights: the setting of that name; with `auto`, native kernels compute quantized weights where they run.
    """
    plain = next(
        (rate for rate in profile.rates if rate.weights == (profile.computes_in or "bfloat16")),
        profile.rates[0],
    )
    if (
        profile.device != "cpu"
        or profile.computes_in != "float32"
        or (cpu_weights == "auto" and profile.kernels)
    ):
        cpu_weights = "quantized"
    beside = profile.agent_bytes if beside_bytes is None else beside_bytes
    return NodeProfile(
        name=name,
        memory_bytes=min(profile.memory_bytes, memory_cap or profile.memory_bytes),
        bandwidth=plain.bandwidth,
        flops=plain.flops,
        reserve_share=reserve_share,
        rates=profile.rates,
        costs=profile.costs,
        widens=profile.computes_in == "float32",
        keeps_scales=bool(profile.kernels),
        cpu_weights=cpu_weights,
        # A GPU has memory of its own, or an advised part of it, where no process lies.
        process_bytes=profile.worker_bytes + beside if profile.device == "cpu" else 0,
        layers_ahead=LAYERS_AHEAD_WITH_CUDA if profile.uses_cuda else 0.0,
        long_chunk_tokens=0 if profile.device == "cpu" else LONG_CHUNK_TOKENS,
        cpu_quota=_cpu_quota(profile),
        is_measured=True,
        workers_at_once=max(1, profile.cores // profile.blas_threads) if profile.device == "cpu" else 1,
    )


def _cpu_quota(profile: MachineProfile) -> CpuQuota | None:
    """Return the CPU quota; None if rates were measured in wall-clock time (`stopwatch` of the worker's profile mode)."""
    share, period_s = profile.cpu_share, profile.cpu_period_s
    if profile.device != "cpu" or profile.blas_threads > 1 or share is None or share >= 1 or period_s is None:
        return None
    return CpuQuota(share, period_s)
