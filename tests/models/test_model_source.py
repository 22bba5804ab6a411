"""Sources of models: the package, the disk, the hub's cache, and the hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.core.fake_hub import COMMIT, find_elsewhere, running_hub
from tests.models.gguf.writing import write_gguf_of

from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, ModelNotFound, PlanError
from mlx_ring.head.served_model import start_name
from mlx_ring.models.config_limits import check_memory
from mlx_ring.models.model_source import (
    builtin_names,
    describe_model,
    find_model,
    full_name,
    list_local_models,
    remove_model,
)

PRIVATE = "someone/private"


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[tuple[str, list[str]]]:
    """Start a hub; return its address, and the list of its requests."""
    with running_hub(tiny_model) as running:
        yield running


def put_in_cache(cache: Path, model: Path, name: str) -> Path:
    """Make a snapshot as the hub's client does, and return its folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for path in model.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    return snapshot


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def test_both_demo_models_are_built_in() -> None:
    assert builtin_names() == ["demo", "demo-moe"]
    assert find_model("demo").kind == "built-in"


def test_a_folder_is_found_by_its_path_and_named_after_itself(tiny_model: Path) -> None:
    model = find_model(str(tiny_model))
    assert (model.name, model.kind, model.folder.num_layers) == ("tiny", "folder", 5)


def test_a_built_in_name_takes_precedence_over_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("demo").kind == "built-in"
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        find_model("./demo")


def test_a_complete_snapshot_is_found_without_a_request(cache: Path, tiny_model: Path) -> None:
    snapshot = put_in_cache(cache, tiny_model, "someone/tiny")
    model = find_model("someone/tiny")
    assert (model.name, model.kind, model.folder.path) == ("someone/tiny", "hub", snapshot)


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_an_incomplete_snapshot_is_not_listed(missing: str, cache: Path, tiny_model: Path) -> None:
    snapshot = put_in_cache(cache, tiny_model, "someone/tiny")
    put_in_cache(cache, tiny_model, "someone/whole")
    (snapshot / missing).unlink()
    assert [model.name for model in list_local_models()] == ["demo", "demo-moe", "someone/whole"]


def test_a_snapshot_with_custom_code_is_not_listed(cache: Path, tiny_model: Path) -> None:
    snapshot = put_in_cache(cache, tiny_model, "someone/tiny")
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "mine.Model"}}))
    assert [model.name for model in list_local_models()] == ["demo", "demo-moe"]


@pytest.mark.parametrize("layers", [None, 10**9])
def test_a_snapshot_without_valid_sizes_is_not_listed(
    layers: int | None, cache: Path, tiny_model: Path
) -> None:
    snapshot = put_in_cache(cache, tiny_model, "someone/tiny")
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    assert [model.name for model in list_local_models()] == ["demo", "demo-moe"]


