"""Checks of hosts, origins and API keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from tests.api.clients import Api, error_of, refusal
from tests.default_settings import make_api_settings

from mlx_ring.api.middleware.guard import Admission, Guard


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:8100", "[::1]:8100", "LOCALHOST.", "192.168.5.1:8100"]
)
def test_local_names_and_the_bound_address_are_allowed_hosts(host: str) -> None:
    assert Api(settings=make_api_settings(host="192.168.5.1")).get("/", host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8100", "10.0.0.1", "localhost.evil.example", "a@localhost", "[", ""],
)
def test_foreign_host_is_refused(api: Api, host: str) -> None:
    refusal(api.get("/health", host=host), 403)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])  # noqa: S104 - an address that a user may bind to
def test_wildcard_bind_allows_any_address_as_host_but_no_name(bound: str) -> None:
    api = Api(settings=make_api_settings(host=bound))
    assert api.get("/", host="10.1.2.3:8100").status_code == 200
    assert api.get("/", host="[fd00::7]:8100").status_code == 200
    refusal(api.get("/", host="evil.example"), 403)


@pytest.mark.parametrize("bound", ["fe80::1%en0", "[fe80::1%25en0]"])
@pytest.mark.parametrize("scope", ["", "%en0", "%25en0", "%12"])
def test_a_link_local_address_is_an_allowed_host_with_any_scope(bound: str, scope: str) -> None:
    api = Api(settings=make_api_settings(host=bound))
    host = f"[fe80::1{scope}]:8100"
    assert api.get("/", host=host, origin=f"http://{host}").status_code == 200
    refusal(api.get("/", host=f"[fe80::2{scope}]:8100"), 403)


def test_own_names_are_allowed_hosts_and_origins() -> None:
    api = Api(settings=make_api_settings(host="0.0.0.0", own_names=lambda: ("mini.local", "mini")))  # noqa: S104 - as above
    host = "Mini.local:8100"
    assert api.get("/", host=host, origin=f"http://{host}").status_code == 200
    assert api.get("/", host="mini:8100").status_code == 200
    refusal(api.get("/", host="studio.local:8100"), 403)


def test_a_name_that_the_machine_gets_later_is_allowed() -> None:
    names = list[str]()
    api = Api(settings=make_api_settings(host="0.0.0.0", own_names=lambda: tuple(names)))  # noqa: S104 - as above
    host = "mini.local:8100"
    refusal(api.get("/", host=host), 403)
    names.append("mini.local")
    assert api.get("/", host=host, origin=f"http://{host}").status_code == 200
    refusal(api.get("/", host="studio.local:8100"), 403)
    names[:] = ["mini-2.local"]
    refusal(api.get("/", host=host), 403)
    refusal(api.get("/", host="mini-2.local:8100", origin=f"http://{host}"), 403)
    assert api.get("/", host="mini-2.local:8100").status_code == 200


@pytest.mark.parametrize("name", ["host.docker.internal", "host.containers.internal"])
def test_containers_may_use_the_name_by_which_they_reach_this_machine(api: Api, name: str) -> None:
    host = f"{name}:8100"
    assert api.get("/v1/models", host=host).status_code == 200
    assert api.get("/", host=host, origin=f"http://{host}").status_code == 200
    refusal(api.get("/", origin=f"http://{host}"), 403)
    refusal(api.get("/", host=f"{name}.evil.example"), 403)


@pytest.mark.parametrize("origin", ["app://obsidian.md", "vscode-webview://1a2b", "vscode-file://vscode-app"])
def test_pages_of_desktop_apps_may_use_the_server(api: Api, origin: str) -> None:
    assert api.get("/v1/models", origin=origin).headers["access-control-allow-origin"] == origin


def test_a_refused_browser_gets_a_page_that_names_the_flag(api: Api) -> None:
    page = api.get("/", host="<evil>.example", accept="text/html,*/*;q=0.8")
    assert page.status_code == 403
    assert page.headers["content-type"].startswith("text/html")
    assert "--allowed-hosts" in page.text
    assert "&lt;evil&gt;.example" in page.text
    assert "<evil>" not in page.text
    assert "--allowed-hosts NAME" in page.text, (
        "a command to copy repeats nothing that a shell may read otherwise"
    )
    assert "mlx-ring serve MODEL --allowed-hosts studio.lan" in api.get("/", host="studio.lan:8100").text
    foreign = api.get("/", origin="https://app.example").text
    assert "mlx-ring serve MODEL --allowed-origins https://app.example" in foreign
    refusal(api.get("/", host="evil.example", accept="application/json"), 403)


def test_listed_hosts_and_origins_are_allowed() -> None:
    allowing = make_api_settings(allowed_hosts=("Studio.local",), allowed_origins=("https://app.example",))
    api = Api(settings=allowing)
    assert api.get("/", host="studio.local:8100").status_code == 200
    response = api.get("/", origin="https://app.example")
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    refusal(api.get("/", origin="http://app.example"), 403)


def test_star_allows_every_host_and_origin() -> None:
    api = Api(settings=make_api_settings(allowed_hosts=("*",), allowed_origins=("*",)))
    assert api.get("/", host="any.example", origin="https://any.example").status_code == 200


def test_wildcard_bind_allows_only_the_origin_that_equals_the_host() -> None:
    api = Api(settings=make_api_settings(host="0.0.0.0"))  # noqa: S104 - an address that a user may bind to
    host = "192.168.1.5:8100"
    assert api.get("/", host=host, origin=f"http://{host}").status_code == 200
    refusal(api.get("/", host=host, origin="http://203.0.113.9:8100"), 403)


def test_star_for_hosts_does_not_allow_foreign_origins() -> None:
    api = Api(settings=make_api_settings(allowed_hosts=("*",)))
    assert api.get("/", host="any.example", origin="https://any.example").status_code == 200
    refusal(api.get("/", host="any.example", origin="https://evil.example"), 403)


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8100"])
def test_local_origin_may_read_responses(api: Api, origin: str) -> None:
    response = api.get("/v1/models", origin=origin)
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["vary"] == "origin"
    exposed = set(response.headers["access-control-expose-headers"].split(", "))
    assert exposed == {"x-request-id", "request-id", "retry-after", "x-should-retry", "x-mlx-ring-resumed"}


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "app://",
        "file://",
        "https://app://x",
        "http://localhost@evil.example",
        "",
        "x",
    ],
)
def test_foreign_origin_is_refused_without_cors_headers(api: Api, origin: str) -> None:
    response = api.post("/v1/chat/completions", {}, origin=origin)
    refusal(response, 403)
    assert "access-control-allow-origin" not in response.headers
    assert not api.service.executor.sent


def test_preflight_of_an_allowed_origin_is_answered(api: Api) -> None:
    preflight = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    response = api.request("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert response.status_code == 204
    assert response.headers["access-control-allow-headers"] == "content-type,authorization"
    refused = api.request("OPTIONS", "/v1/models", headers=preflight | {"origin": "https://evil.example"})
    assert refused.status_code == 403


def test_every_response_has_its_own_request_id(api: Api) -> None:
    ids = {api.get(path).headers["x-request-id"] for path in ("/", "/health", "/nothing")}
    assert len(ids) == 3


@pytest.mark.parametrize("name", ["x-request-id", "x-client-request-id"])
def test_request_id_of_the_client_is_kept_if_it_is_safe_to_log(api: Api, name: str) -> None:
    own_id = "trace-7f3a.2:/+=@_"
    assert api.get("/", **{name: own_id}).headers["x-request-id"] == own_id
    for other in ("two words", "x" * 129, "{}", "\x1b[2J"):
        assert api.get("/", **{name: other}).headers["x-request-id"].startswith("req_")
    both = {"x-request-id": "{}", "x-client-request-id": own_id}
    assert api.get("/", **both).headers["x-request-id"] == own_id


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models", "/v1/v1/models", "/models/"])
def test_a_base_url_may_end_with_a_slash_or_the_prefix(api: Api, path: str) -> None:
    assert api.get(path).json() == api.get("/v1/models").json()


@pytest.mark.timeout(60)
def test_a_long_path_is_read_in_time_linear_in_its_length() -> None:
    """Send a path of 6 MB, which takes a second; with work for each pair of parts it would take a quarter of an hour."""
    paths: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        paths.append(scope["path"])

    async def unused(*_: object) -> Any:
        raise AssertionError

    guard = Guard(app, make_api_settings(), Admission())
    for path in ("/v1" * 2_000_000, "/v1" * 2_000_000 + "/models"):
        asyncio.run(guard({"type": "http", "method": "GET", "path": path, "headers": []}, unused, unused))
    assert paths == ["/v1", "/v1/models"]


def test_slashes_do_not_bypass_the_key() -> None:
    api = Api(settings=make_api_settings(api_keys=("k",)))
    for path in ("/v1//models", "/v1/v1/models", "/v1/models/"):
        refusal(api.get(path), 401)
    assert api.get("/health/").status_code == 200


def test_head_is_answered_like_get(api: Api) -> None:
    assert api.request("HEAD", "/health/ready").status_code == 200
    assert api.request("HEAD", "/generate").status_code == 405
    assert api.request("HEAD", "/health", headers={"host": "evil.example"}).status_code == 403


KEYED = make_api_settings(api_keys=("first-key", "schlüssel", "voilà"))


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer  first-key"},
        {"x-api-key": "first-key"},
        {"authorization": "Basic abc", "x-api-key": "first-key"},
        {"x-api-key": "schlüssel".encode()},
        {"authorization": "Bearer voilà".encode()},
        {"x-api-key": "schlüssel".encode("latin-1")},
    ],
)
def test_request_with_an_accepted_key_is_answered(headers: dict[str, str | bytes]) -> None:
    assert Api(settings=KEYED).request("GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({}, "requires an API key"),
        ({"authorization": "Bearer "}, "requires an API key"),
        ({"authorization": "Basic first-key"}, "requires an API key"),
        ({"authorization": "Bearer first-ke"}, "not one of this server's"),
        ({"authorization": "Bearer first-key2"}, "not one of this server's"),
        ({"x-api-key": ""}, "not one of this server's"),
    ],
)
def test_request_without_an_accepted_key_is_401_in_openais_format(headers: dict[str, str], text: str) -> None:
    api = Api(settings=KEYED)
    response = api.post("/v1/chat/completions", {}, **headers)
    assert text in refusal(response, 401)[1]
    error = error_of(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert not api.service.executor.sent


def test_health_needs_no_key_and_everything_else_does() -> None:
    api = Api(settings=KEYED)
    for path in ("/health", "/health/live", "/health/ready"):
        assert api.get(path).status_code == 200
    for path in (
        "/",
        "/v1/models",
        "/models",
        "/cluster/status",
        "/cache/stats",
        "/model/info",
        "/healthy",
        "/nothing",
    ):
        assert api.get(path).status_code == 401


def test_allowed_origin_can_read_the_401() -> None:
    response = Api(settings=KEYED).get("/v1/models", origin="http://localhost:3000")
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
