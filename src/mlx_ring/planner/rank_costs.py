"""Memory and time of one rank of a stage: its share of split tensors, and all of the others. Pure.

Attention and KV count by heads, MLPs and experts by rows, the output head by tokens of the vocabulary. Each counts as in
the shares that can really be made. Norms, routers, the embedding, activations and drawing are whole.

It also has the times of collectives over machines, the order of the machines in their ring, and those that are alike.

MLX's backend jaccl sums in one round over a mesh of cables. Its ring sums in `2 (K - 1)` rounds, in each of which every rank sends one part of `K` to the next. Gathering takes
`K - 1` rounds of a rank's whole part. All send at once, so that the slowest link of the ring makes the pace.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mlx_ring.models.tensor_shares import TensorShare, TensorSizes
from mlx_ring.planner.profiles import ClusterProfile, LayerKinds, LayerProfile, NodeProfile, Seconds
from mlx_ring.planner.request import Chunks, Demand, limited_kv_bytes, planned_kv_bytes, usual_chunks
from mlx_ring.planner.stage_costs import (
    Table,
    before,
    bytes_ahead,
    head_seconds,
    layer_seconds,
    prefill_factor,
    prefill_layers,
    working_bytes,
)
from mlx_ring.rpc.link_profile import LinkProfile


@dataclass(frozen=True, slots=True)
class Fractions:
    """Fractions of a layer's parts that one rank holds."""

    heads: float
    rows: float
    experts: float
    vocabulary: float

    @classmethod
    def of(cls, share: TensorShare, sizes: TensorSizes) -> Fractions:
        """Return the fractions of a share that can be made."""
        rows = len(share.intermediate) / sizes.intermediate
        return cls(
            len(share.kv_heads) / sizes.kv_heads,
            rows,
            len(share.experts) / sizes.experts if sizes.experts else rows,
            len(share.vocabulary) / sizes.vocabulary,
        )


