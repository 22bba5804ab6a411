"""Find the source files that one chat request crosses, in a real head and in its real workers.

`mlx-ring serve` runs with two stages and records calls (`call_recorder/`). A file counts when a function in it is called
or resumed during each of several recordings of streamed chat completions. Functions that also run while nothing is asked do
not count. Thus heartbeats and status reports do not count, and neither does what happens by chance during one recording.
Code at module level (imports) does not count. A first chat warms everything
up.

A recording has two chats, one after the other. The head and its workers take messages in order, so that the first chat's
KV is freed before the second one's answer ends. Freeing it belongs to a request.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import httpx
import psutil
from tests.processes import serving

_RECORDER = Path(__file__).parent / "call_recorder"
_IDLE_S = 11.0
"""Time in which each regular task runs, the rarest ones every 10 s: while a machine is busy, chats take as long."""
_RECORDINGS = 5
"""Number of recordings of chats."""
_ANSWER_TOKENS = 16
_WAIT_S = 60.0
_Calls = frozenset[tuple[str, str]]
"""File and qualified name of each function."""


class _Recording(TypedDict):
    command: list[str]
    calls: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ChatTrace:
    """Files that a chat crosses, relative to the package's folder."""

    head: tuple[str, ...]
    workers: tuple[tuple[str, ...], ...]
    """One entry for each worker process."""

    @property
    def worker(self) -> tuple[str, ...]:
        """Files of the worker that crosses most."""
        return max(self.workers, key=len)


def trace_chat(model: Path, root: Path) -> ChatTrace:
    """Serve `model` with the sources of the checkout `root`, and trace chats with it.

    Args:
        model: folder of a model that loads quickly.
        root: a checkout whose dependencies this interpreter has.
    """
    # A socket's path has about 100 characters at most, and a test's folder has more.
    with tempfile.TemporaryDirectory(prefix="trace-", dir="/tmp") as name:
        folder = Path(name)
        package = root.resolve() / "src" / "mlx_ring"
        variables = (f"PYTHONPATH={_RECORDER}{os.pathsep}{package.parent}", f"RECORD_CALLS_IN={folder}")
        # A look once a second at the requests that are open, and at the power supply, belongs to no request.
        flags = ("--stages", "2", "--keep-awake", "never")
        with serving(model, *flags, folder=folder, within=("env", *variables)) as server:
            _chat(server.url, model.name, 0)
            head = folder / f"{server.process.pid}.sock"
            return _trace(lambda number: _chat(server.url, model.name, number), head, package)


def _trace(chat: Callable[[int], None], head: Path, package: Path) -> ChatTrace:
    sockets = [path for path in sorted(head.parent.glob("*.sock")) if psutil.pid_exists(int(path.stem))]
    workers = [path for path in sockets if _is_worker(_command(path, b"stop")["command"])]

    def record(act: Callable[[], None]) -> Mapping[Path, _Calls]:
        for path in (head, *workers):
            _command(path, b"start")
        act()
        return {path: _own_calls(_command(path, b"stop")["calls"], package) for path in (head, *workers)}

    def two_chats(first: int) -> None:
        chat(first)
        chat(first + 1)

    idle = record(lambda: time.sleep(_IDLE_S))
    chats = [record(lambda first=2 * place + 1: two_chats(first)) for place in range(_RECORDINGS)]

    def crossed(path: Path) -> tuple[str, ...]:
        files = [frozenset(file for file, _ in calls[path] - idle[path]) for calls in chats]
        return tuple(sorted(frozenset[str].intersection(*files)))

    return ChatTrace(crossed(head), tuple(map(crossed, workers)))


def _chat(url: str, model: str, number: int) -> None:
    """Have one chat whose prompt differs from the others' from its first word on."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number} is the number of this question. Answer it."}],
        "max_tokens": _ANSWER_TOKENS,
        "seed": 0,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=_WAIT_S) as response:
        response.raise_for_status()
        for _ in response.iter_lines():
            pass


def _is_worker(command: list[str]) -> bool:
    return "-m" in command and command[command.index("-m") + 1].startswith("mlx_ring.worker")


def _own_calls(calls: list[tuple[str, str]], package: Path) -> _Calls:
    return frozenset(_within(calls, package))


def _within(calls: list[tuple[str, str]], package: Path) -> Iterator[tuple[str, str]]:
    for file, function in calls:
        path = Path(file)
        if path.is_relative_to(package) and function != "<module>" and "_pb2" not in path.name:
            yield path.relative_to(package).as_posix(), function


def _command(path: Path, command: bytes) -> _Recording:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_WAIT_S)
        connection.connect(str(path))
        connection.sendall(command)
        return json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
