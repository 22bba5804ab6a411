"""Profiles between runs: kept under what they depend on, and measured again where they are of no use."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tests.profiles import made_up_profile

from mlx_ring.agent import profiling as profile_store
from mlx_ring.agent.profiling import PROFILE_FILE, ProfileKey, ProfileOptions, ProfileStore, recall_or_measure
from mlx_ring.core.errors import WorkerLost
from mlx_ring.host.machine_profile import MachineProfile

OPTIONS = ProfileOptions(blas_threads=2)
KEY = ProfileKey.of_here(OPTIONS)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ProfileOptions]:
    """Each time that the machine would have been measured; what is found then tells the times apart."""
    calls: list[ProfileOptions] = []

    async def measure(options: ProfileOptions) -> MachineProfile:
        calls.append(options)
        return made_up_profile(seconds=float(len(calls)))

    monkeypatch.setattr(profile_store, "measure_machine", measure)
    return calls


def recall(folder: Path, options: ProfileOptions = OPTIONS, *, again: bool = False) -> MachineProfile:
    return asyncio.run(recall_or_measure(ProfileStore(folder), options, again=again))


def test_a_machine_is_measured_once(tmp_path: Path, measured: list[ProfileOptions]) -> None:
    first, second = recall(tmp_path / "state"), recall(tmp_path / "state")
    assert first == second
    assert measured == [OPTIONS]


def test_it_is_measured_again_where_that_is_asked_for(tmp_path: Path, measured: list[ProfileOptions]) -> None:
    recall(tmp_path)
    assert recall(tmp_path, again=True).seconds == 2.0
    assert recall(tmp_path).seconds == 2.0
    assert len(measured) == 2


def test_other_threads_are_another_profile(tmp_path: Path, measured: list[ProfileOptions]) -> None:
    recall(tmp_path)
    recall(tmp_path, ProfileOptions(blas_threads=1))
    assert len(measured) == 2


@pytest.mark.parametrize("name", [field.name for field in fields(ProfileKey)])
def test_whatever_changes_makes_a_profile_stale(name: str, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.save(KEY, made_up_profile())
    value: Any = getattr(KEY, name)
    other: Any = (*value, "card") if isinstance(value, tuple) else value * 2 + type(value)(1)
    changes: dict[str, Any] = {name: other}
    assert store.load(KEY) == made_up_profile()
    assert store.load(replace(KEY, **changes)) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": {}}', "\udcff", json.dumps({"key": "KEY", "profile": {"version": 1}})],
)
def test_a_broken_file_is_measured_over(text: str, tmp_path: Path, measured: list[ProfileOptions]) -> None:
    key = json.dumps(KEY.as_json())
    content = text.replace('"KEY"', key)
    (tmp_path / PROFILE_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert recall(tmp_path) == recall(tmp_path)
    assert len(measured) == 1


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, measured: list[ProfileOptions]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert recall(tmp_path / "file" / "state").seconds == 1.0
    assert len(measured) == 1


def test_nothing_but_the_profile_is_left_in_the_folder(
    tmp_path: Path, measured: list[ProfileOptions]
) -> None:
    recall(tmp_path)
    recall(tmp_path, again=True)
    assert [path.name for path in tmp_path.iterdir()] == [PROFILE_FILE]
    assert len(measured) == 2


def test_a_failure_leaves_the_kept_profile(
    tmp_path: Path, measured: list[ProfileOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = recall(tmp_path)

    async def fail(_options: ProfileOptions) -> MachineProfile:
        raise WorkerLost("it ended by signal 9")

    monkeypatch.setattr(profile_store, "measure_machine", fail)
    with pytest.raises(WorkerLost):
        recall(tmp_path, again=True)
    assert recall(tmp_path) == kept
    assert len(measured) == 1
