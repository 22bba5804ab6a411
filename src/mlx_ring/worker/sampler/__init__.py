"""Draws tokens from logits: a pure function of (logits, parameters, seed, position).

A row's token depends on nothing but that row, so a sequence draws the same tokens in any
batch, at any split of the model, and after a replay; draft tokens are verified by sampling every
position and accepting while equal.

The chain, in order, is vLLM's (`vllm/v1/sample/sampler.py`): logit bias, `min_tokens`, repetition,
frequency and presence penalties, grammar, temperature, min-p, top-k, top-p, draw. Where tokens are equally
likely at a threshold, the lowest ids are kept, so `top_k=1` is greedy.
"""

from mlx_ring.worker.sampler.logprobs import LazyLogprobs, prompt_logprobs, token_logprobs
from mlx_ring.worker.sampler.parameters import Parameters, SamplerRow
from mlx_ring.worker.sampler.sample import LazySample, sample

__all__ = [
    "LazyLogprobs",
    "LazySample",
    "Parameters",
    "SamplerRow",
    "prompt_logprobs",
    "sample",
    "token_logprobs",
]
