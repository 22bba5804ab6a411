"""Commands of `mlx-ring`: a thin shell over the other packages."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from mlx_ring.models.model_folder import PullProgress

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""
LOST_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to stdout, which name no file."""
_TABLE_WIDTH = 300
_LEAST_WIDTH = 80
_FIGURES_WIDTH = 46
"""Columns of a terminal that a progress bar's figures take: the bytes, the speed and the time, with a short bar."""
_LEAST_NAME = 12
_LINE_S, _LONGEST_LINE_S = 10.0, 60.0
"""Least and most seconds between two lines of progress."""
_LINE_SHARE = 0.1
"""Least progress between two lines of it."""


def table_console() -> Console:
    """Return a console for tables of names and addresses, which are useless if they are cut or broken.

    A narrow terminal wraps the lines itself, and pipes get each row in a line. Names are no markup.
    """
    from rich.console import Console  # slow to import, and few commands print a table

    return Console(width=_TABLE_WIDTH, soft_wrap=True, highlight=False, markup=False, emoji=False)


def report_console() -> Console:
    """Return a console for tables whose cells may break. It has 80 columns at least: fewer would cut names and numbers.

    A narrower terminal wraps the lines itself. Names are no markup.
    """
    from rich.console import Console  # as above

    width = max(_LEAST_WIDTH, Console().width)
    return Console(width=width, soft_wrap=True, highlight=False, markup=False)


class DownloadBar:
    """Progress of a fetch on stderr: a bar on a terminal, and a line now and then for files and programs."""

    def __init__(self, model: str) -> None:
        from rich.console import Console  # as above

        self._console = Console(stderr=True)
        # A terminal without control codes would show no bar.
        has_bar = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar = progress_bar(self._console, has_speed=True) if has_bar else None
        self._task = None if self._bar is None else self._bar.add_task(model, total=None, visible=False)
        self._model = model
        self._printed: set[str] = set()
        """Kinds of progress of which there was a line."""
        self._printed_share, self._printed_s = 0.0, 0.0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, progress: PullProgress) -> None:
        """Move the bar, or print a line."""
        if self._bar is None or self._task is None:
            self._print(progress)
            return
        name = name_beside_figures(self._model, self._console, len(progress.status))
        self._bar.update(
            self._task,
            description=f"{progress.status} {name}",
            completed=progress.done_bytes,
            total=progress.total_bytes,
            visible=True,
        )

    def _print(self, progress: PullProgress) -> None:
        """Print a line at the start of each kind of progress, for each tenth of a long fetch, and each minute.

        Several files are fetched and verified at once, so that the kind changes all the time.
        """
        share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0
        now_s = time.monotonic()
        least_s = _LINE_S if share >= self._printed_share + _LINE_SHARE else _LONGEST_LINE_S
        is_early = progress.status in self._printed and now_s < self._printed_s + least_s
        if progress.status == "done" or is_early:
            return
        self._printed.add(progress.status)
        self._printed_share, self._printed_s = share, now_s
        size = f"{share:.0%} of {progress.total_bytes / 1e6:,.0f} MB"
        print(f"{progress.status} {self._model}: {size}", file=sys.stderr, flush=True)


def name_beside_figures(name: str, console: Console, others: int) -> str:
    """Return a name, or its end, that leaves room for `others` characters and the figures of a progress bar."""
    from rich.cells import cell_len  # as above

    room = max(_LEAST_NAME, console.width - _FIGURES_WIDTH - others)
    if cell_len(name) <= room:
        return name
    while cell_len(name) > room - 1:
        name = name[1:]
    return f"…{name}"


def progress_bar(console: Console, *, has_speed: bool) -> Progress:
    """Return a bar of bytes whose figures stay whole: without the bar, the speed and the time in a narrow terminal."""
    from rich import progress as rich_progress  # as above
    from rich.table import Column

    timers = (
        (rich_progress.TransferSpeedColumn, rich_progress.TimeRemainingColumn)
        if has_speed
        else (rich_progress.TimeElapsedColumn,)
    )
    columns: list[rich_progress.ProgressColumn] = [
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.DownloadColumn(table_column=Column(no_wrap=True)),
    ]
    if console.width >= _LEAST_WIDTH:
        columns.insert(1, rich_progress.BarColumn())
        columns += [timer(table_column=Column(no_wrap=True)) for timer in timers]
    return rich_progress.Progress(*columns, console=console, transient=True)


def discard_output() -> None:
    """Let what is still buffered for stdout, and what follows, go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
