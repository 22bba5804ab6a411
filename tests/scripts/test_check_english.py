"""The check of English: findings with their lines, and none in code."""

from __future__ import annotations

import textwrap

import pytest
from scripts.check_english import check_other, check_python


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
            """A line of requests."""

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


def test_a_phrase_in_comments_and_formatted_strings_is_reported() -> None:
    assert [line for line, _, _ in _found('# It was told\n# of it.\nerror = f"{1} is gone."\n')] == [1, 3]


def test_code_and_single_words_do_not_count_as_prose() -> None:
    assert _found('KEY = "told"\n"""Value of `told` and of ``gone``."""\n') == []


def test_a_question_is_not_reported_as_a_clause() -> None:
    assert _found('TEXT = "What is new? Ask it."\n') == []
    assert [kind for _, kind, _ in _found('TEXT = "It runs. What waits is taken first."\n')] == ["clause"]


def test_names_are_checked_by_their_words() -> None:
    assert [what for _, _, what in _found("class PlanWish:\n    toldness: int\n")] == ["PlanWish -> request"]


def test_a_page_is_checked_in_strings_and_comments() -> None:
    source = 'const told = "told";\n// It is gone.\nconst text = `it makes way`;\n'
    assert [finding.line for finding in check_other("page.js", source)] == [2, 3]


def test_a_document_is_checked_outside_code() -> None:
    source = "It goes on.\n\n```sh\nit goes on\n```\n\nIt `goes on`, and is gone.\n"
    assert sorted(finding.line for finding in check_other("page.md", source)) == [1, 7]


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
