"""Grammars are there before a step names them, once, and no more of them than there is room for."""

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
from mlx_ring.worker.grammars.answer import Compiled
from mlx_ring.worker.grammars.compiler import KeptGrammars, key_of

REGEX = step_pb2.Grammar(kind="regex", text="^(ab|cd){3}$")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def grammars(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(read_model_folder(folder))


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[list[str], Callable[[], None]]]:
    """Return the compiled grammars, and the compiler, which waits at its first until it may continue."""
    compiled: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def wait(kind: str, text: str) -> str:
        compiled.append(text)
        begun.set()
        assert goes_on.wait(30)
        return to_llguidance(kind, text)

    monkeypatch.setattr(compiler, "to_llguidance", wait)
    try:
        yield compiled, lambda: cast("None", begun.wait(30))
    finally:
        goes_on.set()


def ask(grammars: GrammarCompiler, id_: int, text: str) -> Future[BaseException | None]:
    answer = Future[BaseException | None]()
    wanted = worker_pb2.PrepareGrammar(id=id_, grammar=step_pb2.Grammar(kind="regex", text=text))
    grammars.prepare(wanted, answer.set_result)
    return answer


def test_a_step_never_waits_for_a_grammar_that_is_being_made(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(monkeypatch) as (_, begun):
        answer = ask(grammars, 1, "a")
        begun()
        early = grammars.begin(step_pb2.Open(grammar=1))
        with pytest.raises(ProtocolError, match="not prepared"):
            early.go_to([], 0)
    assert answer.result(30) is None
    assert grammars.begin(step_pb2.Open(grammar=1)).go_to([], 0)
    with pytest.raises(ProtocolError, match="Grammar 2 was not prepared"):
        grammars.begin(step_pb2.Open(grammar=2)).go_to([], 0)


def test_what_is_dropped_before_its_turn_is_not_compiled_nor_answered(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(monkeypatch) as (compiled, begun):
        first = ask(grammars, 1, "a")
        begun()
        dropped, other = ask(grammars, 2, "b"), ask(grammars, 3, "c")
        again = [ask(grammars, 4, "d"), ask(grammars, 5, "d")]
        grammars.drop(2)
        grammars.drop(4)
    assert [answer.result(30) for answer in (first, other, again[1])] == [None] * 3
    assert compiled == ["a", "c", "d"]
    assert not dropped.done()
    assert not again[0].done()


def test_a_grammar_is_compiled_once_for_all_who_come_while_it_is_kept(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def note(kind: str, text: str) -> str:
        made.append(text)
        return to_llguidance(kind, text)

    monkeypatch.setattr(compiler, "to_llguidance", note)
    for id_ in (1, 2):
        assert prepare(grammars, id_, REGEX) is None
        grammars.drop(id_)
    assert len(made) == 1
    assert prepare(grammars, 3, REGEX) is None
    grammars.forget(step_pb2.Open(grammar=3))
    assert prepare(grammars, 4, REGEX) is None
    assert len(made) == 2


def test_a_tokenizer_that_cannot_be_read_is_tried_once(
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


def test_references_may_go_thousands_deep(grammars: GrammarCompiler) -> None:
    """On an ordinary thread's stack they end the process."""
    count = 2500
    deep: dict[str, Any] = {
        f"d{at}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{(at + 1) % count}"}}}
        for at in range(count)
    }
    schema = json.dumps({"$defs": deep, "$ref": "#/$defs/d0"})
    assert prepare(grammars, 1, step_pb2.Grammar(kind="json_schema", text=schema)) is None
    assert grammars.begin(step_pb2.Open(grammar=1)).go_to([], 0)


def test_another_head_finds_nothing_wanted(grammars: GrammarCompiler) -> None:
    assert prepare(grammars, 1, REGEX) is None
    grammars.reset()
    with pytest.raises(ProtocolError):
        grammars.begin(step_pb2.Open(grammar=1)).go_to([], 0)


def test_a_grammar_that_fails_says_so_each_time(grammars: GrammarCompiler) -> None:
    for id_ in (1, 2):
        error = prepare(grammars, id_, step_pb2.Grammar(kind="regex", text="a("))
        assert isinstance(error, RequestError)
        assert "unclosed" in str(error)


def compiled() -> Future[Compiled]:
    future = Future[Compiled]()
    future.set_result(cast("Any", None))
    return future


def test_large_grammars_make_way_before_many_small_ones_and_what_is_wanted_stays() -> None:
    kept = KeptGrammars(budget_bytes=100 << 20)
    large = step_pb2.Grammar(kind="regex", text="a" * (200 << 10))
    wanted = kept.add(large, key_of(large), compiled())
    wanted.wanted_by.add(1)
    for number in range(60):
        small = step_pb2.Grammar(kind="regex", text=str(number))
        kept.leave(kept.add(small, key_of(small), compiled()), 2)
    assert 20 < len(kept) < 40
    assert kept.find(key_of(large)) is wanted
    kept.leave(wanted, 1)
    for number in range(60, 120):
        small = step_pb2.Grammar(kind="regex", text=str(number))
        kept.leave(kept.add(small, key_of(small), compiled()), 2)
    assert not kept.find(key_of(large))
    assert len(kept) >= 60
