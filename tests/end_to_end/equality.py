"""Tokens held against a reference, token by token, with ties allowed and counted.

Splitting and batching round differently, by some 1e-6 in float32. Two tokens whose scores lie
within `TIE` may therefore swap. Where that happens the answer is asked for again from
the reference's own tokens, so that everything after the tie is compared as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

TIE = 1e-4

Generate = Callable[[tuple[int, ...], int], Awaitable[list[int]]]
"""(prompt, number of tokens) to that many tokens."""
ScoreGap = Callable[[Sequence[int], int, int], float]
"""(all tokens before, one token, another) to how far apart their scores are."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many tokens were compared, and how many of them were ties."""

    tokens: int = 0
    ties: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.tokens + other.tokens, self.ties + other.ties)

    def __str__(self) -> str:
        return f"{self.tokens} tokens compared, {self.ties} ties"


async def compare(
    prompt: tuple[int, ...], expected: Sequence[int], generate: Generate, gap: ScoreGap
) -> Agreement:
    """Generate as many tokens as `expected` has and hold each against it.

    Raises:
        AssertionError: two tokens differ that are no tie.
    """
    ties = 0
    done = 0
    while done < len(expected):
        before = (*prompt, *expected[:done])
        got = await generate(before, len(expected) - done)
        assert len(got) == len(expected) - done, (
            f"{len(got)} tokens came, {len(expected) - done} were asked for"
        )
        same = next((index for index, token in enumerate(got) if token != expected[done + index]), None)
        if same is None:
            break
        done += same
        distance = gap((*prompt, *expected[:done]), expected[done], got[same])
        assert distance <= TIE, (
            f"at position {len(prompt) + done}: {got[same]} instead of {expected[done]}, "
            f"whose scores differ by {distance:.2g}"
        )
        ties += 1
        done += 1
    return Agreement(len(expected), ties)
