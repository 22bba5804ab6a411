"""Nodes in quarantine, and its duration."""

from __future__ import annotations

import errno
from itertools import count
from pathlib import Path

import pytest

from mlx_ring.cluster.quarantine import (
    LINK_LOSSES,
    LOSSES,
    REST_S,
    WINDOW_S,
    Loss,
    QuarantineList,
    quarantined,
    still_counting,
)
from mlx_ring.core.errors import ConfigError
from mlx_ring.host import private_files

TIMES_S = [10 * number for number in range(LOSSES)]


def losses(node: str, *times_s: float) -> tuple[Loss, ...]:
    return tuple(Loss(node, f"lost at {at_s:g}", at_s) for at_s in times_s)


def test_a_node_is_quarantined_after_several_losses_with_the_last_reason() -> None:
    own = losses("mini", *TIMES_S)
    assert not quarantined(own[:-1], TIMES_S[-1])
    nodes = quarantined(own + losses("studio", 1.0), TIMES_S[-1])
    assert set(nodes) == {"mini"}
    assert nodes["mini"].reason.endswith(f"lost at {TIMES_S[-1]}")


def test_instances_lost_together_count_once() -> None:
    assert not quarantined(losses("mini", 0.0, 0.1, 0.2, 1.0, 60.0, 60.5), 61.0)


def test_an_instance_begun_after_a_loss_counts_separately() -> None:
    own = tuple(Loss("mini", "lost", at_s, at_s - 0.5) for at_s in range(LOSSES))
    assert set(quarantined(own, float(LOSSES))) == {"mini"}


def test_a_node_is_readmitted_after_a_rest_with_no_losses() -> None:
    own = losses("mini", *TIMES_S)
    end = TIMES_S[-1] + REST_S
    assert "mini" in quarantined(own, end - 1)
    assert not quarantined(own, end)
    assert not quarantined(own + losses("mini", end + 1), end + 2), "the old losses no longer count"


def test_losses_far_apart_cause_no_quarantine() -> None:
    assert not quarantined(losses("mini", *(WINDOW_S * number for number in range(9))), WINDOW_S * 9)


def test_old_and_future_losses_are_dropped() -> None:
    stored = losses("mini", 0.0, 5_000.0, 9_999.0)
    assert still_counting(stored, 5_001.0) == stored[1:2]


def test_losses_outlive_a_head_and_a_node_can_be_readmitted(tmp_path: Path) -> None:
    times_s = count(1000.0, 10.0)
    quarantine = QuarantineList(tmp_path, clock=lambda: next(times_s))
    entries = [quarantine.note("mini", "its worker died", 0.0) for _ in range(LOSSES)]
    assert entries[:-1] == [None] * (LOSSES - 1)
    assert entries[-1] is not None
    again = QuarantineList(tmp_path, clock=lambda: next(times_s))
    assert set(again.held()) == {"mini"}
    with pytest.raises(ConfigError, match=r"of it\. Nodes in quarantine are mini\.$"):
        again.readmit("studio")
    again.readmit("mini")
    with pytest.raises(ConfigError, match=r"is not in quarantine, and plans avoid no link of it\.$"):
        again.readmit("mini")
    assert not quarantine.held()
    assert quarantine.note("mini", "once more", 0.0) is None


def test_losses_in_the_future_cause_no_quarantine(tmp_path: Path) -> None:
    times_s = count(1e6, 10.0)
    ahead = QuarantineList(tmp_path, clock=lambda: next(times_s))
    assert [ahead.note("mini", "its worker died", 0.0) for _ in range(LOSSES)][-1] is not None
    corrected = QuarantineList(tmp_path, clock=lambda: 1000.0)
    assert not corrected.held()
    with pytest.raises(ConfigError, match=r"plans avoid no link of it\.$"):
        corrected.readmit("mini")
    assert corrected.note("mini", "once more", 0.0) is None


def test_a_link_that_was_lost_twice_in_ten_minutes_is_avoided_for_a_quarter_of_an_hour(
    tmp_path: Path,
) -> None:
    now_s = 1000.0
    quarantine = QuarantineList(tmp_path, clock=lambda: now_s)
    assert quarantine.note_link(("b", "a"), "it broke", 0.0) is None
    assert quarantine.note_link(("a", "b"), "it broke for another instance, too", 0.0) is None
    now_s += WINDOW_S - 1
    avoided = quarantine.note_link(("a", "b"), "it broke again", 1000.5)
    assert avoided is not None
    assert avoided.reason == "It was lost 2 times within 10 minutes. The last reason: it broke again"
    assert not quarantine.held(), "no node is blamed"
    again = QuarantineList(tmp_path, clock=lambda: now_s)
    now_s += REST_S - 1
    assert again.links() == {("a", "b"): avoided}, "it outlives a head"
    now_s += 1
    assert again.links() == {}


def test_losses_of_a_link_that_are_far_apart_do_not_count(tmp_path: Path) -> None:
    times_s = count(1000.0, WINDOW_S)
    quarantine = QuarantineList(tmp_path, clock=lambda: next(times_s))
    assert [quarantine.note_link(("a", "b"), "it broke", 0.0) for _ in range(9)] == [None] * 9


@pytest.mark.parametrize("end", ["a", "b"])
def test_a_link_can_be_readmitted_by_either_of_its_ends(end: str, tmp_path: Path) -> None:
    times_s = count(1000.0, 10.0)
    quarantine = QuarantineList(tmp_path, clock=lambda: next(times_s))
    for _ in range(LINK_LOSSES):
        quarantine.note_link(("a", "b"), "it broke", 0.0)
    assert set(quarantine.links()) == {("a", "b")}
    with pytest.raises(ConfigError, match="Links that plans avoid are a and b"):
        quarantine.readmit("c")
    quarantine.readmit(end)
    assert not quarantine.links()


def test_links_of_a_node_that_is_readmitted_are_used(tmp_path: Path) -> None:
    times_s = count(1000.0, 10.0)
    quarantine = QuarantineList(tmp_path, clock=lambda: next(times_s))
    for _ in range(LOSSES):
        quarantine.note("a", "its worker died", 0.0)
        quarantine.note_link(("a", "b"), "it broke", 0.0)
        quarantine.note_link(("b", "c"), "it broke", 0.0)
    quarantine.readmit("a")
    assert set(quarantine.links()) == {("b", "c")}


@pytest.mark.parametrize("fault", ["rubbish", "no file", "no folder"])
def test_an_unusable_file_is_logged_once_and_causes_no_quarantine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    folder = tmp_path / "state"
    if fault == "no folder":
        folder.write_text("in its place")
    elif fault == "no file":
        (folder / "losses.json").mkdir(parents=True)
    else:
        folder.mkdir()
        (folder / "losses.json").write_text("rubbish")
    quarantine = QuarantineList(folder)
    for _ in range(2):
        assert not quarantine.held()
    assert [quarantine.note("mini", "its worker died", 0.0) for _ in range(LOSSES)] == [None] * LOSSES
    assert 1 <= len(caplog.messages) <= 2
    assert all(
        message.startswith("Losses are not counted, and no node is put into quarantine")
        for message in caplog.messages
    )
    assert "join again" not in caplog.text


def test_a_file_that_cannot_be_written_is_logged_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_write(_path: Path, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private_files, "write_private", fail_to_write)
    assert QuarantineList(tmp_path).note("mini", "its worker died", 0.0) is None
    assert caplog.messages[-1].endswith("losses.json: No space left on device")
