"""Models that a head fetches and lists: when it fetches, with which limits, and what it says of those it cannot serve."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from huggingface_hub import constants
from tests.core.fake_hub import COMMIT
from tests.eventually import run_tasks_until

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import Conflict, ModelCorrupt, ModelUnsupported, NotReady
from mlx_ring.head import models
from mlx_ring.head.model import HostedModel
from mlx_ring.head.models import Catalog
from mlx_ring.head.served_model import ServedModel, prepare_model
from mlx_ring.host.energy import EnergyPerToken, PartEnergy
from mlx_ring.host.private_files import is_held
from mlx_ring.models.fetching import Fetches
from mlx_ring.models.model_folder import PullProgress
from mlx_ring.settings.settings_sources import load_settings

HUB_ID = "mlx-community/Qwen3-8B-4bit"
MEMORY = 10**9


class Machine:
    """Disk and hub of a head whose cluster has `MEMORY`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: set[str]) -> None:
        self.here = here
        """Names of the models that need no fetch."""
        self.fetched: list[tuple[str, object]] = []
        """Fetched models, each with the memory that its fetch was limited to."""
        monkeypatch.setattr(models, "must_be_fetched", lambda name: name not in self.here)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        monkeypatch.setattr(Fetches, "fetch", self.fetch)
        cluster = SimpleNamespace(machines=SimpleNamespace(nodes=[SimpleNamespace(memory_bytes=MEMORY)]))
        monkeypatch.setattr(Catalog, "running", lambda *_: cluster)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]

    async def fetch(
        self,
        name: str,
        *,
        memory_bytes: int | None,
        then: Callable[[], Coroutine[Any, Any, None]],
        **_: object,
    ) -> None:
        self.fetched.append((name, memory_bytes))
        self.here.add(name)
        await then()


def make_catalog(nodes: int = 1) -> Catalog:
    settings = load_settings({"model": "demo", "nodes": nodes})
    return Catalog(settings, [], cast("Any", None), cast("Any", None))


def ignore(_: PullProgress) -> None:
    """Watch without interest."""