def test_only_needed_files_are_fetched_and_only_once(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, requests = hub
    first = find_elsewhere("someone/tiny", endpoint, tmp_path)
    assert first.returncode == 0, first.stderr
    fetched = {path.name for path in Path(first.stdout.strip()).iterdir()}
    assert fetched >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert not [name for name in fetched if name.endswith((".py", ".bin", ".md"))]
    requests.clear()
    second = find_elsewhere("someone/tiny", endpoint, tmp_path)
    assert second.stdout == first.stdout
    assert requests == []


def test_only_a_single_machine_must_have_the_memory_before_a_fetch(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    code = (
        "import sys; from mlx_ring.models import config_limits; from mlx_ring.host.process import UsableMemory; "
        "config_limits.usable_memory = lambda: UsableMemory(1, 1, 'it'); from mlx_ring.models.model_source import find_model; "
        "find_model(sys.argv[1], must_fit=sys.argv[2] == 'alone')"
    )

    def find(mode: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, "someone/tiny", mode],
            env=inherited_environment({"HF_ENDPOINT": hub[0], "HF_HOME": str(tmp_path)}),
            capture_output=True,
            text=True,
            check=False,
        ).stderr

    assert "of memory for its weights" in find("alone")
    assert not any(path.endswith("safetensors") for path in hub[1])
    assert "Error" not in find("among several")


def test_errors_distinguish_a_model_missing_on_the_hub_from_no_network(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    unknown = find_elsewhere(PRIVATE, hub[0], tmp_path)
    assert f"The hub has no model {PRIVATE}, or it is private" in unknown.stderr
    offline = find_elsewhere(PRIVATE, "http://127.0.0.1:9", tmp_path)
    assert "is not on this machine and cannot be fetched" in offline.stderr


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b/c", "../x", "x" * 300, "demo ", "~nobody-has-this-name/x", "x\0y"]
)
def test_an_invalid_model_is_refused_with_the_built_in_names(name: str) -> None:
    with pytest.raises(ModelNotFound, match="demo, demo-moe"):
        find_model(name)


def test_weights_larger_than_memory_are_refused_with_both_sizes() -> None:
    check_memory("small", 1)
    with pytest.raises(PlanError, match=r"huge needs 1000000\.0 GB .* this machine has \d"):
        check_memory("huge", 10**15)


@pytest.fixture
def gguf(tiny_model: Path, tmp_path: Path, cache: Path) -> Path:
    assert cache
    return write_gguf_of(tiny_model, tmp_path / "small.Q4.gguf")


def test_a_folder_above_the_working_one_has_its_own_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, model := tmp_path / "my model")
    (model / "inner").mkdir()
    (tmp_path / "link").symlink_to(model / "inner")
    monkeypatch.chdir(model / "inner")
    for name in ("..", "../../my model", str(tmp_path / "link" / "..")):
        found = find_model(name)
        assert (found.name, found.folder.path, describe_model(name).name) == ("my model", model, "my model")
        assert start_name(name, found) == str(model)


def test_names_of_models_hold_in_a_working_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert full_name("qwen3:8b") == "mlx-community/Qwen3-8B-4bit"
    assert find_model("demo").kind == "built-in"
    with pytest.raises(ModelNotFound, match="is not on this machine"):
        remove_model("Qwen/Qwen3-0.6B")


