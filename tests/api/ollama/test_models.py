"""Models and embeddings, as Ollama's client reads them."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from tests.api.clients import Api, serving
from tests.api.twins import TwinService
from tests.lazily import lazily

if TYPE_CHECKING:
    import ollama
else:
    ollama = lazily("ollama")

METADATA = {
    "model_type": "qwen3",
    "layers": 8,
    "parameters": 1_720_000_000,
    "quantization": {"bits": 4},
    "weight_bytes_on_disk": 900,
    "digest": "ab12",
}


@pytest.fixture(scope="module")
def client() -> Generator[ollama.Client]:
    service = TwinService()
    service.metadata = dict(METADATA)
    with serving(service) as url, closing(ollama.Client(url)) as client:
        yield client


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.size, listed.digest) == ("org/twin", 900, "ab12")
    assert listed.details is not None
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("1.7B", "4-bit")
    shown = client.show("twin:latest")
    assert shown.modelinfo is not None
    assert (shown.modelinfo["general.architecture"], shown.modelinfo["qwen3.context_length"]) == (
        "qwen3",
        4096,
    )
    assert shown.capabilities == ["completion", "embedding"]


def test_fields_that_ollama_s_own_client_always_sends_are_accepted_if_empty(api: Api) -> None:
    show: dict[str, object] = {"model": "twin", "system": "", "template": "", "options": None, "name": ""}
    assert api.post("/api/show", show).status_code == 200
    assert api.post("/api/show", {"model": "twin", "options": {}}).status_code == 200
    pull = {"model": "twin", "username": "", "password": "", "name": ""}
    assert api.post("/api/pull", pull).json() == {"status": "success"}
    for path, body, field in (
        ("/api/show", show, "system"),
        ("/api/show", show, "template"),
        ("/api/pull", pull, "username"),
        ("/api/pull", pull, "password"),
    ):
        refused = api.post(path, body | {field: "x"})
        assert (refused.status_code, f"'{field}' is not supported" in refused.text) == (400, True)


def test_loaded_models_show_their_memory(client: ollama.Client) -> None:
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.size, loaded.context_length) == ("org/twin", 2 * (10 + 0), 4096)
    assert loaded.size_vram == 0


def test_texts_are_embedded(client: ollama.Client) -> None:
    answer = client.embed("twin", ["A", "BC"], dimensions=2)
    assert [len(vector) for vector in answer.embeddings] == [2, 2]
    assert answer.prompt_eval_count == 5
    assert client.embeddings("twin", "A").embedding == pytest.approx(client.embed("twin", "A").embeddings[0])


def test_text_over_the_context_is_truncated_or_refused(api: Api) -> None:
    long, most = "x" * 5000, "x" * 4095
    (truncated,) = api.post("/api/embed", {"input": long}).json()["embeddings"]
    assert truncated == api.post("/api/embed", {"input": most}).json()["embeddings"][0]
    refused = api.post("/api/embed", {"input": long, "truncate": False})
    assert refused.status_code == 400
    assert "5001 tokens" in refused.json()["error"]


def test_a_pull_shows_its_progress_and_fails_in_one_sentence(client: ollama.Client) -> None:
    assert client.pull("twin").status == "success", "a served model is here already"
    lines = list(client.pull("org/other", stream=True))
    assert [line.status for line in lines] == [
        "pulling manifest",
        *["pulling org/other"] * 3,
        "verifying sha256 digest",
        "success",
    ]
    assert [(line.completed, line.total) for line in lines[1:4]] == [(0, 100), (50, 100), (100, 100)]
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", line.digest or "") for line in lines[1:4])
    assert client.pull("org/other").status == "success"
    for streams in (True, False):
        with pytest.raises(ollama.ResponseError, match="There is no model 'nobody/knows'"):
            list(client.pull("nobody/knows", stream=streams))


def test_a_model_that_is_not_loaded_is_deleted(client: ollama.Client) -> None:
    assert client.delete("org/kept").status == "success"
    with pytest.raises(ollama.ResponseError, match="is served by this server: unload it first"):
        client.delete("org/twin")


def test_requests_that_change_models_are_refused_with_a_reason(client: ollama.Client, api: Api) -> None:
    for call in (
        lambda: client.copy("twin", "other"),
        lambda: client.push("twin"),
    ):
        with pytest.raises(ollama.ResponseError, match="make models or send them elsewhere"):
            call()
    assert api.request("HEAD", "/api/blobs/sha256:ab12").status_code == 400
    assert set(api.get("/api/version").json()) == {"version", "mlx_ring"}
