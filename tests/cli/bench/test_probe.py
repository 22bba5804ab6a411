"""What is found out about servers that do not say."""

from __future__ import annotations

import asyncio

import pytest
from tests.cli.bench.foreign import Foreign, serving_foreign

from mlx_ring.cli.bench.client import BenchClient, Endpoint, RequestOptions, Target, probe
from mlx_ring.cli.bench.workload import Words
from mlx_ring.core.errors import ConfigError, NotReady, RingError


def found(foreign: Foreign, endpoint: Endpoint = "completions") -> tuple[Target, list[str]]:
    async def look(url: str) -> tuple[Target, list[str]]:
        client = BenchClient(f"{url}/v1/", api_key=None, timeout_s=60.0)
        try:
            return await probe(client, await client.discover(None), RequestOptions(endpoint))
        finally:
            await client.close()

    with serving_foreign(foreign) as url:
        return asyncio.run(look(url))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_that_takes_everything_is_asked_for_everything(endpoint: Endpoint) -> None:
    target, notes = found(Foreign(tokens_per_word=2, template_tokens=11), endpoint)
    assert notes == []
    assert (target.model, target.context, target.vocabulary) == ("small", 5000, None)
    assert (target.ignores_eos, target.reports_usage, target.limit_field) == (True, True, "max_tokens")
    assert target.words == Words(2.0, 11.0)


@pytest.mark.parametrize("names_fields", [True, False])
def test_ignore_eos_is_left_out_where_it_is_refused(names_fields: bool) -> None:  # noqa: FBT001 - an example
    foreign = Foreign(refuses=frozenset({"ignore_eos"}), names_fields=names_fields)
    target, notes = found(foreign)
    assert (target.ignores_eos, target.reports_usage) == (False, True)
    assert len(notes) == 1
    assert "ignore_eos" in notes[0]
    assert "ignore_eos" not in foreign.bodies[-1]


def test_only_the_field_that_a_refusal_names_is_left_out() -> None:
    target, notes = found(Foreign(refuses=frozenset({"stream_options"})))
    assert (target.ignores_eos, target.reports_usage) == (True, False)
    assert "usage" in notes[0]
    assert target.words == Words()


def test_usage_that_is_asked_for_and_not_told_is_noted() -> None:
    target, notes = found(Foreign(reports_usage=False))
    assert not target.reports_usage
    assert "usage" in notes[0]


def test_a_server_that_wants_the_newer_name_of_the_limit_gets_it() -> None:
    foreign = Foreign(refuses=frozenset({"max_tokens"}))
    target, _ = found(foreign, "chat")
    assert target.limit_field == "max_completion_tokens"
    assert "max_tokens" not in foreign.bodies[-1]


@pytest.mark.parametrize(
    ("foreign", "error", "said"),
    [
        (Foreign(fault="404"), ConfigError, "HTTP 404: Status 404.*--endpoint chat"),
        (Foreign(fault="401"), ConfigError, "--api-key"),
        (Foreign(refuses=frozenset({"model"})), ConfigError, "HTTP 400"),
        (Foreign(fault="500"), NotReady, "HTTP 500"),
        (Foreign(fault="silence"), NotReady, "stream ended early"),
    ],
)
def test_a_server_that_cannot_be_loaded_says_why(foreign: Foreign, error: type[RingError], said: str) -> None:
    with pytest.raises(error, match=said):
        found(foreign)


def test_a_model_that_is_not_served_is_named_beside_those_that_are() -> None:
    async def discover(url: str, model: str) -> str:
        client = BenchClient(url, api_key=None, timeout_s=60.0)
        try:
            return (await client.discover(model)).model
        finally:
            await client.close()

    with serving_foreign(Foreign()) as url:
        assert asyncio.run(discover(url, "large")) == "large"
        with pytest.raises(ConfigError, match="does not serve 'other'; it has small, large"):
            asyncio.run(discover(url, "other"))
