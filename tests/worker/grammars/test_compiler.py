"""Compilation of grammars: in the background, once for each grammar, and kept within a budget."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.tiny_model import write_tiny_model
from tests.worker.stages import prepare

from mlx_ring.core.errors import ModelCorrupt, ProtocolError, RequestError
from mlx_ring.models.grammars import to_llguidance
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.grammars import GrammarCompiler, compiler
from mlx_ring.worker.grammars.answer_state import Compiled
from mlx_ring.worker.grammars.compiler import KeptGrammars, key_of

REGEX = step_pb2.Grammar(kind="regex", text="^(ab|cd){3}$")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def grammars(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(read_model_folder(folder))


@contextmanager
def blocked_compiler(monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[list[str], Callable[[], None]]]:
    """Block the compiler at its first grammar; yield what it compiles, and a function that waits for that start."""
    compiled: list[str] = []
    started, released = threading.Event(), threading.Event()

    def wait(kind: str, text: str) -> str:
        compiled.append(text)
        started.set()
        assert released.wait(30)
        return to_llguidance(kind, text)

    monkeypatch.setattr(compiler, "to_llguidance", wait)
    try:
        yield compiled, lambda: cast("None", started.wait(30))
    finally:
        released.set()


def request_grammar(grammars: GrammarCompiler, id_: int, text: str) -> Future[BaseException | None]:
    answer = Future[BaseException | None]()
    message = worker_pb2.PrepareGrammar(id=id_, grammar=step_pb2.Grammar(kind="regex", text=text))
    grammars.prepare(message, answer.set_result)
    return answer


def test_step_never_waits_for_a_grammar_that_is_being_compiled(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocked_compiler(monkeypatch) as (_, started):
        answer = request_grammar(grammars, 1, "a")
        started()
        early = grammars.begin(step_pb2.Open(grammar=1))
        with pytest.raises(ProtocolError, match="not prepared"):
            early.go_to([], 0)
    assert answer.result(30) is None
    assert grammars.begin(step_pb2.Open(grammar=1)).go_to([], 0)
    with pytest.raises(ProtocolError, match="Grammar 2 was not prepared"):
        grammars.begin(step_pb2.Open(grammar=2)).go_to([], 0)


def test_grammar_dropped_before_its_turn_is_neither_compiled_nor_answered(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocked_compiler(monkeypatch) as (compiled, started):
        first = request_grammar(grammars, 1, "a")
        started()
        dropped, other = request_grammar(grammars, 2, "b"), request_grammar(grammars, 3, "c")
        again = [request_grammar(grammars, 4, "d"), request_grammar(grammars, 5, "d")]
        grammars.drop(2)
        grammars.drop(4)
    assert [answer.result(30) for answer in (first, other, again[1])] == [None] * 3
    assert compiled == ["a", "c", "d"]
    assert not dropped.done()
    assert not again[0].done()


def test_kept_grammar_is_compiled_only_once(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def record(kind: str, text: str) -> str:
        made.append(text)
        return to_llguidance(kind, text)

    monkeypatch.setattr(compiler, "to_llguidance", record)
    for id_ in (1, 2):
        assert prepare(grammars, id_, REGEX) is None
        grammars.drop(id_)
    assert len(made) == 1
    assert prepare(grammars, 3, REGEX) is None
    grammars.forget(step_pb2.Open(grammar=3))
    assert prepare(grammars, 4, REGEX) is None
    assert len(made) == 2


def test_unreadable_tokenizer_is_tried_only_once(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def read(folder: object) -> None:
        tried.append(folder)
        raise ModelCorrupt("No tokenizer here.")

    monkeypatch.setattr(compiler, "read_tokenizer", read)
    for id_ in (1, 2):
        assert str(prepare(grammars, id_, REGEX)) == "No tokenizer here."
    assert len(tried) == 1


def test_references_may_be_thousands_deep(grammars: GrammarCompiler) -> None:
    """Nest references so deep that the process would end on an ordinary thread's stack."""
    count = 2500
    deep: dict[str, Any] = {
        f"d{at}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{(at + 1) % count}"}}}
        for at in range(count)
    }
    schema = json.dumps({"$defs": deep, "$ref": "#/$defs/d0"})
    assert prepare(grammars, 1, step_pb2.Grammar(kind="json_schema", text=schema)) is None
    assert grammars.begin(step_pb2.Open(grammar=1)).go_to([], 0)


def test_reset_drops_the_grammars_of_the_previous_head(grammars: GrammarCompiler) -> None:
    assert prepare(grammars, 1, REGEX) is None
    grammars.reset()
    with pytest.raises(ProtocolError):
        grammars.begin(step_pb2.Open(grammar=1)).go_to([], 0)


def test_failed_grammar_reports_its_error_each_time(grammars: GrammarCompiler) -> None:
    for id_ in (1, 2):
        error = prepare(grammars, id_, step_pb2.Grammar(kind="regex", text="a("))
        assert isinstance(error, RequestError)
        assert "unclosed" in str(error)


def finished_compilation() -> Future[Compiled]:
    future = Future[Compiled]()
    future.set_result(cast("Any", None))
    return future


def test_large_grammars_are_evicted_before_small_ones_and_wanted_ones_stay() -> None:
    kept = KeptGrammars(budget_bytes=100 << 20)
    large = step_pb2.Grammar(kind="regex", text="a" * (200 << 10))
    wanted = kept.add(large, key_of(large), finished_compilation())
    wanted.wanted_by.add(1)
    for number in range(60):
        small = step_pb2.Grammar(kind="regex", text=str(number))
        kept.leave(kept.add(small, key_of(small), finished_compilation()), 2)
    assert 20 < len(kept) < 40
    assert kept.find(key_of(large)) is wanted
    kept.leave(wanted, 1)
    for number in range(60, 120):
        small = step_pb2.Grammar(kind="regex", text=str(number))
        kept.leave(kept.add(small, key_of(small), finished_compilation()), 2)
    assert not kept.find(key_of(large))
    assert len(kept) >= 60
