"""Pair of processes in an MLX group, of which one sends to the other, and a test's inbox for what arrives.

MLX makes one group in a process, so a test cannot be an end itself. Content that the sender cannot put into a
collective goes straight to the test's inbox, as it would to the next stage's.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from tests.open_mpi import mpi_places
from tests.ports import free_ports

from mlx_ring.core.environment import set_for_libraries
from mlx_ring.core.errors import RingError
from mlx_ring.rpc.backends import LINKS, find_link
from mlx_ring.rpc.channels import make_server
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import HIDDEN, GrpcLink, Inbox, LinkKey, WireTensor, deliver_frames
from mlx_ring.rpc.methods import LINK, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_OTHERS = {
    "grpc": "tests/rpc/test_links.py opens it without a group",
    "nccl": "needs two GPUs",
    "jaccl": "needs two Macs that Thunderbolt 5 connects",
}
"""Links that no pair of processes can have here, each with the reason."""
KINDS = tuple(link for link in LINKS if link not in _OTHERS)
_WAIT_S = 60.0
_HIDDEN = 3


class ForwardingInbox(Inbox):
    """Inbox that files messages in another one, which may be exchanged."""

    def __init__(self) -> None:
        super().__init__("forwarding", 1)
        self.target: Inbox = self

    def put(self, key: LinkKey, message: WireTensor | RingError) -> None:
        self.target.put(key, message)


class _RemoteInbox(Inbox):
    """Inbox that sends messages to one in another process."""

    def __init__(self, address: str) -> None:
        super().__init__("remote", 1)
        self._link = GrpcLink(address, make_hello())

    def put(self, key: LinkKey, message: Any) -> None:
        self._link.send(key, WireTensor(message.dtype, message.shape, bytes(message.data), message.tokens))


def _end(rank: int, kind: str, variables: dict[str, str], address: str, orders: Connection) -> None:
    """Run one of the processes: join, then follow commands."""
    set_for_libraries(variables)
    # The test's own process does not need them.
    from mlx_ring.core.lean_imports import import_mlx_lm

    import_mlx_lm()
    import mlx.core as mx

    from mlx_ring.worker.collective.link_ends import (
        CollectiveReceiver,
        CollectiveSender,
        Form,
        transport_between,
    )
    from mlx_ring.worker.group import group_capabilities

    link = LINKS[find_link(kind)]
    backend = link.backend
    assert backend is not None
    group_capabilities(backend)
    group = mx.distributed.init(strict=True, backend=backend)
    transport = transport_between(group, backend, 0, sums=link.sums)
    form = Form(_HIDDEN, "float32", 4)
    end: Any
    if rank == 0:
        end = CollectiveSender(transport, form, GrpcLink(address, make_hello()))
    else:
        end = CollectiveReceiver(transport, form, _RemoteInbox(address), "rank 0")
    orders.send(os.getpid())
    with contextlib.suppress(EOFError):
        while True:
            method, *arguments = orders.recv()
            if method == "expect":
                arguments = [step_pb2.Step.FromString(arguments[0])]
            elif method == "send_failure":
                arguments[1] = step_pb2.Failure.FromString(arguments[1])
            getattr(end, method)(*arguments)


@dataclass
class Pair:
    """Sending end for tests, as `rpc/links.py` defines it: both processes, and the inbox."""

    processes: list[Any]
    orders: list[Connection]
    pids: list[int]
    inbox: Inbox

    def send(self, key: LinkKey, tensor: WireTensor) -> None:
        """Announce a step with as many tokens as the tensor to both processes; then have one send it."""
        self._expect(key, tensor.shape[0])
        self.orders[0].send(("send", key, _picklable(tensor)))

    def send_failure(self, key: LinkKey, failure: step_pb2.Failure) -> None:
        self._expect(key, 1)
        self.orders[0].send(("send_failure", key, failure.SerializeToString()))

    def send_to_survivor(self, rank: int, key: LinkKey, tensor: WireTensor) -> None:
        """Announce and send, if only this process is left, as long as it lives."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.orders[rank].send(("expect", _step(key, tensor.shape[0])))
            if rank == 0:
                self.orders[rank].send(("send", key, _picklable(tensor)))

    def exit_code_of(self, rank: int) -> int | None:
        """Wait until the process has ended by itself; return its exit code."""
        self.processes[rank].join(_WAIT_S)
        return self.processes[rank].exitcode

    def close(self) -> None:
        """End the processes with the test."""

    def _expect(self, key: LinkKey, tokens: int) -> None:
        if key.purpose == HIDDEN:
            for orders in self.orders:
                orders.send(("expect", _step(key, tokens)))


def _step(key: LinkKey, tokens: int) -> bytes:
    row = step_pb2.Row(sequence=1, tokens=step_pb2.Tokens(ids=range(tokens)))
    return step_pb2.Step(
        instance=key.instance, epoch=key.epoch, step=key.step, rows=[row]
    ).SerializeToString()


def _picklable(tensor: WireTensor) -> WireTensor:
    return WireTensor(tensor.dtype, tensor.shape, bytes(tensor.data), tensor.tokens)


@contextlib.contextmanager
def joined_pair(kind: str, inbox: Inbox | None = None) -> Generator[Pair]:
    """Yield a connected pair, and end it afterwards."""
    filed = inbox or Inbox("test", 1)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(prefix="pair-") as folder:
        address = f"unix:{folder}/s"
        server = _serve(filed, address)
        variables = stack.enter_context(_variables(kind, Path(folder)))
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(2)]
        processes = [
            spawn.Process(target=_end, args=(rank, kind, variables[rank], address, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            ours = [mine for mine, _ in pipes]
            assert all(mine.poll(_WAIT_S) for mine in ours), "the processes did not find each other"
            yield Pair(processes, ours, [mine.recv() for mine in ours], filed)
        finally:
            for process in processes:
                process.kill()
                process.join()
            server.stop(None).wait()


@contextlib.contextmanager
def _variables(kind: str, folder: Path) -> Generator[list[dict[str, str]]]:
    """Yield the environment of each process."""
    if kind == "mpi":
        with mpi_places(2) as places:
            yield places
        return
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    yield [{"MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)} for rank in range(2)]


def _serve(inbox: Inbox, address: str) -> grpc.Server:
    def take(frames: Iterator[Frame], _context: grpc.ServicerContext) -> Iterator[worker_pb2.FrameAccepted]:
        next(frames)
        yield worker_pb2.FrameAccepted(hello=make_hello())
        with contextlib.suppress(grpc.RpcError):
            deliver_frames(frames, inbox)

    server = make_server(4)
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((LINK, take),)),))
    server.add_insecure_port(address)
    server.start()
    return server
