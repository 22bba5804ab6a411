"""Profiles of a model, of machines and of the links between them, as the planner reads them. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_ring.host.machine_profile import StepCosts, WeightRate
from mlx_ring.models.tensor_shares import TensorSizes
from mlx_ring.planner.cpu_quota import CpuQuota
from mlx_ring.rpc.link_profile import ETHERNET, LOCAL, UNREACHABLE, LinkProfile


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer's sizes."""

    weight_bytes: int
    read_bytes: int
    """Of the weights, what one token reads: of a mixture of experts some."""
    flops_per_token: int
    kv_bytes_per_token: int = 0
    kv_bytes_per_sequence: int = 0
    """However long it is: a recurrent state, or the window of a sliding layer once it is full."""
    query_width: int = 0
    """Numbers of one token's queries, which are held against each token before it; 0: not known."""
    window: int | None = None
    """Most tokens that it looks back at."""
    attention_bytes: int = 0
    """Of the weights, those of attention, which ranks share by heads."""
    whole_bytes: int = 0
    """Of the weights, those that every rank has whole: norms, what chooses experts."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model's sizes. The first stage also embeds, the last also has the output head."""

    name: str
    layers: tuple[LayerProfile, ...]
    embedding_bytes: int
    head_bytes: int
    is_tied: bool
    """Whether the head is the embedding, so that a stage with both holds one."""
    hidden_size: int
    vocabulary: int
    context_tokens: int
    """The longest that the model takes."""
    weights: str = "bfloat16"
    """Of which kind they are, as `WeightRate` names them."""
    number_bytes: int = 2
    """Of one number between stages, and in a KV cache that is not quantized."""
    widened: ModelProfile | None = None
    """The same where half precision becomes float32 when it is loaded; None: it is no other."""
    shared: TensorSizes | None = None
    """What of a layer several ranks can share; None: its layers cannot be split."""

    @property
    def weight_bytes(self) -> int:
        once = self.embedding_bytes if self.is_tied else self.embedding_bytes + self.head_bytes
        return once + sum(layer.weight_bytes for layer in self.layers)


UNMEASURED = StepCosts(step_s=0.3e-3, layer_s=0.0, draw_s=0.0, logit_s=0.0, attention_s=0.0)
"""Of a machine that is known by its data sheet: Python, launches, the wire's own code."""


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One machine."""

    name: str
    memory_bytes: int
    """That its accelerator may use."""
    bandwidth: float
    """Bytes a second that it reads from memory."""
    flops: float
    """A second, in large products of the dtype that it computes in."""
    reserve_share: float = 0.1
    """Of its memory, what is left to others."""
    rates: tuple[WeightRate, ...] = ()
    """As they were measured, by kind of weights; others go by the two numbers above."""
    costs: StepCosts = UNMEASURED
    widens: bool = False
    """Whether half precision becomes float32 when it is loaded, as on a CPU."""
    process_bytes: int = 0
    """Of its memory, what our processes hold before any weights."""
    cpu_quota: CpuQuota | None = None
    """Of the time of the threads that compute, where it is less than all. Rates and costs are of that time."""
    trusted: bool = False
    """Whether its owner named an interface over which collectives may run, which are neither encrypted nor authenticated."""
    workers_at_once: int = 1
    """How many workers compute at the same time without slowing each other down."""

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (1 - self.reserve_share))

    def rate(self, weights: str) -> WeightRate:
        """For weights of a kind; of quantized ones that were not measured, those of the nearest number of bits."""
        bits = _quantized_bits(weights)
        measured = {kind: rate for rate in self.rates if (kind := _quantized_bits(rate.weights)) is not None}
        if bits is not None and measured:
            return min(measured.items(), key=lambda item: (abs(item[0] - bits), item[1].bandwidth))[1]
        for rate in self.rates:
            if rate.weights == weights:
                return rate
        return WeightRate(weights=weights, bandwidth=self.bandwidth, row_s=0.0, spread=0.0, flops=self.flops)


def _quantized_bits(weights: str) -> int | None:
    """Of a kind like `4-bit`."""
    number, _, rest = weights.partition("-")
    return int(number) if rest == "bit" and number.isdigit() else None


@dataclass(frozen=True)
class ClusterProfile:
    """Machines, in the order that their owner gave them, the head's first."""

    nodes: tuple[NodeProfile, ...]
    links: Mapping[frozenset[str], LinkProfile] = field(default_factory=dict[frozenset[str], LinkProfile])
    usual_link: LinkProfile = ETHERNET

    def link(self, one: str, other: str) -> LinkProfile:
        if one == other:
            return LOCAL
        return self.links.get(frozenset((one, other)), self.usual_link)

    def trusts(self, one: NodeProfile, other: NodeProfile) -> bool:
        """Whether collectives may run between two machines: over a link that is trusted, or with an interface on each."""
        link = self.link(one.name, other.name)
        return link != UNREACHABLE and (link.trusted or (one.trusted and other.trusted))
