"""Saved KV of other machines: their agents list and send files; one may lack them, hang, leave, or send wrong bytes."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.machines import node_credentials
from tests.worker.kv.passes import ModelRun, difference
from tests.worker.kv.test_disk import (
    DIGESTS,
    LAYERS,
    NAME,
    PLACE,
    SIZE,
    blocks,
    damage_byte,
    filled,
    heads_of,
    save_by,
    store_of,
)

from mlx_ring.agent.weights import serving
from mlx_ring.agent.weights.serving import WeightsService
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.types import MemberRange
from mlx_ring.rpc.channels import add_secure_port, make_aio_server
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import step_pb2, weights_pb2, worker_pb2
from mlx_ring.rpc.tls.caller_checks import AioPeerGuard
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.rpc.tls.peers import Revoked
from mlx_ring.worker.kv import block_reader
from mlx_ring.worker.kv.block_files import HeadShare
from mlx_ring.worker.kv.block_reader import PeerDisks
from mlx_ring.worker.kv.disk import KvDisk


class FaultyService(WeightsService):
    """Agent's service that flips a byte of each file, or sends nothing, from the step on that a test chooses."""

    flips = hangs = hangs_at_list = False

    async def list_blocks(self, request: weights_pb2.ListBlocksRequest, _context: Any) -> Any:
        if self.hangs_at_list:
            await asyncio.Event().wait()
        return await super().list_blocks(request, _context)

    async def read_block(
        self, request: weights_pb2.ReadBlockRequest, _context: Any
    ) -> AsyncIterator[weights_pb2.FetchPart]:
        if self.hangs:
            await asyncio.Event().wait()
        async for part in super().read_block(request, _context):
            if self.flips and part.data:
                part.data = part.data[:-1] + bytes([part.data[-1] ^ 1])
            yield part


class Agent:
    """Agent of a machine, in a thread of its own."""

    def __init__(
        self, node: str, folder: Path | None, speed: float, credentials: Credentials | None = None
    ) -> None:
        self.service = FaultyService(node, None, folder)
        self._node, self._speed, self._credentials = node, speed, credentials
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> int:
        self._server = make_aio_server(
            interceptors=[AioPeerGuard(Revoked().refusal)] * bool(self._credentials)
        )
        self._server.add_generic_rpc_handlers((self.service.handler(),))
        if self._credentials is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = add_secure_port(self._server, "127.0.0.1:0", self._credentials.for_server())
        await self._server.start()
        return port

    @property
    def peer(self) -> worker_pb2.KvPeer:
        return worker_pb2.KvPeer(
            reader="reader", address=f"127.0.0.1:{self.port}", node=self._node, bytes_per_s=self._speed
        )

    def stop(self) -> None:
        """Leave."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._loop.close()


@contextmanager
def agents(*folders: Path | None) -> Generator[list[Agent]]:
    """Run an agent for each folder; the first ones have the fastest links."""
    running = [Agent(f"mini-{number}", folder, 1e9 / (number + 1)) for number, folder in enumerate(folders)]
    try:
        yield running
    finally:
        for agent in running:
            agent.stop()


def open_reader(folder: Path, layers: tuple[int, int], share: HeadShare | None = None) -> KvDisk:
    return KvDisk(folder, 1 << 30, NAME, range(*layers), None, share, PeerDisks("reader", NAME, None))


def ask(
    disk: KvDisk,
    running: Sequence[Agent],
    *,
    only_looks: bool = False,
    text: Sequence[int] | None = None,
    number: int = 1,
) -> worker_pb2.KvFetched:
    """Return the answer to a fetch that may use these machines."""
    answers: list[worker_pb2.KvFetched] = []
    answered = threading.Event()

    def answer(fetched: worker_pb2.KvFetched) -> None:
        answers.append(fetched)
        answered.set()

    following = None if text is None else step_pb2.ListedBlock(place=PLACE, tokens=text)
    wanted = worker_pb2.FetchKv(
        id=number,
        blocks=blocks(),
        only_looks=only_looks,
        asks_peers=True,
        peers=[agent.peer for agent in running],
        next=following,
    )
    disk.fetch(wanted, answer)
    assert answered.wait(60)
    return answers[0]


def continues_alike(run: ModelRun, disk: Any, layers: tuple[int, int], number: int = 1) -> bool:
    """Return True if a rank's layers are restored bit for bit."""
    target = store_of(run, layers)
    target.open(7, 70)
    disk.adopt(target, step_pb2.Adopt(sequence=7, fetch=number, length=64))
    for place, layer in enumerate(range(*layers)):
        heads = (0, heads_of(run, layer))
        mine = target.read(7, place, heads, (0, 64))
        theirs = run.store.read(1, layer, heads, (0, 64))
        if any(difference(one, two) for one, two in zip(mine, theirs, strict=True)):
            return False
    return True


