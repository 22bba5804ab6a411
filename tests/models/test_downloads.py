"""Downloads of models: checked against the hub, found in other programs' folders, and removed unless they are served."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from unittest.mock import patch

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from tests.core.fake_hub import COMMIT, FakeHub, running_hub
from tests.models.gguf.writing import write_gguf_of
from tests.processes import run_in_process

from mlx_ring.cli import INTERRUPTED
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, Conflict, ExceedsMemory, ModelNotFound, ModelUnsupported
from mlx_ring.host.private_files import release
from mlx_ring.models import hub
from mlx_ring.models.hub_cache import (
    PART,
    Meter,
    Part,
    check_shared_memory,
    explain_failure,
    interrupted_downloads,
)
from mlx_ring.models.model_source import (
    describe_model,
    find_model,
    hold_folder,
    list_local_models,
    must_be_fetched,
    remove_model,
)

WAIT_S = 60
FIRST = "model-00001-of-00006.safetensors"


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


def start(*typed: str, endpoint: str, home: Path) -> subprocess.Popen[str]:
    """Start a command in a process of its own, because the hub's client reads its address once."""
    # A shell starts background jobs with interrupts ignored, and their children inherit that.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from mlx_ring.cli.app import run; sys.argv[0] = 'mlx-ring'; sys.exit(run())"
    )
    changes = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HOME": str(home),
        "MLX_RING_STATE_DIR": str(home / "state"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *typed],
        env=inherited_environment(changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def mlx_ring(*typed: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, with the hub's address where the hub's client keeps it."""
    urls = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    with (
        patch.object(constants, "ENDPOINT", endpoint),
        patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls),
    ):
        return run_in_process(*typed, folder=home, environment={"MLX_RING_STATE_DIR": str(home / "state")})


def mlx_ring_beside(*typed: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: one that another process hinders, or whose whole output counts."""
    process = start(*typed, endpoint=endpoint, home=home)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(typed, process.returncode, output, errors)


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
        pulled = mlx_ring_beside("pull", "someone/tiny", endpoint=endpoint, home=home)
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


class GiantHub(FakeHub):
    """Hub whose weights need more memory than any machine has, by its list."""

    def sibling(self, name: str, data: bytes) -> dict[str, object]:
        giant = {"size": 10**15, "lfs": {"size": 10**15, "sha256": "0" * 64, "pointerSize": 134}}
        return super().sibling(name, data) | (giant if name.endswith(".safetensors") else {})


def test_a_pull_of_weights_beyond_the_memory_is_refused_with_the_option_that_insists(
    tiny_model: Path, home: Path
) -> None:
    with running_hub(tiny_model, GiantHub) as (endpoint, _):
        pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
        insisted = mlx_ring("pull", "someone/tiny", "--force", endpoint=endpoint, home=home)
    assert pulled.returncode != 0
    assert pulled.stderr.endswith(
        " GB. Choose a smaller model. Or download it all the same with --force.\n"
    ), pulled.stderr
    assert "on disk" in insisted.stderr
    with pytest.raises(ExceedsMemory, match=r"8\.0 GB.* 2\.0 GB\. Choose a smaller model\.$"):
        check_shared_memory("someone/tiny", 8 * 10**9, 2 * 10**9)


class NewerHub(FakeHub):
    """Hub whose newest commit has another tokenizer's configuration than `COMMIT`, which it still has."""

    commit = "b" * 40

    def sibling(self, name: str, data: bytes) -> dict[str, object]:
        is_newer = name == "tokenizer_config.json" and COMMIT not in self.path
        return super().sibling(name, data + b" " if is_newer else data)


def test_a_complete_model_is_compared_with_its_own_version_and_a_newer_one_is_named(
    tiny_model: Path, home: Path
) -> None:
    snapshot = put_in_cache(home, tiny_model, "someone/tiny")
    with running_hub(tiny_model, NewerHub) as (endpoint, _):
        pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
    assert pulled.returncode == 0, pulled.stderr
    assert "The hub has a newer version: to get it, `mlx-ring rm someone/tiny`" in pulled.stdout
    assert {path.name for path in snapshot.iterdir()} == {path.name for path in tiny_model.iterdir()}


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_part_of_an_older_version_is_removed_once_the_model_is_complete(
    *, is_complete: bool, tiny_model: Path, home: Path
) -> None:
    if is_complete:
        put_in_cache(home, tiny_model, "someone/tiny")
    part = home / "hub" / "models--someone--tiny" / "blobs" / f"{'0' * 64}{PART}"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(b"older")
    with running_hub(tiny_model) as (endpoint, _):
        with part.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
            assert part.exists(), "another process downloads it"
        assert mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home).returncode == 0
    assert not part.exists()
    assert "incomplete" not in mlx_ring("list", endpoint="http://127.0.0.1:9", home=home).stdout


class FailingLaterHub(FakeHub):
    """Hub that answers the first question about a model, and none about its version."""

    def answer(self, *, with_body: bool) -> None:
        if "/revision/" in self.path:
            self.send(429, b"{}", with_body=with_body)
        else:
            super().answer(with_body=with_body)


def test_a_hub_that_fails_midway_is_not_taken_for_a_fault_of_the_disk(tiny_model: Path, home: Path) -> None:
    with running_hub(tiny_model, FailingLaterHub) as (endpoint, _):
        pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
    assert pulled.returncode == 2
    assert "someone/tiny cannot be fetched now: the hub did not send " in pulled.stderr
    assert "written" not in pulled.stderr


def test_a_damaged_file_of_a_served_model_stays(tiny_model: Path, home: Path) -> None:
    snapshot = put_in_cache(home, tiny_model, "someone/tiny")
    (snapshot / "tokenizer_config.json").write_text("{}")
    hold_folder(snapshot)
    with running_hub(tiny_model) as (endpoint, _):
        refused = mlx_ring_beside("pull", "someone/tiny", endpoint=endpoint, home=home)
    release(snapshot)
    assert "It stays, because a server uses it" in refused.stderr
    assert (snapshot / "tokenizer_config.json").read_text() == "{}"


class StalledHub(FakeHub):
    """Hub that sends its first weights file, with another SHA-256 if `lies`, and stalls in the others."""

    lies = False
    stalled, released = Event(), Event()

    def sibling(self, name: str, data: bytes) -> dict[str, object]:
        lfs = {"lfs": {"size": len(data), "sha256": "0" * 64, "pointerSize": 134}}
        return super().sibling(name, data) | (lfs if self.lies and name == FIRST else {})

    def send(self, status: int, data: bytes, *, with_body: bool, code: str = "") -> None:
        is_late = with_body and self.path.endswith(".safetensors") and not self.path.endswith(FIRST)
        super().send(status, data, with_body=with_body and not is_late, code=code)
        if is_late:
            self.stalled.set()
            self.released.wait(WAIT_S)


class LyingStalledHub(StalledHub):
    """The same, which lies."""

    lies = True


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        (StalledHub, 130, "`mlx-ring pull someone/tiny` continues the download"),
        (LyingStalledHub, 2, f"{FIRST} of someone/tiny arrived with SHA-256"),
    ],
)
def test_an_interrupt_and_an_error_end_a_pull_whose_other_files_stall(
    kind: type[StalledHub],
    code: int,
    said: str,
    tiny_model: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", str(WAIT_S))
    model = shutil.copytree(tiny_model, home / "model")
    (model / "model.safetensors").rename(model / FIRST)
    for number in range(2, 7):
        (model / f"model-0000{number}-of-00006.safetensors").write_bytes(bytes([number]) * 1000)
    kind.stalled.clear()
    kind.released.clear()
    with running_hub(model, kind) as (endpoint, _):
        process = start("pull", "someone/tiny", endpoint=endpoint, home=home)
        try:
            assert kind.stalled.wait(WAIT_S)
            if code == INTERRUPTED:
                process.send_signal(signal.SIGINT)
            output = "".join(process.communicate(timeout=WAIT_S / 3))
        finally:
            process.kill()
            kind.released.set()
    assert (process.returncode, said in output) == (code, True), output
    listed = mlx_ring("list", endpoint="http://127.0.0.1:9", home=home).stdout
    assert "someone/tiny is incomplete: `mlx-ring pull someone/tiny` continues the download." in listed


class ExpiringHub(FakeHub):
    """Hub whose connection breaks in the middle of the weights. Their address is refused then, until it is asked for again."""

    requests: ClassVar[list[str]] = []
    breaks: ClassVar[list[int]] = []
    """Numbers of bytes after which the next answers break off."""

    def send(self, status: int, data: bytes, *, with_body: bool, code: str = "") -> None:
        if not self.path.endswith(".safetensors"):
            super().send(status, data, with_body=with_body, code=code)
            return
        has_expired = with_body and self.requests[-1:] == ["broken"]
        self.requests.append("refused" if has_expired else "sent" if with_body else "asked")
        if has_expired:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif with_body and self.breaks:
            self.requests[-1] = "broken"
            begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(data) - begin))
            self.end_headers()
            self.wfile.write(data[begin : begin + self.breaks.pop(0)])
            self.close_connection = True
        else:
            super().send(status, data, with_body=with_body, code=code)


