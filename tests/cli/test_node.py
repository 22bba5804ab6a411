"""`mlx-ring node drain`, against a head without machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.api.clients import serving as api_server
from tests.api.twins import TwinCatalog, TwinService
from tests.processes import run_in_process

from mlx_ring.core.errors import PlanError


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
