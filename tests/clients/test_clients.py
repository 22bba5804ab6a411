"""Test published clients, unmodified, against a running server with an API key and two stages."""

from __future__ import annotations

import platform
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.clients.client_run import KEY, MODEL, becomes_idle, failures
from tests.clients.environments import command_of
from tests.clients.manifest import CLIENTS, PROGRAMS, Client
from tests.clients.page import PAGE, page
from tests.processes import Server, serving

OURS = ("openai-3", "anthropic-2", "ollama")
"""Clients whose packages are in our own environment."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    names = ("--api-key", KEY, "--served-model-name", MODEL)
    with serving("demo", "--stages", "2", *names, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def passed(request: pytest.FixtureRequest) -> Generator[set[str]]:
    """Collect the names of clients whose checks passed; write the page if all did."""
    names: set[str] = set()
    yield names
    if request.config.getoption("--write-table") and names == {client.name for client in CLIENTS}:
        PAGE.write_text(page(), encoding="utf-8")


def test_the_sdks_of_three_dialects_pass_their_checks(server: Server, tmp_path: Path) -> None:
    def failures_of(client: Client) -> str:
        command = (sys.executable, str(PROGRAMS / client.program))
        return failures(client, command, server, tmp_path / client.name)

    with ThreadPoolExecutor(len(OURS)) as threads:
        found = "".join(threads.map(failures_of, [client for client in CLIENTS if client.name in OURS]))
    assert not found, found
    assert becomes_idle(server)


def test_the_page_and_the_pins_agree() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.conformance
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_passes_its_checks(client: Client, server: Server, passed: set[str], tmp_path: Path) -> None:
    if client.only_on not in (None, (sys.platform, platform.machine())):
        pytest.skip(f"{client.package} is a program for {' '.join(client.only_on)}")
    found = failures(client, command_of(client), server, tmp_path / "home")
    assert not found, found
    assert becomes_idle(server)
    passed.add(client.name)
