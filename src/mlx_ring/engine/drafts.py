"""Prompt look-up: what a sequence's own text says may come next, and whether asking pays. Pure.

Drafts are the tokens that followed the last occurrence of the sequence's last few tokens (Saxena 2023, prompt
lookup decoding). They are verified by drawing every position as ever, so they change no token, only the number
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_LONG, _SHORT = 6, 3
"""Lengths of the runs that are looked up, the longer first."""
_START_ACCEPTANCE = 0.6
_WEIGHT = 0.3
_LEAST_GAIN = 1.25
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 512
"""Proposals that are passed over before one is tried again."""


class PromptLookup:
    """One sequence's runs of tokens and its record of accepted drafts."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        """By run: where it ended last."""
        self._noted = 0
        self._acceptance = _START_ACCEPTANCE
        """Chance that a draft token is right, if those before it were."""
        self._passed_over = 0
        self._pause = _FIRST_PAUSE

    def propose(
        self, tokens: Sequence[int], unknown: int, most: int, cost: Callable[[int], float]
    ) -> tuple[int, ...]:
        """Draft tokens for after `tokens` and `unknown` more that are being sampled; often none.

        `cost(count)` is a step that verifies so many draft tokens over a step without.
        """
        count = self._worthwhile(most, cost)
        continuation = self._continuation(tokens, unknown + max(1, count))
        if len(continuation) <= unknown:
            return ()
        if count == 0:
            self._passed_over += 1
            if self._passed_over < self._pause:
                return ()
            self._passed_over = 0
            count = 1
        return tuple(continuation[unknown : unknown + count])

    def verified(self, proposed: int, accepted: int) -> None:
        """Learn how many of the proposed tokens were right."""
        # The first wrong token ends the run: those after it were not tried.
        tried = min(proposed, accepted + 1)
        self._acceptance += _WEIGHT * (accepted / tried - self._acceptance)
        self._pause = _FIRST_PAUSE if accepted else min(_LONGEST_PAUSE, self._pause * 2)

    def _worthwhile(self, most: int, cost: Callable[[int], float]) -> int:
        """The number of draft tokens that gains most tokens for the time; 0 where none gains any."""
        best, best_gain = 0, _LEAST_GAIN
        expected, chance = 1.0, 1.0
        for count in range(1, most + 1):
            chance *= self._acceptance
            expected += chance
            gain = expected / cost(count)
            if gain > best_gain:
                best, best_gain = count, gain
        return best

    def _continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the last tokens where they stood before; what runs past the end goes on in a circle."""
        self._note(tokens)
        end = len(tokens)
        for length in (_LONG, _SHORT):
            before = self._ends.get(tuple(tokens[end - length :])) if end > length else None
            if before is not None:
                follows = list(tokens[before : before + count])
                period = end - before
                while len(follows) < count:
                    follows.append(follows[len(follows) - period])
                return follows
        return []

    def _note(self, tokens: Sequence[int]) -> None:
        """Note every run that ends before the last token: the last is what is looked up."""
        for end in range(max(_SHORT, self._noted), len(tokens)):
            for length in (_LONG, _SHORT):
                if end >= length:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._noted = max(self._noted, len(tokens))
