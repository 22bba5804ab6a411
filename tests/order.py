"""Order the files of a run so that several processes share it well: `--dist loadfile` hands them out in this order.

Files come by the seconds that they took last time, longest first, so that no long file is left for the end. A file
that was never measured has the seconds of a machine with two cores, or a guess from its tests that start processes.
Files of tests that run alone come last.
Other tests have found by then what they compare with, and only short ones are left to wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.alone import is_alone

_CACHED = "mlx_ring/seconds-of-files"
_INPUT = "seconds_of_files"
_END_TO_END = Path(__file__).with_name("end_to_end")
_GUESSED_S, _GUESSED_WITH_PROCESSES_S, _GUESSED_END_TO_END_S = 0.1, 2.0, 10.0
"""Guesses for a test that was never measured."""
_GUESSED_SETUP_S = 40.0
"""Guess for what a file in `end_to_end` sets up for its tests."""
_ON_TWO_CORES_S = {
    "end_to_end/test_cluster_ssh.py": 390.0,
    "end_to_end/test_real_model.py": 290.0,
    "end_to_end/test_shared_lan.py": 240.0,
    "end_to_end/test_cluster.py": 150.0,
    "end_to_end/test_lan_limits.py": 120.0,
    "end_to_end/test_equality_of_ranks.py": 110.0,
    "end_to_end/test_scheduling_caches.py": 110.0,
    "end_to_end/test_cluster_other_python.py": 105.0,
    "end_to_end/test_models_and_replicas.py": 100.0,
    "head/test_head.py": 100.0,
    "worker/test_weights.py": 85.0,
    "end_to_end/test_lan_transfer.py": 85.0,
    "cli/test_main.py": 80.0,
    "worker/collective/test_link_ends.py": 75.0,
    "worker/test_gguf_weights.py": 75.0,
    "end_to_end/test_page.py": 65.0,
    "end_to_end/test_hung_groups.py": 60.0,
    "end_to_end/test_mpi.py": 60.0,
    "worker/test_sparse_folders.py": 55.0,
    "worker/tensor/test_split.py": 55.0,
    "worker/test_lookahead.py": 55.0,
    "faults/test_recoveries.py": 50.0,
    "end_to_end/test_collective_failures.py": 50.0,
    "clients/test_clients.py": 50.0,
}
"""Seconds of files that took longer than guessed, while several processes shared two cores."""


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


def seconds_by_file(reports: Iterable[object]) -> dict[str, float]:
    """Add up the seconds of tests and their fixtures, by file."""
    seconds = defaultdict[str, float](float)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[file_of(report.nodeid)] += report.duration
    return dict(seconds)


def _cached(config: pytest.Config) -> dict[str, float]:
    """Return the seconds of earlier runs. Worker processes get them from the main one, so that all sort alike."""
    given: dict[str, Any] | None = getattr(config, "workerinput", None)
    if given is not None:
        return given[_INPUT]
    cache: Any = getattr(config, "cache", None)
    return cache.get(_CACHED, {}) if cache else {}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the seconds of earlier runs to a process of this one."""
    node.workerinput[_INPUT] = _cached(node.config)


def remember(config: pytest.Config, seconds: Mapping[str, float]) -> None:
    """Keep the seconds for the next run. A run of only some of a file's tests does not lower them."""
    before = _cached(config)
    cache: Any = getattr(config, "cache", None)
    if cache:
        longer = {file: took for file, took in seconds.items() if took > 0.7 * before.get(file, 0.0)}
        cache.set(_CACHED, before | longer)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process of a run begin with other files, and find those compiled with which others have begun.

    In a fresh clone, each of them would otherwise compile all files, at the same time. The items are sorted afterwards.
    """
    report = yield
    given: dict[str, Any] | None = getattr(collector.config, "workerinput", None)
    if given is not None and isinstance(collector, pytest.Session | pytest.Directory):
        number, count = int(given["workerid"].removeprefix("gw")), given["workercount"]
        first = len(report.result) * number // count
        report.result = [*report.result[first:], *report.result[:first]]
    return report


def _guess_s(item: pytest.Item) -> float:
    if item.get_closest_marker("processes") is None:
        return _GUESSED_S
    return _GUESSED_END_TO_END_S if item.path.is_relative_to(_END_TO_END) else _GUESSED_WITH_PROCESSES_S


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files; in its file a test that runs alone comes last."""
    guessed, alone = defaultdict[str, float](float), defaultdict[str, bool](lambda: True)
    # Reads each item's marks and name once: this runs in each process of a run.
    placed = [(file_of(item.nodeid), is_alone(item), item) for item in items]
    for file, item_alone, item in placed:
        if file not in guessed and item.path.is_relative_to(_END_TO_END):
            guessed[file] = _GUESSED_SETUP_S
        guessed[file] += _guess_s(item)
        alone[file] &= item_alone
    known = {f"tests/{file}": seconds for file, seconds in _ON_TWO_CORES_S.items()}
    seconds = guessed | known | _cached(config)

    def place(each: tuple[str, bool, pytest.Item]) -> tuple[bool, float, str, bool]:
        file, item_alone, _ = each
        return alone[file], -seconds[file], file, item_alone

    items[:] = [item for *_, item in sorted(placed, key=place)]
