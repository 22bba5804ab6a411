"""Settings that agents and workers get."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest

import mlx_ring
from mlx_ring.settings.config import Settings
from mlx_ring.settings.process_settings import (
    AgentSettings,
    MemberSettings,
    WorkerSettings,
    add_argument,
    as_arguments,
    names_of,
    select_settings,
)

MEMBER = replace(
    select_settings(MemberSettings, Settings()),
    log_dir=Path("/var/log/mlx ring"),
    run_dir=Path("/run/ring"),
    memory_limit=1 << 34,
    trusted_interface=("en5", "10.0.8.0/24"),
    node_ports=(9000, 9015),
)


def read(kind: type[WorkerSettings], arguments: Sequence[str]) -> WorkerSettings:
    parser = argparse.ArgumentParser()
    add_argument(parser, kind)
    return parser.parse_args(arguments).settings


@pytest.mark.parametrize("name", names_of(MemberSettings))
def test_a_field_has_the_name_and_the_type_of_a_setting(name: str) -> None:
    assert get_type_hints(MemberSettings)[name] == get_type_hints(Settings)[name]


@pytest.mark.parametrize("name", names_of(MemberSettings))
def test_agents_or_workers_read_each_field(name: str) -> None:
    package = Path(mlx_ring.__file__).parent
    sources = [path for room in ("agent", "worker") for path in (package / room).rglob("*.py")]
    assert any(re.search(rf"settings\.{name}\b", path.read_text("utf-8")) for path in sources)


@pytest.mark.parametrize("settings", [MEMBER, select_settings(MemberSettings, Settings())])
@pytest.mark.parametrize("kind", [WorkerSettings, AgentSettings, MemberSettings])
def test_settings_survive_the_command_line(kind: type[WorkerSettings], settings: MemberSettings) -> None:
    passed_on = select_settings(kind, settings)
    assert read(kind, as_arguments(passed_on)) == passed_on


def test_a_change_replaces_a_value() -> None:
    assert select_settings(WorkerSettings, MEMBER, blas_threads=3).blas_threads == 3


@pytest.mark.parametrize("arguments", [(), ("--settings", "{"), ("--settings", '{"unknown": 1}')])
def test_arguments_of_another_form_are_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(WorkerSettings, arguments)
    assert "--settings" in capsys.readouterr().err
