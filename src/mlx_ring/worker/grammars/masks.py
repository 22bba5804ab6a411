"""Masks of the tokens that each row of a step may draw under a grammar. This module comes with the first one, as NumPy does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.errors import RequestError, RingError
from mlx_ring.worker.grammars.answer_state import Allowed, AnswerGrammar, Drawing, StepMasks

if TYPE_CHECKING:
    from llguidance import LLExecutor

_WORD = 32


def make_masks(rows: Iterable[Drawing], vocabulary: int) -> StepMasks:
    """Make the masks of all positions. First positions of rows go side by side, drafts one after the other.

    A draft token that its grammar forbids cannot be drawn, so no mask is made for the positions behind it.
    The same holds behind an answer's end, or if a grammar fails. Those rows still draw like the others. Of ranks that
    share a stage one may fail alone, but all must draw the same rows in the same way.
    """
    step = StepMasks()
    drawing = list(rows)
    going = [row for row in drawing if _is_in_answer(row, step.failed)]
    if going:
        _fill_all(step, going, vocabulary)
    free = [(row.sequence, position) for row in drawing for position in row.positions]
    free = [place for place in free if place not in step.allowed]
    if free:
        step.allowed |= dict.fromkeys(free, Allowed(np.ones(vocabulary, np.bool_), must_end=False))
    return step


def _fill_all(step: StepMasks, going: Sequence[Drawing], vocabulary: int) -> None:
    bits = np.zeros((sum(len(row.positions) for row in going), -(-vocabulary // _WORD)), np.int32)
    places = list(_first_places(going))
    _fill([(row.grammar, place) for row, place in zip(going, places, strict=True)], bits)
    made: list[tuple[Drawing, int, list[bool]]] = []
    for row, place in zip(going, places, strict=True):
        try:
            made.append((row, place, list(_follow(row, bits, place))))
        except RingError as error:
            step.failed[row.sequence] = error
    flags = np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)
    for row, place, must_end in made:
        for at, (position, ends) in enumerate(zip(row.positions, must_end, strict=False)):
            step.allowed[row.sequence, position] = Allowed(flags[place + at], ends)


def _is_in_answer(row: Drawing, failed: dict[int, RingError]) -> bool:
    try:
        return row.grammar.go_to(row.tokens, row.positions[0])
    except RingError as error:
        failed[row.sequence] = error
        return False


def _first_places(rows: Iterable[Drawing]) -> Iterator[int]:
    place = 0
    for row in rows:
        yield place
        place += len(row.positions)


def _follow(row: Drawing, bits: NDArray[np.int32], place: int) -> Iterator[bool]:
    """Step through the row's drafts and back.

    Yields, for each position that was reached, whether the answer must end there.
    """
    grammar, begin = row.grammar, row.grammar.place
    try:
        yield _settle_ends(grammar, bits[place])
        for at in range(1, len(row.positions)):
            between = row.tokens[row.positions[at - 1] : row.positions[at]]
            if not all(map(grammar.try_token, between)):
                return
            _fill([(grammar, place + at)], bits)
            yield _settle_ends(grammar, bits[place + at])
    finally:
        grammar.go_back(begin)


def _fill(matchers: Sequence[tuple[AnswerGrammar, int]], bits: NDArray[np.int32]) -> None:
    from llguidance.numpy import (  # comes with the first grammar
        fill_next_token_bitmask,
        fill_next_token_bitmask_par,
    )

    if len(matchers) == 1:
        ((grammar, place),) = matchers
        fill_next_token_bitmask(grammar.matcher, bits, place)
    else:
        fill_next_token_bitmask_par(
            _executor(), [(grammar.matcher, place) for grammar, place in matchers], bits
        )


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor  # comes with the first grammar

    return LLExecutor(num_threads=min(8, os.cpu_count() or 1))


def _settle_ends(grammar: AnswerGrammar, row: NDArray[np.int32]) -> bool:
    """Replace the tokenizer's ends by the answer's own. Return whether it must end.

    Raises:
        RequestError: the matcher has reached its limits, or no token is possible.
    """
    grammar.check()
    words = row.view(np.uint32)
    theirs = grammar.tokenizer_ends
    may_end = _has(words, theirs[0])
    _clear(words, {*theirs, *grammar.ends})
    must_end = not words.any()
    if must_end and not may_end:
        raise RequestError("The answer cannot continue: its schema allows no token of this model.")
    if may_end:
        for token in grammar.ends or theirs:
            words[token // _WORD] |= np.uint32(1 << token % _WORD)
    return must_end


def _has(words: NDArray[np.uint32], token: int) -> bool:
    return bool(words[token // _WORD] >> np.uint32(token % _WORD) & np.uint32(1))


def _clear(words: NDArray[np.uint32], tokens: Iterable[int]) -> None:
    for token in tokens:
        words[token // _WORD] &= np.uint32(~(1 << token % _WORD) & 0xFFFFFFFF)
