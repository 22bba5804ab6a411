"""Fetches of KV when another head takes over a worker: those of the head before end, and disturb none of the new one's."""

# Races between threads are replayed step by step, from the inside.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tests.worker.kv.test_disk import blocks, filled, open_disk, save_by, store_of
from tests.worker.test_server import assign_stage

from mlx_ring.core.errors import NotReady
from mlx_ring.core.types import fetch_ids
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv.transfer import KvTransfers
from mlx_ring.worker.sequences import SequenceTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def test_operations_of_the_head_before_leave_what_a_new_head_fetches(tmp_path: Path) -> None:
    """Run them after the new head has opened its stream, as a step in progress does."""
    run, answers = filled(), list[worker_pb2.KvFetched]()
    save_by(run, tmp_path, [(0, 4)])
    disk = open_disk(tmp_path)
    table = SequenceTable(store_of(run), 8, disk=disk)
    before, after = next(fetch_ids(1)), next(fetch_ids(2))
    disk.fetch(worker_pb2.FetchKv(id=after, blocks=blocks()), answers.append)
    for operation in (
        step_pb2.CacheOperation(adopt=step_pb2.Adopt(sequence=1, fetch=before)),
        step_pb2.CacheOperation(reset=step_pb2.Reset()),
    ):
        assert table.apply([operation], 1) == {}
        assert list(disk._fetches) == [after]
    table.apply([step_pb2.CacheOperation(reset=step_pb2.Reset())], 2)
    assert (list(disk._fetches), [each.id for each in answers]) == ([], [after])


def test_reset_of_an_epoch_ends_only_its_fetches_from_other_workers() -> None:
    transfers, answers = KvTransfers(lambda _: None), list[int]()
    ids = [next(fetch_ids(epoch, moved=True)) for epoch in (1, 2)]
    hold_fetches(transfers)
    for id_ in ids:
        transfers.fetch(wanted(id_), lambda _blocks, _problem, id_=id_: answers.append(id_))
    transfers.reset(1)
    assert (list(transfers._fetches), answers) == (ids[1:], ids[:1])


def test_read_that_ends_late_leaves_a_later_fetch_of_the_same_number() -> None:
    transfers, answers = KvTransfers(lambda _: None), list[str]()
    reads = hold_fetches(transfers)
    transfers.fetch(wanted(5), lambda _blocks, _problem: answers.append("before"))
    transfers.reset()
    transfers.fetch(wanted(5), lambda _blocks, _problem: answers.append("after"))
    reads[0]()
    assert (list(transfers._fetches), answers) == ([5], ["before"])


def wanted(id_: int) -> worker_pb2.FetchKv:
    source = worker_pb2.KvSource(key=str(id_), address="127.0.0.1:1", first_layer=0, end_layer=1)
    return worker_pb2.FetchKv(id=id_, start=0, end=8, sources=[source])


def hold_fetches(transfers: KvTransfers) -> list[Callable[[], None]]:
    """Let a stage of one layer begin no read. Return the reads, each of which fails when it is called."""
    reads: list[Callable[[], None]] = []

    def fail(*_: object) -> None:
        raise NotReady("the fetch has ended")

    def submit(read: Callable[..., None], *given: object) -> None:
        reads.append(partial(read, *given))

    def kinds(_: int) -> list[object]:
        return []

    subject = cast("Any", transfers)
    subject._kv, subject._layers = SimpleNamespace(kinds=kinds), range(1)
    subject._threads, subject._read_all = SimpleNamespace(submit=submit), fail
    return reads


def test_no_head_takes_over_between_the_check_of_a_stream_and_what_it_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would be done for the head before, after everything of that head was forgotten."""
    server, under_lock = assign_stage(1)[0], list[str]()

    def recorded(name: str) -> Callable[..., None]:
        return lambda *_: under_lock.append(name) if server._lock.locked() else None

    disk = SimpleNamespace(fetch=recorded("fetch"), reset=lambda: None)
    server._built = cast("Any", SimpleNamespace(disk=disk))
    server._runner = cast("Any", SimpleNamespace(reset=list[object], last_step=0))
    monkeypatch.setattr(server._transfers, "fetch", recorded("move"))
    monkeypatch.setattr(server._transfers, "export", recorded("export"))
    stream = server._open_stream(make_hello(instance="demo-1", epoch=1))
    server._fetch(stream, worker_pb2.FetchKv(id=1))
    server._fetch(stream, wanted(2))
    server._export(stream, worker_pb2.ExportKv(key="k"))
    assert under_lock == ["fetch", "move", "export"]
