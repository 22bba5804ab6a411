"""Comparison of a disturbed answer with the undisturbed one. Only a tie of the noised scores explains a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import cast

import mlx.core as mx
from tests.end_to_end.equality import TIE
from tests.end_to_end.reference import WholeModel
from tests.faults.dialects import TEMPERATURE, Answer, Choice, Question
from tests.faults.models import tokens_of

from mlx_ring.api.openai.sampling import with_derived_seed
from mlx_ring.core.types import SamplingParams
from mlx_ring.worker.sampler.draw import gumbel, keys

LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Compared:
    """Result of a comparison."""

    kind: str
    """`equal`, `tie` or `unexplained`."""
    detail: str = ""


class Judge:
    """Judge of the answers of one model."""

    def __init__(self, folder: Path) -> None:
        self._whole = WholeModel(folder)

    def compare(
        self, question: Question, prompt: Sequence[int], expected: Answer, answer: Answer
    ) -> Compared:
        """Compare two answers to a question, whose prompt has these tokens."""
        if len(answer.choices) != len(expected.choices):
            return Compared("unexplained", f"{len(answer.choices)} choices")
        found = [
            self._compare(_sampling(question, index), prompt, *pair)
            for index, pair in enumerate(zip(expected.choices, answer.choices, strict=True))
        ]
        worst = max(found, key=lambda each: ("equal", "tie", "unexplained").index(each.kind))
        if worst.kind == "equal" and _usage(expected) != _usage(answer):
            return Compared("unexplained", f"usage {_usage(answer)} instead of {_usage(expected)}")
        return worst

    def _compare(
        self, sampling: SamplingParams, prompt: Sequence[int], expected: Choice, choice: Choice
    ) -> Compared:
        if expected.text == choice.text:
            return _same_text(expected, choice)
        same = len(
            list(takewhile(lambda pair: pair[0] == pair[1], zip(expected.text, choice.text, strict=False)))
        )
        if same == min(len(expected.text), len(choice.text)):
            return Compared("unexplained", f"{choice.text!r} instead of {expected.text!r}")
        before = [*prompt, *tokens_of(expected.text[:same])]
        first, second = tokens_of(expected.text[same] + choice.text[same])
        gap = self._gap(sampling, before, first, second)
        detail = f"after {same} tokens of {expected.text!r}: {choice.text!r}, scores differ by {gap:.2g}"
        return Compared("tie" if gap <= TIE else "unexplained", detail)

    def _gap(self, sampling: SamplingParams, before: Sequence[int], first: int, second: int) -> float:
        """Return the distance of two tokens' scores: of the logits, or of logits over temperature plus noise."""
        logits = self._whole.logits(before)[mx.array([first, second])]
        if sampling.temperature:
            noise = gumbel(keys([(sampling.seed, len(before))])[:, :2], mx.array([[first, second]]))[0]
            logits = logits / sampling.temperature + noise
        return abs(cast("float", (logits[0] - logits[1]).item()))


def _sampling(question: Question, choice: int) -> SamplingParams:
    if question.seed is None:
        return SamplingParams()
    return with_derived_seed(replace(SamplingParams(temperature=TEMPERATURE), seed=question.seed), choice)


def _usage(answer: Answer) -> tuple[int, int]:
    return answer.prompt_tokens, answer.completion_tokens


def _same_text(expected: Choice, choice: Choice) -> Compared:
    if choice.finish != expected.finish:
        return Compared("unexplained", f"it ended with {choice.finish} instead of {expected.finish}")
    if choice.names != expected.names:
        return Compared("unexplained", f"tokens {choice.names} instead of {expected.names}")
    pairs = zip(expected.logprobs, choice.logprobs, strict=True)
    apart = max((abs(first - second) for first, second in pairs), default=0.0)
    if apart > LOGPROB_TOLERANCE:
        return Compared("unexplained", f"log-probabilities differ by {apart:.2g}")
    return Compared("equal")
