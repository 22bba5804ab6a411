"""`mlx-ring capacity` as a person types it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.api.clients import serving
from tests.api.twins import TwinCatalog, TwinService
from tests.cli.test_main import complaint
from tests.default_settings import make_api_settings
from tests.planner.clusters import known_cluster
from tests.processes import run_in_process

from mlx_ring.cli.planning import read_lengths
from mlx_ring.head.served_model import policy_of
from mlx_ring.planner.place import RunningCluster
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.settings.config import Settings

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
    done = run_in_process("capacity", "llama-1b", *options, *watts, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "with m4-mac-mini-16" in done.stdout
    assert "per 1,000 of price" in done.stdout
    found = run_in_process("capacity", "llama-1b", *options, *watts, "--json", folder=tmp_path)
    now, more = json.loads(found.stdout)["capacities"]
    assert more["requests_per_s"] > 1.5 * now["requests_per_s"]
    assert (now["price"], more["price"]) == (700, 1400)
    assert more["tokens_per_joule"] > 0


@pytest.mark.slow
def test_the_short_list_is_compared_at_a_rate(tmp_path: Path) -> None:
    """Ask for a cluster whose model needs both machines. A rate needs one run for each case, not a search."""
    (tmp_path / "mine.yaml").write_text(
        "machines:\n  - {name: one, machine: m4-max-64}\n  - {name: two, machine: m4-max-64}\n"
        "links:\n  - {between: [one, two], link: tb5}\n"
    )
    level = ("--first-token-within", "60s", "--between-tokens-within", "1s")
    load = ("--prompt", "256", "--answer", "8")
    options = ("llama-70b", "--cluster", "mine.yaml", *level, *load, "--rate", "0.02", "--what-to-add")
    found = json.loads(run_in_process("capacity", *options, "--json", folder=tmp_path).stdout)["capacities"]
    labels = ["now", "with m4-pro-64", "with m4-max-128", "with m3-ultra-256", "with nvidia-dgx-spark"]
    assert [row["label"] for row in found] == labels
    now, *more = found
    assert {row["requests_per_s"] for row in found} == {0.02}
    assert all(row["first_token_s"] <= now["first_token_s"] for row in more)
    assert min(more, key=lambda row: row["first_token_s"])["label"] in (
        "with m3-ultra-256",
        "with nvidia-dgx-spark",
    )


def test_a_running_head_gives_its_machines_model_and_scheduler(tmp_path: Path) -> None:
    with serving(TwinService()) as url:
        options = ("--url", url, "--prompt", "64", "--answer", "4", "--rate", "0.1", "--json")
        own = run_in_process("capacity", *options, folder=tmp_path)
        named = run_in_process("capacity", "llama-1b", *options, "--max-num-seqs", "3", folder=tmp_path)
        refused = complaint("capacity", "lama", *options, folder=tmp_path)
    assert f"The head at {url} refuses: There is no model 'lama'" in refused
    found = json.loads(own.stdout)
    (now,) = found["capacities"]
    assert found["model"] == "org/twin"
    assert now["stages"] == ["m4-mac-mini-16 0-31"]
    assert json.loads(named.stdout)["capacities"][0]["max_num_seqs"] == 3


def test_a_head_with_api_keys_answers_who_gives_one(tmp_path: Path) -> None:
    options = ("--prompt", "64", "--answer", "4", "--rate", "0.1", "--json")
    with serving(TwinService(), make_api_settings(api_keys=("k",))) as url:
        found = run_in_process("capacity", "--url", url, "--api-key", "k", *options, folder=tmp_path)
        refused = complaint("capacity", "--url", url, *options, folder=tmp_path)
    assert json.loads(found.stdout)["model"] == "org/twin"
    assert "asks for an API key: give it with --api-key, or set MLX_RING_API_KEY." in refused


@pytest.mark.parametrize(("bits", "name"), [("32", "float32"), ("16", "bfloat16"), ("4", "4-bit")])
def test_assumed_weights_have_the_name_of_their_numbers(tmp_path: Path, bits: str, name: str) -> None:
    for command, *options in (("capacity", "--rate", "1"), ("plan", "--users-at", "1k")):
        asked = (command, "llama-1b", *MACHINE, "--quantization", bits, *options)
        printed = run_in_process(*asked, folder=tmp_path).stdout
        assert f"llama-1b is taken as Llama-3.2-1B in {name}" in printed


def test_a_time_without_end_is_null_in_json(tmp_path: Path) -> None:
    options = ("capacity", "demo", *MACHINE, *SMALL, "--rate", "100000", "--json")
    printed = run_in_process(*options, folder=tmp_path).stdout
    assert "Infinity" not in printed
    assert json.loads(printed)["capacities"][0]["first_token_s"] is None


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1024", (1024, 1024)),
        ("1k", (1024, 1024)),
        ("1.5K", (1536, 1536)),
        ("200-2k", (200, 2048)),
        (" 1k - 1m ", (1024, 1024**2)),
    ],
)
def test_lengths_may_be_thousands_of_tokens(text: str, lengths: tuple[int, int]) -> None:
    assert read_lengths("--prompt", text) == lengths


def test_recorded_requests_are_read_from_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("prompt,answer\n100,20\n200,30\n", "utf-8-sig")
    done = run_in_process(
        "capacity", "demo", *MACHINE, "--requests", "r.csv", "--rate", "0.01", folder=tmp_path
    )
    assert "A request has 150 tokens of prompt and 25 of answer on average" in done.stdout, done.stderr


def test_prompts_alone_have_long_chunks_unless_a_number_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask for experts, which longer chunks read less often, on given machines and of running heads."""
    options = ("--prompt", "4k", "--answer", "4", "--rate", "0.001", "--max-num-seqs", "1", "--json")
    asked = ("capacity", "qwen3-30b-a3b-4bit", *options)
    basis = RunningCluster(known_cluster("m4-max-128"), PlanRequest(Demand(8192, 1)))

    def first_token_s(*flags: str) -> float:
        found = run_in_process(*asked, *flags, folder=tmp_path)
        return json.loads(found.stdout)["capacities"][0]["first_token_s"]

    def of_head(chunk: int | None, *flags: str) -> float:
        request = PlanRequest(Demand(8192, 1, chunk_tokens=chunk))
        policy = policy_of(Settings(prefill_chunk=chunk))
        running = replace(basis, request=request, policy=policy)
        monkeypatch.setattr(TwinCatalog, "running", Mock(return_value=running))
        with serving(TwinService()) as url:
            return first_token_s("--url", url, *flags)

    machine = ("--machine", "m4-max-128")
    usual, long = first_token_s(*machine, "--prefill-chunk", "512"), first_token_s(*machine)
    assert usual > 1.1 * long
    assert (of_head(512), of_head(None)) == pytest.approx((usual, long), rel=0.01)
    assert of_head(None, "--prefill-chunk", "512") == pytest.approx(usual, rel=0.01)


