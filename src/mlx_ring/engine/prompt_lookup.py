"""Prompt lookup: drafts from a sequence's own text, and the decision to verify them. Pure.

A draft is the tokens that followed the last occurrence of the sequence's last few tokens (Saxena 2023, prompt
lookup decoding). Every drafted position is sampled as usual, so drafts change no token, only the number
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from math import isinf
from operator import mul

_LONG, _SHORT = 6, 3
"""Lengths of the token runs that are looked up, the longer first."""
_START_ACCEPTANCE = 0.6
_WEIGHT = 0.3
_LEAST_GAIN = 0.25
"""Smallest relative gain for which a draft is sent, of one row's speed."""
_NOTED_AT_ONCE = 2048
"""Most places of a prompt that are indexed per step, because the event loop has other work."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 512
"""Number of proposals that are skipped before one is tried again."""


class DraftedStep:
    """A decode step in preparation: its expected tokens, and the cost of verifying its drafts."""

    def __init__(self, rows: int, cost: Callable[[int], float]) -> None:
        """Prepare a step. `cost(count)` is its time with `count` draft tokens, relative to none."""
        self._rows = rows
        self._cost = cost
        self._drafts = 0
        self._tokens = float(rows)
        """Expected number of its tokens."""

    def worthwhile(self, acceptance: float, most: int) -> int:
        """Return the number of draft tokens of a further row that gains most; 0 if none gains enough."""
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
        """Count a row's draft tokens."""
        self._drafts += count
        self._tokens += sum(_chances(acceptance, count))


def _chances(acceptance: float, count: int) -> Iterator[float]:
    """Yield the chances that the first draft token is right, that the first two are, and so on."""
    return accumulate(repeat(acceptance, count), mul)


def _expected(acceptance: float, count: int) -> Iterator[float]:
    """Yield the expected number of right tokens of one draft token, of two, and so on."""
    return accumulate(_chances(acceptance, count))


class PromptLookup:
    """Index of one sequence's token runs, and its record of accepted drafts."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        """End of the last occurrence of each run."""
        self._noted = 0
        self._acceptance = _START_ACCEPTANCE
        """Chance that a draft token is right if those before it are."""
        self._passed_over = 0
        self._pause = _FIRST_PAUSE

    def propose(self, tokens: Sequence[int], unknown: int, most: int, step: DraftedStep) -> tuple[int, ...]:
        """Return draft tokens to follow `tokens` and `unknown` tokens that are being sampled; often none."""
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
        """Record how many of the proposed tokens were right."""
        # The first wrong token ends the run: those after it were not tried.
        tried = min(proposed, accepted + 1)
        self._acceptance += _WEIGHT * (accepted / tried - self._acceptance)
        self._pause = _FIRST_PAUSE if accepted else min(_LONGEST_PAUSE, self._pause * 2)

    def record_draft(self, step: DraftedStep, count: int) -> None:
        """Count proposed tokens that go into `step`."""
        step.add(self._acceptance, count)

    def _continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the tokens that followed an earlier occurrence of the last tokens, repeated if they reach the end."""
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
        """Index every run that ends before the last token, which is the one looked up."""
        begin = max(_SHORT, self._noted)
        until = min(len(tokens), begin + _NOTED_AT_ONCE)
        for end in range(begin, until):
            for length in (_LONG, _SHORT):
                if end >= length:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._noted = max(self._noted, until)