def pull_from_expiring_hub(
    breaks: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Sequence[int], list[str]]:
    """Pull a model, and return the bytes of each progress, and what the hub did with the weights."""
    monkeypatch.setattr(ExpiringHub, "requests", [])
    monkeypatch.setattr(ExpiringHub, "breaks", breaks)
    monkeypatch.setattr(hub, "_PAUSE_S", 0.01)
    awake = Event()
    awake.set()
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", awake.wait)
    done: list[int] = []
    with running_hub(model, ExpiringHub) as (endpoint, _), patch.object(constants, "ENDPOINT", endpoint):
        urls = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
        hub.fetch("someone/tiny", report=lambda progress: done.append(progress.done_bytes))
    return done, ExpiringHub.requests


def test_a_download_continues_at_another_address_once_its_own_has_expired(
    tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (tiny_model / "model.safetensors").read_bytes()
    done, requests = pull_from_expiring_hub([len(weights) // 3] * 2, tiny_model, monkeypatch)
    assert requests == [*["asked", "broken", "refused"] * 2, "asked", "sent", "asked"]
    assert done == sorted(done), "the progress goes back"
    assert done[-1] == sum(file.stat().st_size for file in tiny_model.iterdir())
    [kept] = (home / "hub").glob("models--someone--tiny/snapshots/*/model.safetensors")
    assert kept.read_bytes() == weights


def test_a_download_whose_address_is_refused_without_a_new_byte_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFound, match="the hub answered 403"):
        pull_from_expiring_hub([300_000, 0], tiny_model, monkeypatch)
    assert ExpiringHub.requests == ["asked", "broken", "refused"] * 2


def test_a_download_without_a_new_byte_for_long_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "PATIENCE_S", 0.0)
    with pytest.raises(ModelNotFound, match="the hub answered 403"):
        pull_from_expiring_hub([300_000], tiny_model, monkeypatch)
    assert ExpiringHub.requests == ["asked", "broken", "refused"]


def test_a_part_with_more_bytes_than_the_file_is_fetched_again(tiny_model: Path, home: Path) -> None:
    weights = (tiny_model / "model.safetensors").read_bytes()
    part = home / "hub" / "models--someone--tiny" / "blobs" / f"{hashlib.sha256(weights).hexdigest()}{PART}"
    part.parent.mkdir(parents=True)
    part.write_bytes(weights + b"more")
    with running_hub(tiny_model) as (endpoint, _):
        pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
    assert pulled.returncode == 0, pulled.stderr


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_on_a_file_system_without_locks_a_model_is_pulled_and_nothing_removed(
    tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("mlx_ring.host.private_files.fcntl.flock", refuse)
    with running_hub(tiny_model) as (endpoint, _):
        pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
    assert pulled.returncode == 0, pulled.stderr
    # Locks would show whether a server uses the model, or another process downloads it.
    snapshot = next((home / "hub" / "models--someone--tiny").glob("snapshots/*"))
    hold_folder(snapshot)
    removed = mlx_ring("rm", "someone/tiny", endpoint="http://127.0.0.1:9", home=home)
    assert removed.returncode == 2
    assert f"then remove {home}/hub/models--someone--tiny yourself" in removed.stderr
    part = snapshot.parents[1] / "blobs" / f"{'0' * 64}{PART}"
    part.write_bytes(b"of another process")
    damaged = snapshot / "tokenizer_config.json"
    damaged.write_text("{}")
    with running_hub(tiny_model) as (endpoint, _):
        refused = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
        assert "It stays, because its file system has no locks" in refused.stderr
        assert damaged.read_text() == "{}"
        shutil.copy(tiny_model / damaged.name, damaged)
        assert mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home).returncode == 0
    assert part.exists()
    release(snapshot)


def test_without_links_weights_are_on_the_disk_once(
    tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(_: object = None) -> bool:
        return False

    for module in ("mlx_ring.models.hub", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{module}.are_symlinks_supported", no_links)
    with running_hub(tiny_model) as (endpoint, _):
        for _ in range(2):
            pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
            assert pulled.returncode == 0, pulled.stderr
    size = (tiny_model / "model.safetensors").stat().st_size
    kept = [path for path in (home / "hub").rglob("*") if path.is_file() and path.stat().st_size == size]
    assert [path.name for path in kept] == ["model.safetensors"]
    assert mlx_ring("rm", "someone/tiny", endpoint="http://127.0.0.1:9", home=home).returncode == 0


def test_a_part_that_another_process_has_completed_grows_no_more(tmp_path: Path) -> None:
    meter = Meter(10, lambda _: None)
    with Part(tmp_path / "part", meter) as part:
        part.write(b"first")
        (tmp_path / "part").rename(tmp_path / "whole")
        with pytest.raises(InterruptedError, match="another process has fetched the file"):
            part.write(b"again")
    assert (tmp_path / "whole").read_bytes() == b"first"


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
    blob = put_into_ollama(root, tiny_model, "a-tiny-one", "latest")
    found = find_model("a-tiny-one")
    assert (found.kind, found.folder.is_gguf, found.folder.num_layers) == ("ollama", True, 5)
    assert ("a-tiny-one:latest", "ollama") in [(model.name, model.kind) for model in list_local_models()]
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(ModelNotFound, match="There is no model 'a-tiny-one'"):
        find_model("a-tiny-one")


def test_a_served_model_is_not_removed(tiny_model: Path, home: Path) -> None:
    snapshot = put_in_cache(home, tiny_model, "someone/tiny")
    hold_folder(snapshot)
    with pytest.raises(Conflict, match="someone/tiny is served on this machine: `mlx-ring ps` shows where"):
        remove_model("someone/tiny")
    release(snapshot)
    assert remove_model("someone/tiny")[0] == "someone/tiny"
    with pytest.raises(ModelNotFound, match="is not on this machine"):
        remove_model("someone/tiny")


def test_a_model_in_a_linked_folder_or_of_another_user_is_not_removed_and_the_reason_named(
    tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_cache(home, tiny_model, "someone/tiny")
    folder = home / "hub" / "models--someone--tiny"
    kept = folder.rename(home / "elsewhere")
    folder.symlink_to(kept)
    with pytest.raises(ConfigError, match=f"{folder} is a link to {kept}: remove both yourself"):
        remove_model("someone/tiny")
    folder.unlink()
    kept.rename(folder)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "refs"))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(ConfigError, match=f"{folder}/refs cannot be removed .Permission denied.: correct"):
        remove_model("someone/tiny")


def test_a_model_that_a_process_downloads_is_not_removed(home: Path) -> None:
    part = home / "hub" / "models--someone--tiny" / "blobs" / "ab.mlx-ring.part"
    part.parent.mkdir(parents=True)
    part.touch()
    with part.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert interrupted_downloads() == {"someone/tiny": 0}
        with pytest.raises(Conflict, match="someone/tiny is being downloaded: end the download"):
            remove_model("someone/tiny")
    assert remove_model("someone/tiny") == ("someone/tiny", 0)


class RefusingHub(FakeHub):
    """Hub that refuses everything with one status."""

    status, code = 500, ""

    def answer(self, *, with_body: bool) -> None:
        super().send(self.status, b"{}", with_body=with_body, code=self.code)


class GatedHub(RefusingHub):
    """Hub whose models are gated."""

    status, code = 403, "GatedRepo"


class TokenRefusingHub(RefusingHub):
    """Hub that knows the request's token no more."""

    status, code = 401, "Invalid credentials in Authorization header"


class Mirror(RefusingHub):
    """Hub that lacks the model, and says so as any server does."""

    status, code = 404, ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            GatedHub,
            "/someone/tiny, then run `hf auth login` on this machine, or set HF_TOKEN to a token from http",
        ),
        (GatedHub, "someone/tiny is gated: accept its terms at http://127.0.0.1:"),
        (TokenRefusingHub, "because the hub asks for a token: run `hf auth login` on this machine, or set"),
        (RefusingHub, "cannot be fetched now: the hub answered 500."),
    ],
)
def test_a_refusal_of_the_hub_is_named_in_a_pull_and_in_a_comparison(
    kind: type[RefusingHub], said: str, tiny_model: Path, home: Path
) -> None:
    with running_hub(tiny_model, kind) as (endpoint, _):
        assert said in mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home).stderr
        put_in_cache(home, tiny_model, "someone/tiny")
        compared = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
        alone = mlx_ring("pull", "someone/tiny", endpoint="http://127.0.0.1:9", home=home)
    assert "Its files were not compared: The hub cannot be asked (" in alone.stdout
    assert "Its files were not compared: someone/tiny " in compared.stdout
    assert said in compared.stdout


