"""Weights come from several nodes, are checked, and go on where they were."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import cast

import pytest
from tests.agent.weights.nodes import (
    Told,
    every,
    get,
    is_like,
    manifest_in,
    node,
    say_nothing,
    warnings_of,
    write_pieces,
)
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.agent.weights.peers import Patience
from mlx_ring.agent.weights.shares import RUN_BYTES
from mlx_ring.agent.weights.stages import fetch, fetch_manifest, fetch_stages
from mlx_ring.agent.weights.store import PART_BYTES, WeightStore
from mlx_ring.core.errors import NotReady, WeightsMissing
from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import BUILTIN_FOLDER
from mlx_ring.rpc.channels import make_aio_server
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.protos import weights_pb2

MB = 1 << 20


@pytest.mark.parametrize("files", [1, 3])
def test_a_whole_model_arrives_bit_for_bit(tmp_path: Path, files: int) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    if files > 1:
        split(folder, files)
    manifest = manifest_in(folder, tmp_path / "cache")
    assert len([name for name in manifest.files if name.endswith(".safetensors")]) == files

    async def act() -> None:
        told = Told()
        async with node("big", manifest, folder) as big:
            there = await fetch_manifest(manifest.digest, [big.peer], "mini")
            model = WeightStore(tmp_path / "store").create(there)
            got = await fetch(model, every(there), [big.peer], "mini", told)
        assert is_like(model, folder)
        assert got.received == {"big": sum(manifest.files.values())}
        assert told.steps[0] == (0, got.nbytes)
        assert told.steps[-1] == (got.nbytes, got.nbytes)
        assert told.steps == sorted(told.steps)

    asyncio.run(act())


def split(folder: Path, files: int) -> None:
    """The same tensors in several files, with an index, as the hub has large models."""
    import mlx.core as mx  # other tests here do without

    weights = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    index: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        chosen = {name: weights[name] for name in names[number::files]}
        mx.save_safetensors(str(folder / file), chosen)
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_a_folder_of_links_as_the_hub_makes_them_is_given_out(tmp_path: Path) -> None:
    real = write_random_model(tmp_path / "blobs", QWEN3)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in real.iterdir():
        (folder / path.name).symlink_to(path)
    manifest = manifest_in(folder, tmp_path / "cache")

    async def act() -> None:
        async with node("big", manifest, folder) as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await get(model, big)
        assert is_like(model, real)

    asyncio.run(act())


def test_a_stage_gets_its_share_and_the_rest_of_the_files_is_holes(tmp_path: Path) -> None:
    config = {**QWEN3, "hidden_size": 256, "intermediate_size": 1024}
    folder = write_random_model(tmp_path / "model", config)
    manifest = manifest_in(folder, tmp_path / "cache")
    layers = LayerRange(1, 2)
    share = sum(entry.nbytes for entry in tensors_of_stage(read_model_folder(folder), layers))
    share += manifest.nbytes(manifest.base)
    size = (folder / "model.safetensors").stat().st_size

    async def act() -> None:
        counted: list[int] = []

        async def count(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
            counted.append(len(part.data))
            yield part

        async with node("big", manifest, folder, tamper=count) as big:
            with ExitStack() as hold:
                store, told = WeightStore(tmp_path / "store"), Told()
                got = await fetch_stages(store, manifest.digest, [layers], [big.peer], "mini", told, hold)
        file = got / "model.safetensors"
        assert sum(counted) == share < size / 3
        assert told.steps[-1] == (share, share)
        assert file.stat().st_size == size
        blocks = file.stat().st_blocks * 512
        assert blocks < share + 64 * 4096 < size / 2

    asyncio.run(act())


def test_what_is_here_is_not_asked_for_again(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 4)

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await fetch(model, [0, 2], [big.peer], "mini", say_nothing)
            assert (await get(model, big)).nbytes == 2 * MB
        assert (await get(model)).nbytes == 0
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_a_node_without_the_model_is_no_hindrance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 4)

    async def act() -> None:
        async with node("empty") as empty, node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            with pytest.raises(WeightsMissing, match="empty: empty has no model"):
                await get(model, empty)
            assert (await get(model, empty, big)).received == {"big": 4 * MB}

    asyncio.run(act())
    assert warnings_of(caplog) == ""


def test_a_nodes_long_excuse_is_cut_short(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB])

    async def excuse(_part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
        yield weights_pb2.FetchPart(failure=error_to_failure(NotReady("so tired " * 100_000)))

    async def act() -> None:
        async with node("bad", manifest, tmp_path / "model", tamper=excuse) as bad:
            model = WeightStore(tmp_path / "store").create(manifest)
            with pytest.raises(WeightsMissing, match="bad: so tired so tired") as raised:
                await get(model, bad)
        assert len(str(raised.value)) < 600

    asyncio.run(act())


def test_two_nodes_share_the_work(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [4 * MB] * 64)

    async def act() -> None:
        async with (
            node("one", manifest, tmp_path / "model") as one,
            node("two", manifest, tmp_path / "model") as two,
        ):
            model = WeightStore(tmp_path / "store").create(manifest)
            got = await get(model, one, two)
        assert is_like(model, tmp_path / "model")
        assert got.nbytes == 256 * MB
        assert min(got.received["one"], got.received["two"]) >= RUN_BYTES

    asyncio.run(act())


def test_nodes_that_each_have_a_part_give_the_whole(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 6)

    async def act() -> None:
        stores = [WeightStore(tmp_path / name) for name in ("first", "second")]
        async with node("big", manifest, tmp_path / "model") as big:
            for store, some in zip(stores, ([0, 1, 4], [2, 3, 5]), strict=True):
                await fetch(store.create(manifest), some, [big.peer], "mini", say_nothing)
        async with node("first", store=stores[0]) as first, node("second", store=stores[1]) as second:
            model = WeightStore(tmp_path / "store").create(manifest)
            got = await get(model, first, second)
        assert got.received == {"first": 3 * MB, "second": 3 * MB}
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_when_a_node_dies_in_the_middle_the_others_go_on_within_the_tensor(tmp_path: Path) -> None:
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
            got = await get(model, weak, strong)
            await asyncio.gather(*ending)
        assert is_like(model, tmp_path / "model")
        assert got.received["weak"] > 0
        assert got.nbytes == 99 * MB  # nothing came twice

    asyncio.run(act())


def test_when_no_node_is_left_the_error_says_what_is_missing_and_the_rest_is_kept(tmp_path: Path) -> None:
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
            weak.front.tamper = die
            with pytest.raises(
                WeightsMissing, match=r"pieces of model .* are missing .*tensor tensor\.\d+"
            ) as raised:
                await get(model, weak)
            await asyncio.gather(*ending)
        assert "weak: The connection to weak broke" in str(raised.value)
        kept = len(model.have)
        assert kept > 0
        async with node("big", manifest, tmp_path / "model") as big:
            assert (await get(model, big)).nbytes <= (40 - kept) * 4 * MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_a_node_that_is_back_soon_is_gone_on_with(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [4 * MB] * 20)

    async def act() -> None:
        given = 0
        async with node("big", manifest, tmp_path / "model") as big:
            again = make_aio_server()
            again.add_generic_rpc_handlers((big.front.handler(),))

            async def restart() -> None:
                await big.server.stop(None)
                again.add_insecure_port(big.address)
                await again.start()

            async def stumble(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
                nonlocal given
                given += 1
                if given == 30:
                    restarting.append(asyncio.create_task(restart()))
                yield part

            restarting: list[asyncio.Task[None]] = []
            big.front.tamper = stumble
            model = WeightStore(tmp_path / "store").create(manifest)
            patient = Patience(tries=100, pause_s=0.05, longest_pause_s=0.5)
            got = await fetch(model, every(manifest), [big.peer], "mini", say_nothing, patient)
            await asyncio.gather(*restarting)
            await again.stop(None)
        assert got.nbytes == 80 * MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_a_node_that_says_nothing_is_left_for_another(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 3)

    async def hang(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
        await asyncio.Event().wait()
        yield part

    async def act() -> None:
        async with node("mute", manifest, tmp_path / "model", tamper=hang) as mute:
            model = WeightStore(tmp_path / "store").create(manifest)
            impatient = Patience(silence_s=0.2, tries=1)
            with pytest.raises(WeightsMissing, match="mute stopped sending"):
                await fetch(model, every(manifest), [mute.peer], "mini", say_nothing, impatient)

    asyncio.run(act())


FETCH_ALONE = """
import asyncio, sys
from pathlib import Path
from mlx_ring.agent.weights.stages import fetch, fetch_manifest
from mlx_ring.agent.weights.peers import Peer
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.rpc.channels import open_aio_channel

