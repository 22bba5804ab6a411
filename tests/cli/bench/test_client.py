"""Server-sent events split anywhere, and probes of servers that do not describe themselves."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.bench.third_party import ThirdPartyServer, serving_third_party

from mlx_ring.cli.bench.client import (
    DONE,
    BenchClient,
    Endpoint,
    EventReader,
    RequestOptions,
    Target,
    _served_models,  # pyright: ignore[reportPrivateUsage]
    probe,
    read_event,
)
from mlx_ring.cli.bench.workload import Words
from mlx_ring.core.errors import ConfigError, NotReady, RingError


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_events_are_whole_however_the_bytes_are_split(cuts: list[int]) -> None:
    stream = ': comment\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "ü"}\n\ndata: [DONE]\n\n'.encode()
    reader, found, place = EventReader(), list[str](), 0
    for cut in [*cuts, len(stream)]:
        found += reader.feed(stream[place : place + cut])
        place += cut
    assert found == ['{"a": 1}', '{"b": "ü"}', DONE]


@pytest.mark.parametrize(
    ("data", "output", "finish"),
    [
        ('{"choices": [{"text": "hi", "finish_reason": null}]}', True, None),
        ('{"choices": [{"text": "", "finish_reason": "length"}]}', False, "length"),
        ('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', False, None),
        ('{"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}', True, "stop"),
        ('{"choices": [{"delta": {"reasoning": "hm"}}]}', True, None),
        ('{"choices": [{"delta": {"reasoning_content": "hm"}}]}', True, None),
        ('{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}', True, None),
        ('{"choices": []}', False, None),
        ('{"choices": null}', False, None),
    ],
)
def test_an_event_holds_its_output_and_finish_reason(data: str, output: bool, finish: str | None) -> None:  # noqa: FBT001 - an example
    event = read_event(data)
    assert (event.has_output, event.finish_reason, event.usage, event.error) == (output, finish, None, None)


def test_usage_comes_in_an_event_of_its_own() -> None:
    assert read_event('{"choices": [], "usage": {"completion_tokens": 3}}').usage == {"completion_tokens": 3}


@pytest.mark.parametrize("error", ['{"message": "lost"}', '"lost"'])
def test_an_error_event_holds_its_message(error: str) -> None:
    assert read_event(f'{{"error": {error}}}').error == "lost"


@pytest.mark.parametrize("data", ["3", "{", ""])
def test_data_that_is_no_object_is_refused(data: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own sentences
        read_event(data)


def probed(server: ThirdPartyServer, endpoint: Endpoint = "completions") -> tuple[Target, list[str]]:
    async def look(url: str) -> tuple[Target, list[str]]:
        client = BenchClient(f"{url}/v1/", api_key=None, timeout_s=60.0)
        try:
            return await probe(client, await client.discover(None), RequestOptions(endpoint))
        finally:
            await client.close()

    with serving_third_party(server) as url:
        return asyncio.run(look(url))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_that_accepts_every_field_gets_every_field(endpoint: Endpoint) -> None:
    target, notes = probed(ThirdPartyServer(tokens_per_word=2, template_tokens=11), endpoint)
    assert notes == []
    assert (target.model, target.context, target.vocabulary) == ("small", 5000, None)
    assert (target.ignores_eos, target.reports_usage, target.limit_field) == (True, True, "max_tokens")
    assert target.words == Words(2.0, 11.0)


@pytest.mark.parametrize("names_rejected_field", [True, False])
def test_ignore_eos_is_omitted_if_it_is_rejected(names_rejected_field: bool) -> None:  # noqa: FBT001 - an example
    server = ThirdPartyServer(
        rejected_fields=frozenset({"ignore_eos"}), names_rejected_field=names_rejected_field
    )
    target, notes = probed(server)
    assert (target.ignores_eos, target.reports_usage) == (False, True)
    assert len(notes) == 1
    assert "ignore_eos" in notes[0]
    assert "ignore_eos" not in server.bodies[-1]


def test_only_the_rejected_field_is_omitted() -> None:
    target, notes = probed(ThirdPartyServer(rejected_fields=frozenset({"stream_options"})))
    assert (target.ignores_eos, target.reports_usage) == (True, False)
    assert "usage" in notes[0]
    assert target.words == Words()


def test_missing_usage_is_noted() -> None:
    target, notes = probed(ThirdPartyServer(reports_usage=False))
    assert not target.reports_usage
    assert "usage" in notes[0]


def test_a_server_that_requires_max_completion_tokens_gets_it() -> None:
    server = ThirdPartyServer(rejected_fields=frozenset({"max_tokens"}))
    target, _ = probed(server, "chat")
    assert target.limit_field == "max_completion_tokens"
    assert "max_tokens" not in server.bodies[-1]


@pytest.mark.parametrize(
    ("server", "error", "said"),
    [
        (ThirdPartyServer(fault="404"), ConfigError, "HTTP 404: Status 404.*--endpoint chat"),
        (ThirdPartyServer(fault="401"), ConfigError, "--api-key"),
        (ThirdPartyServer(rejected_fields=frozenset({"model"})), ConfigError, "HTTP 400"),
        (ThirdPartyServer(fault="500"), NotReady, "HTTP 500"),
        (ThirdPartyServer(fault="silence"), NotReady, "stream ended early"),
    ],
)
def test_a_server_that_fails_the_probe_is_refused_with_the_reason(
    server: ThirdPartyServer, error: type[RingError], said: str
) -> None:
    with pytest.raises(error, match=said):
        probed(server)


def test_an_unknown_model_is_reported_with_the_served_models() -> None:
    async def discover(url: str, model: str) -> str:
        client = BenchClient(url, api_key=None, timeout_s=60.0)
        try:
            return (await client.discover(model)).model
        finally:
            await client.close()

    with serving_third_party(ThirdPartyServer()) as url:
        assert asyncio.run(discover(url, "large")) == "large"
        with pytest.raises(ConfigError, match="does not serve 'other'; it has small, large"):
            asyncio.run(discover(url, "other"))


def test_a_refused_key_is_reported_in_two_sentences() -> None:
    for said in ("Wrong key", "Wrong key."):
        refusal = httpx.Response(401, json={"error": {"message": said}})
        with pytest.raises(
            ConfigError,
            match=r"^http://x/v1/models answers 401: Wrong key\. Give --api-key, from which alone ",
        ):
            _served_models(refusal, "http://x")
