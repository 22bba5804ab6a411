"""Which machine gets which layers: `place(model, cluster, wish)`. Pure, and total: a plan, or an error that says what is missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.cpu_quota import lone_stream
from mlx_ring.planner.plan import (
    LeftOut,
    Plan,
    Prediction,
    RankPlan,
    StagePlan,
    given_counts,
    proportional_counts,
)
from mlx_ring.planner.profiles import UNREACHABLE, ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import Wish
from mlx_ring.planner.search import (
    Piece,
    Way,
    has_way,
    in_order,
    quickest_way,
    steadiest_costs,
)
from mlx_ring.planner.stage_costs import CHUNK_TOKENS, StageTables, Table
from mlx_ring.planner.tensor_plans import MOST_NODES, place_shared, weigh
from mlx_ring.planner.timetable import Timetable

__all__ = ["Wish", "place"]

_SHORTEST_CONTEXT = 256
_KV_BITS = (8, 4)
_ALIKE = 1e-3
"""Times that differ by less are told as one."""


def place(model: ModelProfile, cluster: ClusterProfile, wish: Wish) -> Plan:
    """The plan.

    Raises:
        PlanError: the machines cannot hold the model as promised, or the wish contradicts itself.
    """
    if not cluster.nodes:
        raise PlanError("There is no machine to plan for; name one or more.")
    if wish.demand.context_tokens > model.context_tokens:
        raise PlanError(
            f"A context of {wish.demand.context_tokens} tokens was asked for; {model.name} takes "
            f"{model.context_tokens} at most."
        )
    if wish.strategy in ("tensor", "hybrid"):
        return place_shared(model, cluster, wish)
    planner = _Planner(model, cluster, wish)
    way = planner.way()
    if wish.strategy == "auto":
        apart = None if way is None else planner.plan(way)
        if (plan := weigh(model, cluster, wish, apart)) is not None:
            return plan
    if way is None:
        raise PlanError(_cut_off(model, cluster, wish) or _what_is_missing(model, cluster, wish))
    if broken := planner.broken_hop(way.pieces):
        raise PlanError(
            f"With the strategy {wish.strategy} {broken[0]} would hand over to {broken[1]}, and the two do not reach "
            "each other: mend the network between them, or let the strategy auto choose."
        )
    return planner.plan(way)


class _Planner:
    def __init__(self, model: ModelProfile, cluster: ClusterProfile, wish: Wish) -> None:
        self._model = model
        self._wish = wish
        self._nodes = cluster.nodes
        self._cluster = cluster
        self._timetable = Timetable(model, cluster, wish.demand)
        self._costs = self._timetable.costs
        self._tables, self._hops = self._timetable.tables, self._timetable.hops
        self._steady = self._timetable.steady_tables
        self._on = self._costs.model_on

    def way(self) -> Way | None:
        """Machines and layers as wished; None where memory does not do."""
        match self._wish.strategy:
            case "auto":
                return self._best_way()
            case "balanced":
                self._check_layers()
                return in_order(self._steady(1))
            case _:
                return self._fixed_way(self._counts())

    @property
    def fits(self) -> bool:
        """Whether there is a way as wished."""
        if self._wish.strategy == "auto":
            return has_way(self._tables(1), self._hops(1))
        return self.way() is not None

    def _best_way(self) -> Way | None:
        if len(self._nodes) > MOST_NODES:
            raise PlanError(
                f"{len(self._nodes)} machines were given; plans by `auto` are exact for {MOST_NODES} at most. "
                "Use the strategy balanced, or leave some out."
            )
        quickest = quickest_way(self._tables(1), self._hops(1), self._steady(1))
        if self._wish.aim == "latency" or quickest is None:
            return quickest
        best = replace(quickest, with_node=())
        for bound, stages in sorted(self._bounds(), reverse=True):
            if bound <= self._throughput(best.pieces):
                break
            way = self._way_of(stages, self._wish.demand.sequences / bound)
            if way is not None and self._throughput(way.pieces) > self._throughput(best.pieces):
                best = way
        return best

    def _bounds(self) -> Iterator[tuple[float, int]]:
        """For each number of stages: tokens a second that no pipeline of so many exceeds."""
        sequences = self._wish.demand.sequences
        for rows, alike in groupby(range(1, len(self._nodes) + 1), self._rows):
            stages = list(alike)
            costs = steadiest_costs(self._steady(rows), self._hops(rows), stages[-1])
            for number in stages:
                slowest = min(
                    (cost for members, cost in costs.items() if members.bit_count() == number), default=0.0
                )
                if slowest:
                    yield sequences / (min(number, sequences) * slowest), number

    def _way_of(self, stages: int, least: float) -> Way | None:
        """The pipeline of so many stages on which all groups get around soonest: no sooner than the slowest stage has served them."""
        rows, groups = self._rows(stages), min(stages, self._wish.demand.sequences)
        paces = [groups * table for table in self._steady(rows)]
        return quickest_way(self._tables(rows), self._hops(rows), paces, stages=stages, least=least)

    def _rows(self, stages: int) -> int:
        """Of a decode group, where there are as many groups as stages."""
        return -(-self._wish.demand.sequences // stages)

    def _check_layers(self) -> None:
        if len(self._nodes) > len(self._model.layers):
            raise PlanError(
                f"{len(self._nodes)} machines were given and {self._model.name} has {len(self._model.layers)} "
                "layers: each machine needs a layer, so leave some out."
            )

    def _counts(self) -> tuple[int, ...]:
        layers, nodes = len(self._model.layers), self._nodes
        match self._wish.strategy:
            case "memory":
                shares = [float(node.usable_bytes) for node in nodes]
            case "compute":
                shares = [1 / float(table[0, -1] - table[0, 0]) for table in self._unbound_tables()]
            case "custom":
                if self._wish.counts:
                    self._check_given(self._wish.counts, "layer counts")
                    return given_counts(layers, self._wish.counts)
                shares = list(self._wish.proportions)
                self._check_given(shares, "proportions")
            case _:
                shares = [1.0] * len(nodes)
        self._check_layers()
        return proportional_counts(layers, shares)

    def _check_given(self, given: Sequence[float], what: str) -> None:
        if len(given) != len(self._nodes):
            raise PlanError(
                f"The strategy custom takes {what} for each of the {len(self._nodes)} machines; {len(given)} were given."
            )

    def _unbound_tables(self) -> list[Table]:
        """What steps take where memory is no matter."""
        costs = StageTables(self._model, self._wish.demand)
        boundless = [replace(node, memory_bytes=1 << 62) for node in self._nodes]
        return [
            np.where(np.isfinite(table := costs.seconds(node, 1, 0).steady), table, 0.0) for node in boundless
        ]

    def _fixed_way(self, counts: Sequence[int]) -> Way | None:
        tables = self._tables(1)
        ends = [0, *accumulate(counts)]
        pieces = tuple(Piece(node, first, end) for node, (first, end) in enumerate(pairwise(ends)))
        cost = sum(float(tables[piece.node][piece.first, piece.end]) for piece in pieces)
        return Way(pieces, cost) if np.isfinite(cost) else None

    # ---- what is to be expected

    def plan(self, way: Way) -> Plan:
        wish, prediction = self._wish, self._predict(way.pieces)
        return Plan(
            model=self._model.name,
            strategy=wish.strategy,
            aim=wish.aim,
            context_tokens=wish.demand.context_tokens,
            sequences=wish.demand.sequences,
            kv_bits=wish.demand.kv_bits,
            stages=tuple(map(self._stage, way.pieces, self._lone_stream(way.pieces)[0])),
            left_out=self._left_out(way, prediction),
            prediction=prediction,
            remarks=self._remarks(way, prediction),
        )

    def _stage(self, piece: Piece, token_s: float) -> StagePlan:
        node = self._nodes[piece.node]
        alone = RankPlan(
            node=node.name,
            share=1.0,
            weight_bytes=self._costs.weight_bytes(node, piece.first, piece.end),
            memory_bytes=int(self._costs.memory(node)[piece.first, piece.end]),
            usable_bytes=node.usable_bytes,
        )
        return StagePlan(
            node=node.name,
            layers=LayerRange(piece.first, piece.end),
            weight_bytes=alone.weight_bytes,
            memory_bytes=alone.memory_bytes,
            usable_bytes=alone.usable_bytes,
            token_s=token_s,
            why=self._why(piece, node),
            ranks=(alone,),
        )

    def _why(self, piece: Piece, node: NodeProfile) -> str:
        count, layers = piece.end - piece.first, len(self._model.layers)
        part = {
            "uniform": "as many layers as the others, give or take one",
            "memory": f"{node.usable_bytes / sum(other.usable_bytes for other in self._nodes):.0%} of the usable memory",
            "compute": self._speed(node),
            "balanced": "so that no stage takes longer than it must",
            "custom": "as given",
            "auto": self._speed(node),
        }[self._wish.strategy]
        memory = self._costs.memory(node)
        if piece.end < layers and memory[piece.first, piece.end + 1] > node.usable_bytes:
            part += "; its memory is full"
        return f"{count} of {layers} layers: {part}"

    def _speed(self, node: NodeProfile) -> str:
        bandwidth = node.rate(self._on(node).weights).bandwidth / 1e9
        told = f"reads {bandwidth:,.0f} GB/s" if bandwidth >= 10 else f"reads {bandwidth:.1f} GB/s"  # noqa: PLR2004 - two digits
        return f"{told} for {node.grant.share:.0%} of the time" if node.grant else told

    def _left_out(self, way: Way, prediction: Prediction) -> tuple[LeftOut, ...]:
        used = {piece.node for piece in way.pieces}
        told: list[LeftOut] = []
        for place, node in enumerate(self._nodes):
            if place in used:
                continue
            with_it = way.with_node[place] if way.with_node else np.inf
            if alone := self._out_of_reach(node, used):
                why = f"it and {alone} do not reach each other"
            elif not np.isfinite(self._tables(1)[place]).any():
                why = "too little memory for a single layer"
            elif self._wish.aim == "throughput":
                why = "no plan with it gives more"
            elif not np.isfinite(with_it):
                why = "no plan with it answers sooner"
            elif with_it > prediction.token_s * (1 + _ALIKE):
                why = (
                    f"with it a token takes {1e3 * with_it:.1f} ms instead of {1e3 * prediction.token_s:.1f}"
                )
            else:
                why = "with it a token takes as long"
            told.append(LeftOut(node.name, why))
        return tuple(told)

    def _out_of_reach(self, node: NodeProfile, used: Collection[int]) -> str:
        """A machine of the plan that this one does not reach."""
        names = [self._nodes[place].name for place in sorted(used)]
        return next((name for name in names if self._cluster.link(node.name, name) == UNREACHABLE), "")

    def _remarks(self, way: Way, prediction: Prediction) -> tuple[str, ...]:
        if len(way.pieces) == 1:
            return ("One machine alone does best.",) if len(self._nodes) > 1 else ()
        alone = [float(table[0, -1]) for table in self._steady(1)]
        best = min(range(len(alone)), key=lambda place: alone[place])
        if alone[best] < prediction.token_s:
            return (
                (
                    f"{self._nodes[best].name} alone would answer a single stream sooner: "
                    f"{1e3 * alone[best]:.1f} ms a token instead of {1e3 * prediction.token_s:.1f}."
                ),
            )
        return ()

    def _predict(self, pieces: Sequence[Piece]) -> Prediction:
        return Prediction(
            token_s=self._lone_stream(pieces)[1],
            tokens_per_s=self._throughput(pieces),
            first_token_s=self._first_token_s(pieces),
            prompt_tokens=self._wish.prompt_tokens,
        )

    def broken_hop(self, pieces: Sequence[Piece]) -> tuple[str, str] | None:
        """Two neighbours in the pipeline, or its last and its first, that do not reach each other."""
        names = [self._nodes[piece.node].name for piece in pieces]
        for one, other in zip(names, [*names[1:], names[0]], strict=True):
            if self._cluster.link(one, other) == UNREACHABLE:
                return one, other
        return None

    def _around(self, pieces: Sequence[Piece], rows: int) -> float:
        """Seconds of all hops on the way around."""
        hops = self._hops(rows)
        places = [piece.node for piece in pieces]
        if len(places) == 1:
            return 0.0
        return sum(
            float(hops[one, other]) for one, other in zip(places, [*places[1:], places[0]], strict=True)
        )

    def _lone_stream(self, pieces: Sequence[Piece]) -> tuple[list[float], float]:
        """Seconds of each stage, and from token to token."""
        unhindered, steady = (_of(tables, pieces) for tables in (self._tables(1), self._steady(1)))
        return lone_stream(unhindered, steady, self._around(pieces, 1))

    def _throughput(self, pieces: Sequence[Piece]) -> float:
        """As many groups as stages: a cycle lasts as long as the slowest stage takes for all groups, or one group around."""
        sequences, stages = self._wish.demand.sequences, len(pieces)
        groups = min(stages, sequences)
        rows = -(-sequences // groups)
        once = sum(_of(self._tables(rows), pieces)) + self._around(pieces, rows)
        return sequences / max(groups * max(_of(self._steady(rows), pieces)), once)

    def _first_token_s(self, pieces: Sequence[Piece]) -> float:
        tokens = self._wish.prompt_tokens
        chunks = -(-tokens // CHUNK_TOKENS)
        times = [
            self._costs.prefill_seconds(self._nodes[piece.node], piece.first, piece.end, tokens) / chunks
            for piece in pieces
        ]
        hops = self._around(pieces, min(tokens, CHUNK_TOKENS))
        return sum(times) + (chunks - 1) * max(times) + hops + self._lone_stream(pieces)[1]


def _of(tables: Sequence[Table], pieces: Sequence[Piece]) -> list[float]:
    return [float(tables[piece.node][piece.first, piece.end]) for piece in pieces]


def _cut_off(model: ModelProfile, cluster: ClusterProfile, wish: Wish) -> str:
    """That there would be a plan if all machines reached each other; empty where that is not it."""
    broken = [sorted(pair) for pair, link in cluster.links.items() if link == UNREACHABLE]
    if not broken or not _Planner(model, replace(cluster, links={}), wish).fits:
        return ""
    pairs = ", ".join(f"{one} and {other}" for one, other in sorted(broken))
    return f"{model.name} needs several machines, and these do not reach each other: {pairs}. Mend the network between them."


def _what_is_missing(model: ModelProfile, cluster: ClusterProfile, wish: Wish) -> str:
    """Why nothing fits, and what would."""
    demand, usable = wish.demand, sum(node.usable_bytes for node in cluster.nodes)
    tables = StageTables(model, demand)
    need = min(float(tables.memory(node)[0, -1]) for node in cluster.nodes)
    several = "" if demand.sequences == 1 else "s"
    asked = (
        f"{model.name} with {demand.sequences} sequence{several} of {demand.context_tokens} tokens "
        f"needs {need / 1e9:.1f} GB"
    )
    have = f"the {len(cluster.nodes)} machines have {usable / 1e9:.1f} GB for it"
    if need > usable:
        begin = f"{asked}, and {have}: {(need - usable) / 1e9:.1f} GB are missing."
    else:
        begin = f"{asked}, and {have}, but not in the parts that the strategy {wish.strategy} gives them."
    return f"{begin} {_nearest(model, cluster, wish)}"


def _nearest(model: ModelProfile, cluster: ClusterProfile, wish: Wish) -> str:
    demand, ways = wish.demand, list[str]()

    def fits(**changes: int) -> bool:
        changed = replace(wish, demand=replace(demand, **changes), aim="latency")
        return _Planner(model, cluster, changed).fits

    for bits in _KV_BITS:
        if bits < demand.kv_bits and fits(kv_bits=bits):
            ways.append(f"KV of {bits} bits")
            break
    context = _largest(_SHORTEST_CONTEXT, demand.context_tokens, lambda tokens: fits(context_tokens=tokens))
    if context:
        ways.append(f"a context of {context} tokens")
    sequences = _largest(1, demand.sequences, lambda number: fits(sequences=number))
    if sequences:
        ways.append(f"{sequences} sequence{'s' * (sequences > 1)}")
    if not ways:
        return (
            "Even one short sequence does not fit."
            if not fits(context_tokens=_SHORTEST_CONTEXT, sequences=1)
            else (f"One sequence of {_SHORTEST_CONTEXT} tokens fits.")
        )
    return f"What fits: {', or '.join(ways)}."


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `low` to below `high` that fits, in steps of `low`; 0: none."""
    if not fits(low):
        return 0
    good, bad = 1, -(-high // low)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(low * middle):
            good = middle
        else:
            bad = middle
    return good * low
