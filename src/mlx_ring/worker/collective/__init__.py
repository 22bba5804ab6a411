"""Links between stages over MLX's collectives: one message for each step, in their order, of a size both ends know."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_ring.rpc.backends import ALLREDUCE, backend_of
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker.collective.links import CollectiveReceiver, CollectiveSender
from mlx_ring.worker.collective.messages import Form
from mlx_ring.worker.collective.ways import Way, way_between
from mlx_ring.worker.replies import StageLinks, ToldOfSteps
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensors import dtype_name


def over_collectives(
    links: StageLinks,
    assignment: worker_pb2.StageAssignment,
    model: StageModel,
    group: mx.distributed.Group,
) -> StageLinks:
    """The stage's links, with activations over the group of all stages; tokens and failures stay where they were."""
    way = partial(way_between, group, backend_of(assignment), sums=assignment.link == ALLREDUCE)
    stage = assignment.stage
    return with_collectives(
        links, model, way(sender=stage - 1) if stage else None, way(sender=stage) if links.next else None
    )


def with_collectives(links: StageLinks, model: StageModel, come: Way | None, go: Way | None) -> StageLinks:
    """The stage's links, with activations over these ways, from the stage before and to the next."""
    form = Form(model.hidden_size, dtype_name(model.dtype), model.dtype.size)
    told: list[ToldOfSteps] = []
    onward = links.next
    if come is not None:
        told.append(CollectiveReceiver(come, form, links.inbox, "the stage before"))
    if onward is not None and go is not None:
        onward = CollectiveSender(go, form, onward)
        told.append(onward)
    return StageLinks(links.inbox, onward, links.first, tuple(told))
