"""Answers under schemas, by real workers: they validate, and are what mlx-lm would say under the same masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tests.end_to_end.equality import TIE
from tests.end_to_end.instance import running_engine
from tests.end_to_end.random_schemas import Schema, random_schema
from tests.end_to_end.reference import WholeModel
from transformers import AutoTokenizer

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import Grammar, SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.models.grammars import to_llguidance
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model

SCHEMAS, SOME = 200, 30
LONGEST = 400
"""Tokens of an answer; few come to it."""
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
class Demo:
    """The demo model, its tokenizer, and what it is asked."""

    folder: Path
    tokenizer: Any

    def prompt(self, schema: Schema) -> tuple[int, ...]:
        text = f"<|im_start|>user\nGive an example of {json.dumps(schema)}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False)))[-600:]

    def text(self, tokens: Sequence[int]) -> str:
        return cast("str", self.tokenizer.decode(list(tokens), skip_special_tokens=True))


@pytest.fixture(scope="module")
def demo() -> Demo:
    folder = find_model("demo").folder.path
    return Demo(folder, AutoTokenizer.from_pretrained(folder))


async def answer(
    engine: Engine, demo: Demo, schema: Schema, sampling: SamplingParams
) -> tuple[list[int], str]:
    """Its tokens and why it ended."""
    tokens: list[int] = []
    reason = ""
    async for delta in engine.submit(GenerateRequest("test", demo.prompt(schema), sampling)):
        tokens += delta.token_ids
        reason = delta.finish_reason or reason
    return tokens, reason


def under(schema: Schema, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LONGEST, grammar=Grammar("json_schema", json.dumps(schema)), **options)


def hold_to_schemas(demo: Demo, stages: int, count: int, logs: Path, **options: Any) -> int:
    """Ask for an answer under each of so many schemas, at temperature 1, side by side. Returns how many ended by themselves."""
    schemas = [random_schema(seed) for seed in range(count)]

    async def run() -> list[tuple[list[int], str]]:
        async with running_engine(demo.folder, stages, logs, max_num_seqs=AT_ONCE, **options) as (engine, _):
            return await asyncio.gather(
                *(
                    answer(engine, demo, schema, under(schema, temperature=1.0, seed=seed))
                    for seed, schema in enumerate(schemas)
                )
            )

    ended = 0
    for schema, (tokens, reason) in zip(schemas, asyncio.run(run()), strict=True):
        if reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(demo.text(tokens)))
            ended += 1
    return ended


def test_answers_at_temperature_1_hold_to_their_schemas(
    demo: Demo, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    ended = hold_to_schemas(demo, 2, SOME, tmp_path)
    record_property("answers that ended by themselves", f"{ended} of {SOME}")
    assert ended >= 0.7 * SOME


@pytest.mark.alone
@pytest.mark.conformance
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options", [{"stages": 2}, {"stages": 1, "shares": (1.0, 1.0)}], ids=["two stages", "two ranks"]
)
def test_answers_to_many_schemas_hold_to_them(demo: Demo, tmp_path: Path, options: dict[str, Any]) -> None:
    assert hold_to_schemas(demo, count=SCHEMAS, logs=tmp_path, **options) >= 0.7 * SCHEMAS


class Masked:
    """mlx-lm's whole model, its logits masked by llguidance: no code of ours is between."""

    def __init__(self, demo: Demo) -> None:
        folder = read_model_folder(demo.folder)
        self._whole = WholeModel(demo.folder)
        self._size = folder.vocab_size
        self._tokenizer = LLTokenizer(
            str(demo.folder / "tokenizer.json"), n_vocab=self._size, eos_token=sorted(folder.eos_token_ids)
        )

    def strays(self, prompt: Sequence[int], tokens: Sequence[int], grammar: Grammar) -> list[int]:
        """Positions of tokens that are not the likeliest of those allowed, ties apart."""
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


@pytest.fixture(scope="module")
def masked(demo: Demo) -> Masked:
    return Masked(demo)


async def refuse(engine: Engine, demo: Demo) -> None:
    """The ranks that draw find out what is wrong, and every one of them holds nothing of it."""
    wrong = SamplingParams(grammar=Grammar("regex", "a(", param="response_format"))
    with pytest.raises(RequestError, match="unclosed") as caught:
        await answer(engine, demo, {}, wrong)
    assert caught.value.param == "response_format"
    assert engine.stats().scheduler.steps_failed == 0


def hold_to_reference(demo: Demo, masked: Masked, logs: Path, *, drafts: int = 8, **options: Any) -> int:
    """Greedy answers side by side with one that is free. Returns how many draft tokens were accepted."""

    async def run() -> tuple[list[tuple[list[int], str]], int]:
        policy = Policy(num_speculative_tokens=drafts)
        async with running_engine(demo.folder, log_dir=logs, policy=policy, **options) as (engine, _):
            free = SamplingParams(max_tokens=60, ignore_eos=True)
            *answers, _ = await asyncio.gather(
                *(
                    answer(engine, demo, schema, replace(under(schema), max_tokens=160))
                    for schema in GREEDY_SCHEMAS
                ),
                answer(engine, demo, {}, free),
            )
            await refuse(engine, demo)
            return answers, engine.stats().scheduler.accepted_tokens

    answers, accepted = asyncio.run(run())
    for schema, (tokens, reason) in zip(GREEDY_SCHEMAS, answers, strict=True):
        assert masked.strays(demo.prompt(schema), tokens, cast("Grammar", under(schema).grammar)) == []
        if reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(demo.text(tokens)))
    return accepted


@pytest.mark.parametrize(("stages", "drafts"), [(1, 8), (2, 8), (2, 0)])
def test_greedy_answers_are_those_of_mlx_lm_under_the_same_masks(
    demo: Demo, masked: Masked, tmp_path: Path, stages: int, drafts: int
) -> None:
    accepted = hold_to_reference(demo, masked, tmp_path, stages=stages, drafts=drafts)
    assert (accepted > 0) == (drafts > 0)


@pytest.mark.alone
def test_ranks_that_share_layers_give_the_same_answers(demo: Demo, masked: Masked, tmp_path: Path) -> None:
    hold_to_reference(demo, masked, tmp_path, stages=1, shares=(1.0, 1.0))
