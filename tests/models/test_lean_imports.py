"""A package's modules without what it brings along, each in a process of its own: what is imported stays."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version
from tests.processes import clean_environment

from mlx_ring.models.lean_imports import UNUSED

BARE = "import sys; from mlx_ring.models.lean_imports import import_bare; import_bare('heavy'); "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with a package that prints when its `__init__` runs, and has a module."""
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


VERSIONS = {"mlx-lm": ("0.32.2", "0.33"), "transformers": ("5.0", "6"), "tokenizers": ("0.20", "1")}
"""Ranges of versions, up to but without the second, whose structure the following tests know."""


@pytest.mark.parametrize("package", VERSIONS)
def test_the_installed_version_is_one_whose_structure_is_known(package: str) -> None:
    least, below = VERSIONS[package]
    assert Version(least) <= Version(version(package)) < Version(below)


def test_mlx_lm_imports_exactly_what_the_stand_ins_provide() -> None:
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "utils.py").read_text()
    imported = {
        node.module: {name.name for name in node.names}
        for statement in ast.parse(source).body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    assert imported["tokenizer_utils"] <= set(UNUSED["mlx_lm.tokenizer_utils"])
    assert imported["huggingface_hub"] <= set(UNUSED["huggingface_hub"])
    assert not any(name.partition(".")[0] in {"transformers", "tokenizers"} for name in imported)


def test_mlx_lm_is_loaded_with_stand_ins_for_the_unused_modules_alone(tmp_path: Path) -> None:
    code = "import sys; from mlx_ring.models.lean_imports import import_mlx_lm as go; go(); import mlx_lm.utils as u; "
    shown = "print(*sorted(n for n in ('huggingface_hub', 'mlx_lm.tokenizer_utils') if n in sys.modules), callable(u.load_model))"
    assert said(tmp_path, code + shown) == ["True"]


def test_transformers_offers_the_tokenizer_modules_without_its_init(tmp_path: Path) -> None:
    code = (
        "import sys; from mlx_ring.models import lean_imports; lean_imports._import_bare(); "
        "import transformers; print(transformers.AutoTokenizer.__module__, transformers.PreTrainedTokenizerFast.__module__, "
        "type(sys.modules['transformers']).__name__)"
    )
    assert said(tmp_path, code) == [
        "transformers.models.auto.tokenization_auto",
        "transformers.tokenization_utils_tokenizers",
        "module",
    ]
