"""Groups of MLX that are of no use although all their workers answer: packets between ranks are dropped, or connections reset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from tests.interrupted import BODY, complete, read
from tests.namespaces import Host, lan, skip_without_namespaces
from tests.processes import client_of, serving

ANSWER: Mapping[str, object] = {**BODY, "max_tokens": 200}


def disturb(lines: Iterator[str], host: Host, fault: str) -> Iterator[str]:
    """Pass on an answer's lines. Cause the fault once tokens come, and again once tokens come after the next load."""
    for is_last in (False, True):
        yield next(line for line in lines if line.startswith("data:"))
        host.drop_packets() if fault == "dropped" else reset_ring(host)
        for line in lines:
            yield line
            if line.startswith(":"):
                break
        if not is_last and fault == "dropped":
            host.deliver_packets()
    yield from lines


def reset_ring(host: Host) -> None:
    """Reset the connections between ranks, which are the only ones on loopback."""
    done = host.run("ss", "--kill", "--tcp", "--numeric", "dst", "127.0.0.1")
    assert done.stdout.count("\n") > 1, f"no connection was reset: {done.stderr}"


def text_of_disturbed(client: httpx.Client, host: Host, fault: str) -> str:
    """Return the text of an answer whose group is disturbed twice."""
    with client.stream("POST", "/v1/completions", json=ANSWER) as answer:
        assert answer.status_code == 200, answer.read()
        return read(disturb((line for line in answer.iter_lines() if line), host, fault)).text


@pytest.mark.parametrize(
    ("flags", "stages", "fault"),
    [
        pytest.param(("--stages", "2", "--link", "ring"), 2, "dropped", marks=pytest.mark.faults),
        (("--stages", "2", "--link", "ring"), 2, "reset"),
        (("--tp", "2"), 2, "dropped"),
    ],
)
def test_answer_continues_without_the_ring_after_it_has_hung_twice(
    flags: tuple[str, ...], stages: int, fault: str, tmp_path: Path
) -> None:
    skip_without_namespaces()
    with lan(2) as (host, other), other.threads() as threads:
        options = ("--host", host.address, "--step-deadline-s", "2", *flags)
        with (
            serving("demo", *options, folder=tmp_path, within=host.command()) as server,
            client_of(server.url) as client,
        ):
            expected = threads.submit(complete, client, ANSWER).result()
            assert threads.submit(text_of_disturbed, client, host, fault).result() == expected
            status = threads.submit(client.get, "/cluster/status").result().json()
            metrics = threads.submit(client.get, "/metrics").result().text
    (instance,) = status["instances"]
    assert [len(stage["ranks"]) for stage in instance["stages"]] == [1] * stages
    assert [stage["group"] for stage in instance["stages"]] == [None] * stages
    (hung,) = status["hung_backends"]
    node = status["nodes"][0]["id"]
    assert (hung["backend"], hung["nodes"], hung["hangs"]) == ("ring", [node, node], 2)
    assert hung["barred_until"] is not None
    assert 'mlx_ring_group_hangs_total{backend="ring"} 2.0' in metrics
    assert f'mlx_ring_backend_barred{{backend="ring",nodes="{node} {node}"}} 1.0' in metrics
    assert "MLX's backend ring is barred on " in (tmp_path / "stderr.txt").read_text()
