"""Text of a stream: decoding token by token, and stop strings."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.engine.small_tokenizers import END, TOOL, byte_fallback, byte_level

from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.streams import AnswerText, Detokenizer, Reading, Tokenizer, Vocabulary

EOS = 0
BYTES = Vocabulary(lambda tokens: bytes(tokens).decode("utf-8", "replace"), frozenset(), 256)
BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return cast("Any", tokenizer).encode(text, add_special_tokens=False)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    return cast("Any", tokenizer).convert_tokens_to_ids(token)


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return the text of each token, and that of the end."""
    detokenizer = Detokenizer(Vocabulary.of(tokenizer))
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@given(st.lists(st.integers(0, len(BYTE_LEVEL) + 3), max_size=60))
def test_streamed_byte_level_tokens_give_their_decoded_text(tokens: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, tokens)) == Vocabulary.of(BYTE_LEVEL).decode(tokens)


@BOTH
@given(text=st.text(max_size=60))
def test_streamed_text_equals_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = encode(tokenizer, text)
    assert "".join(pieces(tokenizer, tokens)) == Vocabulary.of(tokenizer).decode(tokens)


@BOTH
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=60))
def test_no_piece_has_an_incomplete_character(tokenizer: Tokenizer, text: str) -> None:
    assert not any("\ufffd" in piece for piece in pieces(tokenizer, encode(tokenizer, text)))


@BOTH
@given(text=st.text(st.sampled_from("a hello é🚀"), max_size=60), place=st.integers(0, 60))
def test_text_after_a_prefix_keeps_its_first_space(tokenizer: Tokenizer, text: str, place: int) -> None:
    vocabulary, tokens = Vocabulary.of(tokenizer), encode(tokenizer, text)
    before, after = tokens[:place], tokens[place:]
    said = vocabulary.decode(before)
    assume(said and not said.endswith("\ufffd"))
    detokenizer = Detokenizer(vocabulary, before)
    assert said + "".join([*map(detokenizer.push, after), detokenizer.flush()]) == vocabulary.decode(tokens)


@BOTH
def test_a_character_is_shown_with_its_last_byte(tokenizer: Tokenizer) -> None:
    tokens = encode(tokenizer, "a🚀")
    assert len(tokens) >= 4
    *before, last, end = pieces(tokenizer, tokens)
    assert "".join(before) == "a"
    assert (last, end) == ("🚀", "")


@BOTH
def test_plain_words_are_shown_token_by_token(tokenizer: Tokenizer) -> None:
    tokens = encode(tokenizer, "a b hello a b hello a b hello")
    *streamed, end = pieces(tokenizer, tokens)
    assert end == ""
    assert sum(1 for piece in streamed if piece) >= len(tokens) - 1


@BOTH
def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    *streamed, end = pieces(tokenizer, encode(tokenizer, "a🚀")[:-2])
    assert "".join(streamed) == "a"
    assert set(end) == {"\ufffd"}


@BOTH
def test_special_and_padding_tokens_are_hidden_and_added_tokens_shown(tokenizer: Tokenizer) -> None:
    end, tool = token_id(tokenizer, END), token_id(tokenizer, TOOL)
    assert "".join(pieces(tokenizer, [end, tool, len(tokenizer) + 7, end])) == TOOL


@BOTH
def test_stray_bytes_do_not_grow_the_decoding_window(tokenizer: Tokenizer) -> None:
    decoded: list[int] = []
    vocabulary = Vocabulary.of(tokenizer)

    def decode(tokens: Any) -> str:
        decoded.append(len(tokens))
        return vocabulary.decode(tokens)

    detokenizer = Detokenizer(Vocabulary(decode, vocabulary.special, vocabulary.size))
    stray = encode(tokenizer, "a🚀")[-1]
    text = "".join([detokenizer.push(stray) for _ in range(500)]) + detokenizer.flush()
    assert text == "\ufffd" * 500
    assert max(decoded) <= 20


def test_literal_replacement_characters_are_plain_text() -> None:
    tokens = encode(BYTE_LEVEL, "a\ufffd\ufffdb\ufffd")
    assert "".join(pieces(BYTE_LEVEL, tokens)) == "a\ufffd\ufffdb\ufffd"


def test_a_long_text_is_decoded_in_short_windows() -> None:
    longest = 0
    vocabulary = Vocabulary.of(BYTE_LEVEL)

    def decode(tokens: Any) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return vocabulary.decode(tokens)

    detokenizer = Detokenizer(Vocabulary(decode, vocabulary.special, vocabulary.size))
    text = "naïve 你好 👋🏽 the " * 50
    assert "".join([detokenizer.push(t) for t in encode(BYTE_LEVEL, text)]) + detokenizer.flush() == text
    assert longest <= 24


def reader(*stop: str, min_tokens: int = 0) -> AnswerText:
    return AnswerText(BYTES, SamplingParams(stop=stop, min_tokens=min_tokens), frozenset({EOS}))


def test_a_stop_string_over_several_tokens_is_cut_off() -> None:
    text = reader("###")
    assert text.read(b"hi#", None) == Reading("hi", 3)
    assert text.read(b"#", None) == Reading("", 1)
    assert text.read(b"#", None) == Reading("", 1, "###")


def test_tokens_after_a_stop_string_are_not_read() -> None:
    assert reader("b").read(b"abc", None) == Reading("a", 2, "b")


def test_held_back_text_is_released_at_the_end() -> None:
    text = reader("###")
    assert text.read(b"hi##", None).text == "hi"
    assert text.read([EOS], "stop") == Reading("##", 1)


def test_the_end_token_adds_no_text() -> None:
    assert reader().read([*b"hi", EOS], "stop") == Reading("hi", 3)


def test_an_incomplete_character_is_shown_only_at_the_end() -> None:
    text = reader()
    assert text.read("é".encode()[:1], None).text == ""
    assert text.read([], "length").text == "\ufffd"


def test_a_stop_string_can_match_held_back_text() -> None:
    text = reader("a\ufffd")
    assert text.read(b"xa\xc3", None).text == "x"
    assert text.read([], "length") == Reading("", 0, "a\ufffd")


def test_stop_strings_count_only_after_min_tokens() -> None:
    text = reader("b", min_tokens=3)
    assert text.read(b"abb", None) == Reading("abb", 3)
    assert text.read(b"cb", None) == Reading("c", 2, "b")
