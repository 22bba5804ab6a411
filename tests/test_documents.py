"""Documents name commands, flags, files and sections that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from mlx_ring.cli.app import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "bench/*.md", "tests/*.md", "packages/*/*.md")
    for path in ROOT.glob(pattern)
)
FOLDERS = ("src", "tests", "packages", "scripts", "bench", "docs")
"""Folders in which named files are."""
FLAGS_OF_OTHERS = {
    "Claude Code": {"--system-prompt", "--tools"},
    "bench/": {"--cores"},
    "docker": {"--add-host"},
    "scripts/": {"--cross-validate"},
    "pytest": {"--fail-on-skip", "--hypothesis-profile", "--may-skip", "--thorough"},
}
"""Flags of programs other than ours that documents name without the program."""
FILES_OF_OTHERS = {"extra-openai-models.yaml", "librechat.yaml"}
"""Files of other programs."""
_CODE = re.compile(r"`([^`\n]+)`")
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_FILE = re.compile(r"[\w./*-]+\.(?:py|proto|js|css|cpp|h|yaml|tsv|md)")


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def code_in(document: str) -> Iterator[str]:
    """Yield each line of code blocks, and each piece of code within text."""
    text = text_of(document)
    for block in _BLOCK.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from _CODE.findall(_BLOCK.sub("", text))


def sections_of(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", document.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


@cache
def files() -> Sequence[str]:
    """Return the paths of all files of the repository that documents may name, each after a slash."""
    found = [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    return [f"/{path.relative_to(ROOT)}" for path in found]


@cache
def commands() -> Mapping[str, frozenset[str]]:
    """Return the flags of each command, by its name after `mlx-ring`."""
    found: dict[str, frozenset[str]] = {}

    def add(command: Any, words: str) -> None:
        found[words] = frozenset(
            ["--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))]
        )
        if hasattr(command, "list_commands"):
            context = typer.Context(command)
            for name in command.list_commands(context):
                add(command.get_command(context, name), f"{words} {name}".strip())

    add(get_command(app), "")
    return found


def unknown_flags(call: str) -> list[str]:
    """Return the flags that a call of `mlx-ring` has and its command lacks. After two dashes, another command follows."""
    unknown: list[str] = []
    for part in call.partition("#")[0].split(" -- "):
        words = part.split()
        command = next((name for n in (2, 1) if (name := " ".join(words[:n])) in commands()), "")
        unknown += [f"{command} {flag}" for flag in _FLAG.findall(part) if flag not in commands()[command]]
    return unknown


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_sections(document: str) -> None:
    missing: list[str] = []
    for link in _LINK.findall(_BLOCK.sub("", text_of(document)).replace("\n", " ")):
        place, _, section = link.partition("#")
        if "://" in place:
            continue
        target = (ROOT / document).parent / place if place else ROOT / document
        if not target.exists() or (section and section not in sections_of(target)):
            missing.append(link)
    assert missing == []


def calls_in(document: str) -> Iterator[str]:
    """Yield each call of `mlx-ring` with a command, without `mlx-ring`."""
    for code in code_in(document):
        if "install" not in code.partition("mlx-ring")[0]:
            yield from re.findall(r"(?:^|[ /])mlx-ring ([a-z][^|&;>]*)", code)


def is_command(call: str) -> bool:
    """Report whether the first words of a call are a command, which a group alone may be too. `demo` is short for `serve demo`."""
    first, *rest = call.split()
    is_group = any(name.startswith(f"{first} ") for name in commands())
    second = re.fullmatch("[a-z-]+", rest[0]) if is_group and rest else None
    return first == "demo" or (first if second is None else f"{first} {second[0]}") in commands()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_documents_call_exist(document: str) -> None:
    assert is_command("node drain mini")
    assert not is_command("node drian mini")
    assert [call for call in calls_in(document) if not is_command(call)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_have_the_flags_that_documents_give_them(document: str) -> None:
    assert [flag for call in calls_in(document) for flag in unknown_flags(call)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_that_documents_name_exist(document: str) -> None:
    known = {flag for flags in commands().values() for flag in flags}.union(*FLAGS_OF_OTHERS.values())
    named = {_FLAG.match(code) for code in _CODE.findall(_BLOCK.sub("", text_of(document)))}
    assert {found[0] for found in named if found} - known == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    named = {code for code in _CODE.findall(_BLOCK.sub("", text_of(document))) if _FILE.fullmatch(code)}
    missing = {name for name in named if not any(fnmatch(path, f"*/{name}") for path in files())}
    assert missing <= FILES_OF_OTHERS
