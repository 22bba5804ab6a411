from __future__ import annotations

from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.streams import AnswerText, Reading, Vocabulary

END = 0
BYTES = Vocabulary(lambda tokens: bytes(tokens).decode("utf-8", "replace"), frozenset(), 256)


def reader(*stop: str, min_tokens: int = 0) -> AnswerText:
    return AnswerText(BYTES, SamplingParams(stop=stop, min_tokens=min_tokens), frozenset({END}))


def test_a_stop_string_over_several_tokens_is_cut_off() -> None:
    text = reader("###")
    assert text.read(b"hi#", None) == Reading("hi", 3)
    assert text.read(b"#", None) == Reading("", 1)
    assert text.read(b"#", None) == Reading("", 1, "###")


def test_tokens_after_a_stop_string_are_not_read() -> None:
    assert reader("b").read(b"abc", None) == Reading("a", 2, "b")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    text = reader("###")
    assert text.read(b"hi##", None).text == "hi"
    assert text.read([END], "stop") == Reading("##", 1)


def test_the_token_that_ends_the_answer_says_nothing() -> None:
    assert reader().read([*b"hi", END], "stop") == Reading("hi", 3)


def test_half_a_character_comes_out_at_the_end_alone() -> None:
    text = reader()
    assert text.read("é".encode()[:1], None).text == ""
    assert text.read([], "length").text == "\ufffd"


def test_a_stop_string_can_end_with_what_was_held_back() -> None:
    text = reader("a\ufffd")
    assert text.read(b"xa\xc3", None).text == "x"
    assert text.read([], "length") == Reading("", 0, "a\ufffd")


def test_stop_strings_count_after_the_least_number_of_tokens() -> None:
    text = reader("b", min_tokens=3)
    assert text.read(b"abb", None) == Reading("abb", 3)
    assert text.read(b"cb", None) == Reading("c", 2, "b")
