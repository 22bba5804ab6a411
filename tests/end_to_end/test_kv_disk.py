"""KV on disk, by real servers: saved under one split of the layers, restored under others."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from tests.end_to_end.loopback_cluster import running_cluster
from tests.end_to_end.test_drain import three_machines
from tests.eventually import eventually
from tests.faults.injection import held_read, stopping_at_steps
from tests.faults.models import write_model
from tests.machines import free_pair_of_ports
from tests.processes import Server, serving

PROMPT = " ".join(f"word{number}" for number in range(240))
OTHER_PROMPT = " ".join(f"name{number}" for number in range(240))
FLAGS = ("--kv-disk", "1GiB", "--kv-disk-dir")


def ask(server: Server, prompt: str = PROMPT, model: str = "demo", tokens: int = 24) -> tuple[str, int, int]:
    """Return the answer's text, and the tokens of its prompt and those of them that were cached."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer: dict[str, Any] = server.http.post("/v1/completions", json=body).raise_for_status().json()
    usage = answer["usage"]
    return (
        answer["choices"][0]["text"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def prefix_stats(server: Server) -> dict[str, int]:
    return server.http.get("/cache/stats").raise_for_status().json()["prefix_cache"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A prompt whose KV a server has saved, and the greedy answer to it."""

    folder: Path
    text: str
    tokens: int
    """Tokens of the prompt except the last, which is always computed."""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """Tokens that a server of another split has read of the saved prompt, and what it says of them."""

    answer: tuple[str, int]
    """Its text, and the number of cached tokens of its prompt."""
    restored_tokens: int
    metrics: str
    log: str

    def check(self, saved: Saved) -> None:
        """Check that the whole prompt was read from the disk, and that the ways back show it."""
        assert self.answer == (saved.text, saved.tokens)
        assert self.restored_tokens == saved.tokens
        label = '{instance="0",model_name="demo"}'
        assert f"mlx_ring_kv_disk_restored_tokens_total{label} {saved.tokens}.0" in self.metrics
        labels = '{instance="0",model_name="demo",way="disk"}'
        assert f"mlx_ring_way_back_taken_seconds_count{labels} 1.0" in self.metrics
        assert f"mlx_ring_way_back_predicted_seconds_count{labels} 1.0" in self.metrics
        blocks = rf"\({saved.tokens // 256 * 256} tokens; "
        assert re.search(rf"Ways back of \S+: disk \(1\), predicted .* took .* {blocks}", self.log)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a prompt in two stages."""
    folder = tmp_path_factory.mktemp("kv")
    with serving(
        "demo", "--stages", "2", *FLAGS, str(folder), folder=tmp_path_factory.mktemp("first")
    ) as server:
        text, prompt_tokens, cached = ask(server)
        assert cached == 0
        eventually(lambda: prefix_stats(server)["saved_tokens"], lambda tokens: tokens == prompt_tokens + 23)
        # The ranks write behind the steps.
        eventually(lambda: whole_blocks(folder), lambda blocks: blocks == -(-(prompt_tokens + 23) // 256))
        assert server.stop() == 0
    return Saved(folder, text, prompt_tokens - 1)


def whole_blocks(folder: Path) -> int:
    """Return the number of blocks that both stages have written."""
    return sum({file.name for file in path.iterdir()} == {"0-5", "5-8"} for path in folder.glob("*/*"))


def restore(server: Server) -> Restored:
    """Ask the saved prompt of a server that has just started."""
    text, _, cached = ask(server)
    return Restored(
        (text, cached),
        prefix_stats(server)["restored_tokens"],
        server.http.get("/metrics").text,
        (server.folder / "logs" / "head.log").read_text(),
    )


@pytest.mark.thorough
def test_prompt_is_restored_by_another_split_of_the_layers(saved: Saved, tmp_path: Path) -> None:
    with serving("demo", "--stages", "3", *FLAGS, str(saved.folder), folder=tmp_path) as server:
        restore(server).check(saved)


@pytest.fixture(scope="module")
def ranks(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> tuple[Restored, Saved]:
    """Restore the prompt in two ranks, and save another one there, each rank its share of the heads."""
    folder, before = saved.folder, {*saved.folder.glob("*/*")}

    def new_files() -> list[str]:
        return [
            file.name
            for block in {*folder.glob("*/*")} - before
            for file in block.iterdir()
            if "-" in file.name
        ]

    with serving("demo", "--tp", "2", *FLAGS, str(folder), folder=tmp_path_factory.mktemp("ranks")) as server:
        restored = restore(server)
        text, prompt_tokens, cached = ask(server, OTHER_PROMPT)
        assert cached == 0
        expected = logprobs(server)
        eventually(new_files, lambda files: len(files) >= 2 * (prompt_tokens // 256))
        assert server.stop() == 0
    assert {name.partition(".heads-")[2][-5:] for name in new_files()} == {"-of-4"}
    return restored, Saved(folder, text, prompt_tokens - 1, expected)


def logprobs(server: Server) -> tuple[float, ...]:
    body = {"model": "demo", "prompt": OTHER_PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    answer: dict[str, Any] = server.http.post("/v1/completions", json=body).raise_for_status().json()
    return tuple(answer["choices"][0]["logprobs"]["token_logprobs"])


def test_prompt_is_restored_by_another_split_of_the_heads(
    saved: Saved, ranks: tuple[Restored, Saved]
) -> None:
    ranks[0].check(saved)


@pytest.fixture(scope="module")
def damaged(
    saved: Saved, ranks: tuple[Restored, Saved], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Server]:
    """Damage the second block of the prompt, and serve in two stages again."""
    del ranks  # it has read the whole prompt
    written = saved.folder.glob("*/*/5-8")
    blocks = sorted(written, key=lambda path: -path.parent.stat().st_mtime)
    kept = blocks[1].read_bytes()
    blocks[1].write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    folder = tmp_path_factory.mktemp("damaged")
    with serving("demo", "--stages", "2", *FLAGS, str(saved.folder), folder=folder) as server:
        yield server


def test_shares_of_the_heads_are_restored_by_stages(ranks: tuple[Restored, Saved], damaged: Server) -> None:
    _, shares = ranks
    assert ask(damaged, OTHER_PROMPT)[::2] == (shares.text, shares.tokens)
    differences = [abs(one - other) for one, other in zip(shares.logprobs, logprobs(damaged), strict=True)]
    assert max(differences) < 1e-4


def test_damaged_block_is_computed_again(saved: Saved, damaged: Server) -> None:
    answer, _, cached = ask(damaged)
    assert answer == saved.text
    assert cached == 256 < saved.tokens


def change_weights(file: Path) -> None:
    """Change every weight of a file a little."""
    weights = cast("dict[str, mx.array]", mx.load(str(file)))
    mx.save_safetensors(str(file), {name: array * 1.01 for name, array in weights.items()}, {"format": "mlx"})


RESTORED = {"sliding": 1024, "recurrent": 768}
"""Tokens restored of a conversation. Windows are saved at ends of blocks in the first answer, too, states only at those
in the first prompt."""


def test_conversations_of_models_that_forget_continue_after_a_restart_and_those_of_changed_weights_do_not(
    tmp_path: Path,
) -> None:
    """Serve three models, and then two of them with one that differs in its weights alone, as if trained further."""
    kinds, kv, first = tmp_path / "kinds", tmp_path / "kv", PROMPT[:800]
    models = [write_model(kinds / kind, kind) for kind in RESTORED]
    model, trained = write_model(tmp_path / "model", "dense"), tmp_path / "trained" / "model"
    shutil.copytree(model, trained)
    change_weights(trained / "model.safetensors")

    def run(stages: str, dense: Path, use: Callable[[Server], None]) -> None:
        flags = (*map(str, models[1:]), str(dense), "--stages", stages, *FLAGS, str(kv))
        with serving(models[0], *flags, folder=tmp_path) as server:
            # A server is ready with its first model.
            eventually(lambda: model_states(server), lambda states: states == 3 * ["ready"])
            use(server)
            assert server.stop() == 0

    asked: dict[str, tuple[str, str]] = {}

    def converse(server: Server) -> None:
        assert ask(server, first, "model")[2] == 0
        for kind in RESTORED:
            second = f"{first}{ask(server, first, kind, 300)[0]} And then?"
            asked[kind] = second, ask(server, second, kind)[0]
        for kind in ("model", *RESTORED):
            least = 768 if kind == "model" else 1024
            eventually(partial(saved_tokens, server, kind), lambda saved, least=least: saved >= least)

    def continue_all(server: Server) -> None:
        assert ask(server, first, "model")[2] == 0
        for kind, (second, answer) in asked.items():
            assert ask(server, second, kind)[::2] == (answer, RESTORED[kind])

    run("2", model, converse)
    run("3", trained, continue_all)


def model_states(server: Server) -> list[str]:
    return [model["state"] for model in server.http.get("/v1/models").json()["data"]]


def saved_tokens(server: Server, model: str) -> float:
    """Return the number of a model's tokens whose KV was saved."""
    found = re.search(
        rf'^mlx_ring_kv_disk_saved_tokens_total{{[^}}]*model_name="{model}"[^}}]*}} (\S+)$',
        server.http.get("/metrics").text,
        re.MULTILINE,
    )
    return float(found[1]) if found else 0.0


def saved_files(folder: Path) -> list[str]:
    return [file.name for file in folder.glob("*/*/*-*")]


def listed_files(folder: Path) -> list[Path]:
    """Return the list of the last block, which is written after all others."""
    return [*folder.glob("*/*/block")]


@pytest.mark.machines
def test_each_machine_of_a_cluster_keeps_the_kv_of_its_own_layers_and_reads_that_of_others(
    tmp_path: Path,
) -> None:
    """Save under two stages, and restore under three uneven ones, with a machine that has saved nothing.

    Computing is said to be slow, so that reading is the faster way however slow the link was measured to be.
    """
    folders = [tmp_path / name / "kv" for name in ("state", "node-1/state", "node-2/state")]

    def run(nodes: int) -> tuple[tuple[str, int, int], int]:
        flags = ("--strategy", "uniform", *FLAGS[:2])
        with running_cluster(
            "demo", nodes, tmp_path, free_pair_of_ports(), *flags, join_flags=FLAGS[:2], speed=0.002
        ) as server:
            answer = ask(server)
            for folder in folders[:nodes]:
                eventually(partial(listed_files, folder), lambda files: len(files) == 1)
            peer_tokens = prefix_stats(server)["peer_tokens"]
            assert server.stop() == 0
        return answer, peer_tokens

    (text, prompt_tokens, cached), peer_tokens = run(2)
    assert (cached, peer_tokens) == (0, 0)
    assert sorted(set(saved_files(folder)).pop() for folder in folders[:2]) == ["0-4", "4-8"]
    restored = run(3)
    ways = [line for line in head_log(tmp_path).splitlines() if "Ways back of" in line]
    assert restored == ((text, prompt_tokens, prompt_tokens - 1), prompt_tokens - 1), ways
    # Either of the other machines may be the last one.
    assert {*saved_files(folders[2])} in ({"3-6"}, {"6-8"})
    way = next(line for line in ways if "peers" in line)
    assert re.search(r"peers \(1\), predicted .* took .* MB of them from other machines; recompute", way)


@pytest.mark.machines
@pytest.mark.parametrize("leaves", ["killed", "ctrl-c"])
def test_a_machine_leaves_while_others_restore_a_prompt(leaves: str, tmp_path: Path) -> None:
    """Move the layers to a machine without their KV. A killed machine takes it along; one that is drained lends it.

    It leaves as soon as it has no layers, so what others have not read by then is computed.
    """
    flags = FLAGS[:2]
    machines = partial(three_machines, join_flags=flags, speed=0.002)
    with machines(tmp_path, "--strategy", "uniform", *flags) as (server, _):
        (text, prompt_tokens, _), stats = ask(server), prefix_stats(server)
        assert stats["restored_tokens"] == 0
        for place in ("", "node-1", "node-2"):
            folder = tmp_path / place / "state" / "kv"
            eventually(partial(listed_files, folder), lambda files: len(files) == 1)
        assert server.stop() == 0
    with (
        stopping_at_steps() as hook,
        machines(tmp_path, "--strategy", "uniform", *flags) as (server, joined),
        ThreadPoolExecutor(1) as pool,
    ):
        node = (tmp_path / "node-1" / "state" / "node" / "node-id").read_text().strip()
        devices = server.status()["devices"]
        reader = next(device["pid"] for device in devices if device["node"] != node)
        with held_read(hook, reader) as wait_for_read:
            asking = pool.submit(ask, server)
            wait_for_read()
            if leaves == "killed":
                joined[0].kill()
            else:
                joined[0].send_signal(signal.SIGINT)
            assert joined[0].wait(60) == (-signal.SIGKILL if leaves == "killed" else 0)
        (again, tokens, cached), stats = asking.result(), prefix_stats(server)
        assert (again, tokens) == (text, prompt_tokens)
        assert stats["restored_tokens"] == cached
        if leaves == "killed":
            assert cached == 0
        assert node not in {device["node"] for device in server.status()["devices"]}
        assert ask(server)[0] == text
        assert server.stop() == 0


def head_log(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob("head*.log"))
