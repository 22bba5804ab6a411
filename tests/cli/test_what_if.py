"""What-if questions of `mlx-ring plan` as a person types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.clients import serving
from tests.api.twins import TwinService
from tests.cli.test_main import complaint
from tests.eventually import eventually
from tests.processes import run_in_process

from mlx_ring.cli import planning


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
        refused = complaint("plan", "--url", url, "--kv-cache-memory", "1GB", folder=tmp_path)
        assert "--kv-cache-memory is 1GB, which a what-if question to the head does not take" in refused
        refused = complaint("recommend", "--url", url, "--kv-cache-memory", "1GB", folder=tmp_path)
        assert f"--kv-cache-memory is 1GB, but the head at {url} plans with its own" in refused
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
    assert fits["gemma-4-26B-A4B 8-bit"]
    assert not fits["Llama-3.3-70B 4-bit"]


def test_a_list_of_models_says_why_one_does_not_fit(tmp_path: Path) -> None:
    options = ("plan", "--what-fits", "--machine", "m4-pro-48", "--context", "100000")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "supports 32768 at most" in done.stdout
    assert "GB are missing" in done.stdout


def test_users_and_models_are_those_of_a_given_kv_memory(tmp_path: Path) -> None:
    """Ask for users whose KV takes 256 MiB each."""
    options = ("plan", "llama-8b", "--machine", "m4-pro-48", "--users-at", "2k", "--json")
    found = run_in_process(*options, "--kv-cache-memory", "2GiB", folder=tmp_path)
    (one,) = json.loads(found.stdout)["outcomes"]
    assert one["users"] == 8
    options = ("plan", "--what-fits", "--machine", "m4-pro-48", "--json", "--kv-cache-memory", "1GB")
    found = run_in_process(*options, folder=tmp_path)
    fits = {one["label"]: one for one in json.loads(found.stdout)["outcomes"]}
    assert not fits["Llama-3.1-8B 4-bit"]["fits"]
    assert "give a larger --kv-cache-memory" in fits["Llama-3.1-8B 4-bit"]["why"]
    assert fits["Llama-3.2-3B 4-bit"]["fits"]
    options = ("plan", "--what-fits", "--machine", "m4-pro-48", "--kv-cache-memory", "1GB")
    lines = run_in_process(*options, folder=tmp_path).stdout.splitlines()
    (line,) = (line for line in lines if line.startswith("Llama-3.1-8B 4-bit"))
    assert line.endswith("  give a larger --kv-cache-memory")


def test_a_plot_of_nothing_leaves_the_reasons_in_sight(tmp_path: Path) -> None:
    options = ("plan", "405B", "--machine", "m4-mac-mini-16", "--plot-file", "x.svg")
    done = run_in_process(*options, folder=tmp_path)
    assert done.returncode != 0
    assert "GB are missing" in done.stdout
    assert "There is nothing to plot into x.svg" in done.stderr


def test_bits_of_the_kv_cache_are_compared_by_users(tmp_path: Path) -> None:
    options = ("plan", "70B-4bit", "--machine", "m2-ultra-128", "--users-at", "32k", "--kv-bits", "16,8,4")
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


def test_a_head_that_measures_its_machine_first_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answer once the line is printed, later than any head that only computes."""
    lines = list[str]()

    def answer_late(*_: object, timeout_s: float, **__: Any) -> dict[str, int]:
        lines.append(eventually(lambda: capsys.readouterr().err))
        assert timeout_s > 120
        return {"answer": 4}

    monkeypatch.setattr(planning, "ask_head", answer_late)
    monkeypatch.setattr(planning, "_NOTICE_AFTER_S", 0.0)
    answer = planning.ask_running_head("http://127.0.0.1:8100", "/ask", None, dict[str, int], None)
    assert answer == {"answer": 4}
    assert lines == [
        "Waiting for the head at http://127.0.0.1:8100. The first time, it measures its machine, for up to two minutes.\n"
    ]
