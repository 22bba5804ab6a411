"""`mlx-ring plan` as a person types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.test_main import complaint
from tests.processes import run_in_process

MINIS = ("--machine", "m4-mac-mini-16", "--machine", "m4-mac-mini-16")


def test_a_machine_s_name_is_whole_in_a_narrow_terminal(tmp_path: Path) -> None:
    machines = ("--machine", "m4-mac-mini-16", "--machine", "m2-max-mac-studio-64")
    done = run_in_process("plan", "demo", *machines, folder=tmp_path, environment={"COLUMNS": "80"})
    assert re.search(r"^m2-max-mac-studio-64 +0-7 ", done.stdout, re.MULTILINE), done.stdout


def test_a_plan_names_machines_layers_and_reasons(tmp_path: Path) -> None:
    done = run_in_process("plan", "demo", *MINIS, "--strategy", "uniform", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "m4-mac-mini-16#1" in done.stdout
    assert "tokens/s for one stream" in done.stdout
    assert "alone would be faster for a single stream" in done.stdout


def test_one_machine_written_in_two_ways_is_two_of_its_kind(tmp_path: Path) -> None:
    typed = ("--machine", "M4 Max 128GB", "--machine", "m4_max_128")
    done = run_in_process("plan", "demo", *typed, "--strategy", "uniform", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "m4-max-128#1" in done.stdout
    assert "m4-max-128#2" in done.stdout


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


@pytest.mark.parametrize("question", [(), ("--kv-bits", "16,8")], ids=["plan", "what if"])
def test_a_given_number_limits_chunks_and_its_memory_counts(
    question: tuple[str, ...], tmp_path: Path
) -> None:
    """Ask for experts, which longer chunks read less often."""

    def first_token_s_and_bytes(*flags: str) -> tuple[float, int]:
        options = ("--machine", "m4-max-128", "--prompt", "4k", *question, *flags, "--json")
        done = json.loads(run_in_process("plan", "qwen3-30b-a3b-4bit", *options, folder=tmp_path).stdout)
        if question:
            return done["outcomes"][0]["first_token_s"], done["outcomes"][0]["memory_bytes"]
        return done["prediction"]["first_token_s"], done["stages"][0]["memory_bytes"]

    long, usual, longest, whole = (
        first_token_s_and_bytes(*flags)
        for flags in (
            (),
            ("--prefill-chunk", "512"),
            ("--prefill-chunk", "8192"),
            ("--prefill-chunk", "60000"),
        )
    )
    assert usual[0] > 1.1 * long[0]
    assert usual[1] == long[1] < longest[1]
    assert longest[0] < long[0]
    # No prompt is longer than the context.
    assert whole == longest


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
    done = run_in_process("plan", folder=tmp_path)
    assert done.returncode == 0
    assert "m3-ultra-mac-studio" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", *MINIS, "--strategy", "best"], "--strategy is best; it must be one of auto, uniform"),
        (["demo", *MINIS, "--strategy", "custom"], "needs --proportions, as 0.7,0.3, or --layers"),
        (
            ["demo", *MINIS, "--strategy", "custom", "--layers", "5,3", "--proportions", "0.5,0.5"],
            "--proportions is 0.5,0.5 and --layers is 5,3, and each divides the layers; give one of them.",
        ),
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
        (
            ["8B", "--add", "m4-16", "--url", "http://127.0.0.1:9", "--api-key", "k"],
            "No head answers at http://127.0.0.1:9",
        ),
        (["8B", *MINIS, "--api-key", "k"], "--api-key is given, but no head is asked; leave it out."),
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
        (
            ["demo"],
            "No machines are given for demo; name some, such as `mlx-ring plan demo --machine m4-mac-mini-16` (",
        ),
        (["demo", "--kv-cache-memory", "1GB"], "--kv-cache-memory is 1GB, but no machines are given"),
        (["demo", "--prefill-chunk", "64"], "--prefill-chunk is 64, but no machines are given; name some"),
        (
            ["demo", *MINIS, "--prefill-chunk", "0"],
            "--prefill-chunk is 0; it must be a whole number from 1 to",
        ),
        (
            ["8B", "--add", "m4-16", "--prefill-chunk", "9"],
            "--prefill-chunk is 9, which a what-if question to the head",
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
    assert half / whole == pytest.approx(0.5 / 0.9)


def test_the_format_that_is_asked_for_is_in_the_models_name(tmp_path: Path) -> None:
    options = ("plan", "llama-8b", "--machine", "m3-ultra-512", "--quantization", "8")
    done = run_in_process(*options, folder=tmp_path)
    assert "Llama-3.1-8B 8-bit, 1 x 8192" in done.stdout
    assert "is taken as Llama-3.1-8B in 8-bit" in done.stdout
    assert "4-bit" not in done.stdout
    asked = run_in_process(*options, "--users-at", "4k", folder=tmp_path)
    assert "4-bit" not in asked.stdout
    assert "Llama-3.1-8B 8-bit" in asked.stdout
    wide = run_in_process("plan", "demo", *options[2:-1], "32", folder=tmp_path)
    assert "The weights of demo are taken in float32." in wide.stdout
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


@pytest.mark.parametrize(
    ("count", "names", "verb"),
    [(2, "n1", "gets"), (4, "n1, n2 and n3", "get"), (40, "39 machines", "get")],
)
def test_machines_without_layers_for_the_same_reason_share_a_line(
    tmp_path: Path, count: int, names: str, verb: str
) -> None:
    listed = "".join(f"  - {{name: n{place}, machine: m4-max-128}}\n" for place in range(count))
    (tmp_path / "c.yaml").write_text(f"machines:\n{listed}")
    options = ("plan", "demo", "--cluster", "c.yaml")
    why = "no plan with it answers a request sooner."
    shown = run_in_process(*options, folder=tmp_path).stdout.splitlines()
    assert [line for line in shown if why in line] == [f"{names} {verb} no layers: {why}"]
    shown = run_in_process(*options, "--users-at", "8k", folder=tmp_path).stdout.splitlines()
    assert [line for line in shown if why in line] == [f"Without layers: {names}: {why}"]
    found = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)
    assert len(found["left_out"]) == count - 1, "each by name"


def test_no_accuracy_is_claimed_for_a_machine_that_is_described_by_numbers(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "machines: [{name: box, memory_gb: 128, bandwidth_gb_s: 546, tflops: 17.2}]"
    )
    options = ("plan", "qwen3-30b-a3b-4bit", "--cluster", "c.yaml")
    shown = run_in_process(*options, folder=tmp_path).stdout
    remark = (
        "box is described by numbers, and predicted like the nearest chip, m4-max-40 (metal). How far off"
    )
    assert remark in shown
    assert "Predictions are off by factors" not in shown
    plan = json.loads(run_in_process(*options, "--json", folder=tmp_path).stdout)
    assert (plan["ranges"], plan["remarks"][-1].startswith(remark)) == (None, True)
    known = ("plan", "qwen3-30b-a3b-4bit", "--machine", "m4-max-128", "--json")
    expected = json.loads(run_in_process(*known, folder=tmp_path).stdout)["prediction"]
    assert plan["prediction"] == expected
    for asked in (("plan", "8B", "--users-at", "8k"), ("capacity", "8B", "--rate", "0.01")):
        assert remark in run_in_process(*asked, "--cluster", "c.yaml", folder=tmp_path).stdout


def test_a_machine_that_is_too_small_is_named_in_the_singular(tmp_path: Path) -> None:
    said = complaint("plan", "405B", "--machine", "m4-mac-mini-16", folder=tmp_path)
    assert "and m4-mac-mini-16 has 9.2 GB for it" in said


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


def test_a_longer_request_has_a_longer_context_by_default(tmp_path: Path) -> None:
    options = ("plan", "llama-70b", "--machine", "m3-ultra-512", "--prompt", "20000", "--json")
    assert json.loads(run_in_process(*options, folder=tmp_path).stdout)["context_tokens"] == 20256


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
