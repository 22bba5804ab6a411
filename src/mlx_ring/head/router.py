"""Choice of the engine that answers a request, or that continues it after a loss."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mlx_ring.core.engine_stats import EngineLoad
from mlx_ring.core.errors import NotReady, Overloaded, RingError
from mlx_ring.core.generation import GenerateRequest, RequestStream, WaysBack
from mlx_ring.core.traces import REQUEST_TASK
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.live_request import LiveRequest
from mlx_ring.engine.prefill import SEQUENCE_TOKENS
from mlx_ring.engine.resumption import Destination, choose_destination
from mlx_ring.head.instance_view import InstanceService


class Routed(Protocol):
    """An engine that the router can choose."""

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> EngineLoad: ...
    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]: ...
    def make_room(self, *requests: GenerateRequest) -> bool:
        """Shed other clients' requests for these, if fairness allows it; return False if not."""
        ...


class Router:
    """A router that gives each request to the engine with the lowest cost.

    The cost is the number of tokens that an engine would compute before the request's first token. These are its waiting
    prompts, the request's tokens after the cached prefix, and an amount for each running sequence. A conversation therefore
    returns to the engine that holds its KV cache, unless that engine is too busy.
    """

    def __init__(self, engines: Callable[[], Sequence[Routed]]) -> None:
        """Route among the engines that `engines` returns at the time."""
        self._engines = engines
        self._turn = 0
        self.rejected: Counter[str] = Counter()
        """Requests that were refused, by the error's name."""
        self._leases: set[Lease] = set()

    def leased(self) -> Lease:
        """Return a lease, and count it until its request is submitted, or ends.

        Preparing a request may take long: its prompt is tokenized, and its grammar is made.
        """
        lease, task = Lease(self), REQUEST_TASK.get()
        if task is None or task.done():
            task = asyncio.current_task()
        if task is not None:
            self._leases.add(lease)
            task.add_done_callback(lambda _: self.end(lease))
        return lease

    def end(self, lease: Lease) -> None:
        self._leases.discard(lease)

    @property
    def is_leased(self) -> bool:
        """True if a request is about to be submitted."""
        return bool(self._leases)

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Start to answer requests that belong together, on one instance.

        Raises:
            RequestError: the model cannot serve one of them, or there are more than the server ever admits.
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
        """Return the engines that answer, the cheapest first; equal ones in turn."""
        engines = self._engines()
        if len(engines) < 2:  # noqa: PLR2004 - no choice
            return list(engines)
        self._turn += 1
        turned = [engines[(place + self._turn) % len(engines)] for place in range(len(engines))]
        prompts = list(dict.fromkeys(request.prompt_tokens for request in requests))
        tokens = max((len(prompt) for prompt in prompts), default=0)
        loads = [engine.load_for(prompts) for engine in turned]
        by_load = sorted(zip(loads, turned, strict=True), key=lambda pair: _cost(pair[0], tokens))
        return [engine for load, engine in by_load if load.is_open]


class Lease:
    """Access to a router for one request, whose model stays loaded until the request is submitted."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Submit requests as the router does, and end the lease."""
        try:
            return self._router.submit_all(*requests)
        finally:
            self._router.end(self)


def _cost(load: EngineLoad, prompt_tokens: int) -> int:
    """Return the cost of a prompt's first token, in tokens to compute."""
    own = prompt_tokens - load.shared_tokens
    return load.tokens_to_read + own + SEQUENCE_TOKENS * load.sequences


def give_back(
    lives: Sequence[LiveRequest],
    lost: InstanceService | None,
    serving: Sequence[InstanceService],
    ways: WaysBack,
) -> tuple[list[LiveRequest], float]:
    """Give each interrupted request to the instance that is predicted to continue it first.

    Args:
        lives: the requests, in their order.
        lost: their instance, which will be loaded again; None: no request waits for it while another one serves.
        serving: the instances that serve.
        ways: receives the ways of requests that had begun.

    Returns:
        The requests that wait for the lost instance, and the predicted seconds until it serves.
    """
    own, waiting = _own_destination(lost), list[LiveRequest]()
    others = [(_destination(service.engine), service.engine) for service in serving]
    speeds = [each.token_s for each in (own, *(other for other, _ in others)) if each.token_s is not None]
    for each in (own, *(other for other, _ in others)):
        # An instance that has not computed a prompt yet is taken to be as fast as the slowest other one.
        each.token_s = max(speeds, default=None) if each.token_s is None else each.token_s
    for live in lives:
        tokens = tuple(live.sequence.tokens)
        chosen = choose_destination(tokens, [other for other, _ in others], own) if others else own
        live.set_way_back(ways, chosen.way, own.ready_s if chosen is own else chosen.seconds(tokens))
        chosen.give(tokens)
        if chosen is own:
            waiting.append(live)
        for other, engine in others:
            if chosen is other:
                engine.take_over([live])
    return waiting, own.ready_s or 0.0


def _own_destination(lost: InstanceService | None) -> Destination:
    """Return a lost instance, once it is back; its time is unknown if it is None, or was lost too often."""
    if lost is None or lost.recoveries.refusal is not None:
        return Destination("recompute", None, None, 0)
    return Destination("recompute", lost.recoveries.back_s, lost.engine.load_for(()).token_s, 0)


def _destination(engine: Engine) -> Destination:
    """Return another instance, which serves."""

    def shared(tokens: tuple[int, ...]) -> int:
        return engine.load_for([tokens]).shared_tokens

    load = engine.load_for(())
    ahead_tokens = load.tokens_to_read + SEQUENCE_TOKENS * load.sequences
    return Destination("replica", 0.0, load.token_s, ahead_tokens, shared)
