"""The split of a model's layers into stages. Pure."""

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
    """The layers of each stage, and the shares of its ranks."""

    ranges: tuple[LayerRange, ...]
    shares: tuple[tuple[float, ...], ...]
    """Shares of each stage by rank."""

    @classmethod
    def alike(cls, ranges: Sequence[LayerRange], shares: Sequence[float] = (1.0,)) -> Cut:
        """Return a cut with the same ranks in every stage."""
        return cls(tuple(ranges), (tuple(shares),) * len(ranges))


def even_split(num_layers: int, stages: int) -> tuple[LayerRange, ...]:
    """Cut `[0, num_layers)` into stages whose lengths differ by one layer at most.

    The longer ones are in the middle, because the first stage also embeds, and the last one also computes logits and samples.

    Raises:
        PlanError: more stages than layers.
    """
    if not 1 <= stages <= num_layers:
        raise PlanError(
            f"{stages} stages were requested, but the model has {num_layers} layers: "
            f"request {num_layers} stages or fewer."
        )
    shortest, longer = divmod(num_layers, stages)
    # Stages by distance from the middle; of two equals, the later one comes last, because it may hold the vocabulary.
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
    """Cut so that the maximum of bytes that a stage reads in a step is as low as possible.

    Of such cuts, return the most even one (least sum of squares), and of those the nearest to the even split.

    Args:
        layer_bytes: the bytes of each layer that a step reads.
        head_bytes: the bytes that a step reads on the last stage besides.
        stages: the number of stages; each gets at least one layer.

    Raises:
        PlanError: more stages than layers.
    """
    even = [layers.end for layers in even_split(len(layer_bytes), stages)]
    weights = [*layer_bytes[:-1], layer_bytes[-1] + head_bytes]
    before = list(accumulate(weights, initial=0))
    limit = _least_limit(weights, stages)
    # By end: sum of squares, distance and ends of the best split of the layers before it into this many stages.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for even_end in even:
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (squares, distance, ends) in best.items():
            for end in range(start + 1, len(weights) + 1):
                size = before[end] - before[start]
                if size > limit:
                    break
                candidate = (squares + size**2, distance + abs(end - even_end), (*ends, end))
                longer[end] = min(candidate, longer.get(end, candidate))
        best = longer
    ends = best[len(weights)][2]
    return tuple(LayerRange(start, end) for start, end in pairwise((0, *ends)))


def _least_limit(weights: Sequence[int], stages: int) -> int:
    """Return the lowest possible weight of the heaviest contiguous group."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _groups_within(weights, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _groups_within(weights: Sequence[int], limit: int) -> int:
    """Return the number of groups needed if none may weigh more; splitting a group yields more groups."""
    groups, held = 1, 0
    for weight in weights:
        if held + weight > limit:
            groups, held = groups + 1, 0
        held += weight
    return groups


def shaping_settings(settings: Settings) -> str:
    """Return the settings that shape a cut; a head with other ones does not adopt instances cut with these."""
    shaping = (
        settings.strategy,
        settings.proportions,
        settings.optimize_for,
        (settings.expected_prompt, settings.expected_answer, settings.expected_users),
        settings.replicas,
        settings.nodes,
        settings.max_model_len,
        settings.cpu_weights,
        rank_shares(settings),
        # With `latency`, the number of sequences does not affect the cut.
        settings.max_num_seqs if settings.optimize_for == "throughput" else None,
    )
    return repr(shaping)


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
    shaping: str = "",
) -> tuple[worker_pb2.StageAssignment, ...]:
    """Return a plan's stages as messages, in order of stage and rank.

    Addresses are filled in once the workers run.

    Args:
        cut: the layers and shares.
        instance: the instance's ID.
        epoch: the instance's epoch.
        dtype: the type of activations.
        model_digest: the digest of the model.
        max_model_len: the most tokens of a sequence.
        kv_bits: the bits of a quantized KV cache; 0 for none.
        link_compression: the setting of that name.
        link: the setting of that name.
        backend: the requested backend of collectives; empty for the best one.
        group: the addresses on which the workers of an MLX group must listen, if requested.
        shaping: the settings that shape the cut, from `shaping_settings`.
    """
    digest = plan_digest(cut, dtype, model_digest, kv_bits, shaping)
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


def plan_digest(cut: Cut, dtype: str, model_digest: str, kv_bits: int = 0, shaping: str = "") -> str:
    """Return a digest that is equal for equal plans: layers, shares, type, model, KV cache and planning settings."""
    text = f"{model_digest} {dtype} {kv_bits} {' '.join(map(str, cut.ranges))} {shaping} {cut.shares}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
