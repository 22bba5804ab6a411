"""Keys and values from worker to worker: over real connections, whatever the two cuts are, and nothing if one fails."""

from __future__ import annotations

import queue
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_ring.core.errors import StepFailed
from mlx_ring.rpc.channels import make_server
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.methods import READ_KV, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv import KVStore, transfer
from mlx_ring.worker.kv.transfer import KvTransfers

LENGTH = 70
KEY = "secret"
Read = Callable[[worker_pb2.ReadKvRequest, grpc.ServicerContext], Iterator[Frame]]


def read_all(store: KVStore, sequence: int, layers: int, end: int = LENGTH) -> list[list[Any]]:
    return [
        [array.tolist() for array in store.layer_content(sequence, layer, (0, end))]
        for layer in range(layers)
    ]


class Stage:
    """A rank with some layers, whose compute thread is the test's."""

    def __init__(self, first: int, end: int, *, make: Callable[[], Any] = KVCache, **options: Any) -> None:
        self.first, self.end, self.dtype = first, end, options.pop("dtype", mx.float32)
        self.store = KVStore([make() for _ in range(first, end)], self.dtype, **options)
        self.jobs = queue.SimpleQueue[Callable[[], None]]()
        self.transfers = KvTransfers(self.jobs.put)
        self.answers: list[tuple[int, str]] = []
        self.compute(1, 3)
        self.store.free(1)
        assignment = worker_pb2.StageAssignment(first_layer=first, end_layer=end, model_digest="demo")
        self.transfers.attach(self.store, assignment)

    def compute(self, sequence: int, tokens: int) -> None:
        self.store.open(sequence, 500)
        (batch,) = self.store.batches([(sequence, tokens)])
        place = (
            mx.arange(tokens, dtype=mx.float32)[None, None, :, None] + mx.arange(32, dtype=mx.float32) / 32
        )
        for layer, cache in enumerate(batch.caches, self.first):
            keys = mx.broadcast_to(mx.sin(place * (layer + 1)), (1, 2, tokens, 32)).astype(self.dtype)
            cache.update_and_fetch(keys, -keys)
        mx.eval(*batch.arrays)
        self.store.commit(batch)

    def export(self, *nodes: str, length: int = LENGTH) -> None:
        export = worker_pb2.ExportKv(key=KEY, sequence=7, length=length, within_s=60, nodes=nodes or ("",))
        self.transfers.export(export)

    def fetch(self, *sources: tuple[Stage, str], start: int = 0, end: int = LENGTH, id_: int = 5) -> None:
        wanted = worker_pb2.FetchKv(id=id_, start=start, end=end, within_s=60)
        for stage, address in sources:
            wanted.sources.add(
                address=address,
                first_layer=max(self.first, stage.first),
                end_layer=min(self.end, stage.end),
                key=KEY,
            )
        self.transfers.fetch(wanted, lambda blocks, problem: self.answers.append((blocks, problem)))

    def append(
        self, sequence: int, *, start: int = 0, end: int = LENGTH, part: int = 0, parts: int = 0
    ) -> None:
        adopt = step_pb2.Adopt(sequence=sequence, fetch=5, start=start, length=end, moved=True)
        adopt.part, adopt.parts = part, parts
        self.transfers.adopt(self.store, adopt)

    def content(self, sequence: int, end: int = LENGTH) -> list[list[Any]]:
        return read_all(self.store, sequence, self.end - self.first, end)


@contextmanager
def serving(stage: Stage, folder: Path, read: Read | None = None) -> Generator[tuple[Stage, str]]:
    """Serve a stage's KV; yield the stage with its address."""

    def read_kv(request: worker_pb2.ReadKvRequest, context: grpc.ServicerContext) -> Iterator[Frame]:
        return stage.transfers.read(request, "", context.is_active)

    address = f"unix:{folder}/{stage.first}-{stage.end}"
    server = make_server(threads=8)
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, [(READ_KV, read or read_kv)]),))
    server.add_insecure_port(address)
    server.start()
    try:
        yield stage, address
    finally:
        server.stop(None).wait()


