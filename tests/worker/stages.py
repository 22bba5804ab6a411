"""Stages in one process, joined by in-process links, for tests of the step loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.worker.collective.in_process import InProcessTransport
from tests.worker.in_process_link import InProcessLink

from mlx_ring.core.types import DType, LayerRange
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.rpc.links import Inbox
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.collective import with_collectives
from mlx_ring.worker.grammars import AnswerGrammar, GrammarCompiler
from mlx_ring.worker.replies import StageLinks
from mlx_ring.worker.runner import StageRunner
from mlx_ring.worker.stage import make_kv
from mlx_ring.worker.weights import load_stage

Want = step_pb2.Want
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
CUTS = {1: [0, 5], 2: [0, 2, 5], 3: [0, 1, 4, 5]}


_GRAMMARS: list[step_pb2.Grammar] = []


def grammar_id(kind: str, text: str) -> int:
    """Return the id by which `ReadyGrammars` finds a grammar."""
    _GRAMMARS.append(step_pb2.Grammar(kind=kind, text=text))
    return len(_GRAMMARS)


class ReadyGrammars(GrammarCompiler):
    """Compiler whose grammars are ready when a step names them, as the head ensures."""

    def begin(self, opened: step_pb2.Open) -> AnswerGrammar:
        prepare(self, opened.grammar, _GRAMMARS[opened.grammar - 1])
        return super().begin(opened)


def prepare(compiler: GrammarCompiler, id_: int, grammar: step_pb2.Grammar) -> BaseException | None:
    """Prepare a grammar and wait for it; return the error if it failed."""
    answer = Future[BaseException | None]()
    compiler.prepare(worker_pb2.PrepareGrammar(id=id_, grammar=grammar), answer.set_result)
    return answer.result(60)


def make_stages(
    folder: Path, cuts: Sequence[int], *, dtype: DType = "float32", kv_bits: int | None = None, **options: Any
) -> list[StageRunner]:
    """Return runners of the stages between the cuts, each with its own share of the model."""
    inboxes = [Inbox("test", 1) for _ in cuts[1:]]
    return [
        _stage(folder, cuts, stage, inboxes, [], options, dtype=dtype, kv_bits=kv_bits)
        for stage in range(len(inboxes))
    ]


def make_collective_stages(
    folder: Path,
    cuts: Sequence[int],
    make_transport: Callable[[], InProcessTransport] = InProcessTransport,
) -> list[StageRunner]:
    """Return such runners, whose activations use the twin of a collective."""
    inboxes = [Inbox("test", 1) for _ in cuts[1:]]
    transports = [make_transport() for _ in inboxes[1:]]
    return [_stage(folder, cuts, stage, inboxes, transports, {}) for stage in range(len(inboxes))]


def _stage(
    folder: Path,
    cuts: Sequence[int],
    stage: int,
    inboxes: Sequence[Inbox],
    transports: Sequence[InProcessTransport],
    options: dict[str, Any],
    *,
    dtype: DType = "float32",
    kv_bits: int | None = None,
) -> StageRunner:
    last = stage == len(inboxes) - 1
    layers = LayerRange(cuts[stage], cuts[stage + 1])
    model = load_stage(read_model_folder(folder), layers, dtype, lambda _done, _total: None)
    links = StageLinks(
        inboxes[stage],
        None if last else InProcessLink(inboxes[stage + 1]),
        InProcessLink(inboxes[0]) if last and stage else None,
    )
    if transports:
        links = with_collectives(
            links, model, transports[stage - 1] if stage else None, None if last else transports[stage]
        )
    assignment = worker_pb2.StageAssignment(
        instance="test",
        epoch=1,
        stage=stage,
        stages=len(inboxes),
        link="ring" if transports else "",
        kv_bits=kv_bits or 0,
    )
    kv = make_kv(read_model_folder(folder), assignment, model)
    grammars = ReadyGrammars(read_model_folder(folder))
    return StageRunner(assignment, model, kv, links, grammars=grammars, **options)


class Steps:
    """Source of steps that follow each other."""

    def __init__(self) -> None:
        self.step = 0

    def make(
        self,
        *rows: step_pb2.Row,
        operations: Iterable[step_pb2.CacheOperation] = (),
        feed_back: bool = False,
        epoch: int = 1,
    ) -> step_pb2.Step:
        """Make the next step."""
        self.step += 1
        return step_pb2.Step(
            instance="test",
            epoch=epoch,
            step=self.step,
            operations=operations,
            rows=rows,
            deadline_s=5.0,
            feed_back_tokens=feed_back,
        )


class Pipeline(Steps):
    """Stages that run step by step: each answers before the next one starts."""

    def __init__(self, folder: Path, cuts: Sequence[int], *, collective: bool = False) -> None:
        super().__init__()
        self.runners = (make_collective_stages if collective else make_stages)(folder, cuts)

    def run(self, *rows: step_pb2.Row, **options: Any) -> list[step_pb2.StepDone]:
        """Return every stage's answer to a step."""
        step = self.make(*rows, **options)
        return [runner.run(step, 0) for runner in self.runners]

    def results(self, *rows: step_pb2.Row, **options: Any) -> dict[int, step_pb2.RowResult]:
        """Return the results of a step that fails nowhere."""
        answers = self.run(*rows, **options)
        assert [answer.failure.message for answer in answers] == [""] * len(answers)
        return {result.sequence: result for result in answers[-1].results}


def open_sequence(
    sequence: int, prompt_length: int = len(PROMPT), eos: Sequence[int] = (), **sampling: Any
) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(
        open=step_pb2.Open(
            sequence=sequence,
            sampling=step_pb2.Sampling(**sampling),
            seed=7,
            eos=eos,
            prompt_length=prompt_length,
            max_length=256,
        )
    )


def free(sequence: int) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(free=step_pb2.Free(sequence=sequence))


def trim(sequence: int, length: int) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(trim=step_pb2.Trim(sequence=sequence, length=length))


def want(
    what: step_pb2.Want.What = Want.TOKEN, where: step_pb2.Want.Where = Want.LAST, **more: Any
) -> step_pb2.Want:
    return Want(what=what, where=where, **more)


def chunk(sequence: int, start: int, ids: Sequence[int], *wants: step_pb2.Want) -> step_pb2.Row:
    return step_pb2.Row(sequence=sequence, start=start, tokens=step_pb2.Tokens(ids=ids), wants=wants)


def decode(sequence: int, start: int, token: int, draft: Sequence[int] = ()) -> step_pb2.Row:
    where = Want.ALL if draft else Want.LAST
    return step_pb2.Row(sequence=sequence, start=start, token=token, draft=draft, wants=[want(where=where)])


def previous(sequence: int, start: int, draft: Sequence[int] = ()) -> step_pb2.Row:
    where = Want.ALL if draft else Want.LAST
    return step_pb2.Row(sequence=sequence, start=start, previous=True, draft=draft, wants=[want(where=where)])


def tokens_of(result: step_pb2.RowResult) -> list[int]:
    return [token.token for token in result.tokens]


def answer_all(runner: StageRunner, *steps: step_pb2.Step) -> list[step_pb2.StepDone]:
    """Return the answers to steps that all arrive before the first is answered."""
    return [*(done for step in steps for done in runner.take(step, 0)), *runner.finish()]