async def main(address, digest, store):
    async with open_aio_channel(address) as channel:
        peer = Peer("big", channel)
        manifest = await fetch_manifest(digest, [peer], "mini")
        model = WeightStore(Path(store)).create(manifest)
        tell = lambda done, total: print(done, flush=True)
        await fetch(model, range(len(manifest.pieces)), [peer], "mini", tell)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_fetch_goes_on_after_its_process_was_killed_within_a_tensor_too(tmp_path: Path) -> None:
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
                *(sys.executable, "-c", FETCH_ALONE, address, manifest.digest, str(tmp_path / "store")),
                stdout=subprocess.PIPE,
            )
            assert process.stdout is not None
            while int(await process.stdout.readline()) < 56 * MB:
                pass
            process.kill()
            assert await process.wait() == -9
            big.front.tamper = None
            model = WeightStore(tmp_path / "store").create(manifest)
            got = await get(model, big)
        assert is_like(model, tmp_path / "model")
        # Three streams were within a part each when it ended.
        assert sum(sizes) - 60 * MB <= got.nbytes <= sum(sizes) - 56 * MB + 3 * PART_BYTES

    asyncio.run(act())


def test_a_line_that_a_kill_left_unfinished_counts_for_nothing(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 13)

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await fetch(model, [0], [big.peer], "mini", say_nothing)
            with (model.entry / "journal").open("a") as journal:
                journal.write("piece 12")
            again = WeightStore(tmp_path / "store").find(manifest.digest)
            assert again is not None
            assert again.have == {0}
            assert (await get(again, big)).nbytes == 12 * MB
        assert is_like(again, tmp_path / "model")

    asyncio.run(act())


