"""Output of `mlx-ring serve` while it starts: missing machines, the plan, progress, and example commands.

It also names a well-known model that would fit the machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mlx_ring.cli.heads import DEFAULT_URL
from mlx_ring.cli.status_tables import show_plan
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.interfaces import join_lines, lan_addresses
from mlx_ring.host.process import usable_memory
from mlx_ring.rpc.protos import agent_pb2


@dataclass(frozen=True, slots=True)
class SuggestedModel:
    """A model on the hub. `weight_bytes` as its safetensors files have them."""

    hub_id: str
    weight_bytes: int
    active_share: float = 1.0
    """Share of the weights that a token reads: less than 1 in a Mixture of Experts."""


_BY_SIZE = (
    SuggestedModel("mlx-community/Qwen3-0.6B-4bit", 336_000_000),
    SuggestedModel("mlx-community/Qwen3-1.7B-4bit", 968_000_000),
    SuggestedModel("mlx-community/Qwen3-4B-4bit", 2_263_000_000),
    SuggestedModel("mlx-community/Qwen3-8B-4bit", 4_609_000_000),
    SuggestedModel("mlx-community/Qwen3-14B-4bit", 8_308_000_000),
    SuggestedModel("mlx-community/Qwen3-30B-A3B-4bit", 17_180_000_000, 0.11),
    SuggestedModel("mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit", 132_260_000_000, 0.094),
)
_RESERVE_BYTES = 2_000_000_000
"""Memory for the KV cache, computation and other programs."""
PLEASANT_TOKENS_PER_S = 5.0
"""About as fast as people read. A slower model is not recommended."""
_SLOW_BYTES_PER_S = 0.6e9
"""Rate of 4-bit weights in MLX's own operations on a CPU."""
_FLOAT_RATIO = 32 / 4.5
"""Size of float32 weights over that of 4 bits in groups of 64, with scales and biases of 16 bits."""
_LEAST_PROBE_BYTES, _MOST_PROBE_BYTES = 64 << 20, 1 << 30
_OVER_CACHE = 4
"""Size of the memory whose reading is measured, over that of the last cache."""


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """Weights that a CPU reads while it computes one token, in bytes a second."""

    quantized: float
    """Rate of 4-bit weights."""
    plain: float = 0.0
    """Rate of float32 weights, if it holds quantized ones so where they fit; else 0."""

    def tokens_per_s(self, model: SuggestedModel, room_bytes: int) -> float:
        """Return the tokens a second of one stream, with this memory for weights."""
        has_room = model.weight_bytes * _FLOAT_RATIO <= room_bytes
        rate = max(self.quantized, self.plain / _FLOAT_RATIO) if has_room else self.quantized
        return rate / (model.weight_bytes * model.active_share)


def largest_fitting(free_bytes: int, speed: CpuSpeed | None = None) -> SuggestedModel | None:
    """Return the largest known model that fits and answers at a pleasant speed.

    Its weights take at most two thirds of the free memory beyond a reserve. None if no model is fast enough.

    Args:
        free_bytes: the machine's free memory.
        speed: the CPU's; unlimited by default.
    """
    room = room_for_weights(free_bytes)
    fitting = [model for model in _BY_SIZE if model.weight_bytes <= room]
    fast = [
        model
        for model in fitting
        if speed is None or speed.tokens_per_s(model, room) >= PLEASANT_TOKENS_PER_S
    ]
    return fast[-1] if fast else None


def room_for_weights(free_bytes: int) -> int:
    """Return the memory for a model's weights."""
    return (free_bytes - _RESERVE_BYTES) * 2 // 3


def cpu_speed(worker: WorkerInfo, profile: MachineProfile | None) -> CpuSpeed:
    """Return this CPU's speed: as its profile measured it, or after memory's rate and what computes.

    Args:
        worker: computes here.
        profile: this machine's, if it has been measured.
    """
    measured = {} if profile is None else {rate.weights: rate.bandwidth for rate in profile.rates}
    if profile is not None and bool(profile.kernels) == bool(worker.kernels) and "4-bit" in measured:
        return CpuSpeed(measured["4-bit"], 0.0 if worker.kernels else measured.get("float32", 0.0))
    memory = memory_bytes_per_s()
    return CpuSpeed(memory) if worker.kernels else CpuSpeed(_SLOW_BYTES_PER_S, memory)


