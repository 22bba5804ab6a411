"""The text of one answer: tokens through the detokenizer and the stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


class AnswerText:
    """Reads one answer's tokens as they come."""

    def __init__(self, vocabulary: Vocabulary, sampling: SamplingParams, ends: frozenset[int]) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._ends = ends
        self._read = 0

    def read(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> Reading:
        """The text that goes out after `tokens`; with a finish reason, all that was held back too."""
        pieces: list[str] = []
        for count, token in enumerate(tokens, start=1):
            self._read += 1
            text, match = self._read_token(token)
            pieces.append(text)
            if match is not None:
                return Reading("".join(pieces), count, match)
        if finish_reason is not None:
            text, match = self._stops.push(self._detokenizer.flush())
            pieces.append(text)
            if match is not None:
                return Reading("".join(pieces), len(tokens), match)
            pieces.append(self._stops.flush())
        return Reading("".join(pieces), len(tokens))

    def _read_token(self, token: int) -> tuple[str, str | None]:
        """A token that ends the answer says nothing; stop strings count from `min_tokens` on."""
        if token in self._ends:
            return "", None
        text = self._detokenizer.push(token)
        if self._read <= self._min_tokens:
            return text, None
        return self._stops.push(text)
