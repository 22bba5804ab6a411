"""Every sampling parameter has a field in the message and in requests, and reaches a worker unchanged."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.api.openai.sampling import SamplingFields
from mlx_ring.core.types import Sampling
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.rpc.sampling import decode_sampling, encode_sampling

NAMES = {field.name for field in fields(Sampling)}
NAMED_BY_ROUTES = {"logprobs", "top_logprobs"}
"""Parameters that each route reads from fields of its own."""
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


def test_requests_have_a_field_for_each_parameter() -> None:
    assert set(SamplingFields.model_fields) >= NAMES - NAMED_BY_ROUTES


def test_the_api_page_names_each_parameter() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert {name for name in NAMES if f"`{name}`" not in page} == set()


@given(SAMPLINGS)
def test_sampling_parameters_survive_encoding_and_decoding(sampling: Sampling) -> None:
    message = step_pb2.Sampling.FromString(encode_sampling(sampling).SerializeToString())
    assert decode_sampling(message, Sampling) == sampling


def test_an_empty_message_has_every_parameter_off() -> None:
    assert decode_sampling(step_pb2.Sampling(), Sampling) == Sampling()
