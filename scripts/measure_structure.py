"""Measure how the sources are cut into files: their number and size, import cycles, docstrings, and what a change crosses.

Python files under `src/mlx_ring` count, without generated ones (`*_pb2*.py`). Where a figure can be defined in several ways:

- Code lines hold a token other than a comment, and are no docstring of a module, class or function.
- Sizes of files are all their lines. `__init__.py`, `__main__.py` and files that a command starts directly count as entry
  points; sizes of the other files are also given on their own.
- A single importer counts all imports of a module, those within functions too. Both files are in one folder, and neither
  is its `__init__.py`.
- Cycles are groups of modules that import each other when they are loaded. Those that close only through an import within a
  function, or under `if TYPE_CHECKING`, are counted separately.
- Docstring openers are counted in docstrings of modules, classes and functions, and in the strings below values.
  A count that leaves out the latter is lower by a sixth for What and by a quarter for Whether.
- A function's length is that of its definition with its docstring and without its decorators.
- A recipe's files name a witness of it as a whole word; `RECIPES` says which. Sources of the page and the protos count too,
  without the page's generated types.
- The files that a chat crosses are found by a real trace: see `tests/chat_trace.py`. Of two workers, the one that crosses more counts.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Figures = dict[str, int | float]
Lists = dict[str, list[str]]
HERE = Path(__file__).resolve().parent.parent
OPENERS = ("What", "Whether", "Who", "Of")
MOST_LINES = 450
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = frozenset({
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
})  # fmt: skip
_SOURCES = frozenset({".py", ".proto", ".js", ".ts"})
_GENERATED_TYPES = "types.d.ts"

RECIPES: Mapping[str, tuple[str, ...]] = {
    "a setting: http_timeout_keep_alive": (r"\bhttp_timeout_keep_alive\b",),
    "a setting: step_deadline_s": (r"\bstep_deadline_s\b",),
    "a setting: max_queued_requests": (r"\bmax_queued_requests\b", r"\bmax_waiting\b"),
    "a setting that agents take: spare_worker": (r"\bspare_worker\b",),
    "a sampling parameter: min_p": (r"\bmin_p\b",),
    "a sampling parameter that is a penalty: presence_penalty": (r"\bpresence_penalty\b",),
    "a link: allreduce": (r"""["']allreduce["']""",),
    "a link over a backend: nccl": (r"""["']nccl["']""",),
    "a strategy: balanced": (r"""["']balanced["']""",),
    "a rank's status: peak memory": (r"\bpeak_memory_bytes\b", r"\bpeak_bytes\b"),
    "a dialect: Ollama": (r"\bOLLAMA\b",),
    "a metric: preemptions": (r"\bnum_preemptions\b",),
}
"""Recipes, each with patterns of which a file that belongs to it holds at least one."""


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    """Relative to the package's folder."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def definitions(self) -> list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
        """The module, and its classes and functions."""
        nodes: list[ast.AST] = [self.tree]
        for node in nodes:
            nodes += _statements_in(node)
        return [node for node in nodes if isinstance(node, (ast.Module, *_DEFINITIONS))]

    @cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        """Full name of the module."""
        parts = ("mlx_ring", *self.path.with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_entry(self) -> bool:
        """True for a file whose place is fixed: Python or a command looks for it there."""
        return self.path.stem in {"__init__", "__main__"} or "\nif __name__ == " in self.text

    @property
    def code_lines(self) -> int:
        lines = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.definitions:
            if ast.get_docstring(node) is not None:
                lines.difference_update(_lines_of(node.body[0]))
        return len(lines)

    @property
    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Line and text of each docstring, those below values included."""
        for node in self.definitions:
            yield from ((at.lineno, text) for at in node.body if (text := _text_of(at)))

    @property
    def function_lengths(self) -> Iterator[int]:
        for node in self.definitions:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield len(_lines_of(node))


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _text_of(node: ast.stmt) -> str:
    """Return the text of a statement that is only a string."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return node.value.value
    return ""


def read_sources(root: Path) -> list[Source]:
    """Read every Python file of a checkout's package that is written by hand."""
    package = root / "src" / "mlx_ring"
    paths = sorted(path for path in package.rglob("*.py") if "_pb2" not in path.name)
    return [Source(path.relative_to(package), path.read_text(encoding="utf-8")) for path in paths]