@pytest.mark.parametrize("layers", [(0, 2), (2, 4), (1, 3), (0, 4)])
def test_layers_of_other_machines_are_restored_under_any_cut_and_order(
    tmp_path: Path, layers: tuple[int, int]
) -> None:
    """Save two stages on two machines; read any layers on one that has saved nothing, or the second half."""
    run = filled()
    for number, saved in enumerate([(0, 2), (2, 4)]):
        save_by(run, tmp_path / f"{number}", [saved])
    with agents(tmp_path / "0", tmp_path / "1") as running:
        for folder in (tmp_path / "empty", tmp_path / "1"):
            disk = open_reader(folder, layers)
            has_all = folder.name == "1" and layers == (2, 4)
            counted = ask(disk, running, only_looks=True)
            assert counted.blocks == len(DIGESTS) * has_all
            assert counted.HasField("from_peers") == (not has_all)
            assert counted.from_peers.blocks == len(DIGESTS) * (not has_all)
            fetched = ask(disk, running)
            assert fetched.blocks == len(DIGESTS)
            assert fetched.from_peers.blocks == len(DIGESTS) * (not has_all)
            nbytes = {each.node: each.bytes for each in fetched.from_peers.parts}
            predicted = {each.node: each.bytes for each in counted.from_peers.parts}
            assert nbytes.keys() == predicted.keys()
            assert all(nbytes[node] > 0.9 * predicted[node] for node in nbytes)
            assert continues_alike(run, disk, layers)


