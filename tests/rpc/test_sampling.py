"""Every sampling parameter has a field in the message and in requests, and reaches a worker unchanged."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.twins import TwinService

from mlx_ring.api.ollama.request import OPTION_NAMES, Options
from mlx_ring.api.openai.sampling import SamplingFields, sampling_params
from mlx_ring.core.types import Sampling, SamplingParams
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.rpc.sampling import decode_sampling, encode_sampling

NAMES = {field.name for field in fields(Sampling)}
NAMED_BY_ROUTES = {"logprobs", "top_logprobs", "max_tokens", "grammar"}
"""Parameters that each route reads from fields of its own, or from the model."""
REQUESTED = {field.name for field in fields(SamplingParams)} - NAMED_BY_ROUTES
EXAMPLES: dict[str, object] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {"1": 2.0},
    "min_tokens": 3,
    "seed": 7,
    "ignore_eos": True,
    "stop": "x",
    "stop_token_ids": [3],
}
"""Values of request fields that are not the defaults."""
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
VALUES: dict[type, st.SearchStrategy[object]] = {
    float: st.floats(0.01, 100),
    int: st.integers(0, 1000),
    bool: st.booleans(),
    tuple: st.dictionaries(st.integers(0, 1000), st.floats(-100, 100)).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
}
SAMPLINGS = st.builds(Sampling, **{name: VALUES[type(getattr(Sampling(), name))] for name in NAMES})


def test_the_message_has_a_field_for_each_parameter_and_no_other() -> None:
    assert {field.name for field in step_pb2.Sampling.DESCRIPTOR.fields} == NAMES


def test_every_parameter_has_an_example_here() -> None:
    assert EXAMPLES.keys() == REQUESTED


@pytest.mark.parametrize("name", sorted(REQUESTED))
def test_a_request_field_sets_each_parameter(name: str) -> None:
    service = TwinService()

    def parameter(**given: object) -> object:
        requested = SamplingFields.model_validate({"seed": 1} | given)
        return getattr(sampling_params(requested, service, max_tokens=8, top_logprobs=None), name)

    assert parameter(**{name: EXAMPLES[name]}) != parameter()


def test_the_api_page_names_each_parameter() -> None:
    assert {name for name in NAMES | REQUESTED if f"`{name}`" not in PAGE} == set()


def test_the_api_page_names_each_parameter_among_ollama_s_options() -> None:
    options = PAGE.partition("\n`options`:\n")[2].partition("\n`keep_alive`")[0]
    names = {OPTION_NAMES.get(name, name) for name in REQUESTED} & Options.model_fields.keys()
    assert {"temperature", "repeat_penalty"} <= names
    assert {name for name in names if f"`{name}`" not in options} == set()


@given(SAMPLINGS)
def test_sampling_parameters_survive_encoding_and_decoding(sampling: Sampling) -> None:
    message = step_pb2.Sampling.FromString(encode_sampling(sampling).SerializeToString())
    assert decode_sampling(message, Sampling) == sampling


def test_an_empty_message_has_every_parameter_off() -> None:
    assert decode_sampling(step_pb2.Sampling(), Sampling) == Sampling()
