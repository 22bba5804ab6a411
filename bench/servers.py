"""Servers under load: `mlx-ring serve` and `mlx_lm.server`, each pinned and in its own processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
from machine import ONE_THREAD, pin

from mlx_ring.cli.bench.client import Target

_LIMIT_S = 600
_STOP_LIMIT_S = 20
_WORKER = "mlx_ring.worker"
_SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "LD_PRELOAD")
"""Variables that make OpenBLAS choose slower kernels; removed for every contestant."""


def blas_environment() -> list[str]:
    """Return a command prefix that removes the variables that slow OpenBLAS down, and sets one thread."""
    return ["env", *(part for name in _SLOWING for part in ("-u", name)), *ONE_THREAD]


class Server:
    """Server process. The constructor waits until it is ready; `stop` ends it."""

    def __init__(self, name: str, command: Sequence[str], port: int, ready_path: str) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.target: Target | None = None
        """Target of the load, if the server does not report it itself."""
        self._output = tempfile.NamedTemporaryFile(prefix="mlx-ring-bench-", suffix=".log")  # noqa: SIM115 - closed with the server
        self._process = subprocess.Popen(
            [*blas_environment(), *command], stdout=self._output, stderr=subprocess.STDOUT
        )
        try:
            self._wait(f"{self.url}{ready_path}")
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """Return the process and its children."""
        return [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]

    def stop(self) -> None:
        if self._process.poll() is None:
            family = self.processes()
            self._process.send_signal(signal.SIGINT)
            _, left = psutil.wait_procs(family, _STOP_LIMIT_S)
            for process in left:  # ranks under mlx.launch outlive it
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
        self._output.close()

    def _wait(self, address: str) -> None:
        deadline = time.perf_counter() + _LIMIT_S
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                text = Path(self._output.name).read_text(errors="replace")
                raise SystemExit(f"{self.name} ended with exit code {self._process.returncode}:\n{text}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(address, trust_env=False).is_success:
                    return
            time.sleep(0.1)
        raise SystemExit(f"{self.name} was not ready after {_LIMIT_S} s.")


class RingServer(Server):
    """`mlx-ring serve`: worker i on `cores[i]`, head and agent on `head_core`."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        stages: int = 1,
        ranks: int = 1,
        counts: Sequence[int] = (),
        cores: Sequence[int],
        head_core: int | None,
    ) -> None:
        """Start the server with `counts` layers per stage, or the server's own split, and the given `ranks` per stage."""
        port = free_port()
        stages = len(counts) or stages
        self._logs = tempfile.TemporaryDirectory(prefix="mlx-ring-bench-")
        command = [*program(counts), "serve", str(model), "--stages", str(stages), "--port", str(port)]
        command += ["--blas-threads", "1", "--log-dir", self._logs.name, "--log-level", "warning", *flags]
        command += ["--tp", str(ranks)] if ranks > 1 else []
        name = f"mlx-ring, {ranks} ranks" if ranks > 1 else f"mlx-ring, {stages} stage{'s' * (stages > 1)}"
        super().__init__(name, command, port, "/health/ready")
        self._pin(stages * ranks, cores, head_core)

    def _pin(self, count: int, cores: Sequence[int], head_core: int | None) -> None:
        processes = self.processes()
        workers = [process for process in processes if _WORKER in process.cmdline()]
        if len(workers) != count:
            raise SystemExit(f"{self.name} runs {len(workers)} workers, not {count}.")
        order = sorted(workers, key=lambda process: _place(process.cmdline()))
        self._workers = order
        for index, worker in enumerate(order if cores else []):
            pin(worker.pid, cores[index % len(cores)])
        for process in processes:
            if process not in workers and head_core is not None:
                pin(process.pid, head_core)

    def worker_cpu_s(self) -> list[float]:
        """Return the CPU seconds that each stage's worker has used."""
        return [sum(worker.cpu_times()[:2]) for worker in self._workers]

    def head_cpu_s(self) -> float:
        """Return the CPU seconds that the head has used."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        super().stop()
        self._logs.cleanup()


def program(counts: Sequence[int]) -> list[str]:
    """Return the command `mlx-ring`, with given layers of each stage if there are any."""
    if counts:
        return [sys.executable, str(Path(__file__).with_name("cut_server.py")), ",".join(map(str, counts))]
    return [shutil.which("mlx-ring", path=str(Path(sys.executable).parent)) or "mlx-ring"]


class MlxLmServer(Server):
    """`mlx_lm.server` with our BLAS, on one core."""

    def __init__(self, model: Path, *, core: int | None) -> None:
        port = free_port()
        launcher = str(Path(__file__).with_name("mlx_lm_server.py"))
        command = [sys.executable, launcher, "--model", str(model), "--port", str(port)]
        super().__init__("mlx_lm.server", command, port, "/health")
        self.target = Target(self.url, "default_model", None, ignores_eos=False)
        if core is not None:
            pin(self.pid, core)


class LaunchedServer(Server):
    """`mlx_lm.server` with our BLAS under `mlx.launch`: rank i on `cores[i]`, sharing every layer."""

    def __init__(self, model: Path, *, ranks: int, cores: Sequence[int]) -> None:
        port = free_port()
        launch = str(Path(sys.executable).with_name("mlx.launch"))
        server = str(Path(__file__).with_name("mlx_lm_server.py"))
        command = [launch, "-n", str(ranks), "--backend", "ring", "--", sys.executable, server]
        command += ["--model", str(model), "--port", str(port)]
        super().__init__(f"mlx_lm.server, {ranks} ranks", command, port, "/health")
        self.target = Target(self.url, "default_model", None, ignores_eos=False)
        for process in self.processes() if cores else []:
            rank = process.environ().get("MLX_RANK")
            if rank is not None:
                pin(process.pid, cores[int(rank) % len(cores)])


def pin_self(core: int | None) -> None:
    """Pin this process, which is the load generator."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _place(command: Sequence[str]) -> tuple[int, ...]:
    return tuple(int(command[command.index(name) + 1]) for name in ("--stage", "--rank"))
