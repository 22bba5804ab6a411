"""Which layers go to which stage. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.config import Settings
from mlx_ring.settings.rank_settings import rank_shares


@dataclass(frozen=True, slots=True)
class Cut:
    """Which layers each stage has, and how its ranks share them."""

    ranges: tuple[LayerRange, ...]
    shares: tuple[tuple[float, ...], ...]
    """Of each stage, by rank."""

    @classmethod
    def alike(cls, ranges: Sequence[LayerRange], shares: Sequence[float] = (1.0,)) -> Cut:
        """With the same ranks in every stage."""
        return cls(tuple(ranges), (tuple(shares),) * len(ranges))


def even_split(num_layers: int, stages: int) -> tuple[LayerRange, ...]:
    """Cut `[0, num_layers)` into stages whose lengths differ by one layer at most.

    The longer ones stand in the middle: the first stage also embeds, and the last also
    computes scores over the vocabulary and samples.

    Raises:
        PlanError: there are more stages than layers.
    """
    if not 1 <= stages <= num_layers:
        raise PlanError(
            f"{stages} stages were asked for and the model has {num_layers} layers: "
            f"each stage needs a layer, so ask for {num_layers} or fewer."
        )
    shortest, longer = divmod(num_layers, stages)
    # Stages by distance from the middle, the later of two equals last: it has the vocabulary.
    from_the_middle = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))
    lengths = [shortest] * stages
    for stage in from_the_middle[:longer]:
        lengths[stage] += 1
    ranges: list[LayerRange] = []
    start = 0
    for length in lengths:
        ranges.append(LayerRange(start, start + length))
        start += length
    return tuple(ranges)


def balanced_split(layer_bytes: Sequence[int], head_bytes: int, stages: int) -> tuple[LayerRange, ...]:
    """Cut so that the stage which reads most in a step reads as little as any cut allows.

    Of the cuts that reach this, the one whose stages read most alike (least sum of squares), and of those the
    nearest to the even split.

    Args:
        layer_bytes: what a step reads of each layer.
        head_bytes: what it reads besides on the last stage.
        stages: how many; each gets a layer or more.

    Raises:
        PlanError: there are more stages than layers.
    """
    even = [layers.end for layers in even_split(len(layer_bytes), stages)]
    weights = [*layer_bytes[:-1], layer_bytes[-1] + head_bytes]
    before = list(accumulate(weights, initial=0))
    limit = _least_limit(weights, stages)
    # By end: squares, distance and ends of the best way to cover the layers before it with so many stages.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for even_end in even:
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (squares, distance, ends) in best.items():
            for end in range(start + 1, len(weights) + 1):
                size = before[end] - before[start]
                if size > limit:
                    break
                way = (squares + size**2, distance + abs(end - even_end), (*ends, end))
                longer[end] = min(way, longer.get(end, way))
        best = longer
    ends = best[len(weights)][2]
    return tuple(LayerRange(start, end) for start, end in pairwise((0, *ends)))


def _least_limit(weights: Sequence[int], stages: int) -> int:
    """The least that the heaviest of so many neighbouring groups can weigh."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _groups_within(weights, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _groups_within(weights: Sequence[int], limit: int) -> int:
    """How many groups it takes when none may weigh more; any that are left can be had by parting one."""
    groups, held = 1, 0
    for weight in weights:
        if held + weight > limit:
            groups, held = groups + 1, 0
        held += weight
    return groups


def cut_wishes(settings: Settings) -> str:
    """What was asked of a cut: a head that is asked for something else does not go on with one that was made before."""
    wishes = (
        settings.strategy,
        settings.proportions,
        settings.optimize_for,
        settings.replicas,
        settings.nodes,
        settings.max_model_len,
        rank_shares(settings),
        # To a single stream it is no matter how many there may be.
        settings.max_num_seqs if settings.optimize_for == "throughput" else None,
    )
    return repr(wishes)


def make_assignments(
    cut: Cut,
    *,
    instance: str,
    epoch: int,
    dtype: str,
    model_digest: str,
    max_model_len: int,
    kv_bits: int = 0,
    link_compression: str = "auto",
    link: str = "",
    backend: str = "",
    group: Sequence[str] = (),
    wishes: str = "",
) -> tuple[worker_pb2.StageAssignment, ...]:
    """A plan's stages as messages, in order of stage and rank.

    Addresses are filled in when workers are there; `wishes` is from `cut_wishes`, `group` is where workers are to listen for those that
    MLX joins them with, where that is asked for.
    """
    digest = plan_digest(cut, dtype, model_digest, kv_bits, wishes)
    return tuple(
        worker_pb2.StageAssignment(
            instance=instance,
            epoch=epoch,
            stage=stage,
            stages=len(cut.ranges),
            rank=rank,
            tp_size=len(shares),
            shares=shares,
            first_layer=layers.start,
            end_layer=layers.end,
            dtype=dtype,
            plan_digest=digest,
            model_digest=model_digest,
            max_model_len=max_model_len,
            kv_bits=kv_bits,
            link_compression=link_compression,
            link=link,
            backend=backend,
            group=group,
        )
        for stage, (layers, shares) in enumerate(zip(cut.ranges, cut.shares, strict=True))
        for rank in range(len(shares))
    )


def plan_digest(cut: Cut, dtype: str, model_digest: str, kv_bits: int = 0, wishes: str = "") -> str:
    """Equal for equal plans: which layers where and shared how, in what type, of which model, with what KV cache, by what wishes."""
    text = f"{model_digest} {dtype} {kv_bits} {' '.join(map(str, cut.ranges))} {wishes} {cut.shares}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
