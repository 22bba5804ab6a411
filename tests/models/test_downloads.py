"""Downloads of models: checked against the hub, found in other programs' folders, and removed unless they are served."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.core.fake_hub import COMMIT, FakeHub, running_hub
from tests.models.gguf.writing import write_gguf_of

from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, Conflict, ModelNotFound
from mlx_ring.models.model_source import (
    find_model,
    hold_folder,
    list_local_models,
    must_be_fetched,
    release_folder,
    remove_model,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user an empty home, whose hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def put_in_cache(home: Path, model: Path, name: str) -> Path:
    snapshot = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
    shutil.copytree(model, snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(COMMIT)
    return snapshot


def mlx_ring(*typed: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, because the hub's client reads its address once."""
    code = "import sys; from mlx_ring.cli.app import run; sys.argv[0] = 'mlx-ring'; sys.exit(run())"
    changes = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HOME": str(home),
        "MLX_RING_STATE_DIR": str(home / "state"),
    }
    return subprocess.run(
        [sys.executable, "-c", code, *typed],
        env=inherited_environment(changes),
        capture_output=True,
        text=True,
        check=False,
    )


class OtherHub(FakeHub):
    """Hub that sends other weights than it lists."""

    def sibling(self, name: str, data: bytes) -> dict[str, object]:
        return super().sibling(name, data) | (
            {"lfs": {"size": len(data), "sha256": "0" * 64, "pointerSize": 134}}
            if name.endswith(".safetensors")
            else {}
        )


def test_a_model_is_pulled_checked_again_and_removed(tiny_model: Path, home: Path) -> None:
    with running_hub(tiny_model) as (endpoint, requested):
        pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
        assert pulled.returncode == 0, pulled.stderr
        assert pulled.stdout.startswith("someone/tiny is complete: ")
        requested.clear()
        again = mlx_ring("models", "pull", "someone/tiny", endpoint=endpoint, home=home)
        assert "on this machine already (hub)" in again.stdout
        assert "have the hub's sizes and SHA-256" in again.stdout
        assert not any(path.endswith("safetensors") for path in requested)
        [weights] = (home / "hub").glob("models--someone--tiny/snapshots/*/model.safetensors")
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.resolve().write_bytes(content)
        damaged = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
        assert (
            "has another SHA-256 than the hub states: it is removed; pull the model again" in damaged.stderr
        )
        assert mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home).returncode == 0
        removed = mlx_ring("rm", "someone/tiny", endpoint=endpoint, home=home)
        assert removed.stdout.startswith("someone/tiny is removed, which frees ")
        assert not (home / "hub" / "models--someone--tiny").exists()


def test_weights_with_another_content_than_the_hub_states_are_not_kept(tiny_model: Path, home: Path) -> None:
    with running_hub(tiny_model, OtherHub) as (endpoint, _):
        refused = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
    assert refused.returncode == 2
    assert "model.safetensors of someone/tiny arrived with SHA-256" in refused.stderr
    assert not [path for path in (home / "hub").rglob("*") if path.stat().st_size > 1 << 20]


def test_a_pull_of_a_listed_model_that_the_hub_lacks_says_so(tiny_model: Path, home: Path) -> None:
    with running_hub(tiny_model) as (endpoint, _):
        refused = mlx_ring("pull", "qwen3:8b", endpoint=endpoint, home=home)
    assert refused.returncode == 2
    assert "The hub has mlx-community/Qwen3-8B-4bit no more, for which qwen3:8b stands" in refused.stderr


@pytest.mark.parametrize("place", [".lmstudio/models", ".cache/lm-studio/models"])
def test_a_model_of_lm_studio_is_not_downloaded_again(place: str, tiny_model: Path, home: Path) -> None:
    shutil.copytree(tiny_model, home / place / "mlx-community" / "Qwen3-8B-4bit")
    assert not must_be_fetched("qwen3:8b")
    found = find_model("qwen3:8b")
    assert (found.name, found.kind) == ("mlx-community/Qwen3-8B-4bit", "LM Studio")
    assert ("mlx-community/Qwen3-8B-4bit", "LM Studio") in [
        (model.name, model.kind) for model in list_local_models()
    ]
    with pytest.raises(ConfigError, match="belongs to LM Studio: remove it there"):
        remove_model("qwen3:8b")


def put_into_ollama(root: Path, model: Path, name: str, tag: str) -> Path:
    """Write a model's GGUF file and its manifest as ollama does."""
    written = write_gguf_of(model, root / "written.gguf")
    digest = hashlib.sha256(written.read_bytes()).hexdigest()
    (root / "blobs").mkdir()
    blob = written.rename(root / "blobs" / f"sha256-{digest}")
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / name / tag
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00", "size": 1},
        {
            "mediaType": "application/vnd.ollama.image.model",
            "digest": f"sha256:{digest}",
            "size": blob.stat().st_size,
        },
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def test_a_model_of_ollama_is_read_in_place_unless_its_file_is_incomplete(
    tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = home / "ollama"
    root.mkdir()
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    blob = put_into_ollama(root, tiny_model, "tinyllama", "latest")
    found = find_model("tinyllama")
    assert (found.kind, found.folder.is_gguf, found.folder.num_layers) == ("ollama", True, 5)
    assert ("tinyllama:latest", "ollama") in [(model.name, model.kind) for model in list_local_models()]
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(ModelNotFound, match="There is no model 'tinyllama'"):
        find_model("tinyllama")


def test_a_served_model_is_not_removed(tiny_model: Path, home: Path) -> None:
    snapshot = put_in_cache(home, tiny_model, "someone/tiny")
    hold_folder(snapshot)
    with pytest.raises(Conflict, match="someone/tiny is served on this machine: `mlx-ring ps` shows where"):
        remove_model("someone/tiny")
    release_folder(snapshot)
    assert remove_model("someone/tiny")[0] == "someone/tiny"
    with pytest.raises(ModelNotFound, match="is not on this machine"):
        remove_model("someone/tiny")
