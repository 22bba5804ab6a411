"""Groups of machines that compute layers together: times of a stage, and the best shares. Pure.

Each layer is over when the slowest rank is, and after two sums over all of them. The last stage also gathers every rank's
part of the logits, and rank 0 sends the others its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.tensor_shares import TensorSizes, nearest_proportions, share_out
from mlx_ring.planner.plan import Times
from mlx_ring.planner.profiles import ClusterProfile, LayerKinds, LoadedForms, ModelProfile, NodeProfile
from mlx_ring.planner.rank_costs import Fractions, RankCosts, Ring, crowded
from mlx_ring.planner.request import Chunks, Demand, chunks_alone, usual_chunks
from mlx_ring.planner.stage_costs import TOKEN_BYTES, Table, long_chunk_on, times_on

SUMS_PER_LAYER = 2
_PARTS = 256
"""Number of parts in which shares are counted, so that they add up to exactly 1."""
_BISECTIONS, _TRIES = 30, 8
ALL = Fractions(1.0, 1.0, 1.0, 1.0)
_NONE = Fractions(0.0, 0.0, 0.0, 0.0)

Ends = NDArray[np.intp]


class SharedModel:
    """Model as machines load it, with the promised load."""

    def __init__(self, model: ModelProfile, demand: Demand, sizes: TensorSizes | None) -> None:
        """Prepare the model; without `sizes` every share can be made, to predict a split that is not possible."""
        self.model = model
        self.demand = demand
        self.sizes = sizes
        self.most_ranks = _PARTS if sizes is None else sizes.most_ranks
        self._forms = LoadedForms(model)
        self._ends_of: dict[NodeProfile, tuple[RankCosts, RankCosts]] = {}
        self._largest: dict[tuple[NodeProfile, bytes], Table] = {}
        self._groups: dict[tuple[object, ...], RankGroup] = {}

    def on(self, node: NodeProfile) -> LayerKinds:
        """Return the model as a machine holds it; one with a choice holds the smaller form, until shares are settled."""
        return self._forms.on(node)[-1]

    @property
    def context_tokens(self) -> int:
        """Mean context of a stream."""
        return self.demand.mean_context_tokens

    def costs(self, node: NodeProfile, part: Fractions) -> RankCosts:
        return RankCosts(self.on(node), self.demand, node, part)

    def bounds(self, node: NodeProfile) -> tuple[RankCosts, RankCosts]:
        """Return the costs with no share and with all; a rank's costs lie between, in proportion."""
        if node not in self._ends_of:
            self._ends_of[node] = self.costs(node, _NONE), self.costs(node, ALL)
        return self._ends_of[node]

    def largest_shares(self, node: NodeProfile, ends: Ends) -> Table:
        """Return the largest share that memory allows for every stage between two of the ends; minus infinity for none."""
        key = node, ends.tobytes()
        if key not in self._largest:
            least, whole = (costs.memory_table(ends) for costs in self.bounds(node))
            room = (node.usable_bytes - least) / np.maximum(1.0, whole - least)
            room = np.minimum(room, self.bounds(node)[1].kv_shares(ends))
            self._largest[key] = np.where(room > 0, np.minimum(room, 1.0), -np.inf)
        return self._largest[key]

    def group(self, key: tuple[object, ...], make: Callable[[], RankGroup]) -> RankGroup:
        """Return the group of a key, which is made once; it keeps the machines whose objects the key names."""
        if key not in self._groups:
            self._groups[key] = make()
        return self._groups[key]

    def made(self, shares: Sequence[float]) -> tuple[list[float], list[Fractions]]:
        """Return the nearest shares that can be made, and the fractions of each rank."""
        if self.sizes is None:
            return list(shares), [Fractions(share, share, share, share) for share in shares]
        try:
            found = share_out(self.sizes, shares)
        except PlanError:
            near = nearest_proportions(self.sizes, shares)
            shares = [count / sum(near) for count in near]
            found = share_out(self.sizes, shares)
        return list(shares), [Fractions.of(share, self.sizes) for share in found]


