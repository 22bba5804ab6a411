"""Measuring in a process of its own: what it finds, and what becomes of its failures."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from mlx_ring.agent.profiling import ProfileOptions, measure_machine
from mlx_ring.core.errors import ProtocolError, RingError, WorkerLost, WorkerStuck

pytestmark = pytest.mark.processes
QUICK = ProfileOptions(seconds=0.1, memory_share=0.05)
WRITE = "import sys; out = sys.argv[sys.argv.index('--output') + 1]; open(out, 'w').write({!r})"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is a module for child processes: `measuring`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "measuring.py"


def measure(options: ProfileOptions = QUICK, module: str = "measuring") -> object:
    return asyncio.run(measure_machine(options, module))


def test_the_machine_is_measured_with_the_threads_that_workers_have() -> None:
    found = asyncio.run(measure_machine(ProfileOptions(blas_threads=2, seconds=0.1, memory_share=0.05)))
    assert found.blas_threads == 2
    assert found.memory_bytes > 0
    assert not left_behind("mlx_ring.worker.profile")


@pytest.mark.parametrize(
    ("code", "error", "sentence"),
    [
        ("import sys; sys.exit('no memory is left')", WorkerLost, "exit code 1: no memory is left"),
        ("import os; os.kill(os.getpid(), 9)", WorkerLost, "ended by signal 9"),
        ("pass", ProtocolError, "left no profile"),
        (WRITE.format("{}"), ProtocolError, "This is no machine's profile"),
        (WRITE.format("rubbish"), ProtocolError, "This is no machine's profile"),
    ],
)
def test_a_failure_is_an_error_that_says_why(
    code: str, error: type[RingError], sentence: str, module: Path
) -> None:
    module.write_text(code)
    with pytest.raises(error, match=sentence):
        measure()


def test_who_takes_too_long_is_ended(module: Path) -> None:
    module.write_text("import threading; threading.Event().wait()")
    with pytest.raises(WorkerStuck, match="took longer than 1 s and was ended"):
        measure(ProfileOptions(timeout_s=1.0))
    assert not left_behind("measuring")


def left_behind(module: str) -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.is_running() and [sys.executable, "-m", module] == child.cmdline()[:3]
    ]
