"""A package's modules without what it brings along, each in a process of its own: what is imported stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import clean_environment

BARE = "import sys; from mlx_ring.models.lean_imports import import_bare; import_bare('heavy'); "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds a package that says when its `__init__` runs, and has a module."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text(
        "print('init')\nfrom heavy.light import two\nthree = two + 1\n"
    )
    (tmp_path / "heavy" / "light.py").write_text("two = 2\n")
    return tmp_path


def said(folder: Path, code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_module_comes_in_without_its_package_s_init(folder: Path) -> None:
    assert said(folder, BARE + "from heavy.light import two; print(two)") == ["2"]


@pytest.mark.parametrize(
    "ask", ["from heavy import three; print(three)", "import heavy; print(heavy.three); heavy.three"]
)
def test_whoever_asks_the_package_itself_gets_what_it_has_and_init_runs_once(folder: Path, ask: str) -> None:
    assert said(folder, BARE + "import heavy.light; " + ask) == ["init", "3"]


def test_what_the_package_has_not_is_missing_as_ever(folder: Path) -> None:
    code = BARE + "import heavy; print(hasattr(heavy, 'four'), hasattr(heavy, 'four'))"
    assert said(folder, code) == ["init", "False", "False"]


def test_a_package_that_is_in_already_or_not_installed_is_let_be(folder: Path) -> None:
    assert said(folder, "import heavy; " + BARE + "print(heavy.three)") == ["init", "3"]
    code = (
        "from mlx_ring.models.lean_imports import import_bare; import_bare('no_such_package'); import sys; "
    )
    assert said(folder, code + "print('no_such_package' in sys.modules)") == ["False"]