@dataclass(frozen=True, slots=True)
class GroupRank:
    """One rank of a group."""

    node: NodeProfile
    share: float
    costs: RankCosts


class RankGroup:
    """Ranks with their shares, for any layers. A single rank has everything and exchanges nothing."""

    def __init__(
        self, shared: SharedModel, members: Sequence[GroupRank], ring: Ring, longest_head: float = 1.0
    ) -> None:
        """Prepare the group; `longest_head` is the largest fraction of the vocabulary that a rank has."""
        self.shared = shared
        self.members = tuple(members)
        self.nodes = tuple(member.node for member in members)
        self.ring = ring
        self._longest_head = longest_head
        self._layers = len(shared.model.layers)
        self._stage_s: dict[tuple[int, int, int, int], Times[float]] = {}
        self._prefill_s: dict[tuple[int, int, int, int], float] = {}
        self._alone_s: dict[int, float] = {}
        models = [shared.on(member.node).model for member in members]
        self.number_bytes = max(model.number_bytes for model in models)
        self.row_bytes = models[0].hidden_size * models[0].number_bytes
        """Bytes of one row's activations, as rank 0 sends them."""

    def on(self, nodes: Sequence[NodeProfile], places: tuple[int, ...]) -> RankGroup:
        """Return the group on other machines that differ by name only, in the ring's order; both share computed times."""
        other = copy(self)
        other.members = tuple(
            replace(member, node=node) for member, node in zip(self.members, nodes, strict=True)
        )
        other.nodes = tuple(nodes)
        other.ring = replace(self.ring, nodes=places)
        return other

    def exchange_s(self, rows: int) -> tuple[float, float]:
        """Return the seconds of the exchange in a step: for each layer, and after the last one."""
        if len(self.members) == 1:
            return 0.0, 0.0
        model = self.shared.model
        layer = SUMS_PER_LAYER * self.ring.sum_s(rows * model.hidden_size * self.number_bytes)
        logits = rows * model.vocabulary * self._longest_head * self.number_bytes
        return layer, self.ring.gather_s(logits) + self.ring.sum_s(TOKEN_BYTES * rows)

    def times(self, rows: int, context_tokens: int, ends: Ends, *, any_shares: bool = False) -> Times[Table]:
        """Return the seconds of a step of every stage between two of the ends.

        They are infinite where memory does not suffice, with `any_shares` where it suffices for no shares.
        """
        layer_s, last_s = self.exchange_s(rows)
        exchanged = (ends[None, :] - ends[:, None]) * layer_s
        exchanged[:, -1] += last_s
        each = [self._computing(member, rows, context_tokens, ends) for member in self.members]
        fits = (ends[:, None] < ends[None, :]) & (
            self._holds_somehow(ends) if any_shares else self._holds(ends)
        )
        unhindered = np.max([times.unhindered for times in each], axis=0) + exchanged
        steady = np.max([times.steady for times in each], axis=0) + exchanged
        return Times(np.where(fits, unhindered, np.inf), np.where(fits, steady, np.inf))

    def _holds(self, ends: Ends) -> NDArray[np.bool_]:
        return np.logical_and.reduce([member.costs.fits_table(ends) for member in self.members])

    def _holds_somehow(self, ends: Ends) -> NDArray[np.bool_]:
        """Return where the largest shares that memory allows add up to the whole."""
        parts = [self.shared.largest_shares(node, ends) for node in self.nodes]
        return np.add.reduce(parts) >= 1.0

    def _computing(self, member: GroupRank, rows: int, context_tokens: int, ends: Ends) -> Times[Table]:
        before = member.costs.seconds_before(rows, context_tokens)[ends]
        computing = before[None, :] - before[:, None] + member.node.costs.step_s
        is_whole = (ends[:, None] == 0) & (ends[None, :] == self._layers)
        return times_on(member.node, computing, is_whole=is_whole)

    def stage_seconds(self, first: int, end: int, rows: int, context_tokens: int) -> Times[float]:
        """Return the seconds of a step of one stage, regardless of memory."""
        key = first, end, rows, context_tokens
        if key not in self._stage_s:
            self._stage_s[key] = self._step_seconds(*key)
        return self._stage_s[key]

    def _step_seconds(self, first: int, end: int, rows: int, context_tokens: int) -> Times[float]:
        layer_s, last_s = self.exchange_s(rows)
        exchanged = (end - first) * layer_s + last_s * (end == self._layers)
        ends = np.array([first, end])
        each = [self._computing(member, rows, context_tokens, ends) for member in self.members]
        return Times(
            max(float(times.unhindered[0, 1]) for times in each) + exchanged,
            max(float(times.steady[0, 1]) for times in each) + exchanged,
        )

    def prefill_seconds(self, first: int, end: int, tokens: int, context_tokens: int = 0) -> float:
        """Return the seconds of a stage's prefill in chunks, after a context."""
        key = first, end, tokens, context_tokens
        if key not in self._prefill_s:
            self._prefill_s[key] = self._chunks_seconds(*key)
        return self._prefill_s[key]

    def _chunks_seconds(
        self, first: int, end: int, tokens: int, context_tokens: int, chunks: Chunks | None = None
    ) -> float:
        demand = self.shared.demand
        if chunks is None and demand.even_tokens and end - first < self._layers:
            chunks = usual_chunks(tokens, demand.stage_tokens)
        computing = max(
            member.costs.prefill_s(first, end, tokens, context_tokens, chunks) for member in self.members
        )
        steps = chunks or usual_chunks(tokens, demand.step_tokens)
        return computing + (end - first) * sum(count * self.exchange_s(size)[0] for size, count in steps)

    def alone_seconds(self, tokens: int) -> float:
        """Return the seconds in which a group with all layers reads a prompt alone."""
        if tokens not in self._alone_s:
            self._alone_s[tokens] = self._chunks_seconds(0, self._layers, tokens, 0, self._alone(tokens))
        return self._alone_s[tokens]

    def _alone(self, tokens: int) -> Chunks | None:
        """Return the chunks of a prompt alone; None for the usual ones."""
        ranks = ((node, self._layers) for node in self.nodes)
        if not (most := long_chunk_on(ranks, self.shared.model, self.shared.demand)):
            return None
        times = partial(self.chunk_seconds, 0, self._layers)
        return chunks_alone(tokens, self.shared.demand.step_tokens, most, times)

    def chunk_seconds(self, first: int, end: int, tokens: int, context_tokens: int) -> float:
        """Return the seconds of a prefill step with `tokens` tokens after a context."""
        computing = max(
            member.costs.prefill_s(first, end, tokens, context_tokens, ((tokens, 1),))
            + member.node.costs.step_s / (member.node.cpu_quota.share if member.node.cpu_quota else 1.0)
            for member in self.members
        )
        return computing + (end - first) * self.exchange_s(tokens)[0]

    def fits(self, first: int, end: int) -> bool:
        return all(member.costs.fits(first, end) for member in self.members)


