"""The check of English: findings with their lines, and none in code."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from scripts.check_english import check_other, check_python, files_of


def _found(source: str) -> list[tuple[int, str, str]]:
    findings = check_python("module.py", textwrap.dedent(source))
    return [(finding.line, finding.kind, finding.what) for finding in sorted(findings)]


@pytest.mark.parametrize(
    "opener", ["What", "Whether", "Who", "Of", "The", "Returns", "Sending", "Number of", "`x` as"]
)
def test_a_function_docstring_without_a_verb_is_reported(opener: str) -> None:
    assert [kind for _, kind, _ in _found(f'def f():\n    """{opener} it."""\n')] == ["opener"]


@pytest.mark.parametrize("opener", ["Return", "Embed", "Bring", "Pass", "Raise", "Express"])
def test_a_verb_may_open_a_function_docstring(opener: str) -> None:
    assert _found(f'def f():\n    """{opener} it."""\n') == []


def test_nouns_may_describe_values_and_properties() -> None:
    source = '''
        LIMIT = 3
        """Number of requests."""

        class Queue:
            """A queue of requests."""

            @property
            def length(self):
                """Number of requests in it."""
    '''
    assert _found(source) == []


def test_an_opener_of_a_value_is_reported() -> None:
    assert _found('LIMIT = 3\n"""Of requests."""\n') == [(2, "opener", "“Of”")]


def test_a_phrase_across_lines_of_a_docstring_is_reported() -> None:
    [(line, kind, what)] = _found('def f():\n    """Keep it.\n\n    Others make\n    way then.\n    """\n')
    assert (line, kind) == (4, "word")
    assert what.startswith("“make way”")


def test_a_question_is_not_reported_as_a_clause() -> None:
    assert _found('TEXT = "What is new? Ask it."\n') == []
    assert [kind for _, kind, _ in _found('TEXT = "It runs. What waits is taken first."\n')] == ["clause"]


def test_names_are_checked_by_their_words() -> None:
    assert [what for _, _, what in _found("class PlanWish:\n    toldness: int\n")] == ["PlanWish -> request"]


LONG = " ".join(["word"] * 26)


def test_long_sentences_and_chains_of_semicolons_are_reported_in_docstrings_comments_and_messages() -> None:
    source = f'"""Do it. {LONG}.\n\nOne; two; three.\n"""\n# {LONG}\nerror = "{LONG}"\n'
    assert _found(source) == [
        (line, "long", f"{words} words: “{start} …”")
        for line, words, start in (
            (1, 26, "word word word word word word"),
            (3, 3, "One; two; three"),
            (5, 26, "word word word word word word"),
            (6, 26, "word word word word word word"),
        )
    ]


def test_columns_code_and_strings_with_several_lines_have_no_sentences() -> None:
    listing = (
        f'"""Hold files.\n\nname    {LONG}\n| {LONG} |\n"""\nTEXT = "a\\n{LONG}"\nCSP = "a b; c d; e f"\n'
    )
    assert _found(listing) == []


def test_a_colon_does_not_end_a_sentence() -> None:
    half = " ".join(["word"] * 13)
    assert [kind for _, kind, _ in _found(f"# {half}: {half}\n")] == ["long"]
    assert [finding.line for finding in check_other("page.md", f"Word.\n\n{half}:\n{half}\n")] == [3]


def test_a_list_of_short_items_behind_a_colon_does_not_count() -> None:
    items = ", ".join(["one item of short text"] * 5)
    assert _found(f"# It holds lists: {items}, and one more.\n") == []
    assert [kind for _, kind, _ in _found(f"# It holds lists, {items}, and one more.\n")] == ["long"]
    assert [kind for _, kind, _ in _found(f"# {LONG}: one, two, three\n")] == ["long"]


def test_entries_of_arguments_are_sentences_of_their_own() -> None:
    half = " ".join(["word"] * 15)
    source = f'''
        def f(first, second):
            """Do it.

            Args:
                first: {half}
                second: {half}
            """
    '''
    assert _found(source) == []


def test_scripts_without_a_suffix_are_found(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("#!/usr/bin/env bash\n")
    (tmp_path / "Makefile").write_text("all:\n")
    (tmp_path / "notes").write_text("It is gone.\n")
    assert [path.name for path in files_of([""], tmp_path)] == ["Makefile", "run"]


@pytest.mark.parametrize(
    "statement",
    [
        "_UNTOLD = 1",
        "gone = 1",
        "a, gone = 1, 2",
        "self.gone = 1",
        "for troubles in []: pass",
        "import os as heed",
        "x = [handovers for handovers in []]",
        "x = (told := 1)",
        "def f(front, wishes): pass",
    ],
)
def test_constants_locals_and_plurals_are_checked(statement: str) -> None:
    assert [kind for _, kind, _ in _found(f"{statement}\n")] == ["name"]


def test_read_names_are_reported_only_where_they_are_defined() -> None:
    assert _found("import errors\nprint(errors.gone)\n") == []


def test_words_in_ise_are_reported_in_prose_and_names() -> None:
    source = "# It normalises the optimisation.\nPENALISED = 1\n# Otherwise raise a promise.\nnoise = 1\n"
    assert [(line, kind) for line, kind, _ in _found(source)] == [
        (1, "spelling"),
        (1, "spelling"),
        (2, "spelling"),
    ]


def test_a_log_line_begins_with_a_capital() -> None:
    source = 'log.info("step %d failed", 1)\nlog.info("Step %d", 1)\nlog.info("mlx-lm is old")\nprint("no log line")\n'
    assert [(line, kind) for line, kind, _ in _found(source)] == [(1, "log")]


WIDE = "word " * 25


def test_wide_lines_of_documents_are_reported_outside_tables_and_code() -> None:
    prose = f"Word. Word.\n\n{'It is. ' * 20}\n\n| {'a | ' * 60}\n\n```\n{WIDE * 2}\n```\n\n- <{'x' * 130}>\n"
    assert [(finding.line, finding.kind) for finding in check_other("page.md", prose)] == [(3, "wide")]
