"""The home of a test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mlx_ring.core.environment import inherited_environment

_PROGRAM = """
from pathlib import Path
from tests.own_home import remove_own_home, use_own_home

use_own_home()
use_own_home()
import os
from mlx_ring.core.folders import cache_folder, data_folder
print(Path.home(), os.environ.get("HF_TOKEN"), data_folder(), cache_folder(), os.environ["PIP_CACHE_DIR"], sep="\\n")
remove_own_home()
"""


def test_a_run_sees_nothing_of_the_users_home_but_caches_of_packages(tmp_path: Path) -> None:
    used = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data"), "HF_TOKEN": "hf"}
    kept = inherited_environment(used)
    for name in ("PIP_CACHE_DIR", "XDG_CACHE_HOME"):
        kept.pop(name, None)
    program = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(program, env=kept, capture_output=True, text=True, check=True)
    home, account, data, cache, packages = done.stdout.splitlines()
    assert account == "None"
    assert Path(data).is_relative_to(home)
    assert Path(cache).is_relative_to(home)
    assert packages == str(tmp_path / ".cache" / "pip")
    assert not Path(home).exists()
    assert not list(tmp_path.iterdir())


def test_this_run_has_a_home_of_its_own() -> None:
    assert Path.home().name.startswith("mlx-ring-tests-home-")
