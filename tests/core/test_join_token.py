"""Text of a join token: it can be read back, and typing errors are noticed."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlx_ring.core.errors import TokenRefused
from mlx_ring.core.join_token import FINGERPRINT_BYTES, ID_BYTES, SECRET_BYTES, JoinToken, parse_token

tokens = st.builds(
    JoinToken,
    st.binary(min_size=FINGERPRINT_BYTES, max_size=FINGERPRINT_BYTES),
    st.binary(min_size=ID_BYTES, max_size=ID_BYTES),
    st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
)


@given(tokens)
def test_a_token_is_restored_from_its_text(token: JoinToken) -> None:
    assert parse_token(str(token)) == token


@given(tokens)
def test_the_text_has_only_lowercase_letters_and_digits(token: JoinToken) -> None:
    text = str(token)
    assert text.isalnum()
    assert text.isascii()
    assert text == text.lower()


@given(tokens, st.data())
def test_one_changed_character_is_noticed(token: JoinToken, data: st.DataObject) -> None:
    text = str(token)
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(
        st.sampled_from("abcdefghijklmnopqrstuvwxyz234567AZ019=-_\u017f\u0131") | st.characters()
    )
    assume(character != text[place])
    with pytest.raises(TokenRefused):
        parse_token(text[:place] + character + text[place + 1 :])


@given(tokens, st.data())
def test_two_swapped_neighbours_are_noticed(token: JoinToken, data: st.DataObject) -> None:
    text = str(token)
    place = data.draw(st.integers(0, len(text) - 2))
    assume(text[place] != text[place + 1])
    with pytest.raises(TokenRefused):
        parse_token(text[:place] + text[place + 1] + text[place] + text[place + 2 :])


@given(tokens, st.integers(0, 103))
def test_a_truncated_token_is_refused(token: JoinToken, length: int) -> None:
    with pytest.raises(TokenRefused):
        parse_token(str(token)[:length])


@given(st.text())
def test_any_other_text_is_refused_as_an_invalid_token(text: str) -> None:
    with pytest.raises(TokenRefused, match="join token"):
        parse_token(text)


@given(tokens, st.integers(1, 103))
def test_line_breaks_of_a_terminal_are_ignored(token: JoinToken, place: int) -> None:
    text = str(token)
    assert parse_token(f" {text[:place]}\r\n  {text[place:]}\n") == token


@given(tokens)
def test_the_secret_is_not_in_the_repr_of_a_token(token: JoinToken) -> None:
    assert "secret" not in repr(token)
