"""Check the English of docs, docstrings, comments, help, messages, page texts and names.

It reports, by file and line:

- opener: a docstring that opens with What, Whether, Who or Of, or a function's docstring that opens with no verb
- word: a word or phrase of `BANNED`, with what to write in its place
- clause: a sentence that opens with a clause as its subject ("What waits is ...")
- long: a sentence of more than 25 words, or with two semicolons, in a docstring, a comment, a document or a message
- spelling: a word of `IN_IZE` that is spelled with -ise
- name: a class, function, parameter, field, constant, local or file named after a word of `BANNED_NAMES`
- log: a log line that begins with a small letter
- wide: a line of more than 120 characters in a Markdown document, outside tables and code

Text in backticks and code blocks is code and does not count. A string counts when it holds a space; the demo models' corpus
does not count. In other languages, comments and what the reason behind `noqa` says count. `ALLOWED` lists what is right in its
place, with the reason. codespell with a dictionary finds single words only.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

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
OWN_FILES = frozenset({"scripts/check_english.py", "tests/scripts/test_check_english.py"})
"""They hold what must not be."""
CORPUS = "scripts/demo_models/"
"""Folder whose strings are what a model learns from."""

BANNED: Mapping[str, str] = {
    r"told": "reported, set, given",
    r"heed(s|ed|ing)?": "record, follow, observe",
    r"hear(s|d|ing)?": "receive, record",
    r"gone": "removed, ended, lost",
    r"beg[aiu]n(s|ning)? alike": "share a prefix",
    r"(make|makes|making|made) way": "be evicted, be unloaded, free memory",
    r"(give|gives|giving|gave|given) way": "yield, be shed, be preempted",
    r"(go|goes|going|went) on": "continue",
    r"(put|puts|putting) back": "preempt, restore, return",
    r"(take|takes|taking|took|taken) back": "roll back, undo",
    r"thoughts?": "reasoning",
    r"wish(es|ed|ing)?": "request",
    r"tenants?": "KV reservations",
    r"territor(y|ies)": "candidate nodes",
    r"burden(s|ed)?": "load",
    r"trouble(s|d)?": "error, problem",
    r"news": "update",
    r"(in|by|of) ([\w-]+'?s?|its|their|our|your|other|whose|these|those|own|plain) (own )?words": "API, format, terms",
    r"thrice|whence|whither|hitherto|thereof|albeit|lest": "a plain word",
    r"youngest|eldest": "newest, oldest",
    r"park(s|ed|ing)?": "retain",
    r", for (it|they|there|nobody|nothing|no one|what|who|those|these|this|that) ": ", because",
    r"nobody is (asked|told)": "no client, no process, nothing",
    r"(is|are|was|were|be) asked for (the )?longest": "least recently used",
}  # fmt: skip
"""Patterns of words and phrases, each with what to write. A space stands for any white space."""

IN_IZE = (
    *("anonym", "author", "canonical", "capital", "categor", "central", "character", "custom", "digit", "emphas", "equal"),
    *("familiar", "final", "general", "harmon", "initial", "item", "local", "material", "maxim", "memor", "minim", "modern"),
    *("neutral", "normal", "optim", "organ", "parallel", "penal", "popular", "priorit", "quant", "random", "rational", "real"),
    *("recogn", "sanit", "serial", "special", "stabil", "standard", "summar", "symbol", "synchron", "token", "util", "vector"),
    *("virtual", "visual"),
)  # fmt: skip
"""Stems of words that are spelled with -ize here, as in "normalize" and "utilization"."""

ALLOWED: Mapping[str, str] = {
    r"410 Gone": "HTTP's name of the status",
    r"settings_customise_sources": "pydantic's name",
}
"""Patterns of text in which nothing is banned, each with the reason."""

BANNED_NAMES: Mapping[str, str] = {
    "aimed": "target",
    "told": "documented, reported",
    "untold": "needs, lacks",
    "heed": "record, on",
    "hear": "on, receive",
    "heard": "received",
    "tell": "record, set, report",
    "tells": "reports",
    "telling": "messages",
    "wish": "request",
    "seat": "rank placement",
    "arrangement": "placement",
    "territory": "candidate nodes",
    "territorie": "candidate nodes",
    "tenant": "KV reservation",
    "burden": "load",
    "trouble": "error info",
    "news": "update",
    "thought": "reasoning",
    "gone": "lost, ended",
    "park": "retain",
    "parked": "retained",
    "put_back": "preempt",
    "take_back": "rollback",
    "handover": "token feedback",
}
"""Words of names in lower case, each with what to write. Their plurals are banned too."""

BANNED_FILES: Mapping[str, str] = {
    "asking": "request",
    "asked": "request",
    "fewest_tokens": "token_bounds",
    "flights": "in_flight",
    "front": "server",
    "giving_way": "load shedding",
    "handover": "token_feedback",
    "here": "single_node",
    "kept_lines": "log_buffer",
    "kv_plan": "kv_manager",
    "looks": "snapshot",
    "pace": "rates",
    "pacing": "chunk_size",
    "staying": "keep_alive",
    "wanted": "content_negotiation",
}
"""Names of files and folders, each with what to write."""

KINDS = ("opener", "word", "clause", "long", "spelling", "name", "log", "wide")
"""Kinds of findings that must not be."""
OPENERS = frozenset({"What", "Whether", "Who", "Of"})
NO_VERBS = frozenset({
    *("A", "An", "The", "One", "Two", "Some", "Any", "All", "Every", "Each", "Both", "No", "None", "Nothing", "Nobody"),
    *("This", "That", "These", "Those", "It", "Its", "Their", "They", "Our", "We", "There", "Here", "Such", "Other"),
    *("Where", "Which", "How", "When", "Why", "Whose", "While", "If", "Unless", "Until", "Once", "Because"),
    *("As", "At", "By", "For", "From", "In", "Into", "On", "Out", "To", "With", "Within", "Without", "Up", "Under", "Over"),
    *("After", "Before", "Between", "Beside", "Behind", "Among", "Against", "During", "Since", "Than", "Then", "So"),
    *("And", "Or", "But", "Not", "Only", "Also", "Like", "Per", "About", "Enough", "Much", "Many", "More", "Most", "Less"),
    *("Is", "Are", "Has", "Does", "Can", "May", "Must", "Same", "True", "New", "Fewer", "Standard", "Special"),
})  # fmt: skip
_VERBS_IN_S = frozenset({"Bias", "Canvas", "Focus"})
_VERBS_IN_ED = frozenset({"Feed", "Embed", "Proceed", "Need", "Seed", "Shed", "Speed", "Spread"})
_VERBS_IN_ING = frozenset({"Bring", "Ping", "Ring", "String"})
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
"""Most words of an item, and least number of items, for what follows a colon to be a list."""
_LEAST_LISTED = 3
_COLUMNS = re.compile(r"^ *[|├│└].*$|^.*\S {2,}\S.*$", re.MULTILINE)
"""Lines of tables and listings. They hold no sentences."""
_WORD = re.compile(r"[\w'-]*[A-Za-z][\w'-]*")
MOST_WORDS = 25
MOST_CHARACTERS = 120
_PARTS_OF_NAME = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose and where it begins."""

    line: int
    text: str
    is_docstring: bool = False
    has_sentences: bool = True
    """False if it may be code: a string with several lines or a semicolon, a test's string, a script of a page."""


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
    prose = _CODE.sub(_blank, piece.text)
    for pattern in _ALLOWED:
        prose = pattern.sub(_blank, prose)
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
    for found in sentences.finditer(_COLUMNS.sub(_blank, prose)) if piece.has_sentences else ():
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


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "_", found[0])


