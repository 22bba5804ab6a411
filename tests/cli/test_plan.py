"""`mlx-ring plan` as a person types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.api.clients import serving
from tests.api.twins import TwinService
from tests.cli.test_main import complaint
from tests.processes import run_in_process

MINIS = ("--machine", "m4-mac-mini-16", "--machine", "m4-mac-mini-16")


def test_a_plan_names_machines_layers_and_reasons(tmp_path: Path) -> None:
    done = run_in_process("plan", "demo", *MINIS, "--strategy", "uniform", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "m4-mac-mini-16#1" in done.stdout
    assert "tokens/s for one stream" in done.stdout
    assert "alone would be faster for a single stream" in done.stdout


def test_a_plan_states_ranges_without_exponents(tmp_path: Path) -> None:
    """Ask for a small model on a fast machine: more than a thousand tokens a second."""
    done = run_in_process("plan", "demo", "--machine", "nvidia-h200", folder=tmp_path)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Not measured: "))
    found = re.match(
        r"Not measured: expect ([\d,]+) to ([\d,]+) tokens/s .* and ([\d.]+) to ([\d.]+) s to", line
    )
    assert found
    speeds = [int(figure.replace(",", "")) for figure in found.groups()[:2]]
    assert 1000 < speeds[0] < speeds[1]


def test_a_plan_for_several_users_promises_each_a_sequence(tmp_path: Path) -> None:
    options = ("--machine", "m4-mac-mini-16", "--users", "4", "--prompt", "600", "--answer", "100")
    done = run_in_process("plan", "demo", *options, folder=tmp_path)
    assert "tokens/s for each of 4 users, " in done.stdout
    assert "first token of a prompt of 600, " in done.stdout
    plan = json.loads(run_in_process("plan", "demo", *options, "--json", folder=tmp_path).stdout)
    assert (plan["sequences"], plan["prediction"]["users"]) == (4, 4)
    more = run_in_process("plan", "demo", *options, "--sequences", "9", "--json", folder=tmp_path)
    assert json.loads(more.stdout)["sequences"] == 9


def test_a_plan_as_json_has_every_layer_once(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "machines:\n"
        "  - {name: a, memory_gb: 8, bandwidth_gb_s: 100, tflops: 4}\n"
        "  - {name: b, memory_gb: 24, bandwidth_gb_s: 100, tflops: 4}\n"
    )
    options = ("--cluster", "cluster.yaml", "--strategy", "memory", "--json")
    done = run_in_process("plan", "demo", *options, folder=tmp_path)
    plan = json.loads(done.stdout)
    assert [stage["node"] for stage in plan["stages"]] == ["a", "b"]
    assert [(stage["layers"]["start"], stage["layers"]["end"]) for stage in plan["stages"]] == [
        (0, 2),
        (2, 8),
    ]


def test_ranks_of_a_tensor_group_are_listed_together_with_the_reason(tmp_path: Path) -> None:
    machine = "{name: %s, memory_gb: 8, bandwidth_gb_s: %d, tflops: 4, trusted_interface: en5}"
    (tmp_path / "cluster.yaml").write_text(
        f"machines: [{machine % ('a', 100)}, {machine % ('b', 300)}]\n"
        "usual_link: {round_trip_ms: 0.02, gbit_s: 40}\n"
    )
    options = ("plan", "demo", "--cluster", "cluster.yaml", "--strategy", "tensor")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:3] == ["machine", "layers", "share"]
    first, second = (next(line for line in lines if line[:1] == [name]) for name in "ab")
    assert first[1] == second[1]
    assert "a+b compute every layer together: " in done.stdout
    plan = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)
    ranks = plan["stages"][0]["ranks"]
    assert (plan["kind"], [rank["node"] for rank in ranks]) == ("tensor", ["a", "b"])
    assert sum(rank["share"] for rank in ranks) == 1
    assert [first[2], second[2]] == [f"{rank['share']:.0%}" for rank in ranks]


def test_a_plan_for_throughput_shows_a_table_for_each_replica(tmp_path: Path) -> None:
    options = (*MINIS, "--optimize-for", "throughput", "--sequences", "8")
    done = run_in_process("plan", "demo", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Replica 2 of 2" in done.stdout
    assert "sequences over 2 replicas together" in done.stdout
    done = run_in_process("plan", "demo", *options, "--replicas", "1", "--json", folder=tmp_path)
    assert json.loads(done.stdout)["sequences"] == 8


def test_without_machines_the_known_ones_are_listed(tmp_path: Path) -> None:
    done = run_in_process("plan", "demo", folder=tmp_path)
    assert done.returncode == 0
    assert "m3-ultra-mac-studio" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", *MINIS, "--strategy", "best"], "--strategy is best; it must be one of auto, uniform"),
        (["demo", *MINIS, "--strategy", "custom"], "needs --proportions, as 0.7,0.3, or --layers"),
        (["demo", *MINIS, "--strategy", "custom", "--layers", "a,b"], "--layers is a,b; it must be numbers"),
        (["demo", *MINIS, "--kv-bits", "3"], "--kv-bits is 3; it must be one of 4, 8, 16."),
        (["demo", *MINIS, "--users", "0"], "--users is 0; it must be 1 or more."),
        (
            ["demo", *MINIS, "--prompt", "long"],
            "--prompt is long; it must be a number of tokens, such as 8192 or 32k.",
        ),
        (["demo", *MINIS, "--users", "4", "--sequences", "2"], "--sequences is 2 and --users is 4; give"),
        (
            ["8B", *MINIS, "--users-at", "8k", "--sequences", "2"],
            "--sequences is 2, which a what-if question",
        ),
        (["demo", *MINIS, "--sequences", "0"], "--sequences is 0; it must be 1 or more."),
        (["demo", *MINIS, "--cluster", "c.yaml"], "--cluster and --machine were both given"),
        (["demo", "--cluster", "none.yaml"], "--cluster is none.yaml, which cannot be read"),
        (["demo", "--machine", "pc"], "The machine pc is unknown"),
        (["./nowhere", *MINIS], "There is no model './nowhere'"),
        (["lama-70b", *MINIS], "There is no model 'lama-70b'"),
        (["9000B", *MINIS], "9000B has 9000 billion parameters; give a number from 0.5 to 2000."),
        ([*MINIS], "No model is given"),
        (["--plot", *MINIS], "No model is given"),
        (
            ["8B", *MINIS, "--add", "m3-ultr-512"],
            "m3-ultr-512 is unknown; the nearest known ones are m3-ultra-512",
        ),
        (
            ["8B", *MINIS, "--add", "m3-ultra-500"],
            "m3-ultra-500 is unknown; it is known with 96, 256, 512 GB",
        ),
        (
            ["8B", *MINIS, "--add", "m4-16", "--link", "tb9"],
            "The link tb9 is unknown; known links are tb5, tb5-rdma",
        ),
        (["8B", "--cluster", "c.yaml", "--users-at", "8k"], "--cluster is c.yaml, which cannot be read"),
        (
            ["8B", *MINIS, "--users-at", "many"],
            "--users-at is many; it must be a number of tokens, such as 8192 or 32k.",
        ),
        (["8B", *MINIS, "--kv-bits", "16,5"], "--kv-bits is 5; it must be one of 4, 8, 16."),
        (["8B", *MINIS, "--users-at", "8k", "--replicas", "2"], "--replicas is 2, which a what-if question"),
        (["8B", "--what-fits", *MINIS], "--what-fits lists popular models; leave 8B out."),
        (["8B", "--url", "http://127.0.0.1:9", *MINIS], "machines are given too; leave one of them out."),
        (["8B", "--add", "m4-16", "--url", "http://127.0.0.1:9"], "No head answers at http://127.0.0.1:9"),
        (["8B", *MINIS, "--kv-bits", "nan"], "--kv-bits is nan; it must be whole numbers"),
        (["8B", *MINIS, "--kv-bits", "inf"], "--kv-bits is inf; it must be whole numbers"),
        (
            ["demo", *MINIS, "--strategy", "custom", "--layers", "nan,1"],
            "--layers is nan,1; it must be whole numbers",
        ),
        (["x" * 300, *MINIS], "There is no model 'xxx"),
        (["demo", "--cluster", "c.yaml", "--link", "tb5"], "--link is tb5, but no machine is added"),
        (["8B", *MINIS, "--users-at", "8k", "--context", "4096"], "--context is 4096 and --users-at is 8k"),
        (["--what-fits", *MINIS, "--quantization", "4"], "--quantization is 4, which a what-if question"),
        (
            ["8B", *MINIS, "--add", "m4-16", "--prompt", "4000", "--context", "4096"],
            "A prompt of 4000 tokens and an answer of 256 need a context of 4256, which is longer than 4096;",
        ),
        (
            ["8B", *MINIS, "--answer", "4000", "--context", "4096"],
            "A prompt of 1024 tokens and an answer of 4000 need",
        ),
        (["demo", *MINIS, "--layers", "3,5"], "--layers is 3,5, which only the strategy custom uses; give"),
        (
            ["demo", *MINIS, "--strategy", "uniform", "--proportions", "0.7,0.3"],
            "--proportions is 0.7,0.3, which",
        ),
        (["demo", "--kv-bits", "8"], "--kv-bits is 8, but no machines are given; name some with --machine"),
        (["--prompt", "100"], "--prompt is 100, but no machines are given"),
        (["demo", "--strategy", "tensor"], "--strategy is tensor, but no machines are given"),
        (["8B", *MINIS, "--users-at", ""], "--users-at is empty; it must be a number of tokens"),
        (["8B", *MINIS, "--kv-bits", ""], "--kv-bits is empty; it must be numbers separated by commas"),
        (["8B", *MINIS, "--add", ""], "The name of a machine is empty; `mlx-ring plan` lists"),
        (
            ["8B", *MINIS, "--context", "much"],
            "--context is much; it must be a number of tokens, such as 8192 or 32k.",
        ),
        (
            ["llama-70b", *MINIS, "--prompt", "100000000"],
            "A prompt of 100000000 tokens and an answer of 256 need a context of 100000256; Llama-3.3-70B 4-bit supports",
        ),
        (["8B", *MINIS, "--cacert", "c.pem"], "--cacert is c.pem, but no head is asked"),
        (
            ["8B", "--add", "m4-16", "--layers", "1,2"],
            "--layers is 1,2, which a what-if question to the head",
        ),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in complaint("plan", *arguments, folder=tmp_path)


def test_a_devices_file_sets_the_strategy_unless_a_flag_does(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(
        '{"devices": [{"hostname": "a", "capabilities": {"memory_gb": 16, "gpu_cores": 10}},'
        ' {"hostname": "b", "capabilities": {"memory_gb": 16, "gpu_cores": 10}}],'
        ' "sharding": {"strategy": "custom", "custom_proportions": [0.75, 0.25]}}'
    )
    options = ("plan", "demo", "--cluster", "cluster.json", "--json")
    cuts: list[list[int]] = []
    for more in ((), ("--strategy", "uniform")):
        done = run_in_process(*options, *more, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        cuts.append([stage["layers"]["end"] for stage in json.loads(done.stdout)["stages"]])
    assert cuts == [[6, 8], [4, 8]]


def test_a_plan_applies_the_memory_share_of_a_device(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(
        '{"devices": [{"hostname": "a", "capabilities": {"memory_gb": 16, "gpu_cores": 10}},'
        ' {"hostname": "b", "capabilities": {"memory_gb": 16, "gpu_cores": 10}, "gpu_memory_utilization": 0.5}]}'
    )
    options = ("plan", "demo", "--cluster", "cluster.json", "--strategy", "uniform", "--json")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, half = (stage["usable_bytes"] for stage in json.loads(done.stdout)["stages"])
    assert half / whole == pytest.approx(0.5 / 0.95)


def test_the_format_that_is_asked_for_is_in_the_models_name(tmp_path: Path) -> None:
    options = ("plan", "llama-8b", "--machine", "m3-ultra-512", "--quantization", "8")
    done = run_in_process(*options, folder=tmp_path)
    assert "Llama-3.1-8B 8-bit, 1 x 8192" in done.stdout
    assert "is taken as Llama-3.1-8B in 8-bit" in done.stdout
    assert "4-bit" not in done.stdout
    asked = run_in_process(*options, "--users-at", "4k", folder=tmp_path)
    assert "4-bit" not in asked.stdout
    assert "Llama-3.1-8B 8-bit" in asked.stdout
    other = run_in_process("plan", "demo", *options[2:], folder=tmp_path)
    assert "The weights of demo are taken in 8-bit." in other.stdout


def test_lengths_may_have_units(tmp_path: Path) -> None:
    options = ("--context", "16k", "--prompt", "8k", "--answer", "1k", "--json")
    done = run_in_process("plan", "llama-8b", "--machine", "m3-ultra-512", *options, folder=tmp_path)
    plan = json.loads(done.stdout)
    assert plan["context_tokens"] == 16_384
    assert (plan["prediction"]["prompt_tokens"], plan["prediction"]["answer_tokens"]) == (8192, 1024)


def test_a_plan_as_json_has_the_ranges_to_expect(tmp_path: Path) -> None:
    done = run_in_process("plan", "llama-8b", "--machine", "m3-ultra-512", "--json", folder=tmp_path)
    plan = json.loads(done.stdout)
    for name, value in (
        ("tokens_per_s", 1 / plan["prediction"]["token_s"]),
        ("first_token_s", plan["prediction"]["first_token_s"]),
        ("request_s", plan["prediction"]["request_s"]),
    ):
        low, high = plan["ranges"][name]
        assert low < value < high


def test_a_machine_that_is_too_small_is_named_in_the_singular(tmp_path: Path) -> None:
    said = complaint("plan", "405B", "--machine", "m4-mac-mini-16", folder=tmp_path)
    assert "and m4-mac-mini-16 has 10.9 GB for it" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("machines: [a, {b: ]", "is neither YAML nor JSON: "),
        ('{"machines": [}', " in line 1, column "),
        ("machines: [\t- a\n", " in line "),
    ],
)
def test_a_broken_file_is_reported_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    complained = complaint("plan", "demo", "--cluster", "c.yaml", folder=tmp_path)
    assert said in complained
    assert "\n" not in complained.strip()


# ---- what-if questions


def test_a_machine_that_is_added_is_compared_with_the_cluster_as_it_is(tmp_path: Path) -> None:
    options = (
        "plan",
        "llama-70b",
        "--machine",
        "m4-mac-mini-16",
        "--add",
        "m3-ultra-512",
        "--link",
        "tb5-rdma",
    )
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "llama-70b is taken as Llama-3.3-70B in 4-bit" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert next(line for line in lines if line[:1] == ["now"])[1:4] == ["does", "not", "fit"]
    before, after = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)["outcomes"]
    assert (before["fits"], after["fits"]) == (False, True)
    assert after["label"] == "with m3-ultra-512 over tb5-rdma"
    assert after["users"] > 100
    assert after["tokens_per_s_range"][0] < after["tokens_per_s"] < after["tokens_per_s_range"][1]


def test_what_if_questions_minimize_the_request_that_is_asked_for(tmp_path: Path) -> None:
    asked = ("--prompt", "2000", "--answer", "100", "--optimize-for", "first-token")
    options = ("plan", "llama-70b", "--machine", "m3-ultra-512", "--machine", "m4-max-128", *asked)
    done = run_in_process(*options, "--users-at", "8k", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "request, s" in done.stdout
    assert "a prompt of 2,000 tokens and an answer of 100" in done.stdout
    (found,) = json.loads(run_in_process(*options, "--users-at", "8k", "--json", folder=tmp_path).stdout)[
        "outcomes"
    ]
    plan = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)["prediction"]
    assert (found["first_token_s"], found["request_s"]) == (plan["first_token_s"], plan["request_s"])


def test_a_longer_request_has_a_longer_context_by_default(tmp_path: Path) -> None:
    options = ("plan", "llama-70b", "--machine", "m3-ultra-512", "--prompt", "20000", "--json")
    assert json.loads(run_in_process(*options, folder=tmp_path).stdout)["context_tokens"] == 20256


def test_a_running_head_is_asked_for_all_that_is_given(tmp_path: Path) -> None:
    service = TwinService()
    with serving(service) as url:
        given = (
            "--url",
            url,
            "--prompt",
            "500",
            "--answer",
            "40",
            "--optimize-for",
            "first-token",
            "--users",
            "2",
        )
        options = (
            "plan",
            "--add",
            "m3-ultra-512",
            "--link",
            "tb5",
            "--kv-bits",
            "8",
            "--context",
            "4096",
            *given,
        )
        done = run_in_process(*options, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("org/twin\n")
        found = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)["outcomes"]
        assert [one["label"] for one in found] == ["now", "with m3-ultra-512 over tb5"]
        for one in found:
            lengths = (one["prompt_tokens"], one["answer_tokens"], one["context_tokens"], one["kv_bits"])
            assert lengths == (500, 40, 4096, 8)
            assert one["at_once"] == 2
        named = run_in_process("plan", "llama-70b", "--url", url, folder=tmp_path)
        assert named.stdout.startswith("llama-70b is taken as Llama-3.3-70B in 4-bit")
        refused = complaint(
            "plan", "--url", url, "--add", "m4-16", "--context", "100", "--prompt", "200", folder=tmp_path
        )
        assert f"The head at {url} refuses: A prompt of 200 tokens" in refused
        refused = complaint("plan", "lama", "--url", url, folder=tmp_path)
        assert f"The head at {url} refuses: There is no model 'lama'" in refused


def test_a_file_of_machines_can_be_added_to(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("machines: [m3-ultra-512]\nusual_link: tb5\n")
    options = ("plan", "8B-8bit", "--cluster", "cluster.yaml", "--add", "m3-ultra-512", "--json")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)["outcomes"]
    before_s, after_s = (one["first_token_s"] + 256 / one["tokens_per_s"] for one in (before, after))
    assert after_s <= before_s, "the time of a request"
    assert after["users"] > 1.5 * before["users"]


def test_popular_models_are_listed_with_what_fits(tmp_path: Path) -> None:
    done = run_in_process("plan", "--what-fits", "--machine", "m4-pro-48", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    fits = {one["label"]: one["fits"] for one in json.loads(done.stdout)["outcomes"]}
    assert len(fits) > 30
    assert fits["Qwen3-30B-A3B 8-bit"]
    assert not fits["Llama-3.3-70B 4-bit"]


def test_a_list_of_models_says_why_one_does_not_fit(tmp_path: Path) -> None:
    options = ("plan", "--what-fits", "--machine", "m4-pro-48", "--context", "100000")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "supports 32768 at most" in done.stdout
    assert "GB are missing" in done.stdout


def test_a_plot_of_nothing_leaves_the_reasons_in_sight(tmp_path: Path) -> None:
    options = ("plan", "405B", "--machine", "m4-mac-mini-16", "--plot-file", "x.svg")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode != 0
    assert "GB are missing" in done.stdout
    assert "There is nothing to plot into x.svg" in done.stderr


def test_bits_of_the_kv_cache_are_compared_by_users(tmp_path: Path) -> None:
    options = ("plan", "70B-4bit", "--machine", "m3-ultra-96", "--users-at", "32k", "--kv-bits", "16,8,4")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a context of 32,768 tokens" in done.stdout
    outcomes = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)["outcomes"]
    assert [one["kv_bits"] for one in outcomes] == [16, 8, 4]
    users = [one["users"] for one in outcomes]
    assert users[1] > 1.6 * users[0]
    assert users[2] > 1.6 * users[1]


def test_a_table_is_as_wide_as_its_content(tmp_path: Path) -> None:
    options = ("plan", "--what-fits", "--machine", "m4-pro-48", "--add", "m4-pro-48")
    done = run_in_process(*options, folder=tmp_path)
    lines = done.stdout.splitlines()
    rows = [line for line in lines if ", with m4-pro-48" in line or ", now" in line]
    assert len(rows) > 60
    assert all(line == line.rstrip() for line in lines)
    assert max(map(len, rows)) < 160
    missing = [line for line in rows if "does not fit" in line]
    assert missing
    assert all(line.endswith(" GB are missing") for line in missing)


def test_users_who_send_at_once_are_counted_in_a_question(tmp_path: Path) -> None:
    options = ("plan", "llama-8b", "--machine", "m4-pro-48", "--users-at", "8k", "--users", "4")
    done = run_in_process(*options, folder=tmp_path)
    assert (
        "4 users send one at once: `tokens/s` is for each, and the times are the last one's." in done.stdout
    )
    (several,) = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)["outcomes"]
    (alone,) = json.loads(run_in_process(*options[:-2], "--json", folder=tmp_path).stdout)["outcomes"]
    assert (several["at_once"], alone["at_once"]) == (4, 1)
    assert several["first_token_s"] > 3 * alone["first_token_s"]
    plan = json.loads(
        run_in_process(*options[:4], "--context", "8k", "--users", "4", "--json", folder=tmp_path).stdout
    )
    assert several["request_s"] == plan["prediction"]["request_s"]


def test_a_case_that_does_not_fit_claims_no_ranges(tmp_path: Path) -> None:
    done = run_in_process("plan", "405B", "--machine", "m4-16", "--users-at", "8k", folder=tmp_path)
    assert "does not fit" in done.stdout
    assert "Ranges" not in done.stdout


def test_speeds_are_plotted_over_context_and_users(tmp_path: Path) -> None:
    options = ("plan", "demo", "--machine", "m4-mac-mini-16", "--plot", "--plot-file", "speeds.svg")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens/s of one user over the context" in done.stdout
    assert any(line.split()[0] == "2" and "####" in line for line in done.stdout.splitlines() if line.strip())
    picture = (tmp_path / "speeds.svg").read_text("utf-8")
    assert picture.startswith("<svg ")
    assert picture.count("<polyline ") == 2


def test_a_short_name_can_be_planned_as_usual(tmp_path: Path) -> None:
    done = run_in_process("plan", "qwen3-30b-a3b-4bit", "--machine", "m3-ultra-512", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Qwen3-30B-A3B 4-bit, 1 x 8192 tokens" in done.stdout
    assert "mlx-community/Qwen3-30B-A3B-4bit" in done.stdout


# ---- examples of the documentation


EXAMPLES = re.findall(
    r"^```console\n\$ mlx-ring (plan .*)\n((?:.*\n)*?)```$",
    (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_commands_print_what_the_documentation_shows(command: str, shown: str, tmp_path: Path) -> None:
    """Expect each shown line in order, up to `...` where a line or several are left out."""
    done = run_in_process(*command.split(), folder=tmp_path, environment={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    printed = iter(line.rstrip() for line in done.stdout.splitlines())
    for line in filter(None, shown.splitlines()):
        start, left, _ = line.partition("...")
        assert any(found == line or (left and found.startswith(start)) for found in printed), line


def test_the_documentation_has_examples_of_plans() -> None:
    assert len(EXAMPLES) >= 2
