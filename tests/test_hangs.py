"""Tests that hang end their process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLUGINS = ("-p", "tests.hangs", "-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
HANGING = """
import threading
import pytest
import tests.hangs
tests.hangs._FURTHER_S = 0.3
stopped = threading.Event()

@pytest.mark.timeout(0.2)
def test_that_waits_for_a_thread():
    thread = threading.Thread(target=stopped.wait, daemon=True)
    thread.start()
    try:
        stopped.wait()
    finally:
        thread.join()

def test_after_it():
    pass
"""


def test_a_test_that_does_not_end_after_its_limit_fails_with_the_stacks_of_its_threads(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, "-n", "1", "--rootdir", tmp_path, tmp_path],
        cwd=Path(__file__).parents[1],
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 1 passed" in run.stdout, run.stdout
    assert "crashed while running 'test_hanging.py::test_that_waits_for_a_thread'" in run.stdout
    assert "in test_that_waits_for_a_thread" in run.stderr
