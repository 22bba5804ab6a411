"""Output of `mlx-ring serve` while it starts: missing machines, the plan, progress, and example commands."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from mlx_ring.cli import LOST_OUTPUT, discard_output, name_beside_figures, progress_bar
from mlx_ring.cli.head_client import DEFAULT_URL
from mlx_ring.core.environment import program
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.interfaces import join_lines, lan_addresses
from mlx_ring.rpc.protos import agent_pb2

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from mlx_ring.core.worker_status import WorkerInfo
    from mlx_ring.head.head import StartReport
    from mlx_ring.head.placing import Placement

log = logging.getLogger(__name__)

_QUIET_ZONE = 4
"""Light modules around a QR code (ISO/IEC 18004)."""
_HALVES = {
    (0, 0): " ",
    (1, 0): "\N{UPPER HALF BLOCK}",
    (0, 1): "\N{LOWER HALF BLOCK}",
    (1, 1): "\N{FULL BLOCK}",
}
_BLACK_ON_WHITE, _USUAL_COLOURS = "\x1b[38;5;16;48;5;231m", "\x1b[0m"
"""Colours that no theme changes, so that dark modules are dark on every background."""
SAMPLE_QUESTION = "What is the capital of France?"


class StartupMessages:
    """Messages of a starting head, with progress bars for weights on a terminal.

    A head serves on if they cannot be written any more: the terminal is closed, a pipe's reader has ended, or a disk is
    full. It waits for no reader (`unblocked_output`).
    """

    def __init__(self, *, invites: bool = True, lasting: bool = True) -> None:
        self.invites = invites
        """True if the commands to join are shown."""
        self._lasting = lasting
        """True if messages continue after the first model is served; otherwise only the log does."""
        self._has_served = self._is_lost = False
        self._progress = _bars() if sys.stderr.isatty() else None
        self._tasks: dict[tuple[str, int], TaskID] = {}
        """Progress bar by instance and stage."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_bars()

    def joining(self, address: HeadAddress, token: str, missing: int) -> None:
        """Print the commands to run on the other machines."""
        lines = [f"  {line}" for line in join_lines(address, lan_addresses(), token)]
        machines = "one more machine" if missing == 1 else f"{missing} more machines"
        text = [
            f"Waiting for {machines}. On each, run the command with an address that it can reach:",
            *lines,
        ]
        self._show(lambda: print("\n".join(["", *text, ""]), flush=True))

    def planned(self, instance: str, placement: Placement) -> None:
        """Print the table of the plan, and start the progress bars."""
        if (plan := placement.plan) is not None and not self._is_over:
            from mlx_ring.cli.status_tables import show_plan  # slow to import, and one machine needs no plan

            self._show(lambda: show_plan(plan))
        if self._progress is None:
            return
        # An earlier epoch of the instance may have been lost before it served.
        self._remove_bars(instance)
        self._show(self._progress.start)
        for stage in range(len(placement.ranges)):
            title = self._title(instance, stage)
            self._tasks[instance, stage] = self._progress.add_task(title, total=None)

    def loading(self, instance: str, progress: agent_pb2.StageProgress) -> None:
        """Move a stage's bar."""
        if self._progress is None:
            return
        task, loaded = self._tasks[instance, progress.stage], progress.progress
        if loaded.bytes_total:
            self._progress.update(task, completed=loaded.bytes_loaded, total=loaded.bytes_total)
        if loaded.ready:
            self._progress.update(task, description=f"{self._title(instance, progress.stage)} ready")

    def ended(self, instance: str) -> None:
        """Remove the progress bars of an instance that has not served."""
        self._remove_bars(instance)

    def _title(self, instance: str, stage: int) -> str:
        place = f", stage {stage}"
        if self._progress is None:
            return f"{instance}{place}"
        return name_beside_figures(instance, self._progress.console, len(f"{place} ready")) + place

    def serving(self, running: StartReport) -> None:
        """Print the server's address and how to use it."""
        self._remove_bars(running.instance.name)
        if self._is_over:
            log.info("Serving %s (loaded in %.1f s)", running.instance.name, running.load_s)
        else:
            self._show(lambda: print(ready_text(running), flush=True))
        self._has_served = True

    def _show(self, write: Callable[[], object]) -> None:
        """Write a message, unless one could not be written before."""
        if self._is_lost:
            return
        try:
            write()
        except OSError as error:
            if error.errno not in (*LOST_OUTPUT, errno.EAGAIN):
                raise
            self._lose(error.strerror)
        except SystemExit:  # rich ends a program whose pipe is not read
            self._lose(os.strerror(errno.EPIPE))

    def _lose(self, reason: str | None) -> None:
        self._is_lost = True
        discard_output()
        log.warning(
            "The output of `mlx-ring serve` cannot be written any more (%s): it serves on, and only its log continues",
            reason,
        )

    @property
    def _is_over(self) -> bool:
        return self._is_lost or (self._has_served and not self._lasting)

    def _remove_bars(self, instance: str) -> None:
        for place in [place for place in self._tasks if place[0] == instance]:
            task = self._tasks.pop(place)
            if self._progress is not None:
                self._progress.remove_task(task)
        if not self._tasks:
            self._stop_bars()

    def _stop_bars(self) -> None:
        if self._progress is None or not self._progress.live.is_started:
            return
        if self._is_lost:
            # They may be on another terminal, whose cursor they hide.
            with contextlib.suppress(OSError, SystemExit):
                self._progress.stop()
        else:
            self._show(self._progress.stop)