class RankCosts:
    """Costs of one rank, for any layers."""

    def __init__(self, layers: LayerKinds, demand: Demand, node: NodeProfile, part: Fractions) -> None:
        self.node = node
        self._model = layers.model
        self._demand = demand
        self._part = part
        self._layers = layers
        self._kinds = [_share_of(layer, part) for layer in layers.kinds]
        self._head_bytes = round(layers.model.head_bytes * part.vocabulary)
        weights = layers.by_layer([layer.weight_bytes for layer in self._kinds])
        kv = layers.by_layer([planned_kv_bytes(layer, layers.model, demand) for layer in self._kinds])
        limited = layers.by_layer([limited_kv_bytes(layer, layers.model, demand) for layer in self._kinds])
        self._seconds: dict[tuple[int, int], Table] = {}
        self._prefill: dict[tuple[int, Chunks], Table] = {}
        self._weights_before, self._kv_before = before(weights), before(kv)
        self._given_bytes, self._limited_before = demand.kv_memory_bytes, before(limited)

    def seconds_before(self, rows: int, context_tokens: int) -> Table:
        """Return the computing seconds of all layers before each; the output head counts to the last layer."""
        if (rows, context_tokens) not in self._seconds:
            self._seconds[rows, context_tokens] = self._sum_seconds(rows, context_tokens)
        return self._seconds[rows, context_tokens]

    def _sum_seconds(self, rows: int, context_tokens: int) -> Table:
        model, rate = self._model, self.node.rate(self._model.weights)
        if rows > 1 and not model.batches:
            return rows * self._sum_seconds(1, context_tokens)
        each = self._layers.by_layer(
            [
                layer_seconds(layer, self.node, rate, model, self._demand, rows, context_tokens)
                for layer in self._kinds
            ]
        )
        each[-1] += head_seconds(
            self._head_bytes, model.vocabulary * self._part.vocabulary, model.hidden_size, rate, rows
        )
        each[-1] += self.node.costs.draw_s + rows * model.vocabulary * self.node.costs.logit_s
        return before(each)

    def prefill_s(
        self, first: int, end: int, tokens: int, context: int = 0, chunks: Chunks | None = None
    ) -> float:
        """Return the seconds of a stage's prefill in the usual steps or in given ones, without the exchange between ranks."""
        chunks = chunks or usual_chunks(tokens, self._demand.chunk_tokens or self.node.chunk_tokens)
        key = context, chunks
        if key not in self._prefill:
            self._prefill[key] = prefill_layers(self._layers, self._kinds, self.node, context, chunks)
        return float(self._prefill[key][first:end].sum()) * prefill_factor(self.node)

    def weight_bytes(self, first: int, end: int) -> int:
        """Return the bytes of weights, including embedding and part of the head if the stage has them."""
        return int(self._weights_before[end] - self._weights_before[first]) + self._ends_bytes(first, end)

    def kv_bytes(self, first: int, end: int) -> int:
        """Return the bytes of the KV cache: those that are given, or those of the promised load."""
        return (self._given_bytes or 0) + int(self._kv_before[end] - self._kv_before[first])

    def memory_bytes(self, first: int, end: int) -> int:
        """Return the bytes of the rank, including working memory and the process."""
        logits = 4 * self._demand.sequences * self._model.vocabulary * (end == len(self._layers.index))
        whole = (
            self._ends_bytes(first, end)
            + logits
            + working_bytes(self._model, self._demand.step_tokens)
            + self.node.process_bytes
        )
        layers = self._weights_before + self._kv_before
        ahead = bytes_ahead(
            self._model, self.node.layers_ahead, np.array(end - first), self._demand.step_tokens
        )
        return int(np.ceil(layers[end] - layers[first] + ahead)) + whole + (self._given_bytes or 0)

    def kv_share(self, first: int, end: int) -> float:
        """Return the largest part of the rank's KV of the promised load that a given KV memory holds; infinite for all."""
        held = float(self._limited_before[end] - self._limited_before[first])
        return np.inf if self._given_bytes is None or not held else self._given_bytes / held

    def fits(self, first: int, end: int) -> bool:
        """Return True if the machine has the memory of the rank, and its KV cache that of the promised load."""
        return self.memory_bytes(first, end) <= self.node.usable_bytes and self.kv_share(first, end) >= 1

    def _ends_bytes(self, first: int, end: int) -> int:
        """Return the bytes of embedding and head; a stage with both keeps a tied table once, whole."""
        is_first, is_last = first == 0, end == len(self._layers.index)
        if is_first and is_last and self._model.is_tied:
            return self._model.ends_bytes(is_first=True, is_last=True)
        return self._model.embedding_bytes * is_first + self._head_bytes * is_last

    def memory_table(self, ends: NDArray[np.intp]) -> Table:
        """Return `memory_bytes` of every stage between two of the ends."""
        layers = (self._weights_before + self._kv_before)[ends]
        held = (
            layers[None, :]
            - layers[:, None]
            + working_bytes(self._model, self._demand.step_tokens)
            + self.node.process_bytes
            + 1
        )
        held += bytes_ahead(
            self._model,
            self.node.layers_ahead,
            np.maximum(0, ends[None, :] - ends[:, None]),
            self._demand.step_tokens,
        )
        held[0] += self._model.embedding_bytes
        held[:, -1] += self._head_bytes + 4 * self._demand.sequences * self._model.vocabulary
        held += self._given_bytes or 0
        if self._model.is_tied:
            held[0, -1] += self._ends_bytes(0, len(self._layers.index))
            held[0, -1] -= self._model.embedding_bytes + self._head_bytes
        return held

    def kv_shares(self, ends: NDArray[np.intp]) -> Table:
        """Return `kv_share` of every stage between two of the ends."""
        kv = self._limited_before[ends]
        held = kv[None, :] - kv[:, None]
        if self._given_bytes is None:
            return np.full(held.shape, np.inf)
        return np.divide(self._given_bytes, held, out=np.full(held.shape, np.inf), where=held > 0)

    def fits_table(self, ends: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return `fits` of every stage between two of the ends."""
        return (self.memory_table(ends) <= self.node.usable_bytes) & (self.kv_shares(ends) >= 1)


def crowded(node: NodeProfile, ranks: int) -> NodeProfile:
    """Return the machine as one of several ranks on it finds it. Ranks share its speed if it cannot run all at once."""
    slower = ranks / min(ranks, node.workers_at_once)
    if slower <= 1:
        return node
    costs = node.costs
    return replace(
        node,
        bandwidth=node.bandwidth / slower,
        flops=node.flops / slower,
        rates=tuple(
            rate.model_copy(
                update={
                    "bandwidth": rate.bandwidth / slower,
                    "row_s": rate.row_s * slower,
                    "flops": rate.flops / slower,
                }
            )
            for rate in node.rates
        ),
        costs=costs.model_copy(update={name: value * slower for name, value in costs.model_dump().items()}),
        activation_s=node.activation_s * slower,
        vector_s=node.vector_s * slower,
        scan_s=node.scan_s * slower,
    )


def beside_others(node: NodeProfile, instances: int) -> NodeProfile:
    """Return the machine as one of several instances finds it that compute on it at the same time."""
    return replace(crowded(node, instances), workers_at_once=max(1, node.workers_at_once // instances))


def _share_of(layer: LayerProfile, part: Fractions) -> LayerProfile:
    """Return the layer as one rank holds it; it never reads more of the experts than it holds."""
    rows = part.experts if layer.read_bytes < layer.weight_bytes else part.rows

    def share(nbytes: int) -> int:
        shared = max(0, nbytes - layer.attention_bytes - layer.whole_bytes)
        return round(layer.attention_bytes * part.heads + shared * rows + layer.whole_bytes)

    read = share(layer.read_bytes)
    return replace(
        layer,
        weight_bytes=share(layer.weight_bytes),
        read_bytes=read,
        flops_per_token=round(layer.flops_per_token * read / max(1, layer.read_bytes)),
        kv_bytes_per_token=round(layer.kv_bytes_per_token * part.heads),
        kv_bytes_per_sequence=round(layer.kv_bytes_per_sequence * part.heads),
        query_width=round(layer.query_width * part.heads),
        score_width=round(layer.score_width * part.heads),
    )


@dataclass(frozen=True, slots=True)
class Ring:
    """Machines in the order in which each sends to the next, and the last to the first."""

    nodes: tuple[int, ...]
    """Places in the cluster, the lowest first."""
    links: tuple[LinkProfile, ...]
    """Links from each to the next, without duplicates."""

    def sum_s(self, nbytes: float) -> float:
        """Return the seconds of a sum over all ranks."""
        ranks = len(self.nodes)
        if self.is_mesh:
            # Every rank sends all of it to every other, at once over cables of their own.
            return self._round_s(nbytes)
        return 2 * (ranks - 1) * self._round_s(nbytes / ranks)

    def gather_s(self, nbytes: float) -> float:
        """Return the seconds until every rank has every part, the longest of which has `nbytes`."""
        return self._round_s(nbytes) if self.is_mesh else (len(self.nodes) - 1) * self._round_s(nbytes)

    @property
    def is_mesh(self) -> bool:
        """True if all ranks reach each other directly, as with MLX's backend jaccl."""
        return bool(self.links) and all(link.is_mesh for link in self.links)

    def _round_s(self, nbytes: float) -> float:
        return max(link.collective_seconds(nbytes) for link in self.links)


class Rings:
    """Best rings of sets of machines."""

    def __init__(self, cluster: ClusterProfile, nbytes: float, *, trusting: bool = False) -> None:
        """Prepare rings for sums of `nbytes`; with `trusting` as if every interface were trusted."""
        self._cluster = cluster
        nodes = range(len(cluster.nodes))
        self._seconds = np.array(
            [[self._hop_s(one, other, nbytes, trusting=trusting) for other in nodes] for one in nodes]
        )
        self._best: dict[int, NDArray[np.float64]] = {}
        """Slowest hop of the best path from the lowest machine through a set, by set as bits and by last machine."""

    def _hop_s(self, one: int, other: int, nbytes: float, *, trusting: bool) -> float:
        here, there = self._cluster.nodes[one], self._cluster.nodes[other]
        if one == other or not (trusting or self._cluster.trusts(here, there)):
            return np.inf
        return self._cluster.link(here.name, there.name).collective_seconds(nbytes / 2)

    def among(self, members: Sequence[int]) -> Ring | None:
        """Return the ring with the fastest slowest hop; None if there is none. `members` are sorted."""
        among = self._seconds[np.ix_(members, members)][~np.eye(len(members), dtype=bool)]
        if among.size and np.all(among == among[0]):
            # Every order is as fast.
            if not np.isfinite(among[0]):
                return None
            around = zip(members, [*members[1:], members[0]], strict=True)
            return Ring(tuple(members), tuple({self._link(one, other) for one, other in around}))
        bits = sum(1 << node for node in members)
        closed = np.maximum(self._slowest_hops(bits), self._seconds[:, members[0]])
        last = int(closed.argmin())
        if not np.isfinite(closed[last]):
            return None
        order = self._trace(bits, last)
        links = {self._link(one, other) for one, other in zip(order, [*order[1:], order[0]], strict=True)}
        return Ring(tuple(order), tuple(links))

    def _link(self, one: int, other: int) -> LinkProfile:
        nodes = self._cluster.nodes
        return self._cluster.link(nodes[one].name, nodes[other].name)

    def _slowest_hops(self, bits: int) -> NDArray[np.float64]:
        if bits not in self._best:
            lowest = (bits & -bits).bit_length() - 1
            found = np.full(len(self._seconds), np.inf)
            if bits.bit_count() == 1:
                found[lowest] = 0.0
            for last in range(lowest + 1, bits.bit_length()):
                if bits >> last & 1:
                    found[last] = np.maximum(
                        self._slowest_hops(bits & ~(1 << last)), self._seconds[:, last]
                    ).min()
            self._best[bits] = found
        return self._best[bits]

    def _trace(self, bits: int, last: int) -> list[int]:
        order = [last]
        while bits := bits & ~(1 << order[-1]):
            order.append(int(np.maximum(self._slowest_hops(bits), self._seconds[:, order[-1]]).argmin()))
        return order[::-1]


# ---- machines that are alike

Kinds = Sequence[Sequence[int]]
"""Machines by their places, in lists of those that are alike."""


def kinds_of(keys: Sequence[Hashable], *between: Seconds) -> Kinds:
    """Return the lists of machines that are alike: two of them can be exchanged without changing any cost.

    Args:
        keys: what makes a machine different, by machine.
        between: costs from machine to machine.
    """
    kinds: dict[Hashable, list[list[int]]] = {}
    for place, key in enumerate(keys):
        lists = kinds.setdefault(key, [])
        same = next((kind for kind in lists if all(_is_alike(kind[0], place, one) for one in between)), None)
        if same is None:
            lists.append([place])
        else:
            same.append(place)
    return sorted(kind for lists in kinds.values() for kind in lists)


def _is_alike(one: int, other: int, costs: Seconds) -> bool:
    """Return True if the costs stay when the two machines are exchanged."""
    others = np.ones(len(costs), bool)
    others[[one, other]] = False
    return bool(
        costs[one, other] == costs[other, one]
        and np.array_equal(costs[one, others], costs[other, others])
        and np.array_equal(costs[others, one], costs[others, other])
    )


def sets_by_size(kinds: Kinds) -> list[list[int]]:
    """Return all sets of machines by their number, as bits; of machines that are alike, only the first ones."""
    found: list[list[int]] = [[0]]
    for kind in kinds:
        first_ones = [0, *accumulate(1 << place for place in kind)]
        longer: list[list[int]] = [[] for _ in range(len(found) + len(kind))]
        for size, sets in enumerate(found):
            for more, bits in enumerate(first_ones):
                longer[size + more] += [members | bits for members in sets]
        found = longer
    return found


def alike_machines(cluster: ClusterProfile) -> Kinds:
    """Return the machines in lists of those with the same profile and the same links."""
    places = {node.name: place for place, node in enumerate(cluster.nodes)}
    numbers: dict[object, int] = {}
    links = np.zeros((len(places), len(places)))
    for pair, link in cluster.links.items():
        if pair <= places.keys():
            one, other = (places[name] for name in pair)
            links[one, other] = links[other, one] = 1 + numbers.setdefault(link, len(numbers))
    return kinds_of([replace(node, name="") for node in cluster.nodes], links)
