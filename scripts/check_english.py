"""Check the English of docs, docstrings, comments, help, messages, page texts and names.

It reports, by file and line:

- opener: a docstring that opens with What, Whether, Who or Of, or a function's docstring that opens with no verb
- word: a word or phrase of `BANNED` (`english_words.py`), with what to write in its place
- clause: a sentence that opens with a clause as its subject ("What waits is ...")
- long: a sentence of more than 25 words, or with two semicolons, in a docstring, a comment, a document or a message
- spelling: a word of `IN_IZE` that is spelled with -ise
- name: a class, function, parameter, field, constant, local or file named after a word of `BANNED_NAMES`
- log: a log line that begins with a small letter
- wide: a line of more than 120 characters in a Markdown document, outside tables and code

`english_prose.py` says which text counts. Text in backticks and code blocks is code, and the demo models' corpus is data.
Neither counts. codespell with a dictionary finds single words only.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from english_prose import NAMES, PROSE, Text, blank, python_comments, python_names, python_strings
from english_words import (
    ALLOWED,
    BANNED,
    BANNED_FILES,
    BANNED_NAMES,
    IN_IZE,
    NO_VERBS,
    OPENERS,
    VERBS_IN_ED,
    VERBS_IN_ING,
    VERBS_IN_S,
)

HERE = Path(__file__).resolve().parent.parent
PLACES = (
    "src/mlx_ring",
    "packages/mlx-cpu-kernels/src",
    "packages/mlx-cpu-kernels/README.md",
    "packages/mlx-cpu-kernels/CHANGELOG.md",
    "packages/mlx-cpu-kernels/hatch_build.py",
    "packages/mlx-cpu-kernels/pyproject.toml",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
    ".ci/run",
    "scripts",
    "bench",
)
TEST_PLACES = ("tests", "packages/mlx-cpu-kernels/tests")
OWN_FILES = frozenset(
    {
        "scripts/english_words.py",
        *(f"tests/scripts/test_{name}.py" for name in ("check_english", "english_prose")),
    }
)
"""They hold what must not be."""
CORPUS = "scripts/demo_models/"
"""Folder whose strings are what a model learns from."""

KINDS = ("opener", "word", "clause", "long", "spelling", "name", "log", "wide")
"""Kinds of findings that must not be."""
_LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
_NAMES_IN_LOWER_CASE = ("mlx", "gRPC", "uvicorn", "ssh", "libmlx")
_CLAUSE = re.compile(r"(?:^|(?<=[.!;:])\s+|\n\s*\n)(?:What|Whatever|Who|Whoever)\s[^.?!]*(?=[.!]|$)")
_CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|https?://\S+", re.DOTALL)
_BANNED = [
    (re.compile((r"\b" if words[0] != "," else "") + rf"(?:{words})".replace(" ", r"\s+") + r"\b", re.IGNORECASE), instead)
    for words, instead in BANNED.items()
]  # fmt: skip
_ALLOWED = [re.compile(pattern) for pattern in ALLOWED]
_ISE = re.compile(rf"\b\w*?(?:{'|'.join(IN_IZE)})is(?:e[drs]?|ers|ing|able|ations?)\b", re.IGNORECASE)
_WITHIN = r"(?:[^.!?|\n]|\.(?=\S)|\n(?!\s*(?:\n|[-*#|>@]|\d+\. {more})))+"
_SENTENCE = re.compile(_WITHIN.format(more=""))
_SENTENCE_OR_ENTRY = re.compile(_WITHIN.format(more=r"|[*\w.]+: "))
"""The same for docstrings, whose lines may be entries of a list of arguments or errors."""
_LISTED = re.compile(r",? (?:and|or) |, |; ")
_MOST_LISTED_WORDS = 6
"""Most words of an item, and least number of items, of a list that follows a colon."""
_LEAST_LISTED = 3
_COLUMNS = re.compile(r"^ *[|├│└].*$|^.*\S {2,}\S.*$", re.MULTILINE)
"""Lines of tables and listings. They hold no sentences."""
_WORD = re.compile(r"[\w'-]*[A-Za-z][\w'-]*")
MOST_WORDS = 25
MOST_CHARACTERS = 120
_PARTS_OF_NAME = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place to write otherwise."""

    path: str
    line: int
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.what}"


