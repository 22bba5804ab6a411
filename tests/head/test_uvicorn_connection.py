"""The parts of uvicorn on which `ClientConnection` relies, and the choice of connections to shed."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from importlib.metadata import requires

import h11
import pytest
import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from mlx_ring.head.uvicorn_connection import ClientConnection, ConnectionLimits, choose_connection_to_shed

OVERRIDDEN = {
    "connection_made": ("self", "transport"),
    "connection_lost": ("self", "exc"),
    "data_received": ("self", "data"),
    "handle_events": ("self",),
    "on_response_complete": ("self",),
    "pause_writing": ("self",),
    "shutdown": ("self",),
    "send_400_response": ("self", "msg"),
}
"""Parameters of each method that the subclass overrides."""
CYCLE_ATTRIBUTES = {"disconnected", "message_event", "response_complete", "response_started", "scope"}


def test_the_requirement_admits_only_the_tested_minor_version() -> None:
    uvicorn_requirement = next(
        each for each in map(Requirement, requires("mlx-ring") or ()) if each.name == "uvicorn"
    )
    installed = Version(uvicorn.__version__)
    assert uvicorn_requirement.specifier.contains(installed)
    assert not uvicorn_requirement.specifier.contains(f"{installed.major}.{installed.minor - 1}.0")
    assert not uvicorn_requirement.specifier.contains(f"{installed.major}.{installed.minor + 1}.0")


@pytest.mark.parametrize("method", OVERRIDDEN)
def test_uvicorn_has_every_method_that_is_overridden(method: str) -> None:
    assert method in vars(H11Protocol) or method == "data_received"
    assert tuple(inspect.signature(getattr(H11Protocol, method)).parameters) == OVERRIDDEN[method]
    assert method in vars(ClientConnection)


def test_every_overridden_method_is_listed() -> None:
    replaced = {
        name
        for name, value in vars(ClientConnection).items()
        if inspect.isfunction(value) and hasattr(H11Protocol, name) and not name.startswith("__")
    }
    assert replaced == set(OVERRIDDEN)


def test_a_connection_has_the_attributes_that_are_used() -> None:
    async def connect() -> None:
        config, state = uvicorn.Config(Response(), log_config=None), ServerState()
        config.load()
        connection = ClientConnection(config, state, {}, limits=ConnectionLimits())
        assert connection.connections is state.connections
        assert connection.loop is asyncio.get_running_loop()
        assert isinstance(connection.conn, h11.Connection)
        assert {"access_log", "app", "client", "logger", "transport"} <= vars(connection).keys()
        assert connection.cycle is None

    asyncio.run(connect())


def test_a_cycle_has_the_attributes_that_are_used() -> None:
    assigned = set(inspect.getclosurevars(RequestResponseCycle.__init__).unbound)
    assert assigned >= CYCLE_ATTRIBUTES


def test_a_server_calls_its_protocol_with_the_arguments_that_are_accepted() -> None:
    source = inspect.getsource(Server.startup)
    for argument in ("config=config", "server_state=self.server_state", "app_state=", "_loop="):
        assert argument in source
    assert CLOSE_HEADER == (b"connection", b"close")


@dataclass(eq=False)
class Connection:
    """A connection as `choose_connection_to_shed` sees it."""

    peer: str
    since_s: float = 0.0
    quiet_since_s: float | None = None
    has_answered: bool = False


def test_the_longest_idle_connection_of_the_address_with_most_is_shed_first() -> None:
    others = [
        Connection("a", quiet_since_s=1.0),
        Connection("b", quiet_since_s=3.0),
        Connection("b", quiet_since_s=2.0),
        Connection("c"),
    ]
    assert choose_connection_to_shed(Connection("c"), others) is others[2]
    assert choose_connection_to_shed(Connection("c"), [others[0], *others[3:]]) is others[0]


def test_of_busy_connections_the_newest_without_an_answer_is_shed() -> None:
    others = [
        Connection("a", 1.0),
        Connection("b", 2.0),
        Connection("b", 3.0),
        Connection("b", 4.0, has_answered=True),
    ]
    assert choose_connection_to_shed(Connection("a"), others) is others[2]


def test_no_connection_is_shed_for_a_client_with_as_many() -> None:
    others = [Connection("a"), Connection("a"), Connection("b"), Connection("b")]
    assert choose_connection_to_shed(Connection("a"), others) is None
    assert choose_connection_to_shed(Connection("b"), others) is None
    assert choose_connection_to_shed(Connection("c"), others) is others[0]
    assert choose_connection_to_shed(Connection("a"), []) is None
