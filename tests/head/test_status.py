"""Status of nodes and instances, and progress of loading."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from tests.engine.timings import timing
from tests.planner.clusters import cluster_of, model_of, node_of
from tests.profiles import made_up_profile

from mlx_ring.api.ops.status import UsedMemory
from mlx_ring.cluster.membership import Joined, Member, Membership, SessionEnded
from mlx_ring.cluster.quarantine import Quarantine
from mlx_ring.core.types import LayerRange, RankId
from mlx_ring.core.worker_status import MEMORY, REPORTED, WorkerInfo
from mlx_ring.engine.in_flight import StepWindow
from mlx_ring.engine.step_times import StepTimes
from mlx_ring.head.status import (
    ClusterView,
    InstanceView,
    LoadingProgress,
    RankProgress,
    computing_energy,
    instance_status,
    node_statuses,
)
from mlx_ring.host.energy import Part, PartEnergy
from mlx_ring.host.yielding import Yielding
from mlx_ring.planner.forecast import Forecast
from mlx_ring.planner.place import place
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

DEMAND = Demand(context_tokens=4096, sequences=1)
NODES = [node_of("a", gb_s=100), node_of("b", gb_s=200)]
RANGES = (LayerRange(0, 14), LayerRange(14, 28))
VERSIONS = {"mlx": "1"}


def member(node: str, session: int = 1) -> Member:
    return Member(
        node=node,
        machine=f"{node}'s machine",
        host="10.0.0.2",
        port=4000,
        head_host="10.0.0.1",
        profile=made_up_profile(),
        memory_utilization=0.75,
        session=session,
        memory_free_bytes=5,
        since_s=1000.0,
        versions=(("mlx", "1"),),
    )


def worker(stage: int, node: str) -> WorkerInfo:
    return WorkerInfo(
        stage=stage,
        rank=0,
        layers=RANGES[stage],
        node=node,
        pid=100 + stage,
        device="cpu",
        dtype="float32",
        alive=True,
        phase="ready",
        memory={
            "weight_bytes": 10,
            "device_memory_bytes": 30,
            "peak_memory_bytes": 40,
            "rss_bytes": 50,
            "kv_bytes": 7,
        },
    )


NOT_COPIED = {
    **dict.fromkeys(("pid", "hello"), "the agent's report has them"),
    **dict.fromkeys(("sends", "group", "waits"), "messages, which are converted"),
    **dict.fromkeys(("kv", "means", "port", "group_port", "group_host"), "read when the worker is placed"),
    **dict.fromkeys(("last_step", "sequences"), "read by the agent"),
    "uses_cuda": "read when the engine is made",
}
"""Fields of a worker's report that are not copied to `WorkerInfo`, each with the reason."""


def test_every_field_of_a_worker_s_report_is_copied_or_has_a_reason() -> None:
    fields = set(worker_pb2.WorkerStatus.DESCRIPTOR.fields_by_name)
    assert fields == REPORTED | MEMORY.keys() | NOT_COPIED.keys()
    assert not (REPORTED | MEMORY.keys()) & NOT_COPIED.keys()


def test_the_status_of_a_stage_has_every_number_of_a_worker_s_memory() -> None:
    numbers: dict[str, int] = {name: place for place, name in enumerate(MEMORY)}
    used = UsedMemory.model_validate(numbers)
    assert sorted(used.model_dump().values()) == sorted(numbers.values())


def view(**changes: object) -> InstanceView:
    cluster = cluster_of(*NODES)
    plain = InstanceView(
        name="twin-1",
        model="twin",
        epoch=3,
        state="ready",
        reason=None,
        layers=28,
        ranges=RANGES,
        nodes=(("a",), ("b",)),
        plan=place(model_of(28), cluster, PlanRequest(DEMAND, strategy="uniform")),
        forecast=Forecast(model_of(28), DEMAND, cluster, list(zip(NODES, RANGES, strict=True))),
        workers=(worker(0, "a"), worker(1, "b")),
        loading=LoadingProgress(),
        times=StepTimes(),
    )
    return replace(plain, **changes)  # pyright: ignore[reportArgumentType] - fields of the dataclass


def membership_of(*nodes: str) -> Membership:
    membership = Membership()
    for session, node in enumerate(nodes):
        membership = membership.apply(Joined(member(node, session)))
    return membership


def test_status_of_a_stage_has_promised_and_used_memory() -> None:
    status = instance_status(view(), {})
    first = status.stages[0]
    promised, used = first.memory.promised, first.memory.used
    assert promised is not None
    assert used is not None
    assert promised.total_bytes == promised.weight_bytes + promised.kv_bytes + promised.working_bytes
    assert used.model_dump() == {
        "weight_bytes": 10,
        "kv_bytes": 7,
        "device_bytes": 30,
        "peak_bytes": 40,
        "resident_bytes": 50,
    }
    assert (first.node, first.layers, first.pid) == ("a", (0, 14), 100)
    assert first.why is not None
    assert status.promise is not None
    assert (status.promise.context_tokens, status.promise.strategy) == (4096, "uniform")


