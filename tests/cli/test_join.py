"""`mlx-ring join` of a machine that has joined before, with a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import run_in_process

from mlx_ring.cli import join as subject
from mlx_ring.core.errors import HandshakeFailed, PeerRefused
from mlx_ring.host.head_announcement import HeadPlace


@pytest.mark.parametrize(
    ("error", "has_answered", "enrolments"),
    [
        (PeerRefused("It was removed."), False, 2),
        (PeerRefused("It was removed."), True, 1),
        (HandshakeFailed("That is another program."), False, 1),
    ],
    ids=["before its head was up", "while it served", "by another program"],
)
def test_a_machine_that_was_removed_enrols_once_its_head_is_up(
    error: PeerRefused,
    *,
    has_answered: bool,
    enrolments: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use a new token once, but let no machine return that is removed while it serves."""
    enrolled: list[tuple[str, str, bool]] = []
    served: list[HeadPlace] = []

    def enrol(address: str, token: str, _folder: Path, *, is_known: bool = False) -> None:
        enrolled.append((address, token, is_known))

    def serve(_settings: object, _state: Path, place: HeadPlace, _listen: str) -> None:
        served.append(place)
        if has_answered:
            place.answered()
        if len(served) == 1:
            raise error

    monkeypatch.setattr("mlx_ring.agent.enrolment.join", enrol)
    monkeypatch.setattr(subject, "_serve", serve)
    given = {"MLX_RING_STATE_DIR": str(tmp_path / "state"), "MLX_RING_GIVEN_JOIN_TOKEN": "token"}
    done = run_in_process("join", "192.0.2.1", folder=tmp_path, environment=given)
    assert enrolled == [("192.0.2.1:50051", "token", False)] * enrolments
    assert (len(served), done.returncode == 0) == (enrolments, enrolments == 2)
    assert (str(error) in done.stderr) == (enrolments == 1)
