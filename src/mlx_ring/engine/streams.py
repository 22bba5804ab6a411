"""Text of an answer, made of its tokens.

A token may be a part of a character. Its text may depend on the token before it: some tokenizers drop the space
before the first word. So the last few tokens are decoded again with each new one, and the added text is returned. An
end that shows replacement characters may still become a character and is held back. `AnswerText` passes tokens through
the detokenizer and then the stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from mlx_ring.core.generation import StopMatcher
from mlx_ring.core.types import FinishReason, SamplingParams

_REPLACEMENT = "\ufffd"
_LONG_WINDOW = 16
"""Number of tokens after which the front of the window is dropped."""
_SHORTEST_CONTEXT = 4
"""Number of tokens that always stay: a character has at most four bytes, so an incomplete one begins among them."""
_LONGEST_CONTEXT = 8


class AddedToken(Protocol):
    """A token that was added to a vocabulary by name."""

    @property
    def special(self) -> bool: ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer, or of mlx-lm's wrapper of one, that makes text."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def __len__(self) -> int: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Text of tokens. One value per model serves all sequences."""

    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    """Tokens that add no text."""
    size: int
    """First id that names no token: models pad their vocabulary."""
    decode_shown: Callable[[Sequence[int]], str] | None = None
    """Decoder that shows special tokens as text; None if there are none."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Make the vocabulary of a tokenizer, without special tokens and with spaces unchanged."""

        def decode(tokens: Sequence[int], *, skip_special: bool = True) -> str:
            return tokenizer.decode(
                list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )

        special = (token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
        return cls(decode, frozenset(special), len(tokenizer), partial(decode, skip_special=False))

    def showing(self, tokens: frozenset[int]) -> Vocabulary:
        """Return the vocabulary that shows these special tokens as text."""
        if self.decode_shown is None or not tokens & self.special:
            return self
        return replace(self, decode=self.decode_shown, special=self.special - tokens)

    def is_silent(self, token: int) -> bool:
        return token >= self.size or token in self.special


class Detokenizer:
    """Text of one sequence: all pieces joined are the decoding of all tokens."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        """Start a text, which may continue the text of the tokens `before`."""
        self._vocabulary = vocabulary
        self._window, text = _context(vocabulary, before)
        self._emitted = len(text)
        """Number of characters of the window's text that were returned."""
        self._broken = 0
        """Number of tokens since the text last ended cleanly."""

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""
        if self._vocabulary.is_silent(token):
            return ""
        self._window.append(token)
        text = self._vocabulary.decode(self._window)
        whole = len(text.rstrip(_REPLACEMENT))
        self._broken = 0 if whole == len(text) else self._broken + 1
        piece = self._emit(text, whole)
        if (self._broken or len(self._window)) >= _LONG_WINDOW:
            piece += self._shorten(text)
        return piece

    def flush(self) -> str:
        """Return the text held back, at the end: an incomplete character shows as U+FFFD."""
        text = self._vocabulary.decode(self._window)
        return self._emit(text, len(text))

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _shorten(self, text: str) -> str:
        """Shorten the window if that leaves its text unchanged, and return the rest of the text.

        Without this, bytes that never become a character would be decoded again and again.
        """
        for length in range(_SHORTEST_CONTEXT, _LONGEST_CONTEXT + 1):
            context = self._window[-length:]
            said = self._vocabulary.decode(context)
            if said and text.endswith(said):
                dropped = len(text) - len(said)
                piece = self._emit(text, dropped)
                self._window = context
                self._emitted -= dropped
                return piece
        return ""


def _context(vocabulary: Vocabulary, before: Sequence[int]) -> tuple[list[int], str]:
    """Return the last tokens before a text and their text; none if they end within a character.

    If bytes are tokens, a window that starts within a character may have no text: then fewer tokens are taken.
    """
    for length in range(_LONGEST_CONTEXT, 0, -1):
        window = [token for token in before[-length:] if not vocabulary.is_silent(token)]
        text = vocabulary.decode(window) if window else ""
        if text and not text.endswith(_REPLACEMENT):
            return window, text
    return [], ""


@dataclass(frozen=True, slots=True)
class Reading:
    """Text of some tokens."""

    text: str
    tokens: int
    """Number of tokens that were read: fewer than given if a stop string ended the answer."""
    stop_match: str | None = None
    pieces: tuple[str, ...] = field(default=(), compare=False)
    """Text that each token added; joined they are the text."""


class AnswerText:
    """Text of one answer, read token by token."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: SamplingParams,
        ends: frozenset[int],
        shown: frozenset[int] = frozenset(),
        before: Sequence[int] = (),
    ) -> None:
        """Start an answer."""
        self._detokenizer = Detokenizer(vocabulary.showing(shown), before)
        self._stops = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._ends = ends
        self._read = 0

    def read(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> Reading:
        """Return the text after `tokens`; with a finish reason, also all that was held back."""
        pieces: list[str] = []
        for token in tokens:
            self._read += 1
            text, match = self._read_token(token)
            pieces.append(text)
            if match is not None:
                return _reading(pieces, len(pieces), match)
        if finish_reason is None:
            return _reading(pieces, len(tokens))
        text, match = self._flush()
        return _reading([*pieces[:-1], "".join(pieces[-1:]) + text], len(tokens), match)

    def _flush(self) -> tuple[str, str | None]:
        """Return the text held back, which belongs to the last token."""
        text, match = self._stops.push(self._detokenizer.flush())
        return (text, match) if match is not None else (text + self._stops.flush(), None)

    def _read_token(self, token: int) -> tuple[str, str | None]:
        """Return a token's text: none for one that ends the answer. Stop strings count from `min_tokens` on."""
        if token in self._ends:
            return "", None
        text = self._detokenizer.push(token)
        if self._read <= self._min_tokens:
            return text, None
        return self._stops.push(text)


def _reading(pieces: Sequence[str], tokens: int, stop_match: str | None = None) -> Reading:
    return Reading("".join(pieces), tokens, stop_match, tuple(pieces))
