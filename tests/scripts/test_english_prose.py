"""Prose and names in files of each kind, as the check of English finds them."""

from __future__ import annotations

import pytest
from scripts.check_english import check_other, check_python


def _lines(source: str) -> list[int]:
    return [finding.line for finding in sorted(check_python("module.py", source))]


LONG = " ".join(["word"] * 26)


def test_a_phrase_in_comments_and_formatted_strings_is_reported() -> None:
    assert _lines('# It was told\n# of it.\nerror = f"{1} is gone."\n') == [1, 3]


def test_code_and_single_words_do_not_count_as_prose() -> None:
    assert _lines('KEY = "told"\n"""Value of `told` and of ``gone``."""\n') == []


def test_a_page_is_checked_in_strings_and_comments() -> None:
    source = 'const kept = "told";\n// It is gone.\nconst text = `it makes way`;\n'
    assert [finding.line for finding in check_other("page.js", source)] == [2, 3]


def test_a_document_is_checked_outside_code() -> None:
    source = "It goes on.\n\n```sh\nit goes on\n```\n\nIt `goes on`, and is gone.\n"
    assert sorted(finding.line for finding in check_other("page.md", source)) == [1, 7]


@pytest.mark.parametrize("name", ["kernel.cpp", "kernel.h", "program.c"])
def test_comments_and_names_of_c_are_checked(name: str) -> None:
    source = f"// It goes\n// on here.\nint read_input();  // it is gone\n/* It was told. */\nint heed_input();\n// {LONG}\n"
    found = [(finding.line, finding.kind) for finding in sorted(check_other(name, source))]
    assert found == [(1, "word"), (3, "word"), (4, "word"), (5, "name"), (6, "long")]


def test_comments_of_styles_are_checked() -> None:
    source = f"/* It is\n   gone. */\n.gone {{ content: 'gone now'; }}\n/* {LONG} */\n"
    assert [(finding.line, finding.kind) for finding in check_other("page.css", source)] == [
        (2, "word"),
        (4, "long"),
    ]


@pytest.mark.parametrize("name", ["page.js", "program.mjs", "types.ts"])
def test_declarations_of_javascript_are_checked_and_keys_are_not(name: str) -> None:
    source = "const tellings = { gone: 1 };\nfunction heed() {}\n"
    assert [finding.what for finding in check_other(name, source)] == [
        "tellings -> messages",
        "heed -> record, on",
    ]


def test_comments_of_scripts_are_checked_by_paragraph() -> None:
    half = " ".join(["word"] * 14)
    source = f"#!/bin/sh\n# {half}\n# {half}\nrun # it is gone\necho '#told'\n"
    assert [(finding.line, finding.kind) for finding in check_other("run", source)] == [
        (2, "long"),
        (4, "word"),
    ]


def test_the_reason_behind_noqa_is_checked() -> None:
    assert _lines("\nx = 1  # noqa: E501 - it was told\ny = 2  # noqa: E501\n") == [2]


def test_comments_of_yaml_are_checked_and_values_are_not() -> None:
    source = f"# {LONG}\nkey: gone  # it was told\nname: 'it goes on'\n"
    assert [(finding.line, finding.kind) for finding in check_other("data.yaml", source)] == [
        (1, "long"),
        (2, "word"),
    ]