def check_text(path: str, piece: Text) -> Iterator[Finding]:
    """Find banned words and clauses in a piece of prose."""
    prose = _CODE.sub(blank, piece.text)
    for pattern in _ALLOWED:
        prose = pattern.sub(blank, prose)
    for pattern, instead in _BANNED:
        for found in pattern.finditer(prose):
            words = " ".join(found[0].split())
            yield Finding(path, _line(piece, found.start()), "word", f"“{words}” -> {instead}")
    for found in _CLAUSE.finditer(prose):
        # The opener of a docstring is reported as such.
        if (found.start() or not piece.is_docstring) and prose[found.end() : found.end() + 1] != "?":
            start = found.start() + len(found[0]) - len(found[0].lstrip())
            yield Finding(path, _line(piece, start), "clause", f"“{' '.join(found[0].split()[:6])} …”")
    for found in _ISE.finditer(prose):
        yield Finding(path, _line(piece, found.start()), "spelling", f"“{found[0]}” -> -ize")
    sentences = _SENTENCE_OR_ENTRY if piece.is_docstring else _SENTENCE
    for found in sentences.finditer(_COLUMNS.sub(blank, prose)) if piece.has_sentences else ():
        words = _count_words(found[0])
        if words > MOST_WORDS or found[0].count(";") > 1:
            start = found.start() + len(found[0]) - len(found[0].lstrip())
            what = f"{words} words: “{' '.join(found[0].split()[:6])} …”"
            yield Finding(path, _line(piece, start), "long", what)


def _count_words(sentence: str) -> int:
    """Return the number of words of a sentence, without a list of short items that follows a colon."""
    before, _, after = sentence.partition(": ")
    items = _LISTED.split(" ".join(after.split()))
    is_list = len(items) >= _LEAST_LISTED and all(
        len(_WORD.findall(item)) <= _MOST_LISTED_WORDS for item in items
    )
    return len(_WORD.findall(before if is_list else sentence))


def _line(piece: Text, position: int) -> int:
    return piece.line + piece.text.count("\n", 0, position)


def check_python(path: str, source: str) -> Iterator[Finding]:
    """Find all that is wrong in a Python file."""
    tree = ast.parse(source)
    for piece in (*python_comments(source), *python_strings(tree)):
        is_message = not (piece.is_docstring or path.startswith("tests/"))
        if piece.is_docstring or not path.startswith(CORPUS):
            yield from check_text(
                path, piece if is_message else replace(piece, has_sentences=piece.is_docstring)
            )
    yield from _check_openers(path, tree)
    yield from _check_logs(path, tree)
    for line, name in python_names(tree):
        yield from _check_name(path, line, name)


def _check_openers(path: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_property(node)
        for position, statement in enumerate(node.body):
            text = _string_of(statement)
            first = re.split(r"[\s,.:;]", text.strip(), maxsplit=1)[0]
            if first in OPENERS:
                yield Finding(path, statement.lineno, "opener", f"“{first}”")
            elif position == 0 and is_function and text and not _opens_with_verb(text):
                yield Finding(
                    path,
                    statement.lineno,
                    "opener",
                    f"“{' '.join(text.split()[:2])}” is no verb in the imperative",
                )


def _check_logs(path: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="log" | "_log"), attr=level),
                args=[ast.Constant(value=str(text)), *_],
            ) if level in _LEVELS and text[:1].islower() and not text.startswith(_NAMES_IN_LOWER_CASE):
                yield Finding(
                    path, node.lineno, "log", f"“{' '.join(text.split()[:4])} …” begins with a small letter"
                )
            case _:
                pass


