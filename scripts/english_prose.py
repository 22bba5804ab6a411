"""Prose and names in files of each kind, as the check of English reads them.

Of Python, prose is docstrings, comments, strings that hold a space, and the reason behind `noqa`. Of other languages and
of data it is comments, of pages and their modules also text. Of documents it is everything.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose and where it begins."""

    line: int
    text: str
    is_docstring: bool = False
    has_sentences: bool = True
    """False if it may be code: a string with several lines or a semicolon, a test's string, a script of a page."""


def python_comments(source: str) -> Iterator[Text]:
    """Yield comments, those of consecutive lines together."""
    begin, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# fmt", "# pyright", "# type:")):
            continue
        if token.string.startswith("# noqa"):
            yield Text(token.start[0], token.string.partition(" - ")[2].partition("  # ")[0])
            continue
        if lines and token.start[0] == begin + len(lines):
            lines.append(token.string.lstrip("# "))
            continue
        if lines:
            yield Text(begin, "\n".join(lines))
        begin, lines = token.start[0], [token.string.lstrip("# ")]
    if lines:
        yield Text(begin, "\n".join(lines))


def python_strings(tree: ast.Module) -> Iterator[Text]:
    """Yield docstrings and the strings that hold a space; values within an f-string as `_`."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in values)
            case ast.Constant(value=str(text)) if id(node) not in inner:
                pass
            case _:
                continue
        if " " in text.strip():
            is_docstring = id(node) in docstrings
            has_sentences = is_docstring or not ("\n" in text or ";" in text)
            yield Text(node.lineno, text, is_docstring, has_sentences)


def python_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what a module names: classes, functions, parameters, fields, constants, locals and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case _:
                pass


def blank(found: re.Match[str]) -> str:
    """Return as many underscores, in the same lines."""
    return re.sub(r"[^\n]", "_", found[0])


def _whole(source: str) -> Iterator[Text]:
    yield Text(1, source)


def _html(source: str) -> Iterator[Text]:
    """Yield the text between tags."""
    yield Text(1, re.sub(r"<style.*?</style>|<script.*?</script>|<[^>]*>", _bar, source, flags=re.DOTALL))


def _bar(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "|", found[0])


def _lines_behind(mark: str) -> Callable[[str], Iterator[Text]]:
    """Return the reader of comments behind this pattern. Comments that fill consecutive lines are one piece."""
    alone, behind = re.compile(rf"\s*{mark} ?(.*)"), re.compile(rf"(?<!\S){mark} (.*)")

    def comments(source: str) -> Iterator[Text]:
        begin, lines = 0, list[str]()
        for number, line in enumerate(source.splitlines(), start=1):
            if (found := alone.fullmatch(line)) and not line.startswith("#!"):
                begin = begin if lines else number
                lines.append(found[1])
                continue
            if lines:
                yield Text(begin, "\n".join(lines))
                lines = []
            if found := behind.search(line):
                yield Text(number, found[1])
        if lines:
            yield Text(begin, "\n".join(lines))

    return comments


_slashed = _lines_behind("//+")


def _blocks(source: str) -> Iterator[Text]:
    """Yield comments between `/*` and `*/`."""
    for found in re.finditer(r"/\*+(.*?)\*/", source, re.DOTALL):
        text = re.sub(r"^ *\* ?", "", found[1], flags=re.MULTILINE)
        yield Text(1 + source.count("\n", 0, found.start()), text)


def _c(source: str) -> Iterator[Text]:
    yield from _slashed(source)
    yield from _blocks(source)


_JAVASCRIPT = re.compile(r"(?P<comment>//[^\n]*|/\*.*?\*/)|\"[^\"\n]*\"|'[^'\n]*'|`[^`]*`", re.DOTALL)


def _javascript(source: str) -> Iterator[Text]:
    """Yield comments and strings that hold a space; of a template all of it."""
    yield from _c(_JAVASCRIPT.sub(lambda found: found[0] if found["comment"] else blank(found), source))
    for found in _JAVASCRIPT.finditer(source):
        if not found["comment"] and " " in found[0]:
            yield Text(
                1 + source.count("\n", 0, found.start()),
                re.sub(r"\$\{[^}]*\}|`|<[^<>]*>", "|", found[0].strip("\"'`")),
                has_sentences=False,
            )


PROSE: Mapping[str, Callable[[str], Iterator[Text]]] = {
    ".md": _whole,
    ".html": _html,
    ".js": _javascript,
    ".mjs": _javascript,
    ".ts": _javascript,
    ".css": _blocks,
    ".proto": _slashed,
    **dict.fromkeys((".c", ".cpp", ".h"), _c),
    **dict.fromkeys(("", ".sh", ".mk", ".toml", ".yaml", ".yml"), _lines_behind("#+")),
}
"""Readers of the prose of each kind of file. Scripts and makefiles have no suffix."""


def _declared_in_javascript(source: str) -> Iterator[tuple[int, str]]:
    code = _JAVASCRIPT.sub(blank, source)
    for found in re.finditer(r"\b(?:const|let|var|function|class)\s+([A-Za-z_$][\w$]*)", code):
        yield 1 + code.count("\n", 0, found.start()), found[1]


def _named_in_c(source: str) -> Iterator[tuple[int, str]]:
    """Yield each name in the code at its first line."""
    code = _JAVASCRIPT.sub(blank, source)
    lines = dict[str, int]()
    for found in re.finditer(r"\b[A-Za-z]\w*", code):
        lines.setdefault(found[0], 1 + code.count("\n", 0, found.start()))
    yield from ((line, name) for name, line in lines.items())


NAMES: Mapping[str, Callable[[str], Iterator[tuple[int, str]]]] = {
    **dict.fromkeys((".js", ".mjs", ".ts"), _declared_in_javascript),
    **dict.fromkeys((".c", ".cpp", ".h"), _named_in_c),
}
