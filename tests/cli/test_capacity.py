"""`mlx-ring capacity` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.test_main import complaint
from tests.processes import run_in_process

SMALL = ("--prompt", "64", "--answer", "8", "--max-num-seqs", "4")
MACHINE = ("--machine", "m4-mac-mini-16")


@pytest.mark.slow
def test_a_capacity_names_users_stages_and_the_limit(tmp_path: Path) -> None:
    done = run_in_process("capacity", "demo", *MACHINE, *SMALL, "--rate", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "first token, p95" in done.stdout
    assert "1 replica, --max-num-seqs 4: m4-mac-mini-16 0-" in done.stdout
    assert "It holds at this rate." in done.stdout


@pytest.mark.slow
def test_added_machines_are_compared_with_their_gain(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "machines:\n  - {name: mini, machine: m4-mac-mini-16, watts: 40, idle_watts: 4, price: 700}\n"
    )
    options = ("--cluster", "mine.yaml", *SMALL, "--add", "m4-mac-mini-16", "--price", "m4-mac-mini-16=700")
    watts = ("--watts", "m4-mac-mini-16=40/4")
    done = run_in_process("capacity", "demo", *options, *watts, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "with m4-mac-mini-16" in done.stdout
    assert "per 1,000 of price" in done.stdout
    found = run_in_process("capacity", "demo", *options, *watts, "--json", folder=tmp_path)
    now, more = json.loads(found.stdout)["capacities"]
    assert more["requests_per_s"] > 1.5 * now["requests_per_s"]
    assert (now["price"], more["price"]) == (700, 1400)
    assert more["tokens_per_joule"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "No machines are given; name some with --machine, or a file with --cluster."),
        ((*MACHINE, "--prompt", "0"), "--prompt is 0; it must be a number of tokens"),
        ((*MACHINE, "--answer", "9-3"), "--answer is 9-3; it must be a number of tokens"),
        ((*MACHINE, "--rate", "0"), "--rate is 0; it must be more than 0 requests per second."),
        ((*MACHINE, "--percentile", "0"), "--percentile is 0; it must be more than 0"),
        ((*MACHINE, "--prefix-hits", "100%"), "--prefix-hits is 100%; it must be a share"),
        (
            (*MACHINE, "--first-token-within", "soon"),
            "--first-token-within is soon; it must be a time above 0",
        ),
        ((*MACHINE, "--arrivals", "never"), "--arrivals is never; it must be one of poisson, even, burst."),
        ((*MACHINE, "--watts", "x"), "--watts is x; it must be NAME=BUSY or NAME=BUSY/IDLE"),
        ((*MACHINE, "--watts", "x=5/9"), "--watts is x=5/9; the power without load must not be more"),
        ((*MACHINE, "--price", "x=-1"), "--price is x=-1; it must be NAME=PRICE, with numbers above 0."),
        ((*MACHINE, "--years", "0"), "--years is 0"),
        ((*MACHINE, "--requests", "missing.csv"), "--requests is missing.csv, which cannot be read"),
        ((*MACHINE, "--max-num-seqs", "0"), "--max-num-seqs is 0"),
        ((*MACHINE, "--prompt", "90000000"), "The longest prompt and answer have 90,000,256 tokens together"),
        ((*MACHINE, "--first-token-within", "1ms"), "even one request at a time takes"),
        ((*MACHINE, "--add", "m4-mac-nano"), "The machine m4-mac-nano is unknown"),
        (("--machine", "m4-mac-nano"), "The machine m4-mac-nano is unknown"),
    ],
)
def test_wrong_input_gets_one_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    assert sentence in complaint("capacity", "demo", *options, folder=tmp_path)
