"""Drawing of tokens from logits: a pure function of (logits, parameters, seed, position).

A row's token only depends on that row. So a sequence draws the same tokens in any batch, at any split of the model,
and after a replay. Draft tokens are verified by sampling every position, and accepted while equal.

The steps and their order are vLLM's (`vllm/v1/sample/sampler.py`): logit bias, `min_tokens`, repetition,
frequency and presence penalties, grammar, temperature, min-p, top-k, top-p, draw. If tokens are equally
likely at a threshold, the lowest ids are kept, so `top_k=1` is greedy.
"""

from mlx_ring.worker.sampler.draw import History, Parameters, SamplerRow
from mlx_ring.worker.sampler.sample import LazyLogprobs, LazySample, prompt_logprobs, sample, token_logprobs

__all__ = [
    "History",
    "LazyLogprobs",
    "LazySample",
    "Parameters",
    "SamplerRow",
    "prompt_logprobs",
    "sample",
    "token_logprobs",
]
