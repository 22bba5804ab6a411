"""KV on disk, by real servers: saved under one split of the layers, restored under others."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.loopback_cluster import running_cluster
from tests.eventually import eventually
from tests.faults.models import write_model
from tests.machines import free_pair_of_ports
from tests.processes import Server, serving

PROMPT, OTHER = (" ".join(f"{word}{number}" for number in range(240)) for word in ("word", "term"))
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


@pytest.fixture(scope="module")
def ranks(saved: tuple[Path, str, int], tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """Serve two ranks that share the heads, with the folder in which two stages have saved."""
    folder = tmp_path_factory.mktemp("ranks")
    with serving("demo", "--tp", "2", *FLAGS, str(saved[0]), folder=folder) as server:
        yield server


def test_prompt_is_restored_by_another_split_of_the_heads(
    saved: tuple[Path, str, int], ranks: Server
) -> None:
    check_restored(saved, ranks)


@pytest.mark.thorough
def test_prompt_is_restored_by_another_split_of_the_layers(
    saved: tuple[Path, str, int], tmp_path: Path
) -> None:
    with serving("demo", "--stages", "3", *FLAGS, str(saved[0]), folder=tmp_path) as server:
        check_restored(saved, server)


def check_restored(saved: tuple[Path, str, int], server: Server) -> None:
    """Ask for what two stages have saved, and read in the metrics and the log that it was restored."""
    _, text, tokens = saved
    assert ask(server)[::2] == (text, tokens)
    assert prefix_stats(server)["restored_tokens"] == tokens
    metrics = server.http.get("/metrics").text
    log = (server.folder / "logs" / "head.log").read_text()
    assert f'mlx_ring_kv_disk_restored_tokens_total{{instance="0",model_name="demo"}} {tokens}.0' in metrics
    labels = '{instance="0",model_name="demo",way="disk"}'
    assert f"mlx_ring_way_back_taken_seconds_count{labels} 1.0" in metrics
    assert f"mlx_ring_way_back_predicted_seconds_count{labels} 1.0" in metrics
    assert re.search(
        rf"Ways back of \S+: disk \(1\), predicted .* took .* \({tokens // 256 * 256} tokens; ", log
    )


@dataclass(frozen=True, slots=True)
class SavedByRanks:
    """Answer of the ranks, and the files that they saved, before they ended."""

    text: str
    tokens: int
    logprobs: list[float]
    files: set[Path]


@pytest.fixture(scope="module")
def saved_by_ranks(saved: tuple[Path, str, int], ranks: Server) -> SavedByRanks:
    """End the ranks after an answer that is new to them. Their other tests come before those that use this."""
    earlier = {file.parent for file in saved_files(saved[0])}

    def own_files() -> set[Path]:
        return {file for file in saved_files(saved[0]) if file.parent not in earlier}

    text, prompt_tokens, cached = ask(ranks, OTHER)
    assert cached == 0
    expected, tokens = logprobs(ranks), prompt_tokens - 1
    eventually(own_files, lambda files: len(files) >= 2 * (tokens // 256))
    assert ranks.stop() == 0
    return SavedByRanks(text, tokens, expected, own_files())


@pytest.fixture(scope="module")
def stages(
    saved: tuple[Path, str, int], saved_by_ranks: SavedByRanks, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Server]:
    """Damage the second of the first prompt's blocks, and serve two stages with the folder, which have read none yet."""
    del saved_by_ranks  # whose ranks have ended
    folder, *_ = saved
    blocks = sorted((path for path in folder.glob("*/*/5-8")), key=lambda path: -path.parent.stat().st_mtime)
    kept = blocks[1].read_bytes()
    blocks[1].write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with serving(
        "demo", "--stages", "2", *FLAGS, str(folder), folder=tmp_path_factory.mktemp("stages")
    ) as server:
        yield server


def test_shares_of_the_heads_are_restored_by_stages(saved_by_ranks: SavedByRanks, stages: Server) -> None:
    assert {file.name.partition(".heads-")[2][-5:] for file in saved_by_ranks.files} == {"-of-4"}
    assert ask(stages, OTHER)[::2] == (saved_by_ranks.text, saved_by_ranks.tokens)
    differences = [
        abs(one - other) for one, other in zip(saved_by_ranks.logprobs, logprobs(stages), strict=True)
    ]
    assert max(differences) < 1e-4


def logprobs(server: Server) -> list[float]:
    body = {"model": "demo", "prompt": OTHER, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    answer: dict[str, Any] = server.http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def test_damaged_block_is_computed_again(saved: tuple[Path, str, int], stages: Server) -> None:
    _, text, tokens = saved
    answer, _, cached = ask(stages)
    assert answer == text
    assert cached == 256 < tokens


@pytest.mark.parametrize(("kind", "restored"), [("sliding", 1024), ("recurrent", 768)])
def test_conversation_of_a_model_that_forgets_continues_after_a_restart(
    tmp_path: Path, kind: str, restored: int
) -> None:
    """Restore windows at the last end of a block in the first answer, and states at the last one in the first prompt."""
    model, folder, first = write_model(tmp_path / "model", kind), tmp_path / "kv", PROMPT[:800]
    with serving(model, "--stages", "2", *FLAGS, str(folder), folder=tmp_path) as server:
        second = f"{first}{ask(server, first, 'model', 230)[0]} And then?"
        answer, *_ = ask(server, second, "model")
        eventually(lambda: prefix_stats(server)["saved_tokens"], lambda saved: saved >= 1024)
        assert server.stop() == 0
    with serving(model, "--stages", "3", *FLAGS, str(folder), folder=tmp_path) as server:
        assert ask(server, second, "model")[::2] == (answer, restored)


def saved_files(folder: Path) -> set[Path]:
    """Return the files of all blocks, but not those that are being written."""
    return {*folder.glob("*/*/[!.]*-*")}


def listed_files(folder: Path) -> list[Path]:
    """Return the list of the last block, which is written after all others."""
    return [*folder.glob("*/*/block")]


@pytest.mark.machines
def test_each_machine_of_a_cluster_keeps_the_kv_of_its_own_layers_and_reads_that_of_others(
    tmp_path: Path,
) -> None:
    """Save under two stages, and restore under three uneven ones, with a machine that has saved nothing."""
    folders = [tmp_path / name / "kv" for name in ("state", "node-1/state", "node-2/state")]

    def run(nodes: int) -> tuple[tuple[str, int, int], int]:
        flags = ("--strategy", "uniform", *FLAGS[:2])
        with running_cluster(
            "demo", nodes, tmp_path, free_pair_of_ports(), *flags, join_flags=FLAGS[:2]
        ) as server:
            answer = ask(server)
            for folder in folders[:nodes]:
                eventually(partial(listed_files, folder), lambda files: len(files) == 1)
            peer_tokens = prefix_stats(server)["peer_tokens"]
            assert server.stop() == 0
        return answer, peer_tokens

    (text, prompt_tokens, cached), peer_tokens = run(2)
    assert (cached, peer_tokens) == (0, 0)
    assert sorted(saved_files(folder).pop().name for folder in folders[:2]) == ["0-4", "4-8"]
    assert run(3) == ((text, prompt_tokens, prompt_tokens - 1), prompt_tokens - 1)
    # Either of the other machines may be the last one.
    assert {file.name for file in saved_files(folders[2])} in ({"3-6"}, {"6-8"})
    way = next(line for line in head_log(tmp_path).splitlines() if "Ways back of" in line and "peers" in line)
    assert re.search(r"peers \(1\), predicted .* took .* MB of them from other machines; recompute", way)


def head_log(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob("head*.log"))
