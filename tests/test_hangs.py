"""Tests that hang fail, and others run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = ("-p", "tests.hangs", "-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
HANGING = """
import asyncio
import ctypes
import threading
import pytest
import tests.hangs
tests.hangs._END_S = 3.0
stopped = threading.Event()

@pytest.fixture
def thread():
    thread = threading.Thread(target=stopped.wait, daemon=True)
    thread.start()
    yield
    thread.join()

@pytest.mark.timeout(1)
def test_whose_cleanup_waits(thread):
    assert False, "it fails before"

async def never_answered():
    await asyncio.get_running_loop().create_future()

@pytest.mark.timeout(1)
def test_whose_task_waits():
    asyncio.run(never_answered())

@pytest.mark.timeout(1)
def test_that_waits_outside_python():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def test_after_them():
    pass
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a mutex of zeros is one of glibc")
def test_tests_that_hang_fail_with_what_they_wait_for_and_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, "-n", "1", "--rootdir", tmp_path, tmp_path],
        cwd=Path(__file__).parents[1],
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in run.stdout, run.stdout
    for name in ("test_whose_cleanup_waits", "test_that_waits_outside_python"):
        assert f"crashed while running 'test_hanging.py::{name}'" in run.stdout
    assert "thread.join" in run.stderr or "in join" in run.stderr
    assert "in test_that_waits_outside_python" in run.stderr
    assert "FAILED" in run.stdout
    assert "await asyncio.get_running_loop().create_future()" in run.stdout
