"""A real model in a GGUF file, through everything: split in every way, over HTTP, and on a machine that joins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tests.end_to_end.equality import TIE, Agreement, compare
from tests.end_to_end.instance import generate, running_engine
from tests.end_to_end.loopback_cluster import running_cluster
from tests.end_to_end.reference import WholeModel
from tests.machines import free_pair_of_ports
from tests.once import once
from tests.processes import Server, run_in_process, serving
from tests.smollm2 import CONTEXT, smollm2, write_smollm2_folder

from mlx_ring.models.model_source import find_model

pytestmark = [pytest.mark.timeout(900)]
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:",
    "Once upon a time, there was a small",
)
COUNT = 8
"""Tokens of an answer."""
KEY_LEVEL = 0.1
"""Distance of two logits that one level of a quantized key may close."""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NAME = "SmolLM2-135M-Instruct.Q4_1"


@dataclass(frozen=True)
class Expected:
    """mlx-lm's model of the same weights, prompts, and its answers."""

    whole: WholeModel
    prompts: list[tuple[int, ...]]
    answers: list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def cache(shared: Path) -> Generator[Path]:
    """Keep the folders of GGUF files among the run's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield shared / "cache"


@pytest.fixture(scope="module")
def folder() -> Path:
    return find_model(str(smollm2())).folder.path


@pytest.fixture(scope="module")
def expected(shared: Path, folder: Path) -> Expected:
    """Make mlx-lm's folder from what MLX's own reader of GGUF gives, and let mlx-lm answer."""
    from tokenizers import Tokenizer  # its import takes a while

    made = shared / "smollm2"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text).ids) for text in TEXTS]

    def answer() -> dict[str, Any]:
        whole = WholeModel(write_smollm2_folder(made / "model"))
        return {"answers": [whole.greedy(prompt, COUNT) for prompt in prompts]}

    return Expected(prompts=prompts, **once(made, answer), whole=WholeModel(made / "model"))


@pytest.mark.parametrize(
    ("stages", "shares"),
    [
        pytest.param(1, (1.0,), marks=pytest.mark.thorough),
        (3, (1.0,)),
        pytest.param(1, (2.0, 1.0), marks=pytest.mark.alone(loops=True)),
    ],
)
def test_tokens_are_those_of_mlx_lm_however_the_file_is_split(
    folder: Path, expected: Expected, tmp_path: Path, stages: int, shares: Sequence[float]
) -> None:
    async def run() -> Agreement:
        async with running_engine(folder, stages, tmp_path, shares=shares) as (engine, _):

            async def again(before: tuple[int, ...], count: int) -> list[int]:
                return await generate(engine, before, count)

            found = await asyncio.gather(
                *(
                    compare(prompt, answer, again, expected.whole.gap)
                    for prompt, answer in zip(expected.prompts, expected.answers, strict=True)
                )
            )
            return sum(found, start=Agreement())

    assert asyncio.run(run()).tokens == len(TEXTS) * COUNT


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.thorough), 4])
def test_tokens_over_a_quantized_kv_cache_are_those_of_mlx_lm(
    folder: Path, expected: Expected, tmp_path: Path, bits: int
) -> None:
    """Ask mlx-lm, with its quantized cache, whether each token is the likeliest, in one pass over an answer.

    A rounding may move a key to the next level, which is no tie.
    """
    prompts = expected.prompts[:2]

    async def run() -> list[list[int]]:
        async with running_engine(folder, 2, tmp_path, kv_bits=bits) as (engine, _):
            return await asyncio.gather(*(generate(engine, prompt, COUNT) for prompt in prompts))

    behind: list[float] = []
    for prompt, tokens in zip(prompts, asyncio.run(run()), strict=True):
        assert len(tokens) == COUNT
        behind += expected.whole.behind(prompt, tokens, bits)
    assert max(behind) <= KEY_LEVEL
    assert sum(gap > TIE for gap in behind) <= 1


@pytest.mark.parametrize(
    ("options", "held"),
    [
        pytest.param(("--cpu-weights", "float32", "--stages", "2"), "float32", marks=pytest.mark.thorough),
        (("--blas", "openblas", "--cpu-weights", "quantized"), "quantized"),
        (("--blas", "openblas"), "float32"),
    ],
    ids=["float32 as asked", "quantized without kernels", "float32 without kernels"],
)
def test_tokens_are_those_of_mlx_lm_in_each_form_of_the_weights(
    folder: Path, expected: Expected, tmp_path: Path, options: Sequence[str], held: str
) -> None:
    """Serve with the memory of the plan, and read long prompts and single tokens."""
    with serving(smollm2(), *options, folder=tmp_path) as server:
        devices = server.status()["devices"]
        assert {device["cpu_weights"] for device in devices} == {held}
        assert {device["kernels"] is None for device in devices} == {"--blas" in options}
        check_texts(server, folder, expected)


def check_texts(server: Server, folder: Path, expected: Expected) -> None:
    """Check that the server's completions are mlx-lm's."""
    from tokenizers import Tokenizer  # its import takes a while

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for prompt, tokens in zip(expected.prompts, expected.answers, strict=True):
        body = {"prompt": list(prompt), "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    with serving(smollm2(), "--stages", "2", folder=tmp_path_factory.mktemp("serve")) as server:
        yield server


def test_tokens_of_two_stages_are_those_of_mlx_lm(server: Server, folder: Path, expected: Expected) -> None:
    check_texts(server, folder, expected)


def ask(server: Server, **fields: Any) -> httpx.Response:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
    return server.http.post("/v1/chat/completions", json=body)


def content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_it_knows_the_capital_of_france(server: Server) -> None:
    answer = ask(server)
    assert "Paris" in content(answer)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert answer.json()["model"] == NAME


def test_an_answer_holds_a_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    found = json.loads(content(ask(server, response_format=wanted, max_tokens=48)))
    jsonschema.validate(found, schema)
    assert "Paris" in found["city"]


def test_tools_are_refused_because_its_template_has_none(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    answer = ask(server, tools=[tool])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tools"
    assert "chat template" in error["message"]


def test_its_context_is_that_of_the_file(server: Server) -> None:
    (listed,) = server.http.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == CONTEXT
    answer = ask(server, messages=[{"role": "user", "content": "word " * CONTEXT}])
    assert answer.status_code == 400
    assert str(CONTEXT) in answer.json()["error"]["message"]


def test_its_format_is_named(server: Server) -> None:
    assert server.http.get("/model/info").json()["metadata"]["format"] == "gguf"
    (listed,) = server.http.get("/api/tags").json()["models"]
    assert (listed["name"], listed["details"]["format"]) == (NAME, "gguf")


def test_models_list_shows_the_file(tmp_path: Path, server: Server) -> None:
    assert server.http.get("/v1/models").json()["data"][0]["id"] == NAME
    done = run_in_process("models", "list", folder=tmp_path, environment={"COLUMNS": "300"})
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith(str(smollm2()))]
    assert row.split()[1:] == ["file", "llama", "97", "MB", "30", "8,192"]


def test_a_machine_that_joins_fetches_the_ranges_of_its_layers(tmp_path: Path) -> None:
    flags = ("--strategy", "uniform")
    with running_cluster(smollm2(), 2, tmp_path, free_pair_of_ports(), *flags) as server:
        answer = server.http.post(
            "/v1/completions", json={"prompt": TEXTS[0], "max_tokens": 4, "temperature": 0}
        )
        assert " Paris" in answer.json()["choices"][0]["text"]
        devices = server.status()["devices"]
        (file,) = (tmp_path / "node-1" / "state" / "weights").glob("*/model/model.gguf")
    assert len({device["node"] for device in devices}) == 2
    size = smollm2().stat().st_size
    assert file.stat().st_size == size
    assert not file.is_symlink()
    assert 0 < 512 * file.stat().st_blocks < size
