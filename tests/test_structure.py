"""The sources stay few files of a readable size, without import cycles, and a chat crosses few of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.measure_structure import Figures, Lists, measure
from tests.chat_trace import ChatTrace, trace_chat

ROOT = Path(__file__).parents[1]
LIMITS = {
    "files": (481, 370),
    "files over 450 lines": (1, 0),
    "files under 40 lines": (37, 0),
    "import cycles at load": (0, 0),
    "further import cycles through functions": (2, 0),
    "further import cycles under TYPE_CHECKING": (0, 0),
    "docstrings that open with What": (518, 0),
    "docstrings that open with Whether": (208, 0),
    "docstrings that open with Who": (45, 0),
    "docstrings that open with Of": (255, 0),
}
"""Limit of each figure, and its aim."""
CROSSED = {"head": (61, 45), "worker": (36, 33)}
"""Files that a chat may cross, as above."""
SMALL_FILES: dict[str, str] = {}
"""Files that may have under 40 lines, by path within the package, each with the reason."""


@pytest.fixture(scope="module")
def measured() -> tuple[Figures, Lists]:
    return measure(ROOT)


@pytest.fixture(scope="module")
def trace(tiny_model: Path) -> ChatTrace:
    return trace_chat(tiny_model, ROOT)


@pytest.mark.parametrize("figure", LIMITS)
def test_the_sources_keep_within_the_limit(measured: tuple[Figures, Lists], figure: str) -> None:
    figures, lists = measured
    allowed, _ = LIMITS[figure]
    found = [line for line in lists.get(figure, ()) if line.split()[-1] not in SMALL_FILES]
    count = len(found) if figure in lists else figures[figure]
    assert count <= allowed, "\n".join(found)


def test_every_small_file_on_the_list_is_there_and_small(
    measured: tuple[Figures, Lists],
) -> None:
    small = {line.split()[-1] for line in measured[1]["files under 40 lines"]}
    assert set(SMALL_FILES) <= small


@pytest.mark.parametrize("process", CROSSED)
def test_a_chat_crosses_few_files(trace: ChatTrace, process: str) -> None:
    files = {"head": trace.head, "worker": trace.worker}[process]
    assert len(files) <= CROSSED[process][0], "\n".join(files)