def test_pieces_that_a_power_cut_may_have_taken_are_looked_at_again(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 4)

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await fetch(model, [0], [big.peer], "mini", say_nothing)
            with (model.entry / "journal").open("a") as journal:
                journal.write("piece 1\n")
            assert (await get(model, big)).nbytes == 3 * MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_parts_without_a_piece_to_show_for_are_fetched_whole_when_they_were_wrong(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [2 * PART_BYTES, MB])

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            # As a power cut leaves it: noted, and not on the disk.
            model.note_parts([(0, 0), (0, 1)])
            got = await get(model, big)
        assert got.nbytes == 2 * PART_BYTES + MB
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


MEASURE = FETCH_ALONE.replace("print(done, flush=True)", "None") + (
    "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_what_is_fetched(tmp_path: Path) -> None:
    async def peak(name: str, sizes: list[int]) -> int:
        manifest = write_pieces(tmp_path / name, sizes)
        async with node("big", manifest, tmp_path / name) as big:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", MEASURE, big.address, manifest.digest, str(tmp_path / "store")),
                stdout=subprocess.PIPE,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0
            return int(printed) << 10

    async def act() -> None:
        little, much = await peak("little", [MB]), await peak("much", [200 * MB, 200 * MB])
        assert much < little + 100 * MB

    asyncio.run(act())


@pytest.mark.parametrize("name", ["demo", "demo-moe"])
def test_stages_load_from_what_was_fetched(tmp_path: Path, name: str) -> None:
    import mlx.core as mx  # other tests here do without

    from mlx_ring.worker.weights import load_stage

    def run(folders: list[Path], stages: list[LayerRange]) -> mx.array:
        hidden: mx.array | None = None
        for path, layers in zip(folders, stages, strict=True):
            stage = load_stage(read_model_folder(path), layers, "float32", lambda _done, _total: None)
            hidden = stage.forward(mx.array([[3, 1, 4]]), hidden, stage.make_layer_caches(), None)
        assert hidden is not None
        return hidden

    folder = BUILTIN_FOLDER / name
    manifest = manifest_in(folder, tmp_path / "cache")
    layers = read_model_folder(folder).num_layers
    stages = [LayerRange(0, 2), LayerRange(2, layers - 1), LayerRange(layers - 1, layers)]

    async def act() -> list[Path]:
        with ExitStack() as hold:
            async with node("big", manifest, folder) as big:
                return [
                    await fetch_stages(
                        WeightStore(tmp_path / f"node-{number}"),
                        *(manifest.digest, [stage], [big.peer], "mini", say_nothing, hold),
                    )
                    for number, stage in enumerate(stages)
                ]

    assert mx.array_equal(run(asyncio.run(act()), stages), run([folder] * 3, stages))
