"""What the planner knows: of a model, of machines, and of what is between them. Values only.

The share of a machine's memory that plans may count on, as a file states it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.machine_profile import StepCosts, WeightRate
from mlx_ring.models.tensor_shares import TensorSizes
from mlx_ring.planner.cpu_quota import ProcessorGrant


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
    grant: ProcessorGrant | None = None
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


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Between two machines, one way and back."""

    round_trip_s: float
    bandwidth: float
    """Bytes a second."""
    frames_s: float = 0.0
    """Of the round trip, what our own frames and their encryption take, where it was measured with them."""
    trusted: bool = False
    """Whether collectives may run here, which are neither encrypted nor authenticated."""
    collective: LinkProfile | None = None
    """What they take between the interfaces that are trusted, where that is another link and was measured; None: this one."""

    def seconds(self, nbytes: float) -> float:
        """One way."""
        return self.round_trip_s / 2 + nbytes / self.bandwidth

    def collective_seconds(self, nbytes: float) -> float:
        """One way, for a part of a collective: over a plain connection, by threads that hand over to each other."""
        if self.collective is not None:
            return self.collective.collective_seconds(nbytes)
        wire_s = max(0.0, self.round_trip_s - self.frames_s) / 2
        return wire_s + _COLLECTIVE_HOP_S + nbytes / self.bandwidth


_COLLECTIVE_HOP_S = 25e-6
"""What MLX's ring takes for a hop beside the wire: its sum over two ranks on loopback is 52 us at best, which is two hops."""
FRAMES_S = 100e-6
"""There and back: gRPC with mutual TLS beside plain TCP, measured on loopback."""
LOCAL = LinkProfile(round_trip_s=200e-6, bandwidth=2e9, frames_s=190e-6, trusted=True)
"""Between two processes of one machine."""
ETHERNET = LinkProfile(round_trip_s=500e-6, bandwidth=1.1e8)
"""1 Gbit/s, where nothing better is said."""
UNREACHABLE = LinkProfile(round_trip_s=float("inf"), bandwidth=1.0)
"""Between machines that do not get through to each other."""


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


SHARE_FIELDS = frozenset({"gpu_memory_utilization", "memory_utilization"})
"""As the flags are called, vLLM's and ours."""


def read_share(name: str, where: str, *places: Mapping[str, Any]) -> float | None:
    """Of the machine called `name`; None where none of the places states one.

    Args:
        name: of the machine, in sentences.
        where: the file, in sentences.
        places: fields among which it may stand; under `serve` names may have dashes for underscores.

    Raises:
        ConfigError: it is no share, or stands there twice.
    """
    given = [
        (key, value)
        for place in places
        for key, value in place.items()
        if is_share(key) and value is not None
    ]
    if len(given) > 1:
        twice = " and ".join(key for key, _ in given)
        raise ConfigError(f"{where}: the share of memory of {name} stands there twice, as {twice}: give one.")
    for key, value in given:
        if type(value) not in (int, float) or not 0 < cast("float", value) <= 1:
            raise ConfigError(
                f"{where}: {key} of {name} is {value!r}; it must be a number above 0, at most 1."
            )
        return float(cast("float", value))
    return None


def is_share(key: object) -> bool:
    """Whether a field is called so."""
    return str(key).replace("-", "_") in SHARE_FIELDS
