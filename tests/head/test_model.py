"""A model: the choice of the instance that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings
from tests.eventually import run_tasks_until

from mlx_ring.api.app import build_app
from mlx_ring.core.engine_stats import EngineLoad
from mlx_ring.core.errors import NotReady, Overloaded
from mlx_ring.core.generation import GenerateRequest, RequestStream, WaysBack
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.prefill import SEQUENCE_TOKENS
from mlx_ring.head.model import HostedModel
from mlx_ring.head.move_order import unload_for
from mlx_ring.head.router import Lease, Routed, Router, give_back
from mlx_ring.head.served_model import prepare_model, start_name
from mlx_ring.models.model_source import find_model
from mlx_ring.settings.settings_sources import load_settings

IDLE = EngineLoad(is_open=True, sequences=0, tokens_to_read=0, shared_tokens=0)


@dataclass
class Instance:
    """Instance that keeps the ids of its requests."""

    load_now: EngineLoad = IDLE
    is_full: bool = False
    can_shed: bool = False
    request_ids: list[str] = field(default_factory=list[str])

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> EngineLoad:
        assert list(prompts)
        return self.load_now

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        if self.is_full:
            raise Overloaded("Too many wait.", retry_after_s=1.0)
        self.request_ids += [request.request_id for request in requests]
        return []

    def make_room(self, *requests: GenerateRequest) -> bool:
        assert requests
        self.is_full = self.is_full and not self.can_shed
        return not self.is_full


def request(name: str, tokens: int = 1000) -> GenerateRequest:
    return GenerateRequest(name, tuple(range(tokens)), SamplingParams(seed=1))


def load(sequences: int = 0, to_read: int = 0, shared: int = 0, *, is_open: bool = True) -> EngineLoad:
    return EngineLoad(is_open=is_open, sequences=sequences, tokens_to_read=to_read, shared_tokens=shared)


def chosen_place(*loads: EngineLoad) -> int:
    instances = [Instance(each) for each in loads]
    Router(lambda: instances).submit_all(request("a"))
    return next(place for place, instance in enumerate(instances) if instance.request_ids)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_prompt_goes_to_the_instance_that_caches_its_prefix(place: int) -> None:
    loads = [load(shared=900 if here == place else 0) for here in range(3)]
    assert chosen_place(*loads) == place


def test_a_prompt_leaves_its_cached_prefix_if_waiting_costs_more_than_reading() -> None:
    assert chosen_place(load(to_read=2000, shared=900), load()) == 1
    assert chosen_place(load(to_read=800, shared=900), load()) == 0


def test_without_a_cached_prefix_the_least_loaded_instance_answers() -> None:
    assert chosen_place(load(sequences=3), load(sequences=2)) == 1
    assert chosen_place(load(sequences=3), load(to_read=4 * SEQUENCE_TOKENS)) == 0


def test_equally_loaded_instances_take_turns() -> None:
    instances = [Instance(), Instance(), Instance()]
    router = Router(lambda: instances)
    for number in range(6):
        router.submit_all(request(str(number)))
    assert [len(instance.request_ids) for instance in instances] == [2, 2, 2]


def test_requests_of_one_call_go_to_one_instance() -> None:
    instances = [Instance(), Instance()]
    Router(lambda: instances).submit_all(request("a"), request("b"), request("c"))
    assert sorted(len(instance.request_ids) for instance in instances) == [0, 3]


def test_full_and_closed_instances_are_skipped() -> None:
    full, closed, free = Instance(is_full=True), Instance(load(shared=999, is_open=False)), Instance()
    for number in range(3):
        Router(lambda: [full, closed, free]).submit_all(request(str(number)))
    assert len(free.request_ids) == 3
    assert not closed.request_ids


def test_no_request_is_shed_while_another_instance_has_room() -> None:
    full, free = Instance(is_full=True, can_shed=True), Instance(load(to_read=9999))
    Router(lambda: [full, free]).submit_all(request("a"))
    free.is_full = True
    Router(lambda: [free, full]).submit_all(request("b"))
    assert (free.request_ids, full.request_ids) == (["a"], ["b"])


def test_full_instances_are_overloaded_and_none_at_all_is_not_ready() -> None:
    with pytest.raises(Overloaded):
        Router(lambda: [Instance(is_full=True), Instance(is_full=True)]).submit_all(request("a"))
    with pytest.raises(NotReady):
        Router(list).submit_all(request("a"))


class Serving:
    """Instance that serves, or is about to, and records the requests that it takes over."""

    def __init__(self, token_s: float | None, to_read: int = 0, back_s: float | None = 0.0) -> None:
        self.load, self.taken = replace(load(to_read=to_read), token_s=token_s), list[Any]()
        self.engine = self
        self.recoveries = SimpleNamespace(back_s=back_s, refusal=None)

    def load_for(self, _prompts: Iterable[tuple[int, ...]]) -> EngineLoad:
        return self.load

    def take_over(self, lives: Iterable[Any]) -> None:
        self.taken += lives


@dataclass(eq=False)
class Interrupted:
    """Interrupted request that records its way back."""

    sequence: Any
    way: str = ""
    seconds: float | None = None

    def set_way_back(self, _ways: object, way: str, seconds: float | None) -> None:
        self.way, self.seconds = way, seconds


def ignore(*_: object) -> None:
    pass


def ways_of(lost: Serving | None, *serving: Serving) -> list[tuple[str, float | None]]:
    """Return the ways of three requests with the same beginning."""
    lives = [Interrupted(SimpleNamespace(tokens=[*range(100), 100 + number])) for number in range(3)]
    ways = WaysBack("demo", ignore)
    waiting, _ = give_back(cast("Any", lives), cast("Any", lost), cast("Any", serving), ways)
    assert [live.way for live in lives].count("recompute") == len(waiting)
    assert sum(len(each.taken) for each in serving) == 3 - len(waiting)
    return [(live.way, live.seconds) for live in lives]


def test_interrupted_requests_go_to_the_replica_or_wait_by_predicted_time() -> None:
    lost = Serving(0.01, back_s=1.0)
    assert ways_of(lost, Serving(0.01, 50)) == [
        ("replica", pytest.approx(1.51)),
        ("replica", pytest.approx(1.52)),
        ("replica", pytest.approx(1.53)),
    ]
    assert ways_of(lost, Serving(0.01, 500)) == [("recompute", 1.0)] * 3
    assert [way for way, _ in ways_of(lost)] == ["recompute"] * 3


def test_without_predictions_interrupted_requests_go_to_another_replica() -> None:
    for lost in (None, Serving(0.01, back_s=None)):
        assert {way for way, _ in ways_of(lost, Serving(0.01, 9999))} == {"replica"}
    assert ways_of(Serving(None, back_s=1.0), Serving(None, 9999)) == [("replica", None)] * 3


def test_an_instance_that_was_not_measured_counts_as_fast_as_another_one() -> None:
    assert ways_of(Serving(None, back_s=1.0), Serving(0.01, 500)) == [("recompute", 1.0)] * 3
    assert ways_of(Serving(0.01, back_s=9.0), Serving(None))[0] == ("replica", pytest.approx(1.01))


def test_a_model_is_not_unloaded_while_a_request_for_it_is_prepared() -> None:
    settings = load_settings({"model": "demo"})
    served = prepare_model(settings)
    loaded, other = (
        HostedModel(settings, served, on_crash=lambda _: None, missing=lambda: 0) for _ in range(2)
    )
    unused = SimpleNamespace(scheduler=SimpleNamespace(running=0, waiting=0))
    engine = SimpleNamespace(load_for=lambda _: load(is_open=False), stats=lambda: unused, fail=str)  # pyright: ignore[reportUnknownLambdaType]
    loaded.replicas = [cast("Any", SimpleNamespace(service=SimpleNamespace(error=None, engine=engine)))]

    async def prepare(is_prepared: asyncio.Event, *, submits: bool) -> None:
        engine = loaded.engine
        loaded.last_requested -= 60.0
        await is_prepared.wait()
        if submits:
            with pytest.raises(NotReady):
                engine.submit_all(request("a"))
            await asyncio.Event().wait()

    async def act() -> None:
        is_prepared = asyncio.Event()
        tasks = [asyncio.create_task(prepare(is_prepared, submits=submits)) for submits in (True, False)]
        await asyncio.sleep(0)
        assert not await unload_for(other, [loaded, other])
        is_prepared.set()
        await tasks[1]
        assert await unload_for(other, [loaded, other])
        assert not loaded.replicas
        tasks[0].cancel()

    asyncio.run(act())


class LeasedService:
    """Service whose engine is behind a router."""

    def __init__(self) -> None:
        self.twin = TwinService()
        self.router = Router(self._engines)
        self.leased: list[bool] = []
        """At each submission, True if the model was leased."""

    def _engines(self) -> list[Routed]:
        self.leased.append(self.router.is_leased)
        return [self.twin.engine]

    @property
    def engine(self) -> Lease:
        return self.router.leased()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.twin, name)


@pytest.mark.parametrize("stream", [True, False])
def test_model_is_leased_from_the_start_of_a_preparation_to_the_submission(*, stream: bool) -> None:
    service = LeasedService()
    app = build_app(TwinCatalog(cast("TwinService", service)), make_api_settings())
    chat = {"messages": [{"role": "user", "content": "Hello."}], "stream": stream}

    async def run() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            send = partial(client.post, "/v1/chat/completions")
            # Each request has a task of its own, as in a server.
            answer = await asyncio.ensure_future(send(json=chat))
            assert (answer.status_code, service.leased) == (200, [True])
            assert not service.router.is_leased
            refused = await asyncio.ensure_future(
                send(json=chat | {"chat_template_kwargs": {"refuse": True}})
            )
            assert (refused.status_code, service.leased) == (400, [True])
            await run_tasks_until(lambda: not service.router.is_leased)

    asyncio.run(run())


def test_the_digest_of_a_model_is_that_of_the_weights_that_serve(tiny_model: Path) -> None:
    """Replace the files of a model that serves: its digest is read again, for example for a plan, and is another."""
    settings = load_settings({"model": str(tiny_model)})
    hosted = HostedModel(settings, prepare_model(settings), on_crash=lambda _: None, missing=lambda: 0)
    unloaded = hosted.metadata["digest"]
    engine = SimpleNamespace(limits=replace(hosted.served.limits, model="a-1"))
    hosted.replicas = [cast("Any", SimpleNamespace(service=SimpleNamespace(error=None, engine=engine)))]
    assert (unloaded, hosted.metadata["digest"]) == (hosted.served.digest, "a-1")


def test_another_start_finds_a_folder_or_file_by_its_path_and_other_models_by_their_name(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    folder = find_model(tiny_model.name)
    assert start_name(tiny_model.name, folder) == str(tiny_model)
    assert start_name("a file.gguf", replace(folder, kind="file")) == str(tiny_model.parent / "a file.gguf")
    assert start_name("demo", find_model("demo")) == "demo"
    assert start_name("qwen3:8b", replace(folder, kind="hub")) == "qwen3:8b"
