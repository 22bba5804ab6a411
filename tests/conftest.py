"""Options and fixtures of the whole suite. tests/README.md lists the fixtures."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import settings
from tests import alone, hangs, order, process_marks
from tests.examples import fill_caches, register_profiles
from tests.once import once, use_folder
from tests.other_python import other_python
from tests.own_home import remove_own_home, use_own_home

from mlx_cpu_kernels.blas import install_fast_blas
from mlx_ring.core.environment import leave_out_pydantic_plugins, quieten_grpc, quieten_transformers
from mlx_ring.core.lean_imports import import_bare, import_tokenizers

collect_ignore = [] if other_python() else ["end_to_end/test_cluster_other_python.py"]
"""Files that this machine cannot run. The run's first lines name them."""
use_own_home()
gc.disable()
"""Collection makes objects that last as long as the run. A search among them finds nothing: see `pytest_collection_finish`."""
quieten_grpc()
install_fast_blas()
"""Matrix products of the tests and of mlx-lm need not wait for the reference BLAS."""
mx.disable_compile()
"""On a CPU MLX would have a compiler join operations, for a second each. In the workers that tests start, it does."""
register_profiles()
leave_out_pydantic_plugins()
quieten_transformers()
import_bare("mlx_lm")
import_tokenizers()
"""Every process of a run imports every test file. As in a head, the rest of these libraries is imported on use."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skipped test fails the run")
    parser.addoption(
        "--may-skip",
        action="append",
        default=[],
        metavar="TEXT",
        help="with --fail-on-skip: a test may be skipped whose reason has this text",
    )
    parser.addoption("--thorough", action="store_true", help="try more random cases")
    parser.addoption("--write-table", action="store_true", help="write the tables of conformance runs")


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (hangs, alone, order, process_marks):
        config.pluginmanager.register(plugin)
    if config.getoption("--thorough"):
        settings.load_profile("thorough")


def pytest_unconfigure() -> None:
    remove_own_home()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that only a thorough run has."""
    if config.getoption("--thorough"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what the collection has made out of every later garbage collection: each would take a third of a second.

    Its garbage stays, too: to collect it would take as long in each process of a run. Later collections are rare: random
    cases make many objects that last as long as their test, and would be searched a hundred times.
    """
    if session.config.getoption("collectonly"):
        fill_caches()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_report_header() -> list[str]:
    return [
        f"{name}: not run, because this machine has no second Python from 3.11 on" for name in collect_ignore
    ]


def _skipped(config: pytest.Config) -> int:
    """Return the number of tests that were skipped and may not be."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not isinstance(reporter, pytest.TerminalReporter):
        return 0
    allowed: list[str] = config.getoption("--may-skip") or []
    reasons = [str(report.longrepr) for report in reporter.stats.get("skipped", [])]
    return sum(not any(text in reason for text in allowed) for reason in reasons)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--fail-on-skip") and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _write_seconds(reporter: pytest.TerminalReporter, seconds: Mapping[str, float], count: int) -> None:
    """Write the files that took longest, with their fixtures."""
    reporter.section("seconds of test files")
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:count]:
        reporter.write_line(f"{seconds[name]:7.1f} {name}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds = order.seconds_by_file(
        report for reports in terminalreporter.stats.values() for report in reports
    )
    order.remember(config, seconds)
    if count := config.getoption("--durations"):
        _write_seconds(terminalreporter, seconds, count)
    if config.getoption("--fail-on-skip") and (count := _skipped(config)):
        terminalreporter.write_line(f"{count} skipped, which --fail-on-skip does not allow.", red=True)


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder that all processes of a run share, for `once`."""
    own = tmp_path_factory.getbasetemp()
    folder = own if worker_id == "master" else own.parent
    use_folder(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model with a tokenizer of bytes, as in tests/tiny_model.py; return its folder."""
    # Its imports take a while, and not every process needs them.
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def large_model(shared: Path) -> Path:
    """Write a model of 18 layers and 283 MB, as in tests/tiny_model.py; return its folder."""
    from tests.tiny_model import write_large_model

    once(shared / "large", lambda: str(write_large_model(shared / "large" / "model")))
    return shared / "large" / "model"