def _string_of(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
        case _:
            return ""


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _opens_with_verb(text: str) -> bool:
    """Return False for what is certainly no verb in the imperative: a particle, a plural, "Number of"."""
    word, *others = re.split(r"[\s,.:;]", text.strip(), maxsplit=2)
    if word in NO_VERBS or not word[:1].isupper() or (others and others[0] == "of"):
        return False
    ends = {"s": VERBS_IN_S, "ed": VERBS_IN_ED, "ing": VERBS_IN_ING}
    return word.endswith("ss") or all(not word.endswith(end) or word in verbs for end, verbs in ends.items())


def _check_name(path: str, line: int, name: str) -> Iterator[Finding]:
    if any(pattern.fullmatch(name) for pattern in _ALLOWED):
        return
    parts = [part.lower() for part in _PARTS_OF_NAME.findall(name)]
    whole = f"_{'_'.join(parts)}_"
    for banned, instead in BANNED_NAMES.items():
        if re.search(f"_{banned}(?:e?s)?_", whole):
            yield Finding(path, line, "name", f"{name} -> {instead}")
    if any(_ISE.fullmatch(part) for part in parts):
        yield Finding(path, line, "spelling", f"{name} -> -ize")


def check_other(path: str, source: str) -> Iterator[Finding]:
    """Find what is wrong in a file of another kind: a page, a proto, Markdown, C++, a script."""
    suffix = Path(path).suffix
    for piece in PROSE[suffix](source):
        yield from check_text(path, piece)
    for line, name in NAMES[suffix](source) if suffix in NAMES else ():
        yield from _check_name(path, line, name)
    if suffix == ".md":
        yield from _check_width(path, source)


def _check_width(path: str, source: str) -> Iterator[Finding]:
    prose = re.sub(r"^```.*?^```", _blank_lines, source, flags=re.DOTALL | re.MULTILINE)
    wide = [
        number
        for number, line in enumerate(prose.splitlines(), start=1)
        # A table's row and a single long address cannot be wrapped.
        if len(line) > MOST_CHARACTERS and not line.lstrip().startswith("|") and " " in line.strip("-* ")
    ]
    for number in wide:
        yield Finding(path, number, "wide", f"wrap it at {MOST_CHARACTERS} characters")


def _blank_lines(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def check_file(path: Path, root: Path) -> Iterator[Finding]:
    """Check one file, as its kind needs."""
    name = path.relative_to(root).as_posix()
    source = path.read_text(encoding="utf-8")
    yield from _check_name(name, 1, path.stem)
    for part in (path.parent.name, path.stem):
        if part in BANNED_FILES:
            yield Finding(name, 1, "name", f"{part} -> {BANNED_FILES[part]}")
    yield from check_python(name, source) if path.suffix == ".py" else check_other(name, source)


def files_of(places: Iterable[str], root: Path) -> list[Path]:
    """Return the files to check beneath these places, none of which is generated or another project's."""
    found = [
        path
        for place in places
        for path in ([root / place] if (root / place).is_file() else (root / place).rglob("*"))
    ]
    return sorted(
        path
        for path in found
        if path.is_file()
        and (path.suffix == ".py" or (path.suffix in PROSE and (path.suffix or _is_script(path))))
        and "_pb2" not in path.name
        and not {"vendor", "__pycache__"} & set(path.parts)
        and path.relative_to(root).as_posix() not in OWN_FILES
    )


def _is_script(path: Path) -> bool:
    """Return True for a makefile, and for a shell script."""
    with path.open("rb") as stream:
        return path.name == "Makefile" or re.match(rb"#!.*sh\b", stream.readline()) is not None


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(
        description="Check the English of docs, docstrings, messages, pages and names."
    )
    parser.add_argument("places", nargs="*", help="files and folders; otherwise all but the tests")
    parser.add_argument("--tests", action="store_true", help="check the tests too")
    parser.add_argument("--kind", choices=KINDS, help="findings of one kind only")
    parser.add_argument("--summary", action="store_true", help="print the number of findings of each file")
    arguments = parser.parse_args()
    places = arguments.places or [*PLACES, *(TEST_PLACES if arguments.tests else ())]
    findings = [
        finding
        for path in files_of(
            (Path(place).absolute().as_posix() if arguments.places else place for place in places), HERE
        )
        for finding in sorted(check_file(path, HERE))
        if finding.kind in (KINDS if arguments.kind is None else (arguments.kind,))
    ]
    if arguments.summary:
        for path, count in sorted(
            Counter(finding.path for finding in findings).items(), key=lambda item: -item[1]
        ):
            print(f"{count:5} {path}")
    else:
        print(*findings, sep="\n")
    kinds = Counter(finding.kind for finding in findings)
    if findings:
        sys.exit(
            "The English of these places needs work: "
            + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        )


if __name__ == "__main__":
    main()