def test_a_pull_of_a_model_that_another_program_has_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> list[str]:
        await make_catalog().pull("qwen3:8b", force=False, report=ignore)
        return listed

    listed: list[str] = []

    async def record(_: Catalog, name: str) -> None:
        listed.append(name)

    machine = Machine(monkeypatch, here={"qwen3:8b"})
    monkeypatch.setattr(Catalog, "_listed", record)
    assert asyncio.run(act()) == ["qwen3:8b"]
    assert machine.fetched == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_load_is_limited_to_the_memory_of_the_cluster(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        with pytest.raises(Conflict, match="cannot be served here: It is damaged"):
            await make_catalog(nodes).load("qwen3:8b")

    async def refuse(_: Catalog, __: str) -> None:
        raise ModelCorrupt("It is damaged.")

    machine = Machine(monkeypatch, here=set())
    monkeypatch.setattr(Catalog, "_listed", refuse)
    asyncio.run(act())
    assert machine.fetched == [(HUB_ID, MEMORY)]


def test_a_model_is_not_deleted_while_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        with pytest.raises(Conflict, match=f"{HUB_ID} is being downloaded: cancel the download"):
            await make_catalog().delete("qwen3:8b")

    monkeypatch.setattr(Fetches, "is_running", lambda _, name: name == HUB_ID)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    asyncio.run(act())


def test_a_loaded_model_is_not_deleted_whatever_else_is_loaded_or_moves() -> None:
    async def act() -> None:
        catalog: Any = make_catalog()
        model = SimpleNamespace(names=(HUB_ID,))
        catalog._hosted = [SimpleNamespace(served=model, replicas=[1], is_awaited=False)]
        async with catalog._order.turn():
            with pytest.raises(Conflict, match=f"{HUB_ID} is served by this server: unload it first"):
                await catalog.delete("qwen3:8b")

    asyncio.run(act())


class Lacking:
    """Machines of which one is missing."""

    def __init__(self) -> None:
        self.awaited, self.has_joined, self.has_left = list[int](), asyncio.Event(), asyncio.Event()
        self.is_placing = False

    def lacks(self, nodes: int) -> bool:
        return bool(nodes) and not self.has_joined.is_set()

    async def attend(self, nodes: int) -> None:
        self.awaited.append(nodes)
        await self.has_joined.wait()

    async def wait_until_lacking(self, _nodes: int) -> None:
        await self.has_left.wait()

    async def candidate_nodes(self, _declared: object, _nodes: int) -> list[None]:
        self.is_placing = True
        await asyncio.get_running_loop().create_future()
        raise AssertionError


def with_unloaded(catalog: Any, machines: object) -> HostedModel:
    """Add an unloaded model to a catalog, and give it machines."""
    settings = load_settings({"model": "demo"})
    hosted = HostedModel(settings, prepare_model(settings), print, lambda: 0)
    catalog._hosted, catalog._machines = [hosted], machines
    return hosted


def test_while_a_load_waits_for_a_machine_others_may_load_and_it_can_be_given_up() -> None:
    async def act() -> None:
        catalog, machines = make_catalog(), Lacking()
        hosted = with_unloaded(catalog, machines)
        assert hosted.state == "unloaded"
        asking = asyncio.create_task(catalog.ready(hosted))
        await run_tasks_until(lambda: machines.awaited)
        assert hosted.state == "loading"
        async with cast("Any", catalog)._order.turn():
            assert not asking.done()
        await catalog.unload(hosted, force=True)
        with pytest.raises(NotReady, match=r"demo.* was unloaded\."):
            await asking
        assert hosted.state == "unloaded"

    asyncio.run(act())


def test_a_request_for_a_model_that_is_being_unloaded_loads_it_again() -> None:
    async def act() -> None:
        catalog, machines = make_catalog(), Lacking()
        hosted: Any = with_unloaded(catalog, machines)
        hosted.replicas = [cast("Any", None)]
        hosted._stopping = asyncio.create_task(machines.has_left.wait())
        asking = asyncio.create_task(catalog.ready(hosted))
        await run_tasks_until(lambda: asking.done() or machines.awaited)
        assert not asking.done()
        asking.cancel()
        machines.has_left.set()

    asyncio.run(act())


def test_others_may_load_once_the_machines_of_a_load_have_left() -> None:
    async def act() -> None:
        catalog, machines = make_catalog(), Lacking()
        machines.has_joined.set()
        hosted_elsewhere = with_unloaded(catalog, machines)
        hosted = with_unloaded(catalog, machines)
        cast("Any", catalog)._hosted.append(hosted_elsewhere)
        asking = asyncio.create_task(catalog.ready(hosted))
        await run_tasks_until(lambda: machines.is_placing)
        other = asyncio.create_task(catalog.unload(hosted_elsewhere, force=False))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not other.done()
        machines.has_left.set()
        await other
        asking.cancel()

    asyncio.run(act())


def test_a_replica_that_takes_the_place_of_another_one_knows_the_layers_of_its_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "check_room", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]

    async def act() -> None:
        catalog: Any = make_catalog()
        hosted = with_unloaded(catalog, Lacking())
        old = catalog._make_replica(hosted, Lacking(), Meter(), nodes=1, replicas=1)
        old.had = {"n1": frozenset({0, 1})}
        assert catalog._replacement(hosted, old).had == old.had

    asyncio.run(act())


class WaitingReplica:
    """Replica that waits for machines."""

    def __init__(self) -> None:
        recoveries = SimpleNamespace(refusal=None)
        self.service = SimpleNamespace(error=NotReady("It is being loaded."), recoveries=recoveries)
        self.is_running = False

    async def run(self, *_: object) -> None:
        self.is_running = True
        await asyncio.get_running_loop().create_future()


class Left(Lacking):
    """Machines that are there, and then leave."""

    def __init__(self) -> None:
        super().__init__()
        self.has_joined.set()

    async def candidate_nodes(self, _declared: object, _nodes: int) -> list[None]:
        return [None]


@pytest.mark.parametrize(
    ("is_first", "force", "leaves"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, True), (True, True, False)],
)
def test_a_load_in_progress_ends_when_its_model_is_unloaded(
    *, is_first: bool, force: bool, leaves: bool
) -> None:
    def make(*_: object, **__: object) -> WaitingReplica:
        return replica

    replica = WaitingReplica()

    async def act() -> None:
        catalog, machines = make_catalog(), Left()
        hosted = with_unloaded(catalog, machines)
        cast("Any", catalog)._make_replica = make
        hosted.is_awaited = is_first
        loading = asyncio.create_task(
            catalog.begin(cast("Any", machines)) if is_first else catalog.load(hosted.model_id)
        )
        await run_tasks_until(lambda: replica.is_running)
        if leaves:
            machines.has_left.set()
        await catalog.unload(hosted, force=force)
        if is_first:
            await loading
        else:
            with pytest.raises(NotReady, match=r"demo.* was unloaded\."):
                await loading
        assert (hosted.state, hosted.is_awaited, hosted.replicas) == ("unloaded", False, [])

    asyncio.run(act())


