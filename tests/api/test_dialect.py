"""Every dialect is registered with the application, and a path belongs to one of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings
from tests.faults import dialects as disturbed

from mlx_ring import api
from mlx_ring.api.app import DIALECTS
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialect
from mlx_ring.api.errors import transport_error
from mlx_ring.api.openapi import ApiRoute

ROOT = Path(__file__).parents[2]


def defined_dialects() -> Iterator[Dialect[Any, Any]]:
    """Yield every dialect that a module `dialect` of a package of the API defines."""
    for package in pkgutil.iter_modules(api.__path__, f"{api.__name__}."):
        if package.ispkg:
            names = {
                name.name for name in pkgutil.iter_modules(importlib.import_module(package.name).__path__)
            }
            if "dialect" in names:
                values = vars(importlib.import_module(f"{package.name}.dialect")).values()
                yield from (value for value in values if isinstance(value, Dialect))


def paths(dialect: Dialect[Any, Any]) -> set[str]:
    context = ApiContext(TwinCatalog(TwinService()), make_api_settings())
    routers = [routes(context) for routes in dialect.routes]
    return {route.path for router in routers for route in router.routes if isinstance(route, ApiRoute)}


def test_every_defined_dialect_is_registered() -> None:
    assert {dialect.name for dialect in defined_dialects()} == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/api.md", "docs/clients.md", "pyproject.toml", "src/mlx_ring/cli/app.py"],
)
def test_every_dialect_is_documented(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [dialect.name for dialect in DIALECTS if dialect.name not in text] == []


def test_the_table_of_rooms_names_the_folder_of_every_dialect() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {
        dialect.routes[0].__module__.removeprefix(f"{api.__name__}.").partition(".")[0]
        for dialect in DIALECTS
    }
    assert {folder for folder in folders if f"`{folder}/`" not in text} == set()


def test_faults_disturb_answers_of_every_dialect() -> None:
    paths = {dialect.path for dialect in disturbed.DIALECTS.values()}
    assert {DIALECTS.of(path).name for path in paths} == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize("dialect", list(DIALECTS), ids=lambda dialect: dialect.name)
def test_dialect_routes_are_under_its_own_paths(dialect: Dialect[Any, Any]) -> None:
    assert paths(dialect)
    assert {path for path in paths(dialect) if DIALECTS.of(path) is not dialect} == set()


def test_path_belongs_to_the_dialect_of_its_prefix_or_to_the_default() -> None:
    default, *others = DIALECTS
    for dialect in others:
        for prefix in dialect.prefixes:
            assert DIALECTS.of(prefix) is DIALECTS.of(f"{prefix}/below") is dialect
            assert DIALECTS.of(f"{prefix}x") is default


def test_path_of_two_apis_belongs_to_the_one_whose_clients_header_the_request_has() -> None:
    default, *others = DIALECTS
    [anthropic] = [dialect for dialect in others if dialect.shared_prefixes]
    for path in ("/v1/models", "/v1/models/org/name"):
        assert DIALECTS.of(path, {"anthropic-version": "2023-06-01"}) is anthropic
        assert DIALECTS.of(path, {"x-api-key": "key"}) is default
    assert DIALECTS.of("/v1/chat/completions", {"anthropic-version": "2023-06-01"}) is default


@pytest.mark.parametrize("path", ["/v1/models", "/models/org/name", "/v1/files"])
def test_request_that_no_route_gets_is_refused_in_the_form_of_its_clients_api(path: str) -> None:
    bodies = [
        transport_error(
            DIALECTS, 431, "Too long.", "req_1", {"type": "http", "path": path, "headers": headers}
        )
        for headers in ([], [(b"anthropic-version", b"2023-06-01")])
    ]
    assert ["request_id" in body for body in bodies] == [False, True]