def _bars() -> Progress:
    """Return progress bars for a terminal."""
    from rich.console import Console  # slow to import

    return progress_bar(Console(stderr=True), has_speed=False)


def ready_text(running: StartReport) -> str:
    """Return the text on how to use a model that is now served."""
    instance = running.instance
    lines = [
        "",
        f"Serving {running.served.names[0]} at {running.url} (loaded in {running.load_s:.1f} s)",
    ]
    lines += [
        f"  stage {worker.stage}: layers {worker.layers}, worker {worker.pid} on {worker.node}, "
        f"{worker.dtype} on {worker.device}, "
        f"{_megabytes(worker.memory['weight_bytes'])} of weights, {_megabytes(worker.memory['rss_bytes'])} of memory"
        for worker in instance.workers
    ]
    products = sorted({products_of(worker) for worker in instance.workers if worker.device == "cpu"})
    lines += [f"  computed by {each}" for each in products if each]
    if not running.is_first:
        return "\n".join([*lines, ""])
    lines += network_lines(running.lan_urls, asks_for_key=running.asks_for_key)
    if running.lan_urls and sys.stdout.isatty():
        from rich.console import Console  # slow to import

        lines += qr_lines(running.lan_urls, Console())
    model = running.served.names[0]
    lines += [
        "",
        *sample_commands(running.url, model, running.certificate, asks_for_key=running.asks_for_key),
    ]
    if running.served.local.kind == "built-in":
        lines += [
            f"The built-in models are tiny: `{program()} recommend` lists larger ones that run well here."
        ]
    return "\n".join([*lines, "Press Ctrl-C to stop it.", ""])


def network_lines(urls: Sequence[str], *, asks_for_key: bool) -> list[str]:
    """Return the lines on how other machines and phones reach the server, with a warning if all of them may use it."""
    if not urls:
        return []
    warning = "  No API key is set: everyone on these networks can use it. --api-key-file FILE asks for one."
    lines = ["From other machines and phones:", *(f"  {url}" for url in urls)]
    return lines if asks_for_key else [*lines, warning]


def qr_lines(urls: Sequence[str], terminal: Console) -> list[str]:
    """Return the QR code of an address that phones can reach; nothing without one, or if the terminal cannot show it.

    Args:
        urls: the server's addresses for other machines. An IP address is preferred: not every phone finds mDNS names.
        terminal: must be wide enough, with block characters and 256 colours.
    """
    has_blocks = terminal.encoding.startswith("utf") and not terminal.no_color
    if not urls or not has_blocks or terminal.color_system not in ("256", "truecolor"):
        return []
    import segno

    url = next((each for each in urls if _has_ip_address(each)), urls[0])
    modules = segno.make_qr(url, error="m", boost_error=False).matrix
    margin = [0] * _QUIET_ZONE
    rows = [[*margin, *row, *margin] for row in modules]
    blank = [0] * len(rows[0])
    rows = [*[blank] * _QUIET_ZONE, *rows, *[blank] * _QUIET_ZONE]
    if len(blank) > terminal.width:
        return []
    # A character shows two modules, one above the other.
    pairs = zip_longest(rows[::2], rows[1::2], fillvalue=blank)
    lines = ("".join(_HALVES[upper, lower] for upper, lower in zip(*pair, strict=True)) for pair in pairs)
    return [
        f"Scan it with a phone, for {url}:",
        *(f"{_BLACK_ON_WHITE}{line}{_USUAL_COLOURS}" for line in lines),
    ]


def _has_ip_address(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def products_of(worker: WorkerInfo) -> str:
    """Return what computes a worker's products, and what quantized weights cost without native kernels."""
    if worker.kernels or not worker.cpu_weights:
        return worker.blas
    if worker.cpu_weights == "float32":
        return f"{worker.blas}. Quantized weights take seven times the memory, as float32."
    return f"{worker.blas}. With quantized weights, a token takes many times as long."


def sample_commands(url: str, model: str, certificate: Path | None, *, asks_for_key: bool) -> list[str]:
    """Return commands to paste; the key comes from the environment, because a terminal should not show it.

    The request names its model, as it must where several are served, now or later.
    """
    request = {"model": model, "messages": [{"role": "user", "content": SAMPLE_QUESTION}]}
    body = shlex.quote(json.dumps(request, ensure_ascii=False))
    key = ' -H "Authorization: Bearer $MLX_RING_API_KEY"' if asks_for_key else ""
    trust = "" if certificate is None else f" --cacert {shlex.quote(str(certificate.absolute()))}"
    place = "" if url == DEFAULT_URL else f" --url {url}"
    return [
        "Ask it, with one of its keys in MLX_RING_API_KEY:" if asks_for_key else "Ask it:",
        f"  curl {url}/v1/chat/completions{trust}{key} -H 'Content-Type: application/json' -d {body}",
        "Or chat with it in another terminal:",
        f"  {program()} chat{place}{trust}",
    ]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
