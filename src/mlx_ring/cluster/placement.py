"""Which layers go to which stage. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.protos import worker_pb2


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


def make_assignments(
    ranges: Sequence[LayerRange],
    *,
    instance: str,
    epoch: int,
    dtype: str,
    model_digest: str,
    max_model_len: int,
    kv_bits: int = 0,
) -> tuple[worker_pb2.StageAssignment, ...]:
    """A plan's stages as messages, one rank each. Addresses are for the agent to fill in."""
    digest = plan_digest(ranges, dtype, model_digest, kv_bits)
    return tuple(
        worker_pb2.StageAssignment(
            instance=instance,
            epoch=epoch,
            stage=stage,
            stages=len(ranges),
            rank=0,
            tp_size=1,
            first_layer=layers.start,
            end_layer=layers.end,
            dtype=dtype,
            plan_digest=digest,
            model_digest=model_digest,
            max_model_len=max_model_len,
            kv_bits=kv_bits,
        )
        for stage, layers in enumerate(ranges)
    )


def plan_digest(ranges: Sequence[LayerRange], dtype: str, model_digest: str, kv_bits: int = 0) -> str:
    """Equal for equal plans: which layers where, in what type, of which model, with how precise a KV cache."""
    text = f"{model_digest} {dtype} {kv_bits} {' '.join(map(str, ranges))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
