"""Links between stages over MLX's collectives: one message for each step, in order, of a size that both ends know."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_ring.rpc.backends import LINKS, backend_of, find_link
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker.collective.link_ends import (
    CollectiveReceiver,
    CollectiveSender,
    Form,
    Transport,
    transport_between,
)
from mlx_ring.worker.replies import StageLinks, StepListener
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensors import dtype_name


def over_collectives(
    links: StageLinks,
    assignment: worker_pb2.StageAssignment,
    model: StageModel,
    group: mx.distributed.Group,
) -> StageLinks:
    """Move the stage's activations to the group of all stages. Tokens and failures keep their links."""
    transport = partial(
        transport_between, group, backend_of(assignment), sums=LINKS[find_link(assignment.link)].sums
    )
    stage = assignment.stage
    return with_collectives(
        links,
        model,
        transport(sender=stage - 1) if stage else None,
        transport(sender=stage) if links.next else None,
    )


def with_collectives(
    links: StageLinks, model: StageModel, incoming: Transport | None, outgoing: Transport | None
) -> StageLinks:
    """Move the stage's activations to these transports, from the stage before and to the next."""
    form = Form(model.hidden_size, dtype_name(model.dtype), model.dtype.size)
    listeners: list[StepListener] = []
    onward = links.next
    if incoming is not None:
        listeners.append(CollectiveReceiver(incoming, form, links.inbox, "the stage before"))
    if onward is not None and outgoing is not None:
        onward = CollectiveSender(outgoing, form, onward)
        listeners.append(onward)
    return StageLinks(links.inbox, onward, links.first, tuple(listeners))