def test_a_gguf_file_is_listed_once_however_its_path_is_typed(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for name in (str(gguf), f"../{gguf.name}", f"../inner/../{gguf.name}"):
        find_model(name)
    assert [model.name for model in list_local_models() if model.kind == "file"] == [str(gguf)]


def test_a_gguf_file_is_found_by_its_path_and_named_after_itself(gguf: Path) -> None:
    model = find_model(str(gguf))
    assert (model.name, model.kind, model.folder.num_layers) == ("small.Q4", "file", 5)
    assert (model.folder.path / "model.gguf").resolve() == gguf
    assert [file.name for file in model.folder.weight_files] == ["model.gguf"]
    assert {file.name for file in model.folder.path.iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf")
    }


def test_a_gguf_file_is_known_by_its_content_too(gguf: Path) -> None:
    blob = gguf.rename(gguf.with_name("sha256-1234"))
    assert find_model(str(blob)).name == "sha256-1234"


def test_the_folder_of_a_gguf_file_is_made_once_for_each_state_of_the_file(
    gguf: Path, tiny_model: Path, tmp_path: Path
) -> None:
    first = find_model(str(gguf)).folder.path
    made = (first / "config.json").stat().st_mtime_ns
    assert find_model(str(gguf)).folder.path == first
    assert (first / "config.json").stat().st_mtime_ns == made
    other = write_gguf_of(tiny_model, tmp_path / "other.gguf")
    kept = find_model(str(other)).folder.path
    write_gguf_of(tiny_model, gguf, {"qwen3.context_length": 512})
    second = find_model(str(gguf))
    assert (second.folder.context_length, second.folder.path == first) == (512, False)
    assert not first.exists(), "the folder of the former state is removed"
    assert kept.exists()


def test_folders_of_removed_gguf_files_are_removed(gguf: Path, tiny_model: Path, tmp_path: Path) -> None:
    first = find_model(str(gguf)).folder.path
    gguf.unlink()
    find_model(str(write_gguf_of(tiny_model, tmp_path / "other.gguf")))
    assert not first.exists()


def test_the_folder_of_a_gguf_file_stays_while_a_server_holds_it(
    gguf: Path, tiny_model: Path, tmp_path: Path
) -> None:
    first = find_model(str(gguf)).folder.path
    code = "import sys, pathlib; from mlx_ring.models.model_source import hold_folder"
    code += "; hold_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "held\n"
        gguf.unlink()
        find_model(str(write_gguf_of(tiny_model, tmp_path / "other.gguf")))
        assert first.exists()
    finally:
        server.communicate("\n")
    find_model(str(write_gguf_of(tiny_model, tmp_path / "third.gguf")))
    assert not first.exists()


def test_on_a_file_system_without_locks_the_folders_of_removed_gguf_files_stay(
    gguf: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    first = find_model(str(gguf)).folder.path
    gguf.unlink()
    find_model(str(write_gguf_of(tiny_model, tmp_path / "other.gguf")))
    assert first.exists()


def test_a_description_of_a_gguf_file_writes_nothing(gguf: Path, tmp_path: Path) -> None:
    described = describe_model(str(gguf))
    assert not (tmp_path / "own").exists()
    served = find_model(str(gguf))
    assert described.name == served.name
    assert described.folder.weight_bytes == served.folder.weight_bytes
    assert [entry.name for entry in described.folder.tensors] == [
        entry.name for entry in served.folder.tensors
    ]


def test_a_gguf_file_in_parts_is_one_model(tiny_model: Path, tmp_path: Path, cache: Path) -> None:
    assert cache
    whole = find_model(str(write_gguf_of(tiny_model, tmp_path / "whole.gguf"))).folder
    first = write_gguf_of(tiny_model, tmp_path / "parts.gguf", parts=3)
    for part in tmp_path.glob("parts-*.gguf"):
        model = find_model(str(part))
        assert model.name == "parts"
        assert len(model.folder.weight_files) == 3
        assert {entry.name for entry in model.folder.tensors} == {entry.name for entry in whole.tensors}
    first.with_name("parts-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFound, match=r"one of 3 parts.*parts-00002-of-00003"):
        find_model(str(first))


def test_gguf_files_that_were_served_or_fetched_are_listed(gguf: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    snapshot = put_in_cache(cache, tmp_path / "empty", "someone/ggufs")
    (snapshot / "fetched.gguf").write_bytes(gguf.read_bytes())
    (snapshot / "damaged.gguf").write_bytes(b"GGUF")
    find_model(str(gguf))
    find_model(str(snapshot / "fetched.gguf"))
    listed = [(model.name, model.kind) for model in list_local_models()]
    assert sorted(listed[2:]) == [(str(snapshot / "fetched.gguf"), "file"), (str(gguf), "file")]


def test_a_folder_with_a_gguf_file_alone_says_how_to_serve_it(gguf: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"name it: .*small\.Q4\.gguf"):
        find_model(str(gguf.parent))


def test_a_cache_that_cannot_be_written_is_an_error(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be written.*XDG_CACHE_HOME"):
        find_model(str(gguf))


def test_two_first_uses_of_gguf_files_at_once_do_not_disturb_each_other(
    gguf: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use another file just before the folder of the first one gets its name."""
    other = write_gguf_of(tiny_model, tmp_path / "other.gguf")
    rename, used = Path.rename, list[str]()

    def rename_later(self: Path, target: Path) -> Path:
        if not used:
            used.append("other")
            assert find_model(str(other)).name == "other"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_later)
    assert find_model(str(gguf)).folder.path.is_dir()
    assert used


def test_folders_of_killed_processes_are_removed_after_a_while(gguf: Path) -> None:
    root = find_model(str(gguf)).folder.path.parent
    old, new = root / ".new-old", root / ".new-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, 0))
    gguf.touch()
    find_model(str(gguf))
    assert (old.exists(), new.exists()) == (False, True)
