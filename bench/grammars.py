"""Measure the cost of grammars in a decode step: with and without, in turn, on the same model in the same run.

    python bench/grammars.py                 # a vocabulary of 151,936 tokens; about two minutes
    python bench/grammars.py --vocabulary 3072 --rounds 5

Runs one stage in this process the way a worker does: the next step is queued while one runs. Rows are sampled at
temperature 1, and those with a grammar write JSON under a schema. No row, one row, or all rows have a grammar. The
model is small and random, so compare the additional time per step, not its share.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from random_model import Shape, make
from tokenizers import pre_tokenizers

from mlx_cpu_kernels import speed_up
from mlx_ring.core.types import LayerRange
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.rpc.links import Inbox
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.platform.device import keep_freed_memory
from mlx_ring.worker.replies import StageLinks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_ring.worker.grammars import GrammarCompiler

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        },
        "required": ["name", "size", "kind", "tags"],
        "additionalProperties": False,
    },
}
_WARM = 8
_GRAMMAR = 1


def write_tokenizer(file: Path, vocabulary: int) -> None:
    """Write a tokenizer of random byte pairs with a vocabulary of realistic size."""
    chance = random.Random(1)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: at for at, letter in enumerate(letters)}
    pool = [letter for letter in letters if letter.isascii() and letter.isalpha()] + [letters[-1]]
    merges: list[str] = []
    while len(ids) < vocabulary - 8:
        first, second = chance.choice(pool), chance.choice(pool)
        if len(first + second) <= 12 and first + second not in ids:
            ids[first + second] = len(ids)
            merges.append(f"{first} {second}")
            pool.append(first + second)
    end = {"id": len(ids), "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": ids,
        "merges": merges,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
    }
    tokenizer |= {"added_tokens": [{**end, "normalized": False, "special": True}]}
    file.write_text(json.dumps(tokenizer | {"pre_tokenizer": level, "decoder": level, "model": model}))


def make_folder(target: Path, vocabulary: int) -> Path:
    source = make(
        Shape(layers=2, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocabulary=vocabulary)
    )
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, target / name)
    write_tokenizer(target / "tokenizer.json", vocabulary)
    return target


class Arm:
    """Stage whose first `under` rows have a grammar."""

    def __init__(self, folder: Path, rows: int, under: int) -> None:
        from mlx_ring.worker.grammars import GrammarCompiler  # MLX must load after the BLAS
        from mlx_ring.worker.kv import KVStore
        from mlx_ring.worker.runner import StageRunner
        from mlx_ring.worker.weights import load_stage

        read = read_model_folder(folder)
        model = load_stage(read, LayerRange(0, read.num_layers), "float32", lambda _done, _total: None)
        kv = KVStore(model.make_layer_caches(), model.dtype)
        assignment = worker_pb2.StageAssignment(instance="bench", epoch=1)
        links = StageLinks(Inbox("bench", 1))
        grammars = GrammarCompiler(read)
        _prepare(grammars)
        self._runner = StageRunner(assignment, model, kv, links, grammars=grammars)
        self._rows = range(1, rows + 1)
        self._length, self._step = 3, 1
        self._drain(
            self._make(
                [self._chunk(row) for row in self._rows],
                [self._open(row, row <= under) for row in self._rows],
            )
        )
        self.seconds(_WARM)

    def seconds(self, steps: int) -> float:
        """Return the seconds per decode step, each queued before the previous one is answered."""
        started = time.perf_counter()
        for _ in range(steps):
            want = step_pb2.Want(where=step_pb2.Want.LAST, what=step_pb2.Want.TOKEN)
            rows = [
                step_pb2.Row(sequence=row, start=self._length, previous=True, wants=[want])
                for row in self._rows
            ]
            self._drain(self._make(rows), finish=False)
            self._length += 1
        _check(self._runner.finish())
        return (time.perf_counter() - started) / steps

    def _drain(self, step: step_pb2.Step, *, finish: bool = True) -> None:
        _check(self._runner.take(step, 0))
        if finish:
            _check(self._runner.finish())

    def _make(
        self, rows: Sequence[step_pb2.Row], operations: Sequence[step_pb2.CacheOperation] = ()
    ) -> step_pb2.Step:
        self._step += 1
        return step_pb2.Step(instance="bench", epoch=1, step=self._step, rows=rows, operations=operations)

    @staticmethod
    def _chunk(row: int) -> step_pb2.Row:
        want = step_pb2.Want(where=step_pb2.Want.LAST, what=step_pb2.Want.TOKEN)
        return step_pb2.Row(sequence=row, tokens=step_pb2.Tokens(ids=[row, 7, 8]), wants=[want])

    @staticmethod
    def _open(row: int, has_grammar: bool) -> step_pb2.CacheOperation:  # noqa: FBT001 - an internal flag
        opened = step_pb2.Open(
            sequence=row,
            seed=row,
            prompt_length=3,
            max_length=2048,
            sampling=step_pb2.Sampling(temperature=1.0),
        )
        if has_grammar:
            opened.grammar = _GRAMMAR
        return step_pb2.CacheOperation(open=opened)


def _prepare(grammars: GrammarCompiler) -> None:
    """Compile the grammar, as a head requests before the first step that uses it."""
    answer = Future[BaseException | None]()
    grammar = step_pb2.Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    grammars.prepare(worker_pb2.PrepareGrammar(id=_GRAMMAR, grammar=grammar), answer.set_result)
    if (error := answer.result()) is not None:
        raise SystemExit(f"The schema cannot be compiled: {error}")


def _check(answers: Iterable[step_pb2.StepDone]) -> None:
    for done in answers:
        if done.failure.message:
            raise SystemExit(done.failure.message)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    keep_freed_memory()
    speed_up()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch), options.vocabulary)
        print(
            f"{options.vocabulary} tokens; milliseconds per step, medians of {options.rounds} interleaved rounds"
        )
        for rows in options.rows:
            arms = {under: Arm(folder, rows, under) for under in sorted({0, 1, rows})}
            times: dict[int, list[float]] = {under: [] for under in arms}
            for _ in range(options.rounds):
                for under, arm in arms.items():
                    times[under].append(arm.seconds(options.steps) * 1e3)
            free = statistics.median(times[0])
            for under, durations in times.items():
                more = statistics.median(now - then for now, then in zip(durations, times[0], strict=True))
                each = f"{more * 1e3 / under:6.0f} us more per token" if under else ""
                print(
                    f"{rows:3} rows, {under:2} with a grammar: {statistics.median(durations):7.2f} (without {free:7.2f}) {each}"
                )


if __name__ == "__main__":
    main()
