"""Which instance answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from mlx_ring.core.errors import NotReady, Overloaded
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.router import SEQUENCE_TOKENS, Load, Router

IDLE = Load(is_open=True, sequences=0, tokens_to_read=0, shared_tokens=0)


@dataclass
class Instance:
    """Notes what it was asked."""

    load_now: Load = IDLE
    is_full: bool = False
    gives_way: bool = False
    asked: list[str] = field(default_factory=list[str])

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> Load:
        assert list(prompts)
        return self.load_now

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        if self.is_full:
            raise Overloaded("Too many wait.", retry_after_s=1.0)
        self.asked += [request.request_id for request in requests]
        return []

    def make_room(self, *requests: GenerateRequest) -> bool:
        assert requests
        self.is_full = self.is_full and not self.gives_way
        return not self.is_full


def request(name: str, tokens: int = 1000) -> GenerateRequest:
    return GenerateRequest(name, tuple(range(tokens)), SamplingParams(seed=1))


def with_(sequences: int = 0, to_read: int = 0, shared: int = 0, *, is_open: bool = True) -> Load:
    return Load(is_open=is_open, sequences=sequences, tokens_to_read=to_read, shared_tokens=shared)


def asked_first(*loads: Load) -> int:
    instances = [Instance(load) for load in loads]
    Router(lambda: instances).submit_all(request("a"))
    return next(place for place, instance in enumerate(instances) if instance.asked)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_prompt_goes_where_its_beginning_is_cached(place: int) -> None:
    loads = [with_(shared=900 if here == place else 0) for here in range(3)]
    assert asked_first(*loads) == place


def test_a_prompt_goes_elsewhere_when_reading_it_there_costs_less_than_waiting() -> None:
    assert asked_first(with_(to_read=2000, shared=900), with_()) == 1
    assert asked_first(with_(to_read=800, shared=900), with_()) == 0


def test_of_two_with_nothing_cached_the_one_with_less_to_do_answers() -> None:
    assert asked_first(with_(sequences=3), with_(sequences=2)) == 1
    assert asked_first(with_(sequences=3), with_(to_read=4 * SEQUENCE_TOKENS)) == 0


def test_alike_instances_answer_in_turns() -> None:
    instances = [Instance(), Instance(), Instance()]
    router = Router(lambda: instances)
    for number in range(6):
        router.submit_all(request(str(number)))
    assert [len(instance.asked) for instance in instances] == [2, 2, 2]


def test_requests_that_belong_together_stay_together() -> None:
    instances = [Instance(), Instance()]
    Router(lambda: instances).submit_all(request("a"), request("b"), request("c"))
    assert sorted(len(instance.asked) for instance in instances) == [0, 3]


def test_one_that_is_full_or_closed_is_passed_over() -> None:
    full, closed, free = Instance(is_full=True), Instance(with_(shared=999, is_open=False)), Instance()
    for number in range(3):
        Router(lambda: [full, closed, free]).submit_all(request(str(number)))
    assert len(free.asked) == 3
    assert not closed.asked


def test_nobody_gives_way_while_another_has_places() -> None:
    full, free = Instance(is_full=True, gives_way=True), Instance(with_(to_read=9999))
    Router(lambda: [full, free]).submit_all(request("a"))
    free.is_full = True
    Router(lambda: [free, full]).submit_all(request("b"))
    assert (free.asked, full.asked) == (["a"], ["b"])


def test_when_all_are_full_or_none_is_there_it_says_so() -> None:
    with pytest.raises(Overloaded):
        Router(lambda: [Instance(is_full=True), Instance(is_full=True)]).submit_all(request("a"))
    with pytest.raises(NotReady):
        Router(list).submit_all(request("a"))