class Imports:
    """Which module imports which: when it is loaded, within a function, or for type checkers alone."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = {source.module: source for source in sources}
        self.loaded: dict[str, set[str]] = {}
        self.lazy: dict[str, set[str]] = {}
        self.typed: dict[str, set[str]] = {}
        for name, source in self._sources.items():
            for kind, modules in _imports(source.tree.body, "loaded"):
                found = {found for module in modules for found in self._find(module)} - {name}
                {"loaded": self.loaded, "lazy": self.lazy, "typed": self.typed}[kind].setdefault(
                    name, set()
                ).update(found)

    def _find(self, module: str) -> Iterator[str]:
        """Yield the module of ours that an imported name stands for, if any."""
        parent = module.rpartition(".")[0]
        yield from [name for name in (module, parent) if name in self._sources][:1]

    def cycles(self, *kinds: Mapping[str, set[str]]) -> list[list[str]]:
        """Return the groups of modules that import each other by imports of these kinds."""
        return _cycles(
            {name: set[str]().union(*(kind.get(name, ()) for kind in kinds)) for name in self._sources}
        )

    @property
    def single_importers(self) -> list[tuple[Path, Path]]:
        """Files with a single importer, which is in the same folder, each with that importer."""
        importers: dict[str, set[str]] = {}
        for kind in (self.loaded, self.lazy, self.typed):
            for importer, modules in kind.items():
                for module in modules:
                    importers.setdefault(module, set()).add(importer)
        pairs = [
            (self._sources[module].path, self._sources[next(iter(found))].path)
            for module, found in importers.items()
            if len(found) == 1
        ]
        return sorted(
            pair
            for pair in pairs
            if pair[0].parent == pair[1].parent and "__init__.py" not in {path.name for path in pair}
        )


def _imports(body: Sequence[ast.AST], kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the kind and the names of each import."""
    for node in body:
        match node:
            case ast.Import():
                yield kind, [f"{alias.name}.*" for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                yield kind, [f"{module}.{alias.name}" for alias in node.names]
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                yield from _imports(node.body, "typed")
                yield from _imports(node.orelse, kind)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _imports(node.body, "lazy")
            case _:
                yield from _imports(_statements_in(node), kind)


def _statements_in(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a statement that may hold others. Expressions hold none."""
    parts = (ast.stmt, ast.excepthandler, ast.match_case)
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, parts)]


def _cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected parts of more than one module."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(map(list, groups))


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found, open_ends = set[str](), [start]
    while open_ends:
        fresh = graph[open_ends.pop()] - found
        found |= fresh
        open_ends += fresh
    return found


def opening_words(sources: Iterable[Source]) -> list[tuple[str, str]]:
    """Return each place of a docstring that opens with one of `OPENERS`, and the word."""
    return [
        (f"{source.path}:{line}", word)
        for source in sources
        for line, text in source.docstrings
        if (word := re.split(r"\W", text.strip(), maxsplit=1)[0]) in OPENERS
    ]


def noqa_rules(sources: Iterable[Source]) -> Counter[str]:
    """Count the suppressions of each rule."""
    found = (re.findall(r"#\s*noqa:\s*([A-Z0-9, ]+)", source.text) for source in sources)
    return Counter(rule for lists in found for rules in lists for rule in re.findall(r"[A-Z]+\d+", rules))


def recipe_files(root: Path) -> dict[str, list[str]]:
    """Return the files that each recipe edits."""
    package = root / "src" / "mlx_ring"
    texts = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*"))
        if path.suffix in _SOURCES
        and "_pb2" not in path.name
        and path.name != _GENERATED_TYPES
        and "vendor" not in path.parts
    }
    return {
        recipe: [path for path, text in texts.items() if any(re.search(one, text) for one in patterns)]
        for recipe, patterns in RECIPES.items()
    }


def measure(root: Path) -> tuple[Figures, Lists]:
    """Return the figures that reading a checkout's sources gives, and for some of them what they count."""
    sources = read_sources(root)
    others = [source for source in sources if not source.is_entry]
    imports = Imports(sources)
    loaded = imports.cycles(imports.loaded)
    lists = {
        **_files_under(60, others),
        **_files_under(40, others),
        f"files over {MOST_LINES} lines": [_sized(one) for one in sources if one.lines > MOST_LINES],
        "files with a single importer, in their own folder": [
            f"{path} <- {importer}" for path, importer in imports.single_importers
        ],
        "import cycles at load": _joined(loaded),
        "further import cycles through functions": _further(loaded, imports.cycles(imports.loaded, imports.lazy)),
        "further import cycles under TYPE_CHECKING": _further(loaded, imports.cycles(imports.loaded, imports.typed)),
    }  # fmt: skip
    openings = opening_words(sources)
    for opener in OPENERS:
        lists[f"docstrings that open with {opener}"] = [place for place, word in openings if word == opener]
    lengths = sorted(length for source in sources for length in source.function_lengths)
    figures: Figures = {
        "files": len(sources),
        "files other than __init__.py": sum(source.path.name != "__init__.py" for source in sources),
        "median lines of a file": statistics.median(source.lines for source in sources),
        "files under 60 lines, entry points included": sum(source.lines < 60 for source in sources),
        **{name: len(found) for name, found in lists.items()},
        "functions": len(lengths),
        "median lines of a function": statistics.median(lengths),
        "95th percentile lines of a function": lengths[int(0.95 * len(lengths))],
    }
    rules = noqa_rules(sources)
    figures["noqa"] = rules.total()
    lists["noqa"] = [f"{count} {rule}" for rule, count in rules.most_common()]
    for recipe, files in recipe_files(root).items():
        lists[f"files that name {recipe}"] = files
        figures[f"files that name {recipe}"] = len(files)
    return figures, lists


def _files_under(lines: int, sources: Iterable[Source]) -> dict[str, list[str]]:
    small = sorted((source for source in sources if source.lines < lines), key=lambda source: source.lines)
    return {f"files under {lines} lines": [_sized(source) for source in small]}


def _sized(source: Source) -> str:
    return f"{source.lines:4} {source.path}"


def _joined(cycles: Iterable[Iterable[str]]) -> list[str]:
    return [" <-> ".join(cycle) for cycle in cycles]


def _further(loaded: Sequence[list[str]], cycles: Iterable[list[str]]) -> list[str]:
    return _joined(cycle for cycle in cycles if cycle not in loaded)


def _trace(root: Path) -> tuple[Figures, Lists]:
    """Return how many files a chat crosses, and which."""
    sys.path.insert(0, str(HERE))
    # MLX is loaded for this alone.
    from tests.chat_trace import trace_chat
    from tests.tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        trace = trace_chat(write_tiny_model(Path(folder) / "tiny"), root)
    lists = {
        "files that a chat crosses in the head": list(trace.head),
        "files that a chat crosses in a worker": list(trace.worker),
    }
    return {name: len(files) for name, files in lists.items()}, lists


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description="Measure how the sources are cut into files.")
    parser.add_argument("--root", type=Path, default=HERE, help="a checkout; this one otherwise")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="also print what each figure counts")
    parser.add_argument(
        "--no-trace", action="store_true", help="leave out the trace of a chat, which takes half a minute"
    )
    arguments = parser.parse_args()
    figures, lists = measure(arguments.root)
    figures["code lines"] = sum(source.code_lines for source in read_sources(arguments.root))
    if not arguments.no_trace:
        traced, files = _trace(arguments.root)
        figures |= traced
        lists |= files
    if arguments.json:
        print(json.dumps({"figures": figures, "lists": lists} if arguments.list else figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:58} {value:>8}")
        for line in lists.get(name, ()) if arguments.list else ():
            print(f"    {line}")


if __name__ == "__main__":
    main()