def test_measured_steps_have_the_prediction_for_the_same_steps() -> None:
    window = StepWindow()
    for step in range(1, 6):
        window.record(
            timing(step, 4_000, rank=RankId(1, 0), sequence=1, finished_us=9_000 * step, context_tokens=40)
        )
    window.record(timing(9, 70_000, rank=RankId(1, 0), tokens=256, is_decode=False, context_tokens=512))
    known = view(times=window.read())
    status = instance_status(known, {})
    assert known.forecast is not None
    (decode,), (chunk,) = status.stages[1].times.decode, status.stages[1].times.prefill
    assert (decode.rows, decode.steps, decode.measured_ms) == (1, 5, 4.0)
    assert decode.predicted_ms == pytest.approx(1e3 * known.forecast.decode_s(1, 1, 40))
    assert chunk.predicted_ms == pytest.approx(1e3 * known.forecast.chunk_s(1, 256, 512))
    assert status.stream is not None
    assert status.stream.measured_tokens_per_s == pytest.approx(1000 / 9)
    assert status.stream.predicted_tokens_per_s == pytest.approx(1 / known.forecast.token_s(40))


def test_without_measurements_there_is_only_the_prediction() -> None:
    status = instance_status(view(), {})
    (decode,) = status.stages[0].times.decode
    assert (decode.steps, decode.measured_ms, decode.context_tokens) == (0, None, 2048)
    assert decode.predicted_ms is not None
    assert status.stream is not None
    assert (status.stream.measured_tokens_per_s, status.stream.tokens) == (None, 0)


def test_without_a_profile_there_are_only_measurements() -> None:
    window = StepWindow()
    window.record(timing(1, 4_000))
    status = instance_status(view(plan=None, forecast=None, times=window.read()), {})
    assert status.promise is None
    assert status.stages[0].memory.promised is None
    assert (status.stages[0].times.decode[0].measured_ms, status.stages[0].times.decode[0].predicted_ms) == (
        4.0,
        None,
    )
    assert status.stages[1].times.decode == []


def test_loading_stage_reports_bytes_and_an_adopted_worker_is_ready() -> None:
    progress = LoadingProgress()
    report = worker_pb2.LoadProgress(phase="weights", bytes_loaded=3, bytes_total=8)
    progress.record(agent_pb2.StageProgress(stage=1, progress=report))
    first, second = instance_status(view(workers=(), loading=progress, state="loading"), {}).stages
    assert (first.loading.phase, first.memory.used, first.pid) == ("starting", None, None)
    assert (second.loading.bytes_loaded, second.loading.bytes_to_load) == (3, 8)
    adopted = instance_status(view(), {}).stages[0].loading
    assert (adopted.phase, adopted.bytes_loaded) == ("ready", 10)


def test_nodes_list_their_stages_and_memory_and_the_heads_node_comes_first() -> None:
    cluster_view = ClusterView("b", membership_of("a", "b", "c"))
    first, second, third = node_statuses(cluster_view, [view()], VERSIONS, {})
    assert [node.id for node in (first, second, third)] == ["b", "a", "c"]
    assert (first.is_head, first.stages, second.stages, third.stages) == (
        True,
        ["twin-1/1"],
        ["twin-1/0"],
        [],
    )
    memory = second.memory
    assert memory is not None
    assert (memory.usable_bytes, memory.reserve_bytes) == (12 * 10**9, 4 * 10**9)
    assert memory.utilization == 0.75
    known = view()
    assert known.forecast is not None
    assert memory.promised_bytes == known.forecast.memory(0).total_bytes
    assert (memory.used_bytes, memory.free_bytes) == (50, 5)
    assert third.memory is not None
    assert (third.memory.promised_bytes, third.memory.used_bytes, third.state) == (0, 0, "attending")
    assert second.profile is not None
    assert second.profile.rates[0].weights == "float32"
    assert second.versions == {"mlx": "1"}


def test_lost_and_quarantined_nodes_have_a_reason_and_a_returned_node_appears_once() -> None:
    membership = membership_of("a", "b").apply(SessionEnded("b", 1, "it was cut off", 2000.0))
    quarantines = {"a": Quarantine("It was lost 4 times.", 3000.0)}
    quarantined, lost = node_statuses(ClusterView("a", membership, quarantines), [view()], VERSIONS, {})
    assert (quarantined.state, quarantined.reason, quarantined.quarantined_until) == (
        "quarantined",
        "It was lost 4 times.",
        3000,
    )
    assert (lost.state, lost.reason, lost.since, lost.memory) == ("gone", "it was cut off", 2000, None)
    nodes = node_statuses(ClusterView("a", membership.apply(Joined(member("b", 9)))), [view()], VERSIONS, {})
    assert [(node.id, node.state) for node in nodes] == [("a", "attending"), ("b", "attending")]


