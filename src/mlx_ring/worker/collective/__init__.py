"""Links between stages over MLX's collectives: one message for each step, in their order, of a size both ends know."""

from __future__ import annotations

import mlx.core as mx

from mlx_ring.rpc.joined_ranks import ALLREDUCE, backend_of
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker.answers import StageLinks, ToldOfSteps
from mlx_ring.worker.collective.links import CollectiveReceiver, CollectiveSender
from mlx_ring.worker.collective.messages import Form
from mlx_ring.worker.collective.ways import way_between
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensors import dtype_name


def over_collectives(
    links: StageLinks,
    assignment: worker_pb2.StageAssignment,
    model: StageModel,
    group: mx.distributed.Group,
) -> StageLinks:
    """The stage's links, with activations over the group of all stages; tokens and failures stay where they were."""
    stage, backend = assignment.stage, backend_of(assignment)
    form = Form(model.hidden_size, dtype_name(model.dtype), model.dtype.size)
    sums = assignment.link == ALLREDUCE
    told: list[ToldOfSteps] = []
    onward = links.next
    if stage:
        way = way_between(group, backend, stage - 1, sums=sums)
        told.append(CollectiveReceiver(way, form, links.inbox, f"stage {stage - 1}"))
    if onward is not None:
        way = way_between(group, backend, stage, sums=sums)
        onward = CollectiveSender(way, form, onward)
        told.append(onward)
    return StageLinks(links.inbox, onward, links.first, tuple(told))