@pytest.mark.parametrize(
    ("given", "kept", "said"),
    [
        (
            "hf_old",
            None,
            "refuses the token in HF_TOKEN: it is wrong or has expired. Set HF_TOKEN to another",
        ),
        (
            "hf_old",
            "hf_kept",
            "refuses the token in HF_TOKEN: it is wrong or has expired. Set HF_TOKEN to another",
        ),
        ("", "hf_kept", "refuses the token of this machine: it is wrong or has expired. Run `hf auth login`"),
        ("", None, "the hub asks for a token: run `hf auth login`"),
    ],
)
def test_a_refused_token_is_replaced_where_it_is_kept(
    given: str, kept: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", given)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("PATH", "")
    if kept is not None:
        (tmp_path / "token").write_text(kept)
    answer: Any = httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co/api/models/a/b"))
    sentence = str(explain_failure("someone/tiny", HfHubHTTPError("refused", response=answer)))
    assert said in sentence
    assert "/hf" not in sentence


def test_a_mirror_without_the_model_is_not_to_be_asked_again_later(tiny_model: Path, home: Path) -> None:
    with running_hub(tiny_model, Mirror) as (endpoint, _):
        done = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
    assert done.returncode == 2
    assert "The hub has no model someone/tiny, or it is private: check the spelling." in done.stderr
    assert "later" not in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "hub (No space left on device): correct that"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/b"),
            "to /a/b (Permission denied): correct that",
        ),
        (OSError(errno.ENOLCK, "No locks available"), "hub (No locks available): correct that"),
        (OSError(errno.EROFS, "Read-only file system"), "hub (Read-only file system): correct that"),
        (OSError(errno.ESTALE, "Stale file handle"), "hub (Stale file handle): correct that"),
        (OSError("connection reset"), "cannot be fetched (connection reset): connect to the network"),
        (OSError("[Errno -2] Name not known"), "cannot be fetched (Name not known): connect to the network"),
    ],
)
def test_a_failure_of_the_disk_is_not_taken_for_one_of_the_network(error: OSError, said: str) -> None:
    assert said in str(explain_failure("someone/tiny", error))


