"""Comparison of a disturbed answer with the undisturbed one. Only a tie of the noised scores explains a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import mlx.core as mx
import numpy as np
from tests.end_to_end.equality import TIE
from tests.end_to_end.reference import WholeModel
from tests.faults.dialects import PENALTIES, TEMPERATURE, Answer, Choice, Question
from tests.faults.models import tokens_of
from tests.worker.sampler.reference import adjusted

from mlx_ring.api.openai.sampling import with_derived_seed
from mlx_ring.core.types import SamplingParams
from mlx_ring.rpc.sampling import encode_sampling
from mlx_ring.worker.sampler import Parameters, SamplerRow
from mlx_ring.worker.sampler.draw import gumbel, keys

LOGPROB_TOLERANCE = 1e-3
VECTOR_TOLERANCE = 1e-5
"""Largest difference between numbers of vectors of length 1."""


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
        echo = question.prompt if question.echoes else ""
        found = [
            self._compare(_sampling(question, index), prompt, *pair, echo)
            for index, pair in enumerate(zip(expected.choices, answer.choices, strict=True))
        ]
        worst = max(found, key=lambda each: ("equal", "tie", "unexplained").index(each.kind))
        if worst.kind == "equal" and _usage(expected) != _usage(answer):
            return Compared("unexplained", f"usage {_usage(answer)} instead of {_usage(expected)}")
        return worst

    def _compare(
        self, sampling: SamplingParams, prompt: Sequence[int], expected: Choice, choice: Choice, echo: str
    ) -> Compared:
        if expected.text == choice.text:
            return _same_text(expected, choice)
        same = len(
            list(takewhile(lambda pair: pair[0] == pair[1], zip(expected.text, choice.text, strict=False)))
        )
        if not len(echo) <= same < min(len(expected.text), len(choice.text)):
            return Compared("unexplained", f"{choice.text!r} instead of {expected.text!r}")
        before = [*prompt, *tokens_of(expected.text[len(echo) : same])]
        first, second = tokens_of(expected.text[same] + choice.text[same])
        gap = self._gap(sampling, before, len(prompt), first, second)
        detail = f"after {same} tokens of {expected.text!r}: {choice.text!r}, scores differ by {gap:.2g}"
        return Compared("tie" if gap <= TIE else "unexplained", detail)

    def _gap(
        self, sampling: SamplingParams, before: Sequence[int], prompt: int, first: int, second: int
    ) -> float:
        """Return the distance of two tokens' scores: of the logits, or of logits over temperature plus noise.

        Args:
            sampling: the answer's parameters.
            before: all tokens before the two.
            prompt: number of the prompt's tokens among them.
            first: one token.
            second: the other one.
        """
        parameters = Parameters.from_message(encode_sampling(sampling))
        row = SamplerRow(parameters, sampling.seed, len(before), before, prompt)
        logits = adjusted(np.array(self._whole.logits(before), np.float64), row)[[first, second]]
        if sampling.temperature:
            words = keys([(sampling.seed, len(before))])[:, :2]
            noise = np.array(gumbel(words, mx.array([[first, second]])))[0]
            logits = logits / sampling.temperature + noise
        return float(abs(logits[0] - logits[1]))


def _sampling(question: Question, choice: int) -> SamplingParams:
    if question.seed is None:
        return SamplingParams()
    params = SamplingParams(temperature=TEMPERATURE, seed=question.seed)
    if question.has_penalties:
        params = replace(params, **PENALTIES)
    return with_derived_seed(params, choice)


def _usage(answer: Answer) -> tuple[int, int]:
    return answer.prompt_tokens, answer.completion_tokens


def _same_text(expected: Choice, choice: Choice) -> Compared:
    if choice.finish != expected.finish:
        return Compared("unexplained", f"it ended with {choice.finish} instead of {expected.finish}")
    if choice.names != expected.names:
        return Compared("unexplained", f"tokens {choice.names} instead of {expected.names}")
    if len(choice.logprobs) != len(expected.logprobs):
        return Compared("unexplained", f"{len(choice.logprobs)} log-probabilities")
    if (apart := _distance(expected.logprobs, choice.logprobs)) > LOGPROB_TOLERANCE:
        return Compared("unexplained", f"log-probabilities differ by {apart:.2g}")
    if (apart := _distance(expected.vector, choice.vector)) > VECTOR_TOLERANCE:
        return Compared("unexplained", f"vectors differ by {apart:.2g}")
    return Compared("equal")


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference between two equally long lists' numbers."""
    return max((abs(one - other) for one, other in zip(first, second, strict=True)), default=0.0)