@dataclass(frozen=True, slots=True)
class GroupStage:
    """Layers that a group of ranks computes together. A lone rank is a group, too."""

    group: RankGroup
    layers: LayerRange

    @property
    def nodes(self) -> tuple[NodeProfile, ...]:
        """Machine of each rank, rank 0 first."""
        return self.group.nodes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's activations, as rank 0 sends them."""
        return self.group.row_bytes

    def seconds(self, rows: int, context_tokens: int) -> Times[float]:
        """Return the seconds of a decode step."""
        return self.group.stage_seconds(self.layers.start, self.layers.end, rows, context_tokens)

    def prefill_seconds(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the seconds of all usual chunks of a prompt, after a context."""
        return self.group.prefill_seconds(self.layers.start, self.layers.end, tokens, context_tokens)

    def alone_seconds(self, tokens: int) -> float:
        """Return the seconds in which a stage with all layers reads a prompt alone, in chunks that may be longer."""
        return self.group.alone_seconds(tokens)


def alone(shared: SharedModel, node: NodeProfile, place: int = 0) -> RankGroup:
    """Return a group of a single machine."""
    return RankGroup(shared, [GroupRank(node, 1.0, shared.bounds(node)[1])], Ring((place,), ()))


def group_of(
    shared: SharedModel, nodes: Sequence[NodeProfile], shares: Sequence[float], ring: Ring
) -> RankGroup:
    """Return the group with the shares nearest to these; `nodes` and `shares` are in the ring's order."""
    return shared.group((*map(id, nodes), *shares, ring), lambda: _group_of(shared, nodes, shares, ring))


def _group_of(
    shared: SharedModel, nodes: Sequence[NodeProfile], shares: Sequence[float], ring: Ring
) -> RankGroup:
    made, parts = shared.made(shares)
    members = [
        GroupRank(node, share, shared.costs(node, part))
        for node, share, part in zip(nodes, made, parts, strict=True)
    ]
    return RankGroup(shared, members, ring, max(part.vocabulary for part in parts))


def given_group(
    shared: SharedModel, cluster: ClusterProfile, ranks: Sequence[tuple[NodeProfile, float]]
) -> RankGroup:
    """Return the group of given ranks, in their order; ranks on one machine share its speed."""
    names = [node.name for node, _ in ranks]
    around = zip(names, [*names[1:], names[0]], strict=True)
    ring = Ring(tuple(range(len(ranks))), tuple({cluster.link(one, other) for one, other in around}))
    nodes = [crowded(node, names.count(node.name)) for node, _ in ranks]
    whole = sum(share for _, share in ranks)
    return group_of(shared, nodes, [share / whole for _, share in ranks], ring)


def fitting_group(
    shared: SharedModel,
    nodes: Sequence[NodeProfile],
    ring: Ring,
    first: int,
    end: int,
    rows: int = 1,
) -> RankGroup | None:
    """Return the group whose ranks take equally long, as far as memory allows; None if it allows no shares."""
    if len(nodes) > shared.most_ranks:
        return None
    bounds = [shared.bounds(node) for node in nodes]
    caps = np.array([_most(none, whole, first, end) for none, whole in bounds])
    fixed, each = _seconds(shared, nodes, first, end, rows)
    for _ in range(_TRIES):
        shares = _even_times(fixed, each, np.minimum(caps, 1.0), 1 / shared.most_ranks)
        if shares is None:
            return None
        group = group_of(shared, nodes, _in_parts(shares), ring)
        over = np.array([not member.costs.fits(first, end) for member in group.members])
        if not over.any():
            return group
        # Whole heads may exceed the share.
        caps = np.where(over, np.minimum(caps, shares) - 1 / (2 * min(shared.most_ranks, _PARTS // 8)), caps)
    return None


def is_enough_for_all(shared: SharedModel, nodes: Sequence[NodeProfile]) -> bool:
    """Return True if all machines together have the memory of the whole model, beside what each process needs."""
    layers = len(shared.model.layers)
    whole = [shared.bounds(node)[1] for node in nodes]
    own = [costs.memory_bytes(1, 1) for costs in whole]
    room = sum(max(0, node.usable_bytes - each) for node, each in zip(nodes, own, strict=True))
    return layers < 2 or room >= min(  # noqa: PLR2004 - a layer between others
        costs.memory_bytes(0, layers) - each for costs, each in zip(whole, own, strict=True)
    )


def quick_group(
    shared: SharedModel, nodes: Sequence[NodeProfile], ring: Ring, rows: int, *, by_memory: bool
) -> RankGroup:
    """Return the group whose ranks take equally long, or have shares in proportion to memory, for any layers."""
    if by_memory:
        layers = len(shared.model.layers)
        whole = [shared.bounds(node)[0].memory_bytes(0, layers) for node in nodes]
        room = np.array(
            [float(max(1, node.usable_bytes - held)) for node, held in zip(nodes, whole, strict=True)]
        )
        return group_of(shared, nodes, _in_parts(room / room.sum()), ring)
    layers = len(shared.model.layers)
    shares = _even_times(
        *_seconds(shared, nodes, 0, layers, rows), np.ones(len(nodes)), 1 / shared.most_ranks
    )
    even = np.full(len(nodes), 1 / len(nodes))
    return group_of(shared, nodes, _in_parts(even if shares is None else shares), ring)


def _seconds(
    shared: SharedModel, nodes: Sequence[NodeProfile], first: int, end: int, rows: int
) -> tuple[Table, Table]:
    """Return for each node the seconds of a step that do not depend on the share, and those in proportion to it."""
    found: list[tuple[float, float]] = []
    for node in nodes:
        none, whole = (costs.seconds_before(rows, shared.context_tokens) for costs in shared.bounds(node))
        grant = (node.cpu_quota.share if node.cpu_quota else 1.0) / node.ratios.decode
        fixed = float(none[end] - none[first])
        found.append((fixed / grant, max(1e-12, float(whole[end] - whole[first]) - fixed) / grant))
    return np.array([one for one, _ in found]), np.array([other for _, other in found])


def _most(none: RankCosts, whole: RankCosts, first: int, end: int) -> float:
    """Return the largest share of these layers that memory allows."""
    least, all_of_it = none.memory_bytes(first, end), whole.memory_bytes(first, end)
    room = (none.node.usable_bytes - least) / max(1, all_of_it - least)
    return min(room, whole.kv_share(first, end))


def _even_times(fixed: Table, each: Table, caps: Table, least: float) -> Table | None:
    """Return shares that add up to 1 and take equally long, except those at a bound; None if bounds exclude that."""
    lowest = min(least, 1 / len(caps))
    if caps.min() < lowest or caps.sum() < 1:
        return None
    ranks = list(zip(fixed.tolist(), each.tolist(), caps.tolist(), strict=True))

    def at(level: float) -> list[float]:
        return [min(cap, max(lowest, (level - none) / whole)) for none, whole, cap in ranks]

    low, high = 0.0, float((fixed + each).max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < 1 else (low, middle)
    shares = np.array(at(high))
    return shares / shares.sum()


def _in_parts(shares: Table) -> list[float]:
    """Return the shares in whole parts, at least one each."""
    counts = np.maximum(1, np.floor(shares * _PARTS)).astype(int)
    while counts.sum() < _PARTS:
        counts[int((shares * _PARTS - counts).argmax())] += 1
    while counts.sum() > _PARTS:
        counts[int((counts - shares * _PARTS + (counts > 1)).argmax())] -= 1
    return [float(count) / _PARTS for count in counts]


def stage_seconds(
    groups: Sequence[RankGroup], rows: int, ends: Ends, *, adds: bool, any_shares: bool
) -> Table:
    """Return the seconds of a stage with the best shares of some groups of the same machines, by its ends.

    With `any_shares`, other shares are estimated where memory allows none of these.
    """

    def table(group: RankGroup, *, any_shares: bool = False) -> Table:
        times = group.times(rows, group.shared.context_tokens, ends, any_shares=any_shares)
        return times.unhindered if adds else times.steady

    best = np.min([table(group) for group in groups], axis=0)
    if not any_shares or len(groups) == 1:
        return best
    # Between those by speed and those by memory.
    others = np.max([table(group, any_shares=True) for group in groups], axis=0)
    return cast("Table", np.where(np.isfinite(best), best, others))
