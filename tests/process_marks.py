"""Give tests that start processes the mark `processes`, and fail any other test that starts one.

The mark is derived from code: a test and its fixtures, and the test functions that they name in turn. A function or
class of the product counts if its own module starts the process. A test that starts one deeper in the product carries
the mark itself.
"""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import pytest

_STARTERS = {
    ("subprocess", "Popen"),
    ("subprocess", "run"),
    ("subprocess", "check_output"),
    ("asyncio.subprocess", "create_subprocess_exec"),
    ("multiprocessing.context", "DefaultContext.get_context"),
    ("playwright.sync_api", "sync_playwright"),
}
"""Modules and names of functions that start a process."""
_HARMLESS = ("ldconfig", "gcc", "cc", "ld", "uname", "fc-list", "git")
"""Programs with which libraries inspect the machine."""
_found: dict[object, bool] = {}
"""True for each function or class, with the module that names it, that starts processes."""
_started: list[str] = []
"""Commands that the current test has started."""


def _recorded(start: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a function that records what it starts.

    Python's audit hooks would see each start, too, but they cost a call for every `id` and every opened file.

    Args:
        start: the function.
        place: place of the command among its arguments.
    """

    @wraps(start)
    def recorded(*arguments: Any, **options: Any) -> Any:
        command: Any = arguments[place] if len(arguments) > place else options.get("args", start.__name__)
        words: list[Any] = [*command] if isinstance(command, list | tuple) else [command]
        if words and Path(os.fsdecode(words[0])).name not in _HARMLESS:
            _started.append(" ".join(map(os.fsdecode, words)))
        return start(*arguments, **options)

    return recorded


def _record_starts() -> None:
    """Record each process that this one starts from now on."""
    subprocess.Popen.__init__ = _recorded(subprocess.Popen.__init__, 1)
    for name in ("fork", "forkpty", "system", "posix_spawn", "posix_spawnp"):
        setattr(os, name, _recorded(getattr(os, name), 0))


_record_starts()


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and the functions inside it read."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _named(function: FunctionType) -> Iterator[object]:
    """Yield the globals that a function names, and attributes of those that are modules."""
    names = _names(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType):
            yield from (vars(value)[attribute] for attribute in names & vars(value).keys())


def _may_follow(value: object, module: str | None) -> bool:
    """Return true if names in `value` are followed: everywhere in the tests, within one module in the product."""
    own = getattr(value, "__module__", None) or ""
    return own.startswith("tests.") or (own.startswith("mlx_ring.") and module in {None, own})


def _starts(value: object, module: str | None = None) -> bool:
    """Return true if a function or class starts processes; `module` is the product's module that names it."""
    if not isinstance(value, FunctionType | type):
        unwrapped = inspect.unwrap(cast("Any", value))
        return _is_starter(value) or (isinstance(unwrapped, FunctionType) and _starts(unwrapped, module))
    if (value, module) not in _found:
        _found[value, module] = False  # ends a recursion
        _found[value, module] = _is_starter(value) or _names_starter(value, module)
    return _found[value, module]


def _is_starter(value: object) -> bool:
    return (getattr(value, "__module__", None), getattr(value, "__qualname__", None)) in _STARTERS


def _names_starter(named: FunctionType | type, module: str | None) -> bool:
    """Return true if a function or class may be followed, and something in it starts processes."""
    value: object = named if isinstance(named, type) else inspect.unwrap(named)
    if not _may_follow(value, module):
        return False
    if isinstance(value, type):
        # A look at pydantic's validators would build them.
        members = [each for name, each in vars(value).items() if not name.startswith("__pydantic_")]
        return any(_starts(member, module) for member in members)
    if not isinstance(value, FunctionType):
        return False
    inside = None if value.__module__.startswith("tests.") else value.__module__
    return any(_starts(each, inside) for each in _named(value))


def _starts_processes(function: object, fixtures: Mapping[str, Sequence[pytest.FixtureDef[Any]]]) -> bool:
    """Return true if a test's function or one of its fixtures starts a process."""
    functions = [fixture.func for fixtures_of_name in fixtures.values() for fixture in fixtures_of_name]
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", None)
    return any(map(_starts, [function, inner, *functions]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, before `-m` chooses among them."""
    marked: dict[tuple[object, int], bool] = {}
    """All cases of a test have the same function and fixtures."""
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        function: object = cast("Any", item).function
        fixtures = cast("Any", item)._fixtureinfo.name2fixturedefs
        case = function, id(fixtures)
        if case not in marked:
            marked[case] = _starts_processes(function, fixtures)
        if marked[case]:
            item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a test that has started a process without the mark, itself or in its fixtures."""
    result = yield
    if _started and pyfuncitem.get_closest_marker("processes") is None:
        pytest.fail(
            f"This starts `{_started[0]}`: mark the test or its file with `processes`.", pytrace=False
        )
    return result


def pytest_runtest_logstart() -> None:
    """Forget the commands of the previous test."""
    _started.clear()
