"""The text of one answer: tokens through the detokenizer and the stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_ring.core.types import FinishReason, SamplingParams
from mlx_ring.engine.detokenizer import Detokenizer, Vocabulary
from mlx_ring.engine.stops import StopMatcher


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
