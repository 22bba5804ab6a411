"""Waits of MLX's ring in the kernel: the compiled `recv` alone, and in MLX's slots in a process of its own."""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.eventually import eventually

from mlx_cpu_kernels import build
from mlx_cpu_kernels.blas.install import load_from_package
from mlx_cpu_kernels.compiled import load_recv
from mlx_ring.worker.platform import ring_waits
from mlx_ring.worker.platform.ring_waits import share_cores

on_linux_x86_64 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the code is for Linux x86-64"
)
HOURS_NS = 10**13
PPOLL = "271 "
"""Number of the system call in which the code waits."""


@pytest.fixture
def ends() -> Generator[tuple[socket.socket, socket.socket]]:
    """Give two ends of a connection that do not block."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)  # noqa: FBT003 - positional only
        yield here, there


def receive(end: socket.socket, wait_ns: int) -> tuple[bytes, int]:
    """Call it as MLX calls `recv`. Return what came, and the error number if the call failed."""
    load_from_package("mlx", "lib/libmlx.so")
    recv = ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, use_errno=True
    )(load_recv(wait_ns))
    buffer = ctypes.create_string_buffer(16)
    count = recv(end.fileno(), ctypes.addressof(buffer), len(buffer), 0)
    return buffer.raw[: max(0, count)], ctypes.get_errno() if count < 0 else 0


@on_linux_x86_64
def test_data_that_is_there_is_received(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(b"tensor")
    assert receive(ends[0], HOURS_NS) == (b"tensor", 0)


@on_linux_x86_64
def test_one_call_receives_data_that_comes_later(ends: tuple[socket.socket, socket.socket]) -> None:
    with ThreadPoolExecutor(1) as thread:
        place = Path(f"/proc/self/task/{thread.submit(threading.get_native_id).result()}/syscall")
        received = thread.submit(receive, ends[0], HOURS_NS)
        eventually(lambda: place.read_text().startswith(PPOLL))
        ends[1].sendall(b"tensor")
        assert received.result() == (b"tensor", 0)


@on_linux_x86_64
def test_a_call_without_data_ends_as_before(ends: tuple[socket.socket, socket.socket]) -> None:
    assert receive(ends[0], 1) == (b"", errno.EAGAIN)


@on_linux_x86_64
def test_the_end_of_the_stream_and_errors_are_returned(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    assert receive(ends[0], HOURS_NS) == (b"", 0)
    with socket.socket() as unconnected:
        unconnected.setblocking(False)  # noqa: FBT003 - positional only
        assert receive(unconnected, HOURS_NS) == (b"", errno.ENOTCONN)


@on_linux_x86_64
def test_mlx_receives_through_the_code() -> None:
    program = (
        "from mlx_ring.worker.platform import ring_waits as waits; before = waits.wait_in_the_kernel(); "
        "codes = {slot.read() for slot in before}; import mlx.core; from mlx_cpu_kernels import compiled; "
        "print({slot.symbol for slot in before}, codes == {compiled.load_recv(waits.WAIT_NS)})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{'recv'} True\n"


@on_linux_x86_64
def test_without_the_kernels_mlx_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "find_binary", dict[object, None]().get)
    monkeypatch.setattr(build, "why_without", {build.Target.installed(): "they are not built"}.get)
    caplog.set_level("INFO")
    assert not ring_waits.wait_in_the_kernel()
    assert "A rank that waits for others keeps a core busy: they are not built" in caplog.text


@pytest.mark.parametrize(
    ("group", "cores", "shared"),
    [
        (("127.0.0.1:1", "127.0.0.1:2"), 2, True),
        (("127.0.0.1:1", "127.0.0.1:2"), 3, True),
        (("127.0.0.1:1", "127.0.0.1:2"), 4, False),
        (("10.0.0.1:1,10.1.0.1:1", "10.0.0.2:1,10.1.0.2:1"), 2, False),
        (("10.0.0.1:1", "10.0.0.2:1"), 1, True),
        (("10.0.0.1:1", "10.0.0.2:1", "10.0.0.1:2"), 3, True),
    ],
)
def test_ranks_share_cores_below_two_each(group: tuple[str, ...], cores: int, *, shared: bool) -> None:
    assert share_cores(group, 0, cores) == shared