def test_only_the_heads_of_a_rank_are_read(tmp_path: Path) -> None:
    run = filled()
    save_by(run, tmp_path / "0", [(0, LAYERS)])
    total = heads_of(run, 0)
    with agents(tmp_path / "0") as running:
        whole = ask(open_reader(tmp_path / "all", (0, LAYERS)), running).from_peers.parts[0].bytes
        disk: Any = open_reader(tmp_path / "part", (0, LAYERS), HeadShare(MemberRange(0, total // 2), total))
        counted = ask(disk, running, only_looks=True).from_peers.parts[0]
        assert counted.bytes == pytest.approx(whole / 2, rel=0.01)
        assert counted.seconds == pytest.approx(counted.bytes / 1e9, rel=0.01)
        assert ask(disk, running).blocks == len(DIGESTS)
        content = next(iter(disk._fetches[1].blocks[0].values()))
        for place, arrays in content.items():
            expected = run.store.read(1, place, (0, total // 2), (0, SIZE))
            assert [array.shape for array in arrays] == [array.shape for array in expected]


def test_listed_block_comes_from_another_machine(tmp_path: Path) -> None:
    run = filled()
    save_by(run, tmp_path / "0", [(0, LAYERS)])
    saver = KvDisk(tmp_path / "0", 1 << 30, NAME, range(LAYERS))
    listed = step_pb2.ListedBlock(place=PLACE, digest=DIGESTS[3], tokens=range(SIZE))
    saver.save(run.store, step_pb2.Save(sequence=1, blocks=blocks(), listed=[listed]))
    saver.settle()
    with agents(tmp_path / "0") as running:
        disk = open_reader(tmp_path / "empty", (0, LAYERS))
        fetched = ask(disk, running, text=[*range(10), 99])
        assert (fetched.blocks, fetched.next_tokens) == (len(DIGESTS), 10)
        assert fetched.from_peers.blocks == len(DIGESTS) + 1


def test_machine_that_lacks_blocks_or_saves_none_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "0").mkdir()
    with agents(tmp_path / "0", None) as running:
        disk = open_reader(tmp_path / "empty", (0, LAYERS))
        assert ask(disk, running, only_looks=True) == worker_pb2.KvFetched(id=1)
        assert ask(disk, running).blocks == 0
    assert caplog.text.count("mini-1 saves no KV: start it with --kv-disk") == 1


def leave(agent: Agent) -> None:
    agent.stop()


def flip(agent: Agent) -> None:
    agent.service.flips = True


def hang(agent: Agent) -> None:
    agent.service.hangs = True


def hang_at_list(agent: Agent) -> None:
    agent.service.hangs_at_list = True


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (flip, "KV of mini-0 is not used"),
        (hang, "mini-0 is not asked for KV for 60 s"),
        (hang_at_list, "mini-0 is not asked for KV for 60 s"),
        (leave, "mini-0 is not asked for KV for 60 s"),
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_faulty_machine_is_a_miss_and_another_one_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[Agent], None],
    reason: str,
    others: int,
) -> None:
    """Cause the fault between the count and the reading."""
    monkeypatch.setattr(block_reader, "_READ_WITHIN_S", 0.5)
    run = filled()
    save_by(run, tmp_path / "0", [(0, LAYERS)])
    with agents(*[tmp_path / "0"] * (1 + others)) as running:
        disk: Any = open_reader(tmp_path / "empty", (0, LAYERS))
        assert ask(disk, running, only_looks=True).from_peers.blocks == len(DIGESTS)
        monkeypatch.setattr(block_reader, "_LIST_WITHIN_S", 0.5 if fault is hang_at_list else 10.0)
        fault(running[0])
        fetched = ask(disk, running, number=2)
        assert fetched.blocks == len(DIGESTS) * others
        assert reason in caplog.text
        if others:
            assert [each.node for each in fetched.from_peers.parts if each.bytes][-1] == "mini-1"
            assert continues_alike(run, disk, (0, LAYERS), 2)
        if fault is not flip:
            # Nobody waits for it again.
            peers: Any = disk._blocks.peers
            asked = [peer.node for peer in peers.choose([each.peer for each in running])]
            assert asked == ["mini-1"] * others


def test_damaged_file_is_not_requested_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_by(filled(), tmp_path / "0", [(0, LAYERS)])
    with agents(tmp_path / "0") as running:
        disk = open_reader(tmp_path / "empty", (0, LAYERS))
        running[0].service.flips = True
        for number in (1, 2):
            assert ask(disk, running, number=number).blocks == 0
        assert not ask(disk, running, only_looks=True).HasField("from_peers")
    assert caplog.text.count("KV of mini-0 is not used") == 1


def test_copy_of_another_machine_is_used_for_a_damaged_file_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    run = filled()
    for name in ("0", "own"):
        save_by(run, tmp_path / name, [(0, LAYERS)])
    damage_byte(tmp_path / "own" / NAME / DIGESTS[2].hex() / "0-4")
    with agents(tmp_path / "0") as running:
        disk = open_reader(tmp_path / "own", (0, LAYERS))
        monkeypatch.setattr(Path, "unlink", refuse)
        for number in (1, 2):
            fetched = ask(disk, running, number=number)
            assert (fetched.blocks, fetched.from_peers.blocks) == (len(DIGESTS), 1)
            assert continues_alike(run, disk, (0, LAYERS), number)


def test_files_with_long_headers_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "_FIRST_BYTES", 64)
    run = filled()
    save_by(run, tmp_path / "0", [(0, LAYERS)])
    with agents(tmp_path / "0") as running:
        disk = open_reader(tmp_path / "empty", (1, 3))
        assert ask(disk, running).blocks == len(DIGESTS)
        assert continues_alike(run, disk, (1, 3))


def test_complete_files_of_this_machine_are_preferred(tmp_path: Path) -> None:
    """Let another machine have files with the reader's own name, and this one lack the last block."""
    run = filled()
    save_by(run, tmp_path / "0", [(0, 2)])
    save_by(run, tmp_path / "own", [(0, LAYERS)])
    shutil.rmtree(tmp_path / "own" / NAME / DIGESTS[-1].hex())
    with agents(tmp_path / "0") as running:
        disk = open_reader(tmp_path / "own", (0, 2))
        assert ask(disk, running, only_looks=True).blocks == len(DIGESTS) - 1
        fetched = ask(disk, running)
        assert (fetched.blocks, fetched.from_peers.blocks) == (len(DIGESTS), 1)
        assert continues_alike(run, disk, (0, 2))


def test_first_blocks_stay_longest_where_others_read_them(tmp_path: Path) -> None:
    save_by(filled(), tmp_path / "0", [(0, LAYERS)])
    with agents(tmp_path / "0") as running:
        assert ask(open_reader(tmp_path / "empty", (0, LAYERS)), running).blocks == len(DIGESTS)
    used = [(tmp_path / "0" / NAME / digest.hex()).stat().st_mtime for digest in DIGESTS]
    assert used == sorted(used, reverse=True)
    assert len({*used}) == len(used)


def test_disk_of_saved_kv_that_hangs_holds_up_nothing_else(tmp_path: Path) -> None:
    """Fill all of the service's places with calls that hang, and ask for more."""
    service: Any = WeightsService("mini-0", None, tmp_path)
    hangs, places = threading.Event(), serving.MAX_KV_CALLS
    request = weights_pb2.ListBlocksRequest(hello=make_hello(node="reader"), content=NAME, digests=DIGESTS)

    async def run() -> weights_pb2.ListBlocksReply:
        hanging = [asyncio.create_task(service._kv_threads.run(hangs.wait)) for _ in range(places)]
        await asyncio.sleep(0)
        refused = await service.list_blocks(request, None)
        # A call that is given up before its turn leaves its place.
        hanging.pop().cancel()
        hangs.set()
        assert all(await asyncio.gather(*hanging))
        assert not (await service.list_blocks(request, None)).HasField("failure")
        return refused

    assert "others wait for the disk" in asyncio.run(run()).failure.message


def test_only_members_of_the_cluster_read_saved_kv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_by(filled(), tmp_path / "0", [(0, LAYERS)])
    authority, other = Authority.open(tmp_path / "cluster"), Authority.open(tmp_path / "other")
    agent = Agent("mini-0", tmp_path / "0", 1e9, node_credentials(authority, "mini-0"))
    try:
        for members, found in ((authority, len(DIGESTS)), (other, 0)):
            peers = PeerDisks("reader", NAME, node_credentials(members, "reader"))
            disk = KvDisk(tmp_path / f"empty-{found}", 1 << 30, NAME, range(LAYERS), None, None, peers)
            assert ask(disk, [agent]).blocks == found
    finally:
        agent.stop()
    assert "mini-0 is not asked for KV" in caplog.text


@pytest.mark.parametrize(
    ("content", "digest", "file"),
    [
        ("../" + NAME[3:], DIGESTS[0], "0-4"),
        (NAME, b"../../..", "0-4"),
        (NAME, DIGESTS[0], "../../key.pem"),
        (NAME, DIGESTS[0], "0-4/../key"),
        (NAME, DIGESTS[0], "key.pem"),
        (NAME, DIGESTS[0], ""),
    ],
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, content: str, digest: bytes, file: str) -> None:
    save_by(filled(), tmp_path / "kv", [(0, LAYERS)])
    (tmp_path / "kv" / NAME / "key.pem").write_text("secret")
    service = WeightsService("mini-0", None, tmp_path / "kv")
    hello = make_hello(node="reader")
    request = weights_pb2.ReadBlockRequest(
        hello=hello,
        content=content,
        digest=digest,
        file=file,
        ranges=[weights_pb2.ByteRange(offset=0, length=1)],
    )
    context: Any = None

    async def read() -> list[weights_pb2.FetchPart]:
        return [part async for part in service.read_block(request, context)]

    (part,) = asyncio.run(read())
    assert (part.failure.kind, part.data) == ("ProtocolError", b"")