def test_fewer_requests_run_at_once_in_a_given_kv_memory(tmp_path: Path) -> None:
    options = (
        "capacity",
        "llama-1b",
        *MACHINE,
        "--prompt",
        "900",
        "--answer",
        "100",
        "--rate",
        "0.1",
        "--json",
    )
    most = [
        json.loads(run_in_process(*options, *more, folder=tmp_path).stdout)["capacities"][0]["max_num_seqs"]
        for more in ((), ("--kv-cache-memory", "128MiB"))
    ]
    # A block of 256 tokens has 8 MiB of KV.
    assert most[0] > most[1] == 128 // (4 * 8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--url", "http://127.0.0.1:9"), "No head answers at http://127.0.0.1:9"),
        ((*MACHINE, "--url", "http://127.0.0.1:9"), "machines are given too; leave one of them out."),
        ((*MACHINE, "--cacert", "a.pem"), "--cacert is a.pem, but no head is asked; leave it out."),
        ((*MACHINE, "--api-key", "k"), "--api-key is given, but no head is asked; leave it out."),
        (
            ("--url", "http://127.0.0.1:9", "--quantization", "4"),
            "--quantization is 4, which a question to the head",
        ),
        (("--url", "http://127.0.0.1:9", "--link", "tb5"), "--link is tb5, but no machine is added"),
        ((*MACHINE, "--add", "m4-max-128", "--link", "tb9"), "The link tb9 is unknown; known links are"),
        ((*MACHINE, "--kv-bits", "5"), "--kv-bits is 5; it must be one of 4, 8, 16."),
        ((*MACHINE, "--kv-cache-memory", "5"), "--kv-cache-memory is 5; it must be a size of 1MiB or more"),
        (
            (*MACHINE, "--kv-cache-memory", "20GB"),
            "does not fit with a KV cache of 20.0 GB for each worker, because no plan leaves every worker that much",
        ),
        ((*MACHINE, "--burst", "4"), "--burst is 4, but --arrivals is poisson; give --arrivals burst."),
        (
            (*MACHINE, "--prompt", "9", "--requests", "x.csv"),
            "--prompt is 9, but --requests gives the lengths",
        ),
        ((*MACHINE, "--watts", "m4-max=40"), "there is no machine m4-max; there are m4-mac-mini-16."),
        ((*MACHINE, "--thinking-time", "-1s"), "--thinking-time is -1s; it must be a time"),
        ((*MACHINE, "--prompt", "0"), "--prompt is 0; it must be a number of tokens"),
        ((*MACHINE, "--prompt", "1k-"), "--prompt is 1k-; it must be a number of tokens"),
        ((*MACHINE, "--prompt", "2k-1k"), "from fewer to more, as 200-2k."),
        ((*MACHINE, "--answer", "9-3"), "--answer is 9-3; it must be a number of tokens"),
        ((*MACHINE, "--rate", "0"), "--rate is 0; it must be more than 0 requests per second."),
        ((*MACHINE, "--percentile", "0"), "--percentile is 0; it must be more than 0"),
        ((*MACHINE, "--prefix-hits", "100%"), "--prefix-hits is 100%; it must be a share"),
        (
            (*MACHINE, "--first-token-within", "soon"),
            "--first-token-within is soon; it must be a time above 0",
        ),
        (
            (*MACHINE, "--arrivals", "burst", "--burst", "20000"),
            "--burst is 20000; it must be 10000 at most.",
        ),
        ((*MACHINE, "--arrivals", "never"), "--arrivals is never; it must be one of poisson, even, burst."),
        ((*MACHINE, "--watts", "x"), "--watts is x; it must be NAME=BUSY or NAME=BUSY/IDLE"),
        (
            (*MACHINE, "--watts", "m4-mac-mini-16=5/9"),
            "--watts is m4-mac-mini-16=5/9; the power without load, which is 9, must not be more",
        ),
        ((*MACHINE, "--price", "x=-1"), "--price is x=-1; it must be NAME=PRICE, with numbers above 0."),
        ((*MACHINE, "--years", "0"), "--years is 0"),
        ((*MACHINE, "--requests", "missing.csv"), "--requests is missing.csv, which cannot be read"),
        ((*MACHINE, "--max-num-seqs", "0"), "--max-num-seqs is 0"),
        (
            (*MACHINE, "--prompt", "90000000"),
            "The longest request has 90,000,256 tokens of prompt and answer",
        ),
        ((*MACHINE, "--first-token-within", "1ms"), "even one request at a time takes"),
        ((*MACHINE, "--max-num-seqs", "5000"), "--max-num-seqs is 5000"),
        ((*MACHINE, "--add", "m4-mac-nano"), "The machine m4-mac-nano is unknown"),
        (("--machine", "m4-mac-nano"), "The machine m4-mac-nano is unknown"),
    ],
)
def test_wrong_input_gets_one_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    assert sentence in complaint("capacity", "demo", *options, folder=tmp_path)


def test_power_under_load_is_not_less_than_a_file_gives_without_load(tmp_path: Path) -> None:
    """Give only the power under load by a flag: that without load stays as in the file."""
    (tmp_path / "mine.yaml").write_text(
        "machines:\n  - {name: mini, machine: m4-mac-mini-16, watts: 40, idle_watts: 4}\n"
    )
    options = ("--cluster", "mine.yaml", "--rate", "1")
    refused = complaint("capacity", "demo", *options, "--watts", "mini=3", folder=tmp_path)
    assert "--watts is mini=3; the power without load, which is 4, must not be more" in refused


def test_power_under_load_is_not_less_than_an_earlier_flag_gives_without_load(tmp_path: Path) -> None:
    """Give the power of a machine twice: the second time without load stays as in the first."""
    name = "m4-mac-mini-16"
    refused = complaint(
        "capacity", "demo", *MACHINE, "--watts", f"{name}=40/10", "--watts", f"{name}=5", folder=tmp_path
    )
    assert f"--watts is {name}=5; the power without load, which is 10, must not be more" in refused
