"""`mlx-ring node drain` and `mlx-ring replan`, against a head without machines."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.api.clients import serving as api_server
from tests.api.ops.test_cluster import proposal
from tests.api.twins import TwinCatalog, TwinService
from tests.processes import run_in_process

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.cluster.security.enrolment import admit_own_machine
from mlx_ring.cluster.security.records import Members
from mlx_ring.core.errors import PeerRefused, PlanError
from mlx_ring.core.folders import authority_folder, node_folder
from mlx_ring.planner.replan import MoveWay


def test_drain_says_which_requests_moved_and_how_to_undo_it(tmp_path: Path) -> None:
    with api_server(TwinService()) as url:
        drained = run_in_process("node", "drain", "studio", "--url", url, folder=tmp_path)
        undone = run_in_process("node", "drain", "studio", "--undo", "--url", url, folder=tmp_path)
    assert drained.returncode == 0
    assert "2 requests moved without a pause, in 1.2 s." in drained.stdout
    assert "mlx-ring node drain studio --undo" in drained.stdout
    assert undone.stdout == "studio may get layers again: the next plan may use it.\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("mini",), "No machine is called mini: connected are studio."),
        (("studio",), "There is no room for 4 layers."),
        (("studio", "--undo", "--force"), "--undo and --force are given; leave one of them out."),
    ],
)
def test_refusal_is_one_sentence(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    catalog = TwinCatalog(service := TwinService())
    catalog.refusal = PlanError("There is no room for 4 layers.")
    with api_server(service, catalog=catalog) as url:
        refused = run_in_process("node", "drain", *arguments, "--url", url, folder=tmp_path)
    assert refused.returncode != 0
    assert problem in refused.stderr
    assert "Traceback" not in refused.stderr


def replan(folder: Path, way: MoveWay | None, *arguments: str) -> CompletedProcess[str]:
    """Run the command against a head that knows a better split, or none."""
    catalog = TwinCatalog(service := TwinService())
    catalog.proposal = None if way is None else proposal(way)
    with api_server(service, catalog=catalog) as url:
        return run_in_process("replan", *arguments, "--url", url, folder=folder)


def test_replan_shows_both_splits_and_what_moved(tmp_path: Path) -> None:
    shown = replan(tmp_path, "beside", "--dry-run").stdout
    assert "mini 0-4, studio 5-7" in shown
    assert "Predicted gain: 25%" in shown
    assert "no answer pauses" in shown
    assert "2 requests moved without a pause, in 1.2 s." in replan(tmp_path, "beside", "org/twin").stdout
    assert replan(tmp_path, None).stdout == "org/twin has the best split for its machines as they are now.\n"
    assert json.loads(replan(tmp_path, "beside", "--json").stdout)["moved"]["way"] == "beside"


def test_replan_pauses_only_where_that_is_allowed(tmp_path: Path) -> None:
    shown = replan(tmp_path, "after", "--dry-run").stdout
    assert (
        "`mlx-ring replan org/twin --pause` moves to it, and answers pause for about 3 s: There is no room"
        in shown
    )
    shown = replan(tmp_path, "ranges", "--dry-run").stdout
    assert (
        "Workers stay, and load 12 MB of layers that they gain. `mlx-ring replan org/twin` moves to it"
        in shown
    )
    moved = replan(tmp_path, "ranges").stdout
    assert "2 requests paused for 0.0 s, because" in moved
    assert "and workers loaded 12 MB: There is no room for both, in 1.2 s." in moved
    refused = replan(tmp_path, "after")
    assert (refused.returncode, "Answers would pause." in refused.stderr) == (1, True)
    assert "2 requests paused for 0.0 s, because" in replan(tmp_path, "after", "--pause").stdout
    both = replan(tmp_path, "after", "--pause", "--dry-run")
    assert "--dry-run and --pause are given; leave one of them out." in both.stderr


@pytest.mark.parametrize("name", ["[/laptops]", ":x:"])
def test_the_name_of_a_token_is_shown_as_it_is(name: str, tmp_path: Path) -> None:
    state = "--state-dir", str(tmp_path / "state")
    assert run_in_process("token", "create", "--name", name, *state, folder=tmp_path).returncode == 0
    assert name in run_in_process("token", "list", *state, folder=tmp_path).stdout


def test_the_variable_of_a_join_token_is_no_setting(tmp_path: Path) -> None:
    shown = run_in_process(
        *("token", "list", "--state-dir", str(tmp_path / "state")),
        folder=tmp_path,
        environment={"MLX_RING_JOIN_TOKEN": "secret"},
    )
    assert (shown.returncode, shown.stderr) == (0, "")


def test_a_removed_machine_learns_that_the_variable_of_a_token_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = authority_folder(tmp_path)
    admit_own_machine(Authority.open(folder), Members(folder), node_folder(tmp_path))

    def refuse(*_: object) -> None:
        raise PeerRefused("The head refused this machine: join again with a new token.")

    monkeypatch.setattr("mlx_ring.cli.join._serve", refuse)
    monkeypatch.setattr("mlx_ring.cli.join.enable_grpc_logs", lambda: None)
    for variables, advice in (
        ({}, ""),
        ({"MLX_RING_JOIN_TOKEN": "new"}, "MLX_RING_JOIN_TOKEN is not read by a"),
    ):
        refused = run_in_process(
            *("join", "127.0.0.1:9", "--state-dir", str(tmp_path)), folder=tmp_path, environment=variables
        )
        assert refused.returncode == 2
        assert refused.stderr.strip().partition("new token.")[2].strip().startswith(advice)
        assert bool(advice) == ("give --token" in refused.stderr)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 61])
def test_a_name_of_a_token_that_a_table_cannot_show_is_refused(name: str, tmp_path: Path) -> None:
    refused = run_in_process("token", "create", "--name", name, folder=tmp_path)
    assert refused.returncode == 2
    assert f"--name is {name!r}" in refused.stderr


def test_the_head_s_own_machine_cannot_be_removed(tmp_path: Path) -> None:
    folder = authority_folder(tmp_path)
    authority, members = Authority.open(folder), Members(folder)
    admit_own_machine(authority, members, node_folder(tmp_path))
    (node,) = members.list()
    refused = run_in_process("node", "remove", node, "--state-dir", str(tmp_path), folder=tmp_path)
    assert refused.returncode == 2
    assert f"{node} is this machine, which has the head" in refused.stderr
    assert list(members.list()) == [node]
