"""The store of weights: its size limit, its use by several processes, and what a killed process leaves."""

from __future__ import annotations

import asyncio
import errno
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.agent.weights.nodes import all_pieces, ignore_progress, manifest_in, node, write_pieces
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.agent.weights.stages import fetch, fetch_stages
from mlx_ring.agent.weights.store import StoredModel, WeightStore, missing_bytes
from mlx_ring.core.errors import ModelCorrupt, PlanError, WeightsMissing
from mlx_ring.core.types import LayerRange
from mlx_ring.models.weights_manifest import WeightsManifest

MB = 1 << 20


def fill(store: WeightStore, manifest: WeightsManifest, folder: Path) -> StoredModel:
    """Fetch all of a model into the store."""

    async def act() -> StoredModel:
        async with node("big", manifest, folder) as big:
            model = store.create(manifest)
            with model.in_use():
                await fetch(model, all_pieces(manifest), [big.peer], "mini", ignore_progress)
            return model

    return asyncio.run(act())


def models(tmp_path: Path, count: int) -> list[tuple[WeightsManifest, Path]]:
    folders = [tmp_path / f"model-{number}" for number in range(count)]
    return [(write_pieces(folder, [MB, MB], number), folder) for number, folder in enumerate(folders)]


def test_the_least_recently_used_model_is_removed_first(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", 5 * MB)
    kept = [fill(store, *given) for given in models(tmp_path, 2)]
    with kept[0].in_use():
        pass
    store.make_room(2 * MB)
    assert [model.manifest.digest for model in store.models()] == [kept[0].manifest.digest]
    assert {path.name for path in store.root.iterdir()} == {".lock", kept[0].manifest.digest}


def test_a_model_in_use_is_not_removed_and_a_lack_of_space_is_an_error(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", 5 * MB)
    kept = [fill(store, *given) for given in models(tmp_path, 2)]
    with kept[0].in_use():
        store.make_room(2 * MB)
        assert [model.entry for model in store.models()] == [kept[0].entry]
        with pytest.raises(
            PlanError,
            match=r"0\.00 GB of weights do not fit .*store: it has a limit of 0\.01 GB.* or raise --weights-limit",
        ):
            store.make_room(4 * MB)
    assert kept[0].have == {0, 1}


def test_on_a_file_system_without_locks_no_model_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    store = WeightStore(tmp_path / "store", 5 * MB)
    kept = [fill(store, *given) for given in models(tmp_path, 2)]
    unfinished = store.root / ".new-of-another-process"
    unfinished.mkdir()
    with kept[0].in_use(), pytest.raises(PlanError, match="remove models there yourself"):
        store.make_room(2 * MB)
    assert {model.entry for model in store.models()} == {model.entry for model in kept}
    assert unfinished.exists()


USE_MODEL = """
import sys
from pathlib import Path
from mlx_ring.agent.weights.store import WeightStore
model = WeightStore(Path(sys.argv[1])).find(sys.argv[2])
with model.in_use():
    print("in use", flush=True)
    sys.stdin.read()
"""


def test_a_model_that_another_process_uses_stays_until_that_ends(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", 3 * MB)
    ((manifest, folder),) = models(tmp_path, 1)
    fill(store, manifest, folder)
    arguments = [sys.executable, "-c", USE_MODEL, str(store.root), manifest.digest]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "in use\n"
        with pytest.raises(PlanError):
            store.make_room(2 * MB)
        holder.kill()
        holder.wait()
    store.make_room(2 * MB)
    assert store.models() == []


def test_use_of_a_removed_model_is_an_error(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", 3 * MB)
    model = fill(store, *models(tmp_path, 1)[0])
    store.make_room(2 * MB)
    with pytest.raises(ModelCorrupt, match="was removed to make room"), model.in_use():
        pass


def test_a_fetch_larger_than_the_free_disk_is_refused_at_once(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    model = fill(store, *models(tmp_path, 1)[0])
    free = shutil.disk_usage(tmp_path).free
    with (
        model.in_use(),
        pytest.raises(PlanError, match=r"do not fit .*while 0\.27 GB must stay free\. Free some space\.$"),
    ):
        store.make_room(2 * free)


def test_a_fetch_of_nothing_removes_no_model(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", MB)
    model = fill(WeightStore(store.root), *models(tmp_path, 1)[0])
    store.make_room(0)
    assert store.models()[0].have == model.have == {0, 1}


def test_a_folder_that_a_killed_process_left_unfinished_is_no_model_and_is_removed(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    ((manifest, folder),) = models(tmp_path, 1)
    (store.root / ".new-half").mkdir(parents=True)
    (store.root / manifest.digest).mkdir()
    assert store.find(manifest.digest) is None
    fill(store, manifest, folder)
    assert {path.name for path in store.root.iterdir()} == {".lock", manifest.digest}


def test_a_model_whose_manifest_was_changed_on_disk_is_not_found(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    ((manifest, folder),) = models(tmp_path, 1)
    model = fill(store, manifest, folder)
    (model.entry / "manifest.json").write_bytes(manifest.encoded.replace(b"tensor.0", b"tensor.9"))
    assert store.find(manifest.digest) is None
    assert missing_bytes(store.create(manifest), all_pieces(manifest)) == 2 * MB


@pytest.mark.parametrize("name", ["..", "", "0" * 63, "/etc", "0" * 63 + "/"])
def test_only_a_digest_names_a_model(tmp_path: Path, name: str) -> None:
    assert WeightStore(tmp_path).find(name) is None


def test_two_fetches_of_the_same_model_transfer_it_once(tmp_path: Path) -> None:
    ((manifest, folder),) = models(tmp_path, 1)

    async def act() -> None:
        async with node("big", manifest, folder) as big:
            ours = [WeightStore(tmp_path / "store").create(manifest) for _ in range(2)]
            got = await asyncio.gather(
                *(fetch(model, all_pieces(manifest), [big.peer], "mini", ignore_progress) for model in ours)
            )
        assert sorted(fetched.nbytes for fetched in got) == [0, 2 * MB]
        assert [model.have for model in ours] == [{0, 1}, {0, 1}]

    asyncio.run(act())


def test_a_second_stage_of_a_model_is_added_to_the_first(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    manifest = manifest_in(folder, tmp_path / "cache")
    store = WeightStore(tmp_path / "store")

    async def act() -> None:
        with ExitStack() as hold:
            async with node("big", manifest, folder) as big:
                for layers in (LayerRange(0, 2), LayerRange(2, 5)):
                    await fetch_stages(
                        store, manifest.digest, [layers], [big.peer], "mini", ignore_progress, hold
                    )
            every_layer = [LayerRange(0, 2), LayerRange(2, 5)]
            path = await fetch_stages(store, manifest.digest, every_layer, [], "mini", ignore_progress, hold)
        assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()

    asyncio.run(act())


def test_a_stage_is_fetched_only_if_it_fits(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    manifest = manifest_in(folder, tmp_path / "cache")

    async def act() -> None:
        with ExitStack() as hold:
            async with node("big", manifest, folder) as big:
                store = WeightStore(tmp_path / "store", 100_000)
                with pytest.raises(PlanError, match="do not fit"):
                    await fetch_stages(
                        store, manifest.digest, [LayerRange(0, 5)], [big.peer], "mini", ignore_progress, hold
                    )

    asyncio.run(act())


def test_a_missing_model_without_another_node_is_an_error(tmp_path: Path) -> None:
    async def act() -> None:
        with ExitStack() as hold, pytest.raises(WeightsMissing, match="no other node is known"):
            await fetch_stages(
                WeightStore(tmp_path), "0" * 64, [LayerRange(0, 1)], [], "mini", ignore_progress, hold
            )

    asyncio.run(act())
