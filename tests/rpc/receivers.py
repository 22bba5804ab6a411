"""A receiver of gRPC's links, and what is sent to it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from mlx_ring.core.errors import WorkerLost
from mlx_ring.rpc.channels import make_server
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import Inbox, LinkKey, WireTensor, deliver_frames
from mlx_ring.rpc.methods import LINK, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import worker_pb2

TENSOR = WireTensor("float32", (2, 3), bytes(range(24)), (7, 8))


def key(step: int, epoch: int = 1) -> LinkKey:
    return LinkKey("demo", epoch, step)


def serve(inbox: Inbox, address: str) -> tuple[grpc.Server, int]:
    """Start a worker's server whose links deliver to an inbox; return it with its port."""

    def take(frames: Iterator[Frame], _context: grpc.ServicerContext) -> Iterator[worker_pb2.FrameAccepted]:
        next(frames)
        yield worker_pb2.FrameAccepted(hello=make_hello(node="mini-2"))
        try:
            deliver_frames(frames, inbox)
        except grpc.RpcError as error:
            inbox.break_off(WorkerLost(str(error)))
        else:
            inbox.break_off(WorkerLost("closed"))

    server = make_server(4)
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((LINK, take),)),))
    port = server.add_insecure_port(address)
    server.start()
    return server, port
