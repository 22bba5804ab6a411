"""Random parameters and rows, over a vocabulary so small that histories often repeat tokens."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import strategies as st

from mlx_ring.core.types import Sampling
from mlx_ring.worker.sampler import Parameters, SamplerRow

VOCABULARY = 300
EOS = frozenset({0, 7, VOCABULARY + 2})

REPORTED = {"logprobs", "top_logprobs"}
"""Parameters that add to an answer and draw no other tokens."""
DRAWN = tuple(field.name for field in fields(Sampling) if field.name not in REPORTED)
"""Parameters that tokens are drawn by."""
VALUES: dict[str, st.SearchStrategy[object]] = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    "top_p": st.sampled_from([1.0, 0.5, 0.9, 0.999]),
    "top_k": st.sampled_from([0, 1, 5, 40, 299, 10_000]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
    "presence_penalty": st.sampled_from([0.0, 0.5, -1.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.25]),
    "logit_bias": st.dictionaries(
        st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=4
    ).map(lambda bias: tuple(sorted(bias.items()))),
    "min_tokens": st.sampled_from([0, 3, 30]),
}
parameters = st.builds(Parameters, **{name: VALUES[name] for name in DRAWN})


@st.composite
def sampler_rows(draw: st.DrawFn) -> SamplerRow:
    tokens = draw(st.lists(st.integers(0, VOCABULARY + 5), min_size=1, max_size=20))
    position = draw(st.integers(1, len(tokens)))
    return SamplerRow(
        sampling=draw(parameters),
        seed=draw(st.integers(0, 2**64 - 1)),
        position=position,
        tokens=tokens,
        prompt_length=draw(st.integers(1, position)),
        eos=EOS,
    )
