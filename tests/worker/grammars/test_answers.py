"""Steps under grammars: every answer matches, whatever else the step carries, and however it is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from tests.tiny_model import write_tiny_model
from tests.worker.stages import (
    CUTS,
    Pipeline,
    chunk,
    open_sequence,
    tokens_of,
    want,
)

from mlx_ring.rpc.protos import step_pb2

END = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ab", "ac", "b"]},
        "count": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
PROMPT = [40, 50, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def under(
    sequence: int, schema: object, *, kind: str = "json_schema", eos: Sequence[int] = (END,), **sampling: Any
) -> step_pb2.CacheOperation:
    operation = open_sequence(sequence, len(PROMPT), eos, **sampling)
    operation.open.max_length = 1600
    operation.open.seed = sequence
    operation.open.grammar.kind = kind
    operation.open.grammar.text = schema if isinstance(schema, str) else json.dumps(schema)
    return operation


def text_of(folder: Path, tokens: Sequence[int]) -> str:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    return cast("str", AutoTokenizer.from_pretrained(folder).decode(list(tokens), skip_special_tokens=True))


def run(
    pipeline: Pipeline, opened: Sequence[step_pb2.CacheOperation], count: int = 1500
) -> dict[int, list[int]]:
    """Each sequence's answer to its end, or `count` tokens; all step together."""
    sequences = [operation.open.sequence for operation in opened]
    first = pipeline.results(*(chunk(each, 0, PROMPT, want()) for each in sequences), operations=opened)
    answers = {each: tokens_of(first[each]) for each in sequences}
    hand_over = len(pipeline.runners) > 1
    while going := [each for each in sequences if answers[each][-1] != END and len(answers[each]) < count]:
        rows = [
            step_pb2.Row(
                sequence=each,
                start=len(PROMPT) + len(answers[each]) - 1,
                token=answers[each][-1],
                wants=[want()],
            )
            for each in going
        ]
        for sequence, result in pipeline.results(*rows, hand_over=hand_over).items():
            answers[sequence] += tokens_of(result)
    return answers


def test_answers_match_in_a_batch_with_others_that_are_free(folder: Path) -> None:
    pipeline = Pipeline(folder, CUTS[1])
    hot = {"temperature": 1.0}
    free = open_sequence(9, len(PROMPT), (END,), temperature=1.0)
    free.open.max_length = 1600
    answers = run(
        pipeline,
        [under(1, SCHEMA), under(2, SCHEMA, **hot), free, under(3, SCHEMA, **hot, top_p=0.9, min_p=0.01)],
    )
    for sequence in (1, 2, 3):
        assert answers[sequence][-1] == END
        jsonschema.validate(json.loads(text_of(folder, answers[sequence])), SCHEMA)
    alone = open_sequence(9, len(PROMPT), (END,), temperature=1.0)
    alone.open.max_length = 1600
    assert run(Pipeline(folder, CUTS[1]), [alone])[9] == answers[9]
