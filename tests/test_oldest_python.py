"""The code uses nothing that older releases of a supported Python run wrongly, or refuse only when it runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import mlx_ring

POSSESSIVE_GROUPS = (")*+", ")++", ")?+", "}+", "(?>")
"""Python before 3.11.5 matches them wrongly if their content can backtrack."""
NEW_ARGUMENTS = {"extractall": "filter", "extract": "filter"}
"""Functions with an argument that Python before 3.11.4 lacks."""
NAMES = re.compile(rf"\.(?:{'|'.join(NEW_ARGUMENTS)})\b")
BETWEEN_STRINGS = re.compile(r"""["']\s*\w{0,2}["']""")


def may_be_too_new(text: str) -> bool:
    """Return False for a file that surely has nothing to find. Most are such, and parsing all takes seconds."""
    joined = BETWEEN_STRINGS.sub("", text)
    return any(group in joined for group in POSSESSIVE_GROUPS) or bool(NAMES.search(text))


@cache
def sources() -> Sequence[tuple[Path, ast.Call]]:
    """Return the calls in the product's and the tests' files that may be too new."""
    package = Path(next(iter(mlx_ring.__path__)))
    paths = (path for folder in (package, Path(__file__).parent) for path in sorted(folder.rglob("*.py")))
    return [
        (path, node)
        for path in paths
        if path != Path(__file__) and not path.stem.endswith("_pb2")
        for text in [path.read_text(encoding="utf-8")]
        if may_be_too_new(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    ]


def patterns(node: ast.AST) -> Iterator[str]:
    """Yield the pattern texts of a call to `re`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=[first, *_]):
            yield from (
                part.value
                for part in ast.walk(first)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
        case _:
            pass


def is_too_new(node: ast.AST) -> bool:
    """Return True for a call with an argument that the oldest Python lacks."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), keywords=keywords):
            return NEW_ARGUMENTS.get(name, "") in {keyword.arg for keyword in keywords}
        case _:
            return False


@pytest.mark.slow
def test_no_pattern_has_a_possessive_group() -> None:
    found = [
        (str(path), pattern)
        for path, node in sources()
        for pattern in patterns(node)
        if any(group in pattern for group in POSSESSIVE_GROUPS)
    ]
    assert found == []


@pytest.mark.slow
def test_no_call_passes_an_argument_of_a_later_python() -> None:
    assert [(str(path), ast.unparse(node)) for path, node in sources() if is_too_new(node)] == []


@pytest.mark.parametrize("code", [r"re.compile(r'(?:a|b)*+c')", "re.match('(?>a)', text)"])
def test_a_possessive_group_is_found(code: str) -> None:
    texts = [text for node in ast.walk(ast.parse(code)) for text in patterns(node)]
    assert any(group in text for group in POSSESSIVE_GROUPS for text in texts)


def test_an_argument_of_a_later_python_is_found() -> None:
    tree = ast.parse("archive.extractall(folder, filter='data')")
    assert any(is_too_new(node) for node in ast.walk(tree))