def memory_bytes_per_s() -> float:
    """Return the rate at which a core reads memory that no cache holds."""
    size = min(max(_LEAST_PROBE_BYTES, _OVER_CACHE * last_cache_bytes()), _MOST_PROBE_BYTES)
    written = b"\1" * min(size, max(_LEAST_PROBE_BYTES, usable_memory().available_bytes // 8))
    begin = time.perf_counter()
    written.find(b"\0")
    return len(written) / (time.perf_counter() - begin)


def last_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of the largest cache of a core; 0 if the system does not report it."""
    sizes = [0]
    for file in root.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


if TYPE_CHECKING:
    from mlx_ring.core.worker_status import WorkerInfo
    from mlx_ring.head.head import StartReport
    from mlx_ring.head.placing import Placement
    from mlx_ring.host.machine_profile import MachineProfile

log = logging.getLogger(__name__)

SAMPLE_QUESTION = "What is the capital of France?"


class StartupMessages:
    """Messages of a starting head, with progress bars for weights on a terminal."""

    def __init__(self, *, invites: bool = True, lasting: bool = True) -> None:
        self.invites = invites
        """True if the commands to join are shown."""
        self._lasting = lasting
        """True if messages continue after the first model is served; otherwise only the log does."""
        self._has_served = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
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
        print("\n".join(["", *text, ""]), flush=True)

    def planned(self, instance: str, placement: Placement) -> None:
        """Print the table of the plan, and start the progress bars."""
        if placement.plan is not None and not self._is_over:
            show_plan(placement.plan)
        if self._progress.console.is_terminal:
            self._progress.start()
        for stage in range(len(placement.ranges)):
            self._tasks[instance, stage] = self._progress.add_task(f"{instance}, stage {stage}", total=None)

    def loading(self, instance: str, progress: agent_pb2.StageProgress) -> None:
        """Move a stage's bar."""
        task, loaded = self._tasks[instance, progress.stage], progress.progress
        if loaded.bytes_total:
            self._progress.update(task, completed=loaded.bytes_loaded, total=loaded.bytes_total)
        if loaded.ready:
            self._progress.update(task, description=f"{instance}, stage {progress.stage} ready")

    def serving(self, running: StartReport) -> None:
        """Print the server's address and how to use it."""
        for place in [place for place in self._tasks if place[0] == running.instance.name]:
            self._progress.remove_task(self._tasks.pop(place))
        if not self._tasks:
            self._stop_bars()
        if self._is_over:
            log.info("Serving %s (loaded in %.1f s)", running.instance.name, running.load_s)
        else:
            print(ready_text(running), flush=True)
        self._has_served = True

    @property
    def _is_over(self) -> bool:
        return self._has_served and not self._lasting

    def _stop_bars(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


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
    lines += ["", *sample_commands(running.url, running.certificate, asks_for_key=running.asks_for_key)]
    if running.served.local.kind == "built-in":
        lines += _recommendation(instance.workers[0], running.profile)
    return "\n".join([*lines, "Press Ctrl-C to stop it.", ""])


def products_of(worker: WorkerInfo) -> str:
    """Return what computes a worker's products, and what quantized weights cost without native kernels."""
    if worker.kernels or not worker.cpu_weights:
        return worker.blas
    if worker.cpu_weights == "float32":
        return f"{worker.blas}; quantized weights take seven times the memory, as float32"
    return f"{worker.blas}; quantized weights take many times as long for a token"


def _recommendation(worker: WorkerInfo, profile: MachineProfile | None) -> list[str]:
    """Return the lines that name a real model for this machine; none if its memory is too small for all."""
    cpu = cpu_speed(worker, profile) if worker.device == "cpu" else None
    free = usable_memory().available_bytes
    fitting = largest_fitting(free, cpu)
    if fitting is None:
        return []
    speed = "" if cpu is None else f", about {cpu.tokens_per_s(fitting, room_for_weights(free)):.2g} tokens/s"
    return [
        "The built-in models are tiny. A real model that fits this machine:",
        f"  {program()} serve {fitting.hub_id}    # fetches {fitting.weight_bytes / 1e9:.1f} GB{speed}",
    ]


def sample_commands(url: str, certificate: Path | None, *, asks_for_key: bool) -> list[str]:
    """Return commands to paste; the key comes from the environment, because a terminal should not show it."""
    body = json.dumps({"messages": [{"role": "user", "content": SAMPLE_QUESTION}]})
    key = ' -H "Authorization: Bearer $MLX_RING_API_KEY"' if asks_for_key else ""
    trust = "" if certificate is None else f" --cacert {shlex.quote(str(certificate.absolute()))}"
    place = "" if url == DEFAULT_URL else f" --url {url}"
    return [
        "Ask it, with one of its keys in MLX_RING_API_KEY:" if asks_for_key else "Ask it:",
        f"  curl {url}/v1/chat/completions{trust}{key} -H 'Content-Type: application/json' -d '{body}'",
        "Or chat with it in another terminal:",
        f"  {program()} chat{place}{trust}",
    ]


def program() -> str:
    """Return the name by which this program was called, for commands to paste."""
    called = Path(sys.argv[0])
    return "mlx-ring" if shutil.which("mlx-ring") or called.name != "mlx-ring" else str(called)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
