"""Fetch a model in a separate process, which can be ended at any moment. Within one nothing ends the hub's client.

The bytes that arrived stay in the hub's cache, and the next fetch continues from there. Each line of its output is the progress, or
the reason why there is no model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict

from mlx_ring.core import errors
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import Conflict, ModelError, ModelNotFound, NotReady, PlanError, RingError
from mlx_ring.host.child import ChildProcess, watch_lifeline
from mlx_ring.models.model_folder import PullProgress, Report
from mlx_ring.models.model_source import find_model

_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_REPORT_S = 0.25
"""Time between two lines of progress."""


class Fetches:
    """Fetches in progress, one for each model, whoever waits for it."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, list[Report]] = {}
        self._lasting: set[str] = set()
        self._progress: dict[str, PullProgress] = {}
        self._has_stopped = False

    @property
    def progress(self) -> Mapping[str, PullProgress]:
        """Last progress of each fetch that has begun to download."""
        return self._progress

    async def fetch(
        self,
        name: str,
        *,
        must_fit: bool,
        memory_bytes: int | None = None,
        report: Report | None = None,
        lasts: bool = True,
        then: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Wait until a model of the hub is here. A fetch in progress is joined.

        Args:
            name: of the hub's repository.
            must_fit: whether this machine alone must hold the weights.
            memory_bytes: memory of all machines that may share the weights; None for any.
            report: receives the progress.
            lasts: False to end the fetch with the last that waits for it, unless one of them had True.
            then: work after the fetch. It belongs to the fetch, so that it is done also if nobody waits any more.

        Raises:
            NotReady: the server ends.
            Conflict: the fetch was cancelled.
            ModelError, PlanError: as `find_model` does.
            RingError: from `then`.
        """
        if self._has_stopped:
            raise NotReady("The server is shutting down.")
        task = self._tasks.get(name)
        if task is None:
            work = fetch_beside(
                name,
                must_fit=must_fit,
                memory_bytes=memory_bytes,
                report=lambda progress: self._spread(name, progress),
            )
            task = self._tasks[name] = asyncio.create_task(_in_turn(work, then), name=f"fetch {name}")
            self._reports[name] = []
            task.add_done_callback(lambda done: self._forget(name, done))
        if lasts:
            self._lasting.add(name)
        report = report or (lambda _: None)
        self._reports[name].append(report)
        if name in self._progress:
            report(self._progress[name])
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise self._ended(name) from None
            self._leave(name, task, report)
            raise

    def is_running(self, name: str) -> bool:
        """Report whether a fetch of a model is in progress."""
        return name in self._tasks

    def cancel(self, name: str) -> None:
        """End a fetch, whoever waits for it. A later one continues it.

        Raises:
            Conflict: there is none.
        """
        task = self._tasks.get(name)
        if task is None:
            raise Conflict(f"No download of {name} is in progress.")
        task.cancel()

    def _ended(self, name: str) -> RingError:
        """Return the error for a fetch that was cancelled."""
        if self._has_stopped:
            return NotReady("The server is shutting down.")
        return Conflict(f"The download of {name} was cancelled. Another one continues it.")

    def _leave(self, name: str, task: asyncio.Task[None], report: Report) -> None:
        watchers = self._reports.get(name, [])
        if report in watchers:
            watchers.remove(report)
        if not watchers and name not in self._lasting:
            task.cancel()

    def _spread(self, name: str, progress: PullProgress) -> None:
        self._progress[name] = progress
        for report in self._reports.get(name, ()):
            report(progress)

    def _forget(self, name: str, done: asyncio.Task[None]) -> None:
        for kept in (self._tasks, self._reports, self._progress):
            kept.pop(name, None)
        self._lasting.discard(name)
        if not done.cancelled():
            # Retrieve the error: perhaps nobody waits for it any more.
            done.exception()

    def stop(self) -> Sequence[asyncio.Task[None]]:
        """Cancel all fetches, refuse new ones, and return those that end now. Requests that wait for one fail."""
        self._has_stopped = True
        for task in self._tasks.values():
            task.cancel()
        return list(self._tasks.values())


async def _in_turn(work: Awaitable[object], then: Callable[[], Awaitable[object]] | None) -> None:
    await work
    if then is not None:
        await then()


async def fetch_beside(
    name: str, *, must_fit: bool, memory_bytes: int | None = None, report: Report = lambda _: None
) -> None:
    """Fetch a model from the hub into the cache; cancelling stops it at once and keeps what arrived.

    Raises:
        ModelError, PlanError: as `find_model` does.
    """
    lines: list[str] = []

    def record_line(line: str) -> str:
        progress = _progress(line)
        if progress is None:
            lines.append(line)
        else:
            report(progress)
        return ""

    child = await ChildProcess.start(
        "mlx_ring.models.fetching",
        [
            f"--name={name}",
            *(["--must-fit"] if must_fit else []),
            *([] if memory_bytes is None else [f"--memory-bytes={memory_bytes}"]),
        ],
        name=f"fetching {name}",
        rank=None,
        environment=inherited_environment(_QUIET),
        word=record_line,
    )
    try:
        reason = await child.wait()
    finally:
        await child.stop(asks_where=False)
    if reason != "exit code 0":
        raise _read(lines, f"{name} could not be fetched: {reason}.")


def _progress(line: str) -> PullProgress | None:
    """Read a line of progress; None if it is none."""
    try:
        return PullProgress(**json.loads(line)["progress"])
    except (ValueError, TypeError, KeyError):
        return None


def _read(lines: Sequence[str], otherwise: str) -> RingError:
    """Return the error that ended the process; without one, `otherwise`."""
    try:
        last: dict[str, str] = json.loads(lines[-1])
        kind, said = getattr(errors, last["kind"]), last["said"]
        return kind(said) if issubclass(kind, ModelError | PlanError) else ModelNotFound(said)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError):
        return ModelNotFound(otherwise)


# ---- in the process


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the model, and return 0 if it is here."""
    options = _parse(arguments)
    watch_lifeline(options.lifeline_fd, lambda: os._exit(1))
    try:
        find_model(
            options.name,
            must_fit=options.must_fit,
            memory_bytes=options.memory_bytes,
            report=_Printer().report,
        )
    except RingError as error:
        sys.stdout.write(json.dumps({"kind": type(error).__name__, "said": str(error)}) + "\n")
        return 1
    return 0


class _Printer:
    """Printer of lines of progress, not too many."""

    def __init__(self) -> None:
        self._printed_s = 0.0
        self._status = ""

    def report(self, progress: PullProgress) -> None:
        now = time.monotonic()
        if progress.status != self._status or now >= self._printed_s + _REPORT_S:
            self._printed_s, self._status = now, progress.status
            sys.stdout.write(json.dumps({"progress": asdict(progress)}) + "\n")
            sys.stdout.flush()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.models.fetching", description=__doc__)
    parser.add_argument("--name", required=True, help="name of the hub's repository")
    parser.add_argument(
        "--must-fit", action="store_true", help="refuse a model that exceeds this machine's memory"
    )
    parser.add_argument("--memory-bytes", type=int, help="refuse a model that exceeds this memory")
    parser.add_argument("--lifeline-fd", type=int, required=True, help="pipe that closes with the parent")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
