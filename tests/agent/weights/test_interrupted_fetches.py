"""Fetches that lose a node or their process, and continue where they were."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.agent.weights.nodes import (
    FETCH_PROGRAM,
    all_pieces,
    fetch_all,
    ignore_progress,
    is_like,
    node,
    write_pieces,
)

from mlx_ring.agent.weights.stages import fetch
from mlx_ring.agent.weights.store import PART_BYTES, WeightStore
from mlx_ring.agent.weights.transfer import FetchLimits
from mlx_ring.core.errors import WeightsMissing
from mlx_ring.rpc.channels import make_aio_server
from mlx_ring.rpc.protos import weights_pb2

MB = 1 << 20


@pytest.mark.slow
def test_other_nodes_continue_within_the_tensor_when_one_is_lost(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [48 * MB, 3 * MB, 48 * MB])

    async def act() -> None:
        async with AsyncExitStack() as stack:
            given = 0

            async def die(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
                nonlocal given
                given += 1
                if given == 20:
                    ending.append(asyncio.create_task(weak.server.stop(None)))
                yield part

            ending: list[asyncio.Task[None]] = []
            weak = await stack.enter_async_context(node("weak", manifest, tmp_path / "model", tamper=die))
            strong = await stack.enter_async_context(node("strong", manifest, tmp_path / "model"))
            model = WeightStore(tmp_path / "store").create(manifest)
            got = await fetch_all(model, weak, strong)
            await asyncio.gather(*ending)
        assert is_like(model, tmp_path / "model")
        assert got.received["weak"] > 0
        assert got.nbytes == 99 * MB  # no byte arrived twice

    asyncio.run(act())


@pytest.mark.slow
def test_without_any_node_left_the_error_names_missing_pieces_and_the_rest_is_stored(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [4 * MB] * 40)

    async def act() -> None:
        model = WeightStore(tmp_path / "store").create(manifest)
        given = 0
        async with node("weak", manifest, tmp_path / "model") as weak:

            async def die(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
                nonlocal given
                given += 1
                if given == 50:
                    ending.append(asyncio.create_task(weak.server.stop(None)))
                yield part

            ending: list[asyncio.Task[None]] = []
            weak.service.tamper = die
            with pytest.raises(
                WeightsMissing, match=r"pieces of model .* are missing .*tensor tensor\.\d+"
            ) as raised:
                await fetch_all(model, weak)
            await asyncio.gather(*ending)
        assert "weak: The connection to weak broke" in str(raised.value)
        kept = len(model.have)
        assert kept > 0
        async with node("big", manifest, tmp_path / "model") as big:
            assert (await fetch_all(model, big)).nbytes <= (40 - kept) * 4 * MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


@pytest.mark.slow
def test_a_fetch_continues_with_a_restarted_node(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [4 * MB] * 20)

    async def act() -> None:
        given = 0
        async with node("big", manifest, tmp_path / "model") as big:
            again = make_aio_server()
            again.add_generic_rpc_handlers((big.service.handler(),))

            async def restart() -> None:
                await big.server.stop(None)
                again.add_insecure_port(big.address)
                await again.start()

            async def restart_once(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
                nonlocal given
                given += 1
                if given == 30:
                    restarting.append(asyncio.create_task(restart()))
                yield part

            restarting: list[asyncio.Task[None]] = []
            big.service.tamper = restart_once
            model = WeightStore(tmp_path / "store").create(manifest)
            patient = FetchLimits(tries=100, pause_s=0.05, longest_pause_s=0.5)
            got = await fetch(model, all_pieces(manifest), [big.peer], "mini", ignore_progress, patient)
            await asyncio.gather(*restarting)
            await again.stop(None)
        assert got.nbytes == 80 * MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_a_silent_node_is_given_up(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 3)

    async def hang(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
        await asyncio.Event().wait()
        yield part

    async def act() -> None:
        async with node("mute", manifest, tmp_path / "model", tamper=hang) as mute:
            model = WeightStore(tmp_path / "store").create(manifest)
            short = FetchLimits(silence_s=0.2, tries=1)
            with pytest.raises(WeightsMissing, match="mute stopped sending"):
                await fetch(model, all_pieces(manifest), [mute.peer], "mini", ignore_progress, short)

    asyncio.run(act())


def test_a_fetch_continues_within_a_tensor_after_its_process_was_killed(tmp_path: Path) -> None:
    sizes = [2 * MB, 96 * MB, MB]
    manifest = write_pieces(tmp_path / "model", sizes)

    async def act() -> None:
        given = 0

        async def slow(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
            nonlocal given
            given += len(part.data)
            if given > 60 * MB:
                await asyncio.Event().wait()
            yield part

        async with node("big", manifest, tmp_path / "model", tamper=slow) as big:
            address = big.address
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", FETCH_PROGRAM, address, manifest.digest, str(tmp_path / "store")),
                stdout=subprocess.PIPE,
            )
            assert process.stdout is not None
            while int(await process.stdout.readline()) < 56 * MB:
                pass
            process.kill()
            assert await process.wait() == -9
            big.service.tamper = None
            model = WeightStore(tmp_path / "store").create(manifest)
            got = await fetch_all(model, big)
        assert is_like(model, tmp_path / "model")
        # Three streams were within a part each when it ended.
        assert sum(sizes) - 60 * MB <= got.nbytes <= sum(sizes) - 56 * MB + 3 * PART_BYTES

    asyncio.run(act())


def test_an_unfinished_line_of_the_journal_is_ignored(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 13)

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await fetch(model, [0], [big.peer], "mini", ignore_progress)
            with (model.entry / "journal").open("a") as journal:
                journal.write("piece 12")
            again = WeightStore(tmp_path / "store").find(manifest.digest)
            assert again is not None
            assert again.have == {0}
            assert (await fetch_all(again, big)).nbytes == 12 * MB
        assert is_like(again, tmp_path / "model")

    asyncio.run(act())


def test_pieces_that_a_power_cut_may_have_lost_are_checked_again(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 4)

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await fetch(model, [0], [big.peer], "mini", ignore_progress)
            with (model.entry / "journal").open("a") as journal:
                journal.write("piece 1\n")
            assert (await fetch_all(model, big)).nbytes == 3 * MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_a_piece_with_wrong_parts_is_fetched_again_as_a_whole(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [2 * PART_BYTES, MB])

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            # A power cut leaves parts that are in the journal and not on the disk.
            model.note_parts([(0, 0), (0, 1)])
            got = await fetch_all(model, big)
        assert got.nbytes == 2 * PART_BYTES + MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())
