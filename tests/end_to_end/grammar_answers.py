"""Answers under JSON schemas by real workers, and a check of them against mlx-lm under the same masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tests.default_settings import make_policy
from tests.end_to_end.equality import TIE
from tests.end_to_end.instance import running_engine
from tests.end_to_end.random_schemas import Schema, random_schema
from tests.end_to_end.reference import WholeModel
from transformers import AutoTokenizer

from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import Grammar, SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.models.grammars import to_llguidance
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model

LONGEST = 400
"""Tokens of an answer. Few answers reach it."""
AT_ONCE = 20
GREEDY_SCHEMAS: tuple[Schema, ...] = (
    {
        "type": "object",
        "properties": {
            "animals": {
                "type": "array",
                "items": {"enum": ["cat", "dog", "owl"]},
                "minItems": 6,
                "maxItems": 6,
            },
            "name": {"type": "string", "maxLength": 40},
        },
        "required": ["animals", "name"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 10, "maximum": 99},
        "minItems": 8,
        "maxItems": 8,
    },
    {"type": "string", "pattern": "^(ab|cd){4,9}$"},
    *(random_schema(1000 + seed) for seed in range(3)),
)


@dataclass(frozen=True)
class DemoModel:
    """Demo model with its tokenizer, and prompts for it."""

    folder: Path
    tokenizer: Any

    def prompt(self, schema: Schema) -> tuple[int, ...]:
        text = f"<|im_start|>user\nGive an example of {json.dumps(schema)}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False)))[-600:]

    def text(self, tokens: Sequence[int]) -> str:
        return cast("str", self.tokenizer.decode(list(tokens), skip_special_tokens=True))


async def answer(
    engine: Engine, demo: DemoModel, schema: Schema, sampling: SamplingParams
) -> tuple[list[int], str]:
    """Return the tokens of an answer and the reason of its end."""
    tokens: list[int] = []
    reason = ""
    async for delta in engine.submit(GenerateRequest("test", demo.prompt(schema), sampling)):
        tokens += delta.token_ids
        reason = delta.finish_reason or reason
    return tokens, reason


def sampling_under(schema: Schema, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LONGEST, grammar=Grammar("json_schema", json.dumps(schema)), **options)


def count_valid_answers(demo: DemoModel, stages: int, count: int, logs: Path, **options: Any) -> int:
    """Generate an answer under each of `count` schemas, at temperature 1, and validate those that end by themselves.

    Return their number.
    """
    schemas = [random_schema(seed) for seed in range(count)]

    async def run() -> list[tuple[list[int], str]]:
        async with running_engine(demo.folder, stages, logs, max_num_seqs=AT_ONCE, **options) as (engine, _):
            return await asyncio.gather(
                *(
                    answer(engine, demo, schema, sampling_under(schema, temperature=1.0, seed=seed))
                    for seed, schema in enumerate(schemas)
                )
            )

    ended = 0
    for schema, (tokens, reason) in zip(schemas, asyncio.run(run()), strict=True):
        if reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(demo.text(tokens)))
            ended += 1
    return ended


class MaskedModel:
    """Whole model of mlx-lm, with its logits masked by llguidance and by no code of this project."""

    def __init__(self, demo: DemoModel) -> None:
        folder = read_model_folder(demo.folder)
        self._whole = WholeModel(demo.folder)
        self._size = folder.vocab_size
        self._tokenizer = LLTokenizer(
            str(demo.folder / "tokenizer.json"), n_vocab=self._size, eos_token=sorted(folder.eos_token_ids)
        )

    def strays(self, prompt: Sequence[int], tokens: Sequence[int], grammar: Grammar) -> list[int]:
        """Return the positions of tokens that are not the likeliest of those allowed, without ties."""
        logits = cast("Any", np).array(self._whole.every_logits([*prompt, *tokens]))[len(prompt) - 1 : -1]
        matcher = LLMatcher(self._tokenizer, to_llguidance(grammar.kind, grammar.text))
        bits = allocate_token_bitmask(1, self._size)
        strays: list[int] = []
        for position, token in enumerate(tokens):
            fill_next_token_bitmask(matcher, bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little", count=self._size).astype(bool)
            best = logits[position][allowed].max()
            if not allowed[token] or best - logits[position][token] > TIE:
                strays.append(position)
            matcher.consume_token(token)
        return strays


async def _check_refusal(engine: Engine, demo: DemoModel) -> None:
    """Check that the ranks that draw refuse a wrong grammar, and keep nothing of the request."""
    wrong = SamplingParams(grammar=Grammar("regex", "a(", param="response_format"))
    with pytest.raises(RequestError, match="unclosed") as caught:
        await answer(engine, demo, {}, wrong)
    assert caught.value.param == "response_format"
    assert engine.stats().scheduler.steps_failed == 0


def compare_with_reference(
    demo: DemoModel, masked: MaskedModel, logs: Path, *, drafts: int = 8, **options: Any
) -> int:
    """Compare greedy answers under schemas, beside one without, with the reference. Return the number of accepted draft tokens."""

    async def run() -> tuple[list[tuple[list[int], str]], int]:
        policy = make_policy(num_speculative_tokens=drafts)
        async with running_engine(demo.folder, log_dir=logs, policy=policy, **options) as (engine, _):
            free = SamplingParams(max_tokens=60, ignore_eos=True)
            *answers, _ = await asyncio.gather(
                *(
                    answer(engine, demo, schema, replace(sampling_under(schema), max_tokens=160))
                    for schema in GREEDY_SCHEMAS
                ),
                answer(engine, demo, {}, free),
            )
            await _check_refusal(engine, demo)
            return answers, engine.stats().scheduler.accepted_tokens

    answers, accepted = asyncio.run(run())
    for schema, (tokens, reason) in zip(GREEDY_SCHEMAS, answers, strict=True):
        assert (
            masked.strays(demo.prompt(schema), tokens, cast("Grammar", sampling_under(schema).grammar)) == []
        )
        if reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(demo.text(tokens)))
    return accepted


def demo_model() -> DemoModel:
    """Return the demo model."""
    folder = find_model("demo").folder.path
    return DemoModel(folder, AutoTokenizer.from_pretrained(folder))
