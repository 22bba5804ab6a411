"""Results that all processes of a run share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
from tests.once import folder_of_run, once
folder = folder_of_run()
assert folder == folder_of_run() and folder.is_dir(), folder
print(folder)
print(once(folder / "number", lambda: 1), once(folder / "number", lambda: 2))
"""


def test_a_program_without_a_run_has_a_folder_until_it_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    folder, numbers = done.stdout.splitlines()
    assert numbers == "1 1"
    assert not Path(folder).exists()
