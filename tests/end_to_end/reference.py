"""mlx-lm's own whole model in one process, as the reference of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.end_to_end.equality import TIE


class WholeModel:
    """A model as mlx-lm loads and runs it, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_model(folder, lazy=True)[0]
        self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())

    def greedy(self, prompt: Sequence[int], count: int, kv_bits: int | None = None) -> list[int]:
        """Return the tokens of `mlx_lm.generate` at temperature 0, also past the end of an answer.

        With `kv_bits`, keys and values are quantized from the first token on.
        """
        # Imports all of transformers, and most processes of a run have no such test.
        from mlx_lm.generate import generate_step

        cache = self._cache(kv_bits)
        steps = generate_step(mx.array(list(prompt)), self._model, max_tokens=count, prompt_cache=cache)
        return [int(token) for token, _ in steps]

    def _cache(self, kv_bits: int | None) -> list[Any]:
        caches = make_prompt_cache(self._model)
        return [cache.to_quantized(group_size=64, bits=kv_bits) if kv_bits else cache for cache in caches]

    def logits(self, tokens: Sequence[int], kv_bits: int | None = None) -> mx.array:
        """Return the logits after all the tokens, of shape (vocabulary,)."""
        return self.every_logits(tokens, kv_bits)[-1]

    def every_logits(self, tokens: Sequence[int], kv_bits: int | None = None) -> mx.array:
        """Return the logits after each token and those before it, of shape (tokens, vocabulary)."""
        cache = self._cache(kv_bits)
        return cast("mx.array", self._model(mx.array([list(tokens)]), cache=cache))[0]

    def strays(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the positions of tokens after the prompt that are not the likeliest. Ties do not count."""
        return [position for position, gap in enumerate(self.behind(prompt, tokens)) if gap > TIE]

    def behind(self, prompt: Sequence[int], tokens: Sequence[int], kv_bits: int | None = None) -> list[float]:
        """Return the distance of each token after the prompt from the likeliest one, in logits."""
        logits = self.every_logits([*prompt, *tokens], kv_bits)[len(prompt) - 1 : -1]
        chosen = mx.take_along_axis(logits, mx.array(list(tokens))[:, None], axis=1)[:, 0]
        return cast("list[float]", (mx.max(logits, axis=1) - chosen).tolist())

    def gap(self, before: Sequence[int], first: int, second: int) -> float:
        """Return the distance between the logits of two tokens."""
        logits = self.logits(before)
        return abs(cast("float", (logits[first] - logits[second]).item()))
