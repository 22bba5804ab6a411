"""Workload of a load test: prompts, lengths and arrival times, all from one seed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

_WORDS = [
    "river",
    "stone",
    "lamp",
    "winter",
    "garden",
    "letter",
    "copper",
    "window",
    "signal",
    "harbour",
    "thread",
    "meadow",
    "engine",
    "violet",
    "market",
    "paper",
    "shadow",
    "ladder",
    "forest",
    "mirror",
    "island",
    "candle",
    "bridge",
    "summer",
    "button",
    "planet",
    "silver",
    "needle",
    "orchard",
    "valley",
]


@dataclass(frozen=True, slots=True)
class Range:
    """Range of token counts, uniformly distributed from `low` to `high`; equal bounds give a fixed count."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Load that the user requests."""

    requests: int
    prompt_tokens: Range
    output_tokens: Range
    shared_prefix: int = 0
    """Length in tokens of the prefix of all prompts; it counts as part of the prompt."""
    concurrency: int = 1
    """Maximum number of concurrent requests, without a rate."""
    rate: float | None = None
    """Requests per second with random (Poisson) arrivals, whatever the number in progress."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    number: int
    prompt: list[int] | str
    output_tokens: int
    arrives_s: float
    """Arrival time after the start; 0 without a rate."""


@dataclass(frozen=True, slots=True)
class Words:
    """Number of tokens that a server's tokenizer makes of words."""

    per_word: float = 1.0
    """Tokens per word."""
    fixed: float = 0.0
    """Additional tokens of every prompt, such as those of a chat template."""

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> Words:
        """Return the counts measured with two prompts, each given as (words, tokens)."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            return cls(max(few[1], 1) / few[0])
        return cls(per_word, max(0.0, few[1] - per_word * few[0]))

    def whole_prompt(self, tokens: int) -> int:
        """Return the number of words for a prompt of that many tokens, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))

    def part(self, tokens: int) -> int:
        """Return the number of words for a part of a prompt."""
        return round(tokens / self.per_word)


_ONE_EACH = Words()


def make_jobs(
    workload: Workload, vocabulary: int | None, *, first: int = 0, words: Words = _ONE_EACH
) -> Iterator[Job]:
    """Yield the requests of a workload. Prompts are token ids, or words if the vocabulary is unknown.

    Args:
        workload: the workload.
        vocabulary: the number of token ids; None if unknown.
        first: the number of the first request; other numbers give other prompts with the same shared prefix.
        words: the tokens per word, for prompts of words.
    """
    shared = workload.shared_prefix if vocabulary is not None else words.part(workload.shared_prefix)
    beginning = draw(f"{workload.seed} shared", shared, vocabulary)
    arrivals = Random(f"{workload.seed} arrivals {first}")
    arrives_s = 0.0
    for number in range(first, first + workload.requests):
        lengths = Random(f"{workload.seed} lengths {number}")
        length = workload.prompt_tokens.draw(lengths)
        length = length if vocabulary is not None else words.whole_prompt(length)
        prompt = [*beginning, *draw(f"{workload.seed} {number}", max(1, length - shared), vocabulary)]
        yield Job(
            number,
            prompt if vocabulary is not None else as_text(prompt),
            workload.output_tokens.draw(lengths),
            arrives_s,
        )
        if workload.rate is not None:
            arrives_s += arrivals.expovariate(workload.rate)


def draw(seed: str, count: int, vocabulary: int | None = None) -> list[int]:
    """Return random token ids, or without a vocabulary random indexes into `_WORDS`."""
    random = Random(seed)
    return [random.randrange(vocabulary or len(_WORDS)) for _ in range(count)]


def as_text(numbers: Iterable[int]) -> str:
    return " ".join(_WORDS[number] for number in numbers)
