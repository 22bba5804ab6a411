"""Which of a model's instances answers a request: by what it has cached of the prompt, and by what it has to do.

Each instance is asked what it would have to compute before the request's first token, in tokens: what is waiting to
be read there, what the request itself would add after the cached beginning, and for each running sequence as much as
it slows a prompt down. The least wins. So a chat goes back to where its KV is, until that instance has more to do
than reading the chat elsewhere would cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_ring.core.errors import NotReady, Overloaded, RingError
from mlx_ring.core.generation import GenerateRequest, RequestStream

SEQUENCE_TOKENS = 64
"""What a running sequence costs a newcomer, in tokens to read: decode steps go between its chunks."""


@dataclass(frozen=True, slots=True)
class Load:
    """How one instance stands towards some prompts."""

    is_open: bool
    """Whether it answers at all."""
    sequences: int
    """That run or wait there."""
    tokens_to_read: int
    """Of their prompts."""
    shared_tokens: int
    """Of the new prompts, that are cached there."""

    def cost(self, prompt_tokens: int) -> int:
        """Of a prompt's first token, in tokens to compute."""
        own = prompt_tokens - self.shared_tokens
        return self.tokens_to_read + own + SEQUENCE_TOKENS * self.sequences


class Routed(Protocol):
    """An engine, as the router uses it."""

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> Load: ...
    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]: ...
    def make_room(self, *requests: GenerateRequest) -> bool:
        """Whether there are places for these, others having given way where need be."""
        ...


class Router:
    """Answers with one of several engines."""

    def __init__(self, engines: Callable[[], Sequence[Routed]]) -> None:
        """`engines` gives those that serve now."""
        self._engines = engines
        self._turn = 0
        self.rejected: Counter[str] = Counter()
        """By error, requests that were refused."""

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Start to answer requests that belong together, on one instance.

        Raises:
            RequestError: the model cannot take one of them, or the server never takes so many.
            Overloaded: too many requests wait everywhere.
            NotReady: no instance can answer.
        """
        try:
            return self._submit(requests)
        except RingError as error:
            self.rejected[type(error).__name__] += len(requests)
            raise

    def _submit(self, requests: Sequence[GenerateRequest]) -> list[RequestStream]:
        refusal: Overloaded | None = None
        engines = self._by_cost(requests)
        for engine in engines:
            try:
                return engine.submit_all(*requests)
            except Overloaded as error:
                refusal = refusal or error
        for engine in engines:
            if engine.make_room(*requests):
                return engine.submit_all(*requests)
        raise refusal or NotReady("No instance of the model can answer now.")

    def _by_cost(self, requests: Sequence[GenerateRequest]) -> list[Routed]:
        """Those that answer, the cheapest first; of alike ones, in turns."""
        engines = self._engines()
        if len(engines) < 2:  # noqa: PLR2004 - no choice
            return list(engines)
        self._turn += 1
        turned = [engines[(place + self._turn) % len(engines)] for place in range(len(engines))]
        prompts = list(dict.fromkeys(request.prompt_tokens for request in requests))
        tokens = max((len(prompt) for prompt in prompts), default=0)
        loads = [engine.load_for(prompts) for engine in turned]
        ways = sorted(zip(loads, turned, strict=True), key=lambda way: way[0].cost(tokens))
        return [engine for load, engine in ways if load.is_open]