def test_a_plan_of_a_model_asks_an_unreachable_hub_once_and_uses_the_kept_configuration(
    tiny_model: Path, home: Path
) -> None:
    plan = ("plan", "someone/tiny", "--machine", "m4-mac-mini-16")
    nowhere = "http://127.0.0.1:9"
    refused = mlx_ring_beside(*plan, endpoint=nowhere, home=home)
    assert refused.stderr.startswith("mlx-ring: someone/tiny is not on this machine and cannot be fetched (")
    assert len(refused.stderr.splitlines()) == 1, "no line of the hub's client"
    put_in_cache(home, tiny_model, "someone/tiny")
    for file in home.rglob("*.safetensors"):
        file.unlink()
    kept = mlx_ring_beside(*plan, endpoint=nowhere, home=home)
    assert (kept.returncode, kept.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "said", "kind"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt FP8"),
    ],
)
def test_a_model_whose_weights_cannot_be_loaded_is_not_downloaded(
    tiny_model: Path, home: Path, file: str, said: dict[str, object], kind: str
) -> None:
    model = home / "model"
    shutil.copytree(tiny_model, model)
    before = (model / file).read_text() if (model / file).exists() else "{}"
    (model / file).write_text(json.dumps({**json.loads(before), **said}))
    with running_hub(model) as (endpoint, requested):
        pulled = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
        assert not any(path.endswith("safetensors") for path in requested)
    assert f"someone/tiny has weights of the kind {kind}" in pulled.stderr
    assert pulled.returncode == 2