@pytest.mark.parametrize(
    ("content", "problem"),
    [("", "is empty"), ("{}", "is no valid tokenizer"), ('{"mo', "is no valid tokenizer")],
)
def test_a_model_that_cannot_be_served_does_not_count_as_served(
    content: str, problem: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / COMMIT
    shutil.copytree(tiny_model, snapshot)
    (snapshot / "tokenizer.json").write_text(content)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text(COMMIT)
    expected = rf"tokenizer\.json {problem}: copy or fetch the model's files again\.$"
    with pytest.raises(ModelCorrupt, match=expected):
        prepare_model(load_settings({"model": "someone/tiny"}))
    assert not is_held(snapshot)


def test_a_model_whose_kv_cannot_be_quantized_is_refused_before_it_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt_oss"}))
    with pytest.raises(ModelUnsupported, match=r"cannot use a quantized KV cache: leave out --kv-bits\."):
        prepare_model(load_settings({"model": str(folder), "kv_bits": "8"}))


def test_a_model_is_not_taken_for_another_one_of_its_name_and_structure(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name / "tiny" for name in ("one", "copy", "other")]
    for folder in folders:
        shutil.copytree(tiny_model, folder)
    weights = folders[2] / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-64] + bytes(64))
    Machine(monkeypatch, here={*map(str, folders)})

    threads: set[threading.Thread] = set()
    read = ServedModel.read_digest

    def read_in(served: ServedModel) -> str:
        threads.add(threading.current_thread())
        return read(served)

    monkeypatch.setattr(ServedModel, "read_digest", read_in)

    async def act() -> None:
        catalog = make_catalog()
        for folder in folders:
            await catalog.pull(str(folder), force=False, report=ignore)

    with pytest.raises(Conflict, match=f"Another model is already served as tiny: {folders[0]}"):
        asyncio.run(act())
    assert threading.main_thread() not in threads, "answers would wait for the disk"


def test_a_model_is_described_with_the_digest_of_its_weights(tiny_model: Path, tmp_path: Path) -> None:
    async def describe(folder: Path) -> str:
        settings = load_settings({"model": str(folder)})
        served = prepare_model(settings)
        described = str(HostedModel(settings, served, print, lambda: 0).metadata["digest"])
        assert described == served.read_digest()
        return described

    other = tmp_path / "tiny"
    shutil.copytree(tiny_model, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    assert asyncio.run(describe(tiny_model)) != asyncio.run(describe(other))


@dataclass(eq=False)
class CountedModel:
    """Model without instances, whose meters have counted tokens."""

    meters: Sequence[Meter]
    instances: Sequence[object] = ()


def test_energy_per_token_is_that_of_the_last_minute_although_nobody_asked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = joules = 0.0
    meter, rounds = Meter(), 0

    def energy(*_: object) -> dict[str, Sequence[PartEnergy]]:
        return {"a": (PartEnergy("cpu", joules),)}

    async def pause(_: float) -> None:
        """Let ten idle seconds pass at 20 W."""
        nonlocal now_s, joules, rounds
        now_s, joules, rounds = now_s + 10.0, joules + 200.0, rounds + 1
        if rounds > 20:
            raise asyncio.CancelledError

    monkeypatch.setattr(models, "EnergyPerToken", lambda: EnergyPerToken(lambda: now_s))
    monkeypatch.setattr(models, "computing_energy", energy)
    monkeypatch.setattr(asyncio, "sleep", pause)

    async def act() -> float | None:
        nonlocal now_s, joules
        catalog: Any = make_catalog()
        catalog._hosted = [CountedModel([meter])]
        with pytest.raises(asyncio.CancelledError):
            await catalog.keep_learning()
        now_s, joules = now_s + 2.0, joules + 120.0
        meter.generated_tokens = 100
        return catalog.cluster().joules_per_token

    assert asyncio.run(act()) == pytest.approx((60 * 20 + 120) / 100)
