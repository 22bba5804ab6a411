"""mlx-lm's own whole model in one process: what the pipeline is held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts


class WholeModel:
    """A model as mlx-lm loads and runs it, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_model(folder, lazy=True)[0]
        self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What `mlx_lm.generate` gives at temperature 0, its end of answer ignored."""
        steps = generate_step(mx.array(list(prompt)), self._model, max_tokens=count)
        return [int(token) for token, _ in steps]

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """(vocabulary,) after all the tokens."""
        cache = make_prompt_cache(self._model)
        return cast("mx.array", self._model(mx.array([list(tokens)]), cache=cache))[0, -1]

    def gap(self, before: Sequence[int], first: int, second: int) -> float:
        """How far apart two tokens' logits are."""
        logits = self.logits(before)
        return abs(cast("float", (logits[first] - logits[second]).item()))
