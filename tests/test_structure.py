"""Limits on the sources' structure: number and sizes of files, import cycles, files that a chat crosses."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.measure_structure import RECIPES, Figures, Lists, measure
from tests.chat_trace import ChatTrace, trace_chat

ROOT = Path(__file__).parents[1]
LIMITS = {
    "files": 370,
    "files over 450 lines": 0,
    "files under 60 lines": 20,
    "files with a single importer, in their own folder": 62,
    "import cycles at load": 0,
    "further import cycles through functions": 0,
    "further import cycles under TYPE_CHECKING": 0,
    "docstrings that open with What": 0,
    "docstrings that open with Whether": 0,
    "docstrings that open with Who": 0,
    "docstrings that open with Of": 0,
    "files that name a setting: http_timeout_keep_alive": 2,
    "files that name a setting: step_deadline_s": 4,
    "files that name a setting: max_queued_requests": 5,
    "files that name a setting that agents take: spare_worker": 3,
    "files that name a sampling parameter: min_p": 4,
    "files that name a sampling parameter that is a penalty: presence_penalty": 4,
    "files that name a link: allreduce": 1,
    "files that name a link over a backend: nccl": 3,
    "files that name a strategy: balanced": 2,
    "files that name a rank's status: peak memory": 5,
    "files that name a dialect: Ollama": 2,
    "files that name a metric: preemptions": 5,
}
"""Limit of each figure."""
CROSSED = {"head": 45, "worker": 33}
"""Number of files that a chat may cross."""
SMALL_FILES = {
    "cli/main.py": "the console script, which loads nothing before it can be interrupted",
    "rpc/sampling.py": "the one codec of sampling parameters",
}
"""Files with under 40 lines, by path within the package, each with the reason."""


@pytest.fixture(scope="module")
def measured() -> tuple[Figures, Lists]:
    return measure(ROOT)


@pytest.fixture(scope="module")
def trace(tiny_model: Path) -> ChatTrace:
    return trace_chat(tiny_model, ROOT)


def test_every_recipe_has_a_limit() -> None:
    assert {f"files that name {recipe}" for recipe in RECIPES} <= LIMITS.keys()


@pytest.mark.parametrize("figure", LIMITS)
def test_the_sources_keep_within_the_limit(measured: tuple[Figures, Lists], figure: str) -> None:
    figures, lists = measured
    allowed = LIMITS[figure]
    assert figures[figure] <= allowed, "\n".join(lists.get(figure, ()))


def test_files_under_40_lines_are_those_with_a_reason(measured: tuple[Figures, Lists]) -> None:
    _, lists = measured
    assert {line.split()[-1] for line in lists["files under 40 lines"]} == SMALL_FILES.keys()


@pytest.mark.parametrize("process", CROSSED)
def test_a_chat_crosses_few_files(trace: ChatTrace, process: str) -> None:
    files = {"head": trace.head, "worker": trace.worker}[process]
    assert len(files) <= CROSSED[process], "\n".join(files)
