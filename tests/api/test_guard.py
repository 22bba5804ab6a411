"""Who may ask."""

from __future__ import annotations

import pytest
from tests.api.clients import Api, refusal

from mlx_ring.api.settings import ApiSettings


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:8100", "[::1]:8100", "LOCALHOST.", "192.168.5.1:8100"]
)
def test_names_of_this_machine_and_the_bound_address_may_be_hosts(host: str) -> None:
    assert Api(settings=ApiSettings(host="192.168.5.1")).get("/", host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8100", "10.0.0.1", "localhost.evil.example", "a@localhost", "[", ""],
)
def test_a_foreign_host_is_refused(api: Api, host: str) -> None:
    refusal(api.get("/health", host=host), 403)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])  # noqa: S104 - what a person may bind to
def test_bound_to_every_address_any_address_may_be_the_host_but_no_name(bound: str) -> None:
    api = Api(settings=ApiSettings(host=bound))
    assert api.get("/", host="10.1.2.3:8100").status_code == 200
    assert api.get("/", host="[fd00::7]:8100").status_code == 200
    refusal(api.get("/", host="evil.example"), 403)


def test_listed_hosts_and_origins_are_allowed() -> None:
    allowing = ApiSettings(allowed_hosts=("Studio.local",), allowed_origins=("https://app.example",))
    api = Api(settings=allowing)
    assert api.get("/", host="studio.local:8100").status_code == 200
    response = api.get("/", origin="https://app.example")
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    refusal(api.get("/", origin="http://app.example"), 403)


def test_a_star_allows_all() -> None:
    api = Api(settings=ApiSettings(allowed_hosts=("*",), allowed_origins=("*",)))
    assert api.get("/", host="any.example", origin="https://any.example").status_code == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8100"])
def test_a_page_of_this_machine_may_ask_and_read(api: Api, origin: str) -> None:
    response = api.get("/v1/models", origin=origin)
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["vary"] == "origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost@evil.example", "", "x"])
def test_a_foreign_origin_is_refused_and_may_not_read_the_refusal(api: Api, origin: str) -> None:
    response = api.post("/v1/chat/completions", {}, origin=origin)
    refusal(response, 403)
    assert "access-control-allow-origin" not in response.headers
    assert not api.service.executor.sent


def test_a_preflight_of_an_allowed_page_is_answered(api: Api) -> None:
    asked = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    response = api.request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert response.status_code == 204
    assert response.headers["access-control-allow-headers"] == "content-type,authorization"
    refused = api.request("OPTIONS", "/v1/models", headers=asked | {"origin": "https://evil.example"})
    assert refused.status_code == 403


def test_every_answer_has_a_request_id_of_its_own(api: Api) -> None:
    ids = {api.get(path).headers["x-request-id"] for path in ("/", "/health", "/nothing")}
    assert len(ids) == 3