def test_enrolled_machines_that_are_not_connected_are_absent() -> None:
    cluster_view = ClusterView("a", membership_of("b", "c"), enrolled=("c", "a", "e", "b", "d"))
    assert cluster_view.absent == ["d", "e"]


def test_a_single_machine_without_a_profile_is_a_node() -> None:
    (node,) = node_statuses(ClusterView("a"), [view(nodes=(("a",), ("a",)))], VERSIONS, {})
    assert (node.id, node.is_head, node.memory, node.profile) == ("a", True, None, None)
    assert (node.stages, node.versions) == (["twin-1/0", "twin-1/1"], VERSIONS)


def counting(node: str, *parts: Part) -> Member:
    used = tuple(PartEnergy(part, 10.0 * place, 1.5) for place, part in enumerate(parts))
    return replace(member(node), energy=used)


def test_nodes_have_the_energy_of_their_parts_while_they_attend() -> None:
    membership = (
        Membership().apply(Joined(counting("a", "cpu", "memory"))).apply(Joined(counting("b", "gpu")))
    )
    membership = membership.apply(SessionEnded("b", 1, "it was cut off", 2000.0))
    here, lost = node_statuses(ClusterView("a", membership), [view()], VERSIONS, {})
    assert [(used.part, used.joules, used.watts) for used in here.energy] == [
        ("cpu", 0, 1.5),
        ("memory", 10, 1.5),
    ]
    assert lost.energy == []
    alone = ClusterView("a", own_energy=(PartEnergy("cpu", 4.0),))
    (node,) = node_statuses(alone, [], VERSIONS, {})
    assert [(used.part, used.joules, used.watts) for used in node.energy] == [("cpu", 4.0, None)]


def test_nodes_say_why_they_yield_while_they_attend() -> None:
    busy = Yielding("other programs use 1.6 of 2 cores", 0.25, 1.0, "autogroup nice 10")
    membership = Membership().apply(Joined(replace(member("a"), yielding=busy)))
    (here,) = node_statuses(ClusterView("a", membership), [], VERSIONS, {})
    assert here.yielding is not None
    assert here.yielding.model_dump() == asdict(busy)
    (lost,) = node_statuses(
        ClusterView("b", membership.apply(SessionEnded("a", 1, "it was cut off"))), [], VERSIONS, {}
    )[1:]
    assert lost.yielding is None
    (alone,) = node_statuses(ClusterView("a", own_yielding=busy), [], VERSIONS, {})
    assert alone.yielding == here.yielding


def test_energy_that_counts_is_that_of_nodes_whose_computing_device_is_counted() -> None:
    """Leave out nodes without layers, and count nothing of a node that counts another device's energy alone."""
    members = (counting("a", "cpu"), counting("b", "gpu", "memory"), counting("c", "cpu"))
    membership = Membership()
    for each in members:
        membership = membership.apply(Joined(each))
    used = computing_energy(ClusterView("a", membership), [view()])
    assert used == {"a": members[0].energy, "b": None}
    on_gpu = view(workers=(worker(0, "a"), replace(worker(1, "b"), device="gpu")))
    assert computing_energy(ClusterView("a", membership), [on_gpu])["b"] == members[1].energy
    own = (PartEnergy("cpu", 1.0),)
    alone = view(workers=(worker(0, "a"), worker(1, "a")))
    assert computing_energy(ClusterView("a", own_energy=own), [alone]) == {"a": own}
    assert computing_energy(ClusterView("a", own_energy=own), []) == {}


def record(progress: LoadingProgress, stage: int, **report: object) -> None:
    message = worker_pb2.LoadProgress(**report)  # pyright: ignore[reportArgumentType] - fields of the message
    progress.record(agent_pb2.StageProgress(stage=stage, progress=message))


def test_progress_of_fetching_and_of_loading_are_separate_and_both_are_kept() -> None:
    progress = LoadingProgress()
    assert progress.of(RankId(0, 0)) == RankProgress()
    record(progress, 1, phase="fetch", bytes_loaded=5, bytes_total=10)
    assert progress.of(RankId(1, 0)) == RankProgress("fetch", bytes_fetched=5, bytes_to_fetch=10)
    record(progress, 1, phase="fetch", bytes_loaded=10, bytes_total=10)
    record(progress, 1, phase="weights", bytes_loaded=3, bytes_total=8)
    assert progress.of(RankId(1, 0)) == RankProgress("weights", 10, 10, 3, 8)
    record(progress, 1, phase="warm-up")
    record(progress, 1, phase="ready", ready=True, bytes_loaded=8)
    assert progress.of(RankId(1, 0)) == RankProgress("ready", 10, 10, 8, 8)
    assert progress.of(RankId(0, 0)) == RankProgress()
