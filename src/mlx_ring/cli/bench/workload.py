"""What is asked of the server: prompts, lengths and times of arrival, all from one seed. Pure."""

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
    """So many tokens, or a number drawn evenly from `low` to `high`."""

    low: int
    high: int

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


@dataclass(frozen=True, slots=True)
class Words:
    """How a server's tokenizer counts our words."""

    per_word: float = 1.0
    """Tokens."""
    fixed: float = 0.0
    """Tokens that every prompt has besides, such as a chat template's."""

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> Words:
        """From two prompts, each as (words, tokens)."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            return cls(max(few[1], 1) / few[0])
        return cls(per_word, max(0.0, few[1] - per_word * few[0]))

    def whole_prompt(self, tokens: int) -> int:
        """Words of a prompt of so many tokens, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))

    def part(self, tokens: int) -> int:
        """Words of a part of a prompt."""
        return round(tokens / self.per_word)


_ONE_EACH = Words()


def make_jobs(
    workload: Workload, vocabulary: int | None, *, first: int = 0, words: Words = _ONE_EACH
) -> Iterator[Job]:
    """The load's requests. Prompts are token ids, or words where the vocabulary is not known.

    Args:
        workload: the load.
        vocabulary: how many token ids there are.
        first: number of the first request; other numbers give other prompts, and the same shared prefix.
        words: how words are counted, where prompts are words.
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
    """Numbers of tokens, or of our own words."""
    random = Random(seed)
    return [random.randrange(vocabulary or len(_WORDS)) for _ in range(count)]


def as_text(numbers: Iterable[int]) -> str:
    return " ".join(_WORDS[number] for number in numbers)
