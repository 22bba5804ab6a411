"""Prompt look-up: what a sequence's own text says may come next, and whether asking pays. Pure.

Drafts are the tokens that followed the last occurrence of the sequence's last few tokens (Saxena 2023, prompt
lookup decoding). They are verified by drawing every position as ever, so they change no token, only the number
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from math import isinf
from operator import mul

_LONG, _SHORT = 6, 3
"""Lengths of the runs that are looked up, the longer first."""
_START_ACCEPTANCE = 0.6
_WEIGHT = 0.3
_LEAST_GAIN = 0.25
"""Of one row's speed: less is not worth the risk."""
_NOTED_AT_ONCE = 2048
"""A long prompt is noted in so many places a step: the event loop has others to serve."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 512
"""Proposals that are passed over before one is tried again."""


class DraftedStep:
    """A decode step while its rows are put together: what it brings, and what verifying makes of its time."""

    def __init__(self, rows: int, cost: Callable[[int], float]) -> None:
        """`cost(count)` is a step that verifies so many draft tokens, of all its rows, over a step without."""
        self._rows = rows
        self._cost = cost
        self._drafts = 0
        self._tokens = float(rows)
        """That it is expected to bring."""

    def worthwhile(self, acceptance: float, most: int) -> int:
        """Draft tokens of one more row that gain most tokens for the time; 0 where none gains any."""
        before = self._cost(self._drafts)
        if isinf(before):
            return 0
        best, best_gain = 0, 1.0 + _LEAST_GAIN / self._rows
        for count, expected in enumerate(_expected(acceptance, most), start=1):
            gain = (1.0 + expected / self._tokens) * before / self._cost(self._drafts + count)
            if gain > best_gain:
                best, best_gain = count, gain
        return best

    def add(self, acceptance: float, count: int) -> None:
        """A row carries so many."""
        self._drafts += count
        self._tokens += sum(_chances(acceptance, count))


def _chances(acceptance: float, count: int) -> Iterator[float]:
    """That the first draft token is right, the first two are, and so on."""
    return accumulate(repeat(acceptance, count), mul)


def _expected(acceptance: float, count: int) -> Iterator[float]:
    """Right draft tokens of one, two, and so on."""
    return accumulate(_chances(acceptance, count))


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

    def propose(self, tokens: Sequence[int], unknown: int, most: int, step: DraftedStep) -> tuple[int, ...]:
        """Draft tokens for after `tokens` and `unknown` more that are being sampled; often none."""
        count = step.worthwhile(self._acceptance, most)
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

    def record_verified(self, proposed: int, accepted: int) -> None:
        """Learn how many of the proposed tokens were right."""
        # The first wrong token ends the run: those after it were not tried.
        tried = min(proposed, accepted + 1)
        self._acceptance += _WEIGHT * (accepted / tried - self._acceptance)
        self._pause = _FIRST_PAUSE if accepted else min(_LONGEST_PAUSE, self._pause * 2)

    def record_draft(self, step: DraftedStep, count: int) -> None:
        """So many of the proposed tokens go into `step`."""
        step.add(self._acceptance, count)

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
        begin = max(_SHORT, self._noted)
        until = min(len(tokens), begin + _NOTED_AT_ONCE)
        for end in range(begin, until):
            for length in (_LONG, _SHORT):
                if end >= length:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._noted = max(self._noted, until)
