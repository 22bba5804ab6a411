"""KV on disk, by real servers: saved under one split of the layers, restored under others."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from tests.end_to_end.loopback_cluster import running_cluster
from tests.eventually import eventually
from tests.faults.models import write_model
from tests.machines import free_pair_of_ports
from tests.processes import Server, serving

PROMPT = " ".join(f"word{number}" for number in range(240))
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Return a folder in which two stages have saved a prompt, the answer, and the prompt's tokens except the last."""
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
    return folder, text, prompt_tokens - 1


def whole_blocks(folder: Path) -> int:
    """Return the number of blocks that both stages have written."""
    return sum({file.name for file in path.iterdir()} == {"0-5", "5-8"} for path in folder.glob("*/*"))


@pytest.mark.parametrize(
    "flags", [pytest.param(("--stages", "3"), marks=pytest.mark.thorough), ("--tp", "2")]
)
def test_prompt_is_restored_by_another_split_of_the_layers_or_heads(
    saved: tuple[Path, str, int], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    folder, text, tokens = saved
    with serving("demo", *flags, *FLAGS, str(folder), folder=tmp_path) as server:
        assert ask(server)[::2] == (text, tokens)
        assert prefix_stats(server)["restored_tokens"] == tokens
        metrics = server.http.get("/metrics").text
        log = (tmp_path / "logs" / "head.log").read_text()
    assert f'mlx_ring_kv_disk_restored_tokens_total{{instance="0",model_name="demo"}} {tokens}.0' in metrics
    labels = '{instance="0",model_name="demo",way="disk"}'
    assert f"mlx_ring_way_back_taken_seconds_count{labels} 1.0" in metrics
    assert f"mlx_ring_way_back_predicted_seconds_count{labels} 1.0" in metrics
    assert re.search(
        rf"Ways back of \S+: disk \(1\), predicted .* took .* \({tokens // 256 * 256} tokens; ", log
    )


def test_shares_of_the_heads_are_restored_by_stages(saved: tuple[Path, str, int], tmp_path: Path) -> None:
    _, text, tokens = saved
    folder = tmp_path / "kv"
    with serving("demo", "--tp", "2", *FLAGS, str(folder), folder=tmp_path) as server:
        assert ask(server)[::2] == (text, 0)
        expected = logprobs(server)
        eventually(lambda: saved_files(folder), lambda files: len(files) >= 2 * (tokens // 256))
        assert server.stop() == 0
    assert {name.partition(".heads-")[2][-5:] for name in saved_files(folder)} == {"-of-4"}
    with serving("demo", "--stages", "2", *FLAGS, str(folder), folder=tmp_path) as server:
        assert ask(server)[::2] == (text, tokens)
        differences = [abs(one - other) for one, other in zip(expected, logprobs(server), strict=True)]
        assert max(differences) < 1e-4


def logprobs(server: Server) -> list[float]:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    answer: dict[str, Any] = server.http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def test_damaged_block_is_computed_again(saved: tuple[Path, str, int], tmp_path: Path) -> None:
    folder, text, tokens = saved
    blocks = sorted((path for path in folder.glob("*/*/5-8")), key=lambda path: -path.parent.stat().st_mtime)
    kept = blocks[1].read_bytes()
    blocks[1].write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with serving("demo", "--stages", "2", *FLAGS, str(folder), folder=tmp_path) as server:
        answer, _, cached = ask(server)
    assert answer == text
    assert cached == 256 < tokens


def test_kv_of_a_model_is_not_used_for_another_one_of_the_same_structure(tmp_path: Path) -> None:
    """Serve two models in turn that differ in their weights alone, as one that was trained further does."""
    first, second, folder = (
        write_model(tmp_path / "model", "dense"),
        tmp_path / "trained" / "model",
        tmp_path / "kv",
    )
    shutil.copytree(first, second)
    change_weights(second / "model.safetensors")
    saved = PROMPT[:800]
    for model in (first, second):
        with serving(model, *FLAGS, str(folder), folder=tmp_path) as server:
            assert ask(server, saved, "model")[2] == 0
            eventually(partial(listed_files, folder), lambda files: len(files) > 0)
            assert server.stop() == 0


def change_weights(file: Path) -> None:
    """Change every weight of a file a little."""
    weights = cast("dict[str, mx.array]", mx.load(str(file)))
    mx.save_safetensors(str(file), {name: array * 1.01 for name, array in weights.items()}, {"format": "mlx"})


@pytest.mark.parametrize(("kind", "restored"), [("sliding", 1024), ("recurrent", 768)])
def test_conversation_of_a_model_that_forgets_continues_after_a_restart(
    tmp_path: Path, kind: str, restored: int
) -> None:
    """Restore windows at the last end of a block in the first answer, and states at the last one in the first prompt."""
    model, folder, first = write_model(tmp_path / "model", kind), tmp_path / "kv", PROMPT[:800]
    with serving(model, "--stages", "2", *FLAGS, str(folder), folder=tmp_path) as server:
        second = f"{first}{ask(server, first, 'model', 300)[0]} And then?"
        answer, *_ = ask(server, second, "model")
        eventually(lambda: prefix_stats(server)["saved_tokens"], lambda saved: saved >= 1024)
        assert server.stop() == 0
    with serving(model, "--stages", "3", *FLAGS, str(folder), folder=tmp_path) as server:
        assert ask(server, second, "model")[::2] == (answer, restored)


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


def head_log(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob("head*.log"))