class HubWithTypes(FakeHub):
    """Hub that knows the types of the weights."""

    dtypes: ClassVar[dict[str, int]] = {"BF16": 1000, "U8": 1000}


def test_a_model_that_is_still_called_quantized_is_downloaded_unless_the_hub_knows_that_it_is(
    tiny_model: Path, home: Path
) -> None:
    model = home / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    given = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": given}))
    with running_hub(model, HubWithTypes) as (endpoint, _):
        refused = mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home)
    assert "someone/tiny has weights of the kind bitsandbytes" in refused.stderr
    with running_hub(model) as (endpoint, _):
        plan = ("plan", "someone/tiny", "--machine", "m4-mac-mini-16")
        assert mlx_ring(*plan, endpoint=endpoint, home=home).returncode == 0
        assert mlx_ring("pull", "someone/tiny", endpoint=endpoint, home=home).returncode == 0


def test_a_model_of_ollama_that_cannot_be_served_is_refused_with_its_reason(
    tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = home / "ollama"
    root.mkdir()
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    blob = put_into_ollama(root, tiny_model, "a-tiny-one", "latest")
    content = blob.read_bytes()
    blob.write_bytes(content.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    for use in (find_model, describe_model):
        with pytest.raises(ModelUnsupported, match=r"blk\.0\.attn_x\.weight"):
            use("a-tiny-one")
    alike = root / "manifests" / "registry.ollama.ai" / "someone"
    shutil.copytree(root / "manifests" / "registry.ollama.ai" / "library", alike)
    assert must_be_fetched("someone/a-tiny-one")
    assert "Ollama has someone/a-tiny-one, but it cannot be served" in caplog.text