def _line(piece: Text, position: int) -> int:
    return piece.line + piece.text.count("\n", 0, position)


def check_python(path: str, source: str) -> Iterator[Finding]:
    """Find all that is wrong in a Python file."""
    tree = ast.parse(source)
    for piece in (*_comments(source), *_strings(tree)):
        is_message = not (piece.is_docstring or path.startswith("tests/"))
        if piece.is_docstring or not path.startswith(CORPUS):
            yield from check_text(
                path, piece if is_message else replace(piece, has_sentences=piece.is_docstring)
            )
    yield from _check_openers(path, tree)
    yield from _check_logs(path, tree)
    for line, name in _names(tree):
        yield from _check_name(path, line, name)


def _comments(source: str) -> Iterator[Text]:
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


def _strings(tree: ast.Module) -> Iterator[Text]:
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
    ends = {"s": _VERBS_IN_S, "ed": _VERBS_IN_ED, "ing": _VERBS_IN_ING}
    return word.endswith("ss") or all(not word.endswith(end) or word in verbs for end, verbs in ends.items())


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
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
    for piece in _PROSE[suffix](source):
        yield from check_text(path, piece)
    for line, name in _DECLARED[suffix](source) if suffix in _DECLARED else ():
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
    yield from _c(_JAVASCRIPT.sub(lambda found: found[0] if found["comment"] else _blank(found), source))
    for found in _JAVASCRIPT.finditer(source):
        if not found["comment"] and " " in found[0]:
            yield Text(
                1 + source.count("\n", 0, found.start()),
                re.sub(r"\$\{[^}]*\}|`|<[^<>]*>", "|", found[0].strip("\"'`")),
                has_sentences=False,
            )


_PROSE: Mapping[str, Callable[[str], Iterator[Text]]] = {
    ".md": _whole,
    ".html": _html,
    ".js": _javascript,
    ".mjs": _javascript,
    ".ts": _javascript,
    ".css": _blocks,
    ".proto": _slashed,
    **dict.fromkeys((".c", ".cpp", ".h"), _c),
    **dict.fromkeys(("", ".sh", ".mk", ".toml"), _lines_behind("#+")),
}
"""Readers of the prose of each kind of file. Scripts and makefiles have no suffix."""


def _declared_in_javascript(source: str) -> Iterator[tuple[int, str]]:
    code = _JAVASCRIPT.sub(_blank, source)
    for found in re.finditer(r"\b(?:const|let|var|function|class)\s+([A-Za-z_$][\w$]*)", code):
        yield 1 + code.count("\n", 0, found.start()), found[1]


def _named_in_c(source: str) -> Iterator[tuple[int, str]]:
    """Yield each name in the code at its first line."""
    code = _JAVASCRIPT.sub(_blank, source)
    lines = dict[str, int]()
    for found in re.finditer(r"\b[A-Za-z]\w*", code):
        lines.setdefault(found[0], 1 + code.count("\n", 0, found.start()))
    yield from ((line, name) for name, line in lines.items())


_DECLARED: Mapping[str, Callable[[str], Iterator[tuple[int, str]]]] = {
    **dict.fromkeys((".js", ".mjs", ".ts"), _declared_in_javascript),
    **dict.fromkeys((".c", ".cpp", ".h"), _named_in_c),
}


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
        and (path.suffix == ".py" or (path.suffix in _PROSE and (path.suffix or _is_script(path))))
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
