"""What is asked of the server: prompts, lengths and times of arrival, all from one seed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
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
    """So many tokens, or a number drawn evenly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """`128` or `64-256`. Raises `ValueError` for anything else."""
        low, _, high = text.partition("-")
        parsed = cls(int(low), int(high or low))
        if not 1 <= parsed.low <= parsed.high:
            raise ValueError(text)
        return parsed

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """A load as the person asked for it."""

    requests: int
    prompt_tokens: Range
    output_tokens: Range
    shared_prefix: int = 0
    """Tokens that all prompts begin with; they count as part of the prompt."""
    concurrency: int = 1
    """Requests under way at once, where no rate is given."""
    rate: float | None = None
    """Requests a second, arriving at random (Poisson), however many are under way."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    number: int
    prompt: list[int] | str
    output_tokens: int
    arrives_s: float
    """After the start; 0 where requests follow each other."""


def make_jobs(workload: Workload, vocabulary: int | None, *, first: int = 0) -> Iterator[Job]:
    """The load's requests. Prompts are token ids, or words where the vocabulary is not known.

    `first` is the number of the first one: other numbers give other prompts, and the same shared prefix.
    """
    shared = _token_ids(f"{workload.seed} shared", workload.shared_prefix, vocabulary)
    arrivals = Random(f"{workload.seed} arrivals {first}")
    arrives_s = 0.0
    for number in range(first, first + workload.requests):
        lengths = Random(f"{workload.seed} lengths {number}")
        own = max(1, workload.prompt_tokens.draw(lengths) - workload.shared_prefix)
        prompt = [*shared, *_token_ids(f"{workload.seed} {number}", own, vocabulary)]
        yield Job(
            number,
            prompt if vocabulary is not None else " ".join(_WORDS[token] for token in prompt),
            workload.output_tokens.draw(lengths),
            arrives_s,
        )
        if workload.rate is not None:
            arrives_s += arrivals.expovariate(workload.rate)


def _token_ids(seed: str, count: int, vocabulary: int | None) -> list[int]:
    """Into the vocabulary, or into our own words."""
    random = Random(seed)
    return [random.randrange(vocabulary or len(_WORDS)) for _ in range(count)]
