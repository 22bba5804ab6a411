"""Figures of a small package, which can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.measure_structure import Figures, Lists, measure, read_sources

FILES = {
    "__init__.py": "",
    "first.py": '"""What it is."""\n\nfrom mlx_ring.second import act\n\n# A comment.\nLIMIT = act()\n"""Of it."""\n',
    "second.py": "def act() -> int:\n    from mlx_ring import first  # noqa: PLC0415\n\n    return first.LIMIT\n",
    "room/__init__.py": "",
    "room/one.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import mlx_ring.room.two\n",
    "room/two.py": "import mlx_ring.room.one\n\nmin_p = 0.5\n",
    "room/big.py": "\n" * 451,
    "room/any_pb2.py": "x = 1\n",
    "room/any.proto": "double min_p = 1;\n",
}


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Figures, Lists]:
    for name, text in FILES.items():
        path = tmp_path / "src" / "mlx_ring" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return measure(tmp_path)


def test_files_and_lines_are_counted_without_generated_ones(measured: tuple[Figures, Lists]) -> None:
    figures, lists = measured
    assert figures["files"] == 7
    assert figures["files other than __init__.py"] == 5
    assert lists["files over 450 lines"] == [" 451 room/big.py"]
    assert figures["files under 40 lines"] == 4


@pytest.mark.usefixtures("measured")
def test_code_lines_have_neither_comments_nor_docstrings(tmp_path: Path) -> None:
    assert sum(source.code_lines for source in read_sources(tmp_path)) == 3 + 3 + 3 + 2


def test_cycles_are_separated_by_the_import_that_closes_them(measured: tuple[Figures, Lists]) -> None:
    _, lists = measured
    assert lists["import cycles at load"] == []
    assert lists["further import cycles through functions"] == ["mlx_ring.first <-> mlx_ring.second"]
    assert lists["further import cycles under TYPE_CHECKING"] == ["mlx_ring.room.one <-> mlx_ring.room.two"]


def test_single_importers_are_in_the_same_folder(measured: tuple[Figures, Lists]) -> None:
    assert measured[1]["files with a single importer, in their own folder"] == [
        "first.py <- second.py",
        "room/one.py <- room/two.py",
        "room/two.py <- room/one.py",
        "second.py <- first.py",
    ]


def test_openers_suppressions_and_witnesses_are_found(measured: tuple[Figures, Lists]) -> None:
    _, lists = measured
    assert lists["docstrings that open with What"] == ["first.py:1"]
    assert lists["docstrings that open with Of"] == ["first.py:7"]
    assert lists["noqa"] == ["1 PLC0415"]
    assert lists["files that name a sampling parameter: min_p"] == ["room/any.proto", "room/two.py"]
