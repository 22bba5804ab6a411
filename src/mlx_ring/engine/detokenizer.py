"""Token ids to text, one at a time, never half a character.

A token may be a part of a character, and what it says may hang on the one before it (some
tokenizers drop the space before the first word). So the last few tokens are decoded anew
with each one that comes, and what the text has gained goes out. An end that shows
replacement characters may still become a character and is held back.

Stop strings in a stream of text, where one may span several tokens.

The text of one answer: tokens through the detokenizer and the stop strings.
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
"""Tokens after which the front of the window is let go."""
_SHORTEST_CONTEXT = 4
"""Tokens that always stay: a character has at most four bytes, so an incomplete one begins among them."""
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
    """What tokens say. Made once per model and shared by every sequence."""

    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    """Tokens that add nothing to the text."""
    size: int
    """Ids from here on name no token: models pad their vocabulary."""
    decode_shown: Callable[[Sequence[int]], str] | None = None
    """The same with special tokens as text; None: there are none."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Text as the model meant it: special tokens left out, spaces left alone."""

        def decode(tokens: Sequence[int], *, skip_special: bool = True) -> str:
            return tokenizer.decode(
                list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )

        special = (token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
        return cls(decode, frozenset(special), len(tokenizer), partial(decode, skip_special=False))

    def showing(self, tokens: frozenset[int]) -> Vocabulary:
        """The same, where these special tokens are text like any other."""
        if self.decode_shown is None or not tokens & self.special:
            return self
        return replace(self, decode=self.decode_shown, special=self.special - tokens)

    def is_silent(self, token: int) -> bool:
        return token >= self.size or token in self.special


class Detokenizer:
    """One sequence's text: all pieces joined are the decoding of all tokens."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        """`before` are tokens whose text this one goes on with: its first word keeps its space."""
        self._vocabulary = vocabulary
        self._window, text = _context(vocabulary, before)
        self._emitted = len(text)
        """Characters of the window's text that are out."""
        self._broken = 0
        """Tokens since the text last ended cleanly."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
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
        """What was held back, at the end: an incomplete character shows as U+FFFD."""
        text = self._vocabulary.decode(self._window)
        return self._emit(text, len(text))

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _shorten(self, text: str) -> str:
        """Keep the last tokens alone, where that leaves their text as it is; what they don't say goes out.

        Bytes that never become a character would otherwise be decoded again for ever.
        """
        for length in range(_SHORTEST_CONTEXT, _LONGEST_CONTEXT + 1):
            context = self._window[-length:]
            said = self._vocabulary.decode(context)
            if said and text.endswith(said):
                gone = len(text) - len(said)
                piece = self._emit(text, gone)
                self._window = context
                self._emitted -= gone
                return piece
        return ""


def _context(vocabulary: Vocabulary, before: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens before a text that say something, and what; none where they end within a character.

    Where bytes are tokens, those of one character more may be no text at all: then fewer tokens are.
    """
    for length in range(_LONGEST_CONTEXT, 0, -1):
        window = [token for token in before[-length:] if not vocabulary.is_silent(token)]
        text = vocabulary.decode(window) if window else ""
        if text and not text.endswith(_REPLACEMENT):
            return window, text
    return [], ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What some tokens said."""

    text: str
    tokens: int
    """How many were read: fewer than were given where a stop string came before."""
    stop_match: str | None = None
    pieces: tuple[str, ...] = field(default=(), compare=False)
    """What each token added; joined they are the text."""


class AnswerText:
    """Reads one answer's tokens as they come."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: SamplingParams,
        ends: frozenset[int],
        shown: frozenset[int] = frozenset(),
        before: Sequence[int] = (),
    ) -> None:
        """`shown` are special tokens that the text shows; `before` is the prompt, where the answer goes on with its text."""
        self._detokenizer = Detokenizer(vocabulary.showing(shown), before)
        self._stops = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._ends = ends
        self._read = 0

    def read(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> Reading:
        """The text that goes out after `tokens`; with a finish reason, all that was held back too."""
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
        """What was held back; it belongs to the last token."""
        text, match = self._stops.push(self._detokenizer.flush())
        return (text, match) if match is not None else (text + self._stops.flush(), None)

    def _read_token(self, token: int) -> tuple[str, str | None]:
        """A token that ends the answer says nothing; stop strings count from `min_tokens` on."""
        if token in self._ends:
            return "", None
        text = self._detokenizer.push(token)
        if self._read <= self._min_tokens:
            return text, None
        return self._stops.push(text)


def _reading(pieces: Sequence[str], tokens: int, stop_match: str | None = None) -> Reading:
    return Reading("".join(pieces), tokens, stop_match, tuple(pieces))
