"""Fetches of weights from one and several nodes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from tests.agent.weights.nodes import (
    FETCH_PROGRAM,
    RecordedProgress,
    all_pieces,
    fetch_all,
    ignore_progress,
    is_like,
    manifest_in,
    node,
    warnings_of,
    write_pieces,
)
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.agent.weights.shares import RUN_BYTES
from mlx_ring.agent.weights.stages import fetch, fetch_manifest, fetch_stages
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.core.errors import NotReady, WeightsMissing
from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import BUILTIN_FOLDER
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
        progress = RecordedProgress()
        async with node("big", manifest, folder) as big:
            there = await fetch_manifest(manifest.digest, [big.peer], "mini")
            model = WeightStore(tmp_path / "store").create(there)
            got = await fetch(model, all_pieces(there), [big.peer], "mini", progress)
        assert is_like(model, folder)
        assert got.received == {"big": sum(manifest.files.values())}
        assert progress.steps[0] == (0, got.nbytes)
        assert progress.steps[-1] == (got.nbytes, got.nbytes)
        assert progress.steps == sorted(progress.steps)

    asyncio.run(act())


def split(folder: Path, files: int) -> None:
    """Split a model into several files with an index, as the hub has large models."""
    import mlx.core as mx  # slow to import, and only this function needs it

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


def test_a_folder_of_symbolic_links_is_served(tmp_path: Path) -> None:
    real = write_random_model(tmp_path / "blobs", QWEN3)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in real.iterdir():
        (folder / path.name).symlink_to(path)
    manifest = manifest_in(folder, tmp_path / "cache")

    async def act() -> None:
        async with node("big", manifest, folder) as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await fetch_all(model, big)
        assert is_like(model, real)

    asyncio.run(act())


def test_a_stage_fetches_its_share_and_the_rest_of_its_files_is_sparse(tmp_path: Path) -> None:
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
                store, progress = WeightStore(tmp_path / "store"), RecordedProgress()
                got = await fetch_stages(store, manifest.digest, [layers], [big.peer], "mini", progress, hold)
        file = got / "model.safetensors"
        assert sum(counted) == share < size / 3
        assert progress.steps[-1] == (share, share)
        assert file.stat().st_size == size
        blocks = file.stat().st_blocks * 512
        assert blocks < share + 64 * 4096 < size / 2

    asyncio.run(act())


def test_stored_pieces_are_not_fetched_again(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 4)

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            await fetch(model, [0, 2], [big.peer], "mini", ignore_progress)
            assert (await fetch_all(model, big)).nbytes == 2 * MB
        assert (await fetch_all(model)).nbytes == 0
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


def test_a_node_without_the_model_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 4)

    async def act() -> None:
        async with node("empty") as empty, node("big", manifest, tmp_path / "model") as big:
            model = WeightStore(tmp_path / "store").create(manifest)
            with pytest.raises(WeightsMissing, match="empty: empty has no model"):
                await fetch_all(model, empty)
            assert (await fetch_all(model, empty, big)).received == {"big": 4 * MB}

    asyncio.run(act())
    assert warnings_of(caplog) == ""


def test_the_long_error_of_a_node_is_shortened(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB])

    async def fail(_part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
        yield weights_pb2.FetchPart(failure=error_to_failure(NotReady("so tired " * 100_000)))

    async def act() -> None:
        async with node("bad", manifest, tmp_path / "model", tamper=fail) as bad:
            model = WeightStore(tmp_path / "store").create(manifest)
            with pytest.raises(WeightsMissing, match="bad: so tired so tired") as raised:
                await fetch_all(model, bad)
        assert len(str(raised.value)) < 600

    asyncio.run(act())


@pytest.mark.slow
def test_two_nodes_share_a_fetch(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [4 * MB] * 64)

    async def act() -> None:
        async with (
            node("one", manifest, tmp_path / "model") as one,
            node("two", manifest, tmp_path / "model") as two,
        ):
            model = WeightStore(tmp_path / "store").create(manifest)
            got = await fetch_all(model, one, two)
        assert is_like(model, tmp_path / "model")
        assert got.nbytes == 256 * MB
        assert min(got.received["one"], got.received["two"]) >= RUN_BYTES

    asyncio.run(act())


def test_nodes_with_a_part_each_serve_the_whole(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 6)

    async def act() -> None:
        stores = [WeightStore(tmp_path / name) for name in ("first", "second")]
        async with node("big", manifest, tmp_path / "model") as big:
            for store, some in zip(stores, ([0, 1, 4], [2, 3, 5]), strict=True):
                await fetch(store.create(manifest), some, [big.peer], "mini", ignore_progress)
        async with node("first", store=stores[0]) as first, node("second", store=stores[1]) as second:
            model = WeightStore(tmp_path / "store").create(manifest)
            got = await fetch_all(model, first, second)
        assert got.received == {"first": 3 * MB, "second": 3 * MB}
        assert is_like(model, tmp_path / "model")

    asyncio.run(act())


MEASURING_PROGRAM = FETCH_PROGRAM.replace("print(done, flush=True)", "None") + (
    "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_size_of_a_fetch(tmp_path: Path) -> None:
    async def peak(name: str, sizes: list[int]) -> int:
        manifest = write_pieces(tmp_path / name, sizes)
        async with node("big", manifest, tmp_path / name) as big:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-c",
                    MEASURING_PROGRAM,
                    big.address,
                    manifest.digest,
                    str(tmp_path / "store"),
                ),
                stdout=subprocess.PIPE,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0
            return int(printed) << 10

    async def act() -> None:
        little, much = await peak("little", [MB]), await peak("much", [200 * MB, 200 * MB])
        assert much < little + 200 * MB, "what is on the way does not depend on the size of the weights"

    asyncio.run(act())


@pytest.mark.parametrize("name", ["demo", "demo-moe"])
def test_stages_load_from_fetched_weights(tmp_path: Path, name: str) -> None:
    import mlx.core as mx  # slow to import, and only this test needs it

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
                        *(manifest.digest, [stage], [big.peer], "mini", ignore_progress, hold),
                    )
                    for number, stage in enumerate(stages)
                ]

    assert mx.array_equal(run(asyncio.run(act()), stages), run([folder] * 3, stages))
