"""Stop a worker at a chosen step, on request. Processes also report how many asyncio tasks they have.

Python imports a module of this name when it starts. It works with this folder in `PYTHONPATH` and a folder in
`STOP_AT_STEPS_IN`. Then a process and each of its children listen there on a Unix socket named after the process id.

A client sends a condition, as a line of JSON, and gets an empty line once it holds. The worker stops before it takes in
the first step that satisfies it, and sends what it knows of its sequences. It waits for another condition, or continues when the client closes the connection.

A worker kills itself before the first step that satisfies the condition in the file `fatal.json` of the folder, if there
is one. If the condition has a `schema`, it kills itself before it compiles a schema with that text. If there is a FIFO
`load` in the folder, a worker that has loaded its weights waits until a client has opened and
closed it. A FIFO `input-PID` does the same for all input that comes to that worker from another one. A FIFO
`read-PID` does so for each fetch of saved KV before it is read.

A worker with a file `change-PID` there kills itself when it is about to enter another stage. One with a file `drop-PID`
has to drop its stage before it loads another one, which then fails.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = os.environ.get("STOP_AT_STEPS_IN")  # noqa: TID251 - read before anything of the product is imported
_FATAL, _LOAD, _INPUT, _READ, _CHANGE, _DROP = "fatal.json", "load", "input-", "read-", "change-", "drop-"


class _Steps:
    """Steps of this process, if it is a worker. Only its compute thread calls `before`."""

    def __init__(self, folder: Path) -> None:
        fatal = folder / _FATAL
        self._fatal: dict[str, int] | None = json.loads(fatal.read_text()) if fatal.exists() else None
        self._fatal_schema = str((self._fatal or {}).pop("schema", ""))
        self._sequences: dict[int, dict[str, int]] = {}
        """Each open sequence: its prompt's length, and the start and number of draft tokens of its last row."""
        self._epoch = 0
        self._folder = folder
        self._load, self._input = folder / _LOAD, folder / f"{_INPUT}{os.getpid()}"
        self._read = folder / f"{_READ}{os.getpid()}"
        self._change = folder / f"{_CHANGE}{os.getpid()}"
        self._client: tuple[Any, dict[str, int]] | None = None
        """Connection, as a file, and its condition."""

    def listen(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            lines = connection.makefile("rw")
            request = json.loads(lines.readline())
            if request == "tasks":
                lines.write(f"{_count_tasks()}\n")
                lines.close()
                connection.close()
            else:
                self._set(lines, request)

    def _set(self, lines: Any, condition: dict[str, int]) -> None:
        """Set the condition, and confirm it: a short request might pass before it holds."""
        self._client = (lines, condition)
        lines.write("\n")
        lines.flush()

    def loaded(self) -> None:
        """Wait for the client that holds loads, if there is one."""
        if self._load.exists():
            self._load.read_bytes()

    def arrived(self) -> None:
        """Wait for the client that keeps input, if there is one."""
        if self._input.exists():
            self._input.read_bytes()

    def before_read(self) -> None:
        """Wait for the client that holds reads of saved KV, if there is one."""
        if self._read.exists():
            self._read.read_bytes()

    def before_change(self) -> None:
        if self._change.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def has_to_drop(self, pid: int) -> bool:
        """Return True for a worker that has to drop its stage before it loads another one."""
        return (self._folder / f"{_DROP}{pid}").exists()

    def after_drop(self) -> None:
        if self.has_to_drop(os.getpid()):
            raise RuntimeError("No memory is left.")

    def before(self, step: Any) -> None:
        """Note the sequences of a step, and stop if it satisfies the condition."""
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self._sequences.clear()
        for operation in step.operations:
            self._apply(operation)
        rows: list[dict[str, int]] = []
        for row in step.rows:
            known = self._sequences.setdefault(row.sequence, {"prompt": 0})
            known |= {"start": row.start, "draft": len(row.draft)}
            rows.append(known)
        if self._fatal and any(_satisfies(row, self._fatal) for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        while self._client is not None and any(_satisfies(row, self._client[1]) for row in rows):
            self._wait(step.step)

    def before_schema(self, text: str) -> None:
        if self._fatal_schema and self._fatal_schema in text:
            os.kill(os.getpid(), signal.SIGKILL)

    def _apply(self, operation: Any) -> None:
        if operation.HasField("open"):
            self._sequences[operation.open.sequence] = {"prompt": operation.open.prompt_length}
        elif operation.HasField("reset"):
            self._sequences.clear()
        elif operation.HasField("free"):
            self._sequences.pop(operation.free.sequence, None)
        elif operation.HasField("retain"):
            self._sequences.pop(operation.retain.sequence, None)

    def _wait(self, step: int) -> None:
        """Report the sequences, and wait for the client's next condition."""
        assert self._client is not None
        lines, _ = self._client
        self._client = None
        try:
            lines.write(json.dumps({"step": step, "sequences": list(self._sequences.values())}) + "\n")
            lines.flush()
            if line := lines.readline():
                self._set(lines, json.loads(line))
        except OSError:
            """The client has closed the connection."""


def _satisfies(row: dict[str, int], condition: dict[str, int]) -> bool:
    """Return True for a row of the condition's prompt, from a position on; without draft tokens, from a later one."""
    start = condition["start"] if row.get("draft") else condition.get("undrafted") or condition["start"]
    return row["prompt"] == condition["prompt"] and row["start"] >= start


def _count_tasks() -> int:
    """Return the number of tasks that have not ended."""
    known: Any = vars(asyncio.tasks)
    # The name differs between versions of Python.
    every = known["_scheduled_tasks"] if "_scheduled_tasks" in known else known["_all_tasks"]
    return sum(not task.done() for task in list(every))


def _hold_loads(steps: _Steps, runner_module: Any) -> None:
    make = runner_module.StageRunner.__init__

    def wait_and_make(runner: Any, *args: Any, **options: Any) -> None:
        steps.loaded()
        make(runner, *args, **options)

    runner_module.StageRunner.__init__ = wait_and_make


def _stop_at_steps(steps: _Steps, server_module: Any) -> None:
    execute = server_module.WorkerServer.execute

    def stop_and_execute(worker: Any, stream: Any, step: Any, arrived_us: int) -> None:
        steps.before(step)
        execute(worker, stream, step, arrived_us)

    server_module.WorkerServer.execute = stop_and_execute


def _look_at_schemas(steps: _Steps, compiler_module: Any) -> None:
    compile_ = compiler_module.GrammarCompiler._compile

    def look_and_compile(compiler: Any, kind: str, text: str) -> Any:
        steps.before_schema(text)
        return compile_(compiler, kind, text)

    compiler_module.GrammarCompiler._compile = look_and_compile


def _hold_input(steps: _Steps, links_module: Any) -> None:
    put = links_module.Inbox.put

    def wait_and_put(inbox: Any, *message: Any) -> None:
        steps.arrived()
        put(inbox, *message)

    links_module.Inbox.put = wait_and_put


def _hold_reads(steps: _Steps, disk_module: Any) -> None:
    read = disk_module.KvDisk._read_all

    def wait_and_read(disk: Any, *arguments: Any) -> Any:
        steps.before_read()
        return read(disk, *arguments)

    disk_module.KvDisk._read_all = wait_and_read


def _fail_at_changes(steps: _Steps, reshaping_module: Any) -> None:
    enter = reshaping_module.StageHolder._enter

    def die_or_enter(holder: Any, *arguments: Any) -> None:
        steps.before_change()
        enter(holder, *arguments)

    reshaping_module.StageHolder._enter = die_or_enter
    drop = reshaping_module.StageHolder._drop_present

    def drop_and_fail(holder: Any) -> None:
        drop(holder)
        if (stage := holder._next.stage) is not None and not stage.is_loaded:
            steps.after_drop()

    reshaping_module.StageHolder._drop_present = drop_and_fail


def _load_in_the_pause(steps: _Steps, reshaping_module: Any) -> None:
    reserve = reshaping_module.Reshaping._reserve

    def reserve_less(reshaping: Any) -> None:
        reserve(reshaping)
        reshaping.late |= {
            place: reshaping._changes[site.node].gained_bytes
            for place, site in reshaping_module.sites_of(reshaping.placement).items()
            if steps.has_to_drop(reshaping._pids.get(site.node, 0))
        }

    reshaping_module.Reshaping._reserve = reserve_less


_CHANGES = {
    "mlx_ring.head.reshaping": _load_in_the_pause,
    "mlx_ring.rpc.links": _hold_input,
    "mlx_ring.worker.kv.disk": _hold_reads,
    "mlx_ring.worker.reshaping": _fail_at_changes,
    "mlx_ring.worker.runner": _hold_loads,
    "mlx_ring.worker.server": _stop_at_steps,
    "mlx_ring.worker.grammars.compiler": _look_at_schemas,
}
"""Changes of modules when they are imported."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the modules that load, execute steps and compile schemas."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (change := _CHANGES.get(fullname)) is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                change(self._steps, module)

            loader.exec_module = load_and_change
        return spec


def _begin(folder: Path) -> None:
    steps = _Steps(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{os.getpid()}.sock"))
    listener.listen()
    threading.Thread(target=steps.listen, args=(listener,), daemon=True, name="stop at steps").start()
    sys.meta_path.insert(0, _Finder(steps))


if _FOLDER:
    _begin(Path(_FOLDER))