def run_until_answered(readers: list[Stage], sources: list[Stage]) -> None:
    """Do the compute threads' work until every reader has answered."""
    while not all(reader.answers for reader in readers):
        for stage in sources:
            try:
                stage.jobs.get(timeout=0.01)()
            except queue.Empty:
                continue


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send some tokens in each part, and let nobody wait for an export."""
    monkeypatch.setattr(transfer, "_PART_BYTES", 2000)
    monkeypatch.setattr(transfer, "_EXPORT_WAIT_S", 0.0)


pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_bits": 8}, {"dtype": mx.bfloat16}, {"make": lambda: RotatingKVCache(300), "slack": 8}],
    ids=["float32", "8 bits", "bfloat16", "sliding"],
)
def test_three_uneven_stages_read_what_two_have(tmp_path: Path, options: dict[str, Any]) -> None:
    sources = [Stage(0, 5, **options), Stage(5, 8, **options)]
    readers = [Stage(0, 2, **options), Stage(2, 7, **options), Stage(7, 8, **options)]
    with ExitStack() as stack:
        served = [stack.enter_context(serving(stage, tmp_path)) for stage in sources]
        for stage in sources:
            stage.compute(7, LENGTH + 5)
            stage.export()
        for reader in readers:
            overlapping = [
                each for each in served if each[0].end > reader.first and each[0].first < reader.end
            ]
            reader.fetch(*overlapping)
        run_until_answered(readers, sources)
    assert [reader.answers for reader in readers] == [[(1, "")]] * 3
    for reader in readers:
        reader.store.open(9, 200)
        reader.append(9)
        assert reader.store.length(9) == LENGTH
    expected = [layer for stage in sources for layer in stage.content(7)]
    assert [layer for reader in readers for layer in reader.content(9)] == expected


def test_tokens_follow_those_that_a_sequence_has_already(tmp_path: Path) -> None:
    source, reader = Stage(0, 2), Stage(0, 2)
    source.compute(7, LENGTH)
    source.export()
    reader.compute(8, 30)
    reader.store.open(9, 200)
    reader.store.fork(8, 9, 20)
    with serving(source, tmp_path) as served:
        reader.fetch(served, start=20)
        run_until_answered([reader], [source])
    reader.append(9, start=20)
    assert reader.content(9) == source.content(7)


def test_pieces_follow_each_other_and_what_has_arrived_can_be_forked(tmp_path: Path) -> None:
    source, reader = Stage(0, 3), Stage(0, 3)
    source.compute(7, LENGTH)
    source.export()
    reader.store.open(9, LENGTH)
    with serving(source, tmp_path) as served:
        for start, end in ((0, 30), (30, 31), (31, 60)):
            reader.answers.clear()
            reader.fetch(served, start=start, end=end)
            run_until_answered([reader], [source])
            is_complete = end < 60
            for part in range(3 if is_complete else 2):
                reader.append(9, start=start, end=end, part=part, parts=3)
    reader.transfers.forget(5)
    assert reader.store.length(9) == 31
    reader.store.retain(9)
    reader.store.open(10, 200)
    reader.store.fork(9, 10, 31)
    assert reader.content(10, 31) == source.content(7, 31)
    reader.compute(11, 40)
    assert reader.store.length(11) == 40


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_layers_are_taken_over_in_parts_between_which_others_compute(tmp_path: Path, parts: int) -> None:
    source, reader = Stage(0, 5), Stage(0, 5)
    source.compute(7, LENGTH)
    source.export()
    reader.compute(8, 30)
    before = reader.content(8, 30)
    reader.store.open(9, 200)
    reader.store.fork(8, 9, 20)
    with serving(source, tmp_path) as served:
        reader.fetch(served, start=20)
        run_until_answered([reader], [source])
    for part in range(parts):
        assert reader.store.length(9) == 20
        reader.append(9, start=20, part=part, parts=parts)
        reader.compute(10 + part, 40)
    assert reader.content(9) == source.content(7)
    assert reader.content(8, 30) == before
    with pytest.raises(StepFailed, match="No KV of fetch 5 is there"):
        reader.append(9, start=20)


def read_twice(stage: Stage, end: Callable[[], None]) -> Read:
    """Return a method that sends one part, and then does something before the next one."""

    def read(request: worker_pb2.ReadKvRequest, context: grpc.ServicerContext) -> Iterator[Frame]:
        for number, frame in enumerate(stage.transfers.read(request, "", context.is_active)):
            if number == 1:
                end()
            yield frame

    return read


def damaged(stage: Stage) -> Read:
    def read(request: worker_pb2.ReadKvRequest, context: grpc.ServicerContext) -> Iterator[Frame]:
        for frame in stage.transfers.read(request, "", context.is_active):
            yield Frame(frame.header, bytes(frame.payload[:-1]) + bytes([frame.payload[-1] ^ 1]))

    return read


def shortened(stage: Stage) -> Read:
    def read(request: worker_pb2.ReadKvRequest, context: grpc.ServicerContext) -> Iterator[Frame]:
        for frame in stage.transfers.read(request, "", context.is_active):
            payload = bytes(frame.payload[:-4])
            frame.header.kv.checksum = zlib.crc32(payload)
            yield Frame(frame.header, payload)

    return read


def broken(stage: Stage) -> Read:
    def break_off() -> None:
        raise OSError("the process has ended")

    return read_twice(stage, break_off)


def ended(stage: Stage) -> Read:
    return read_twice(stage, partial(stage.export, "elsewhere"))


def freed(stage: Stage) -> Read:
    return read_twice(stage, partial(stage.jobs.put, partial(stage.store.free, 7)))


@pytest.mark.parametrize(
    ("end", "options", "make_read", "reason"),
    [
        (
            2,
            {"dtype": mx.bfloat16},
            None,
            r"layer 0 is bfloat16 \(2, \d+, 32\).* there, float32 \(2, \d+, 32\)",
        ),
        (2, {"kv_bits": 8}, None, "layer 0 is uint32 .* there, float32 "),
        (2, {}, damaged, "the checksum of tokens .* is wrong"),
        (2, {}, shortened, r"bytes came for \d+"),
        (2, {}, broken, "connection to another worker of this machine broke"),
        (2, {}, ended, "no longer allows to read"),
        (2, {}, freed, "Sequence 7 is not open here"),
        (1, {}, None, r"the sources have layers \[0\], tokens \[0, 70\)"),
    ],
    ids=["type", "bits", "damaged", "shortened", "broken", "ended", "freed", "missing layer"],
)
def test_reader_keeps_nothing_and_answers_why(
    tmp_path: Path,
    end: int,
    options: dict[str, Any],
    make_read: Callable[[Stage], Read] | None,
    reason: str,
) -> None:
    source, reader = Stage(0, end, **options), Stage(0, 2)
    source.compute(7, LENGTH)
    source.export()
    with serving(source, tmp_path, None if make_read is None else make_read(source)) as served:
        reader.fetch(served)
        run_until_answered([reader], [source])
    ((blocks, problem),) = reader.answers
    assert blocks == 0
    assert re.search(reason, problem), problem
    reader.store.open(9, 200)
    with pytest.raises(StepFailed, match="No KV of fetch 5 is there"):
        reader.append(9)


def refusal(stage: Stage, caller: str = "", **request: Any) -> str:
    wanted: dict[str, Any] = {"key": KEY, "model_digest": "demo", "end_layer": 2, "end": LENGTH} | request
    (frame,) = stage.transfers.read(worker_pb2.ReadKvRequest(**wanted), caller, lambda: True)
    return frame.header.kv.failure.message


def test_only_who_knows_the_key_reads_and_only_what_was_allowed() -> None:
    stage = Stage(0, 2)
    stage.compute(7, LENGTH + 5)
    stage.export("mini-1")
    assert refusal(stage, "mini-2") == "mini-2 may not read this sequence."
    assert refusal(stage) == "This machine may not read this sequence."
    assert "has not allowed" in refusal(stage, "mini-1", key="guess")
    assert "another model" in refusal(stage, "mini-1", model_digest="other")
    assert refusal(stage, "mini-1", end=LENGTH + 1) == "Tokens [0, 71) of 70 were requested."
    assert "has layers range(0, 2), not range(0, 3)" in refusal(stage, "mini-1", end_layer=3)
    stage.transfers.export(worker_pb2.ExportKv(key=KEY))
    assert "has not allowed" in refusal(stage, "mini-1")
    stage.export("mini-1")
    stage.transfers.reset()
    assert "has not allowed" in refusal(stage, "mini-1")


def test_exports_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("mlx_ring.worker.kv.transfer.time.monotonic", lambda: now_s)
    stage = Stage(0, 2)
    stage.export("mini-1")
    now_s = 161.0
    assert "has not allowed" in refusal(stage, "mini-1")


def test_layers_without_ranges_of_tokens_are_refused() -> None:
    store = KVStore([ArraysCache(2)], mx.float32)
    with pytest.raises(StepFailed, match="moves only as a whole"):
        store.kinds(0)


def test_fetch_that_is_dropped_ends_its_calls(tmp_path: Path) -> None:
    source, reader = Stage(0, 2), Stage(0, 2)
    source.compute(7, LENGTH)
    source.export()
    with serving(source, tmp_path) as served:
        reader.fetch(served)
        source.jobs.get()
        reader.transfers.forget(5)
    assert reader.answers == [(0, "it is not needed any more")]


def test_fetch_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_MOST_FETCHED_BYTES", 1000)
    reader = Stage(0, 2)
    reader.fetch((reader, "unix:/nowhere"))
    assert "more than the limit" in reader.answers[0][1]
