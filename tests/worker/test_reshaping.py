"""Workers that get another stage of their model: they read only what they lack, and compute what a fresh worker does."""

# Jobs of the compute thread are run by hand, so that a test chooses what happens between two parts of a load.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from tests.models.gguf.writing import write_gguf_of
from tests.worker.random_models import QWEN3, QWEN3_MOE, write_random_model
from tests.worker.stages import PROMPT, chunk, open_sequence, want
from tests.worker.test_server import LocalCall
from tests.worker.test_weights import write_quantized_model

from mlx_ring.core.errors import RingError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import Inbox, LinkSender
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker import stage
from mlx_ring.worker.neighbours import LinkOpener, OpenedLinks
from mlx_ring.worker.replies import StageLinks
from mlx_ring.worker.reshaping import WorkerIdentity
from mlx_ring.worker.server import WorkerServer
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.stage import build_stage
from mlx_ring.worker.weights import StageLoading, load_stage, needed_weights

TIED: dict[str, Any] = {"tie_word_embeddings": True}
MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: write_random_model(folder, QWEN3),
    "tied": lambda folder: write_random_model(folder, QWEN3 | TIED),
    "MoE": lambda folder: write_random_model(folder, QWEN3_MOE),
    "quantized": write_quantized_model,
    "quantized, tied": lambda folder: write_quantized_model(folder, **TIED),
    "GGUF": lambda folder: (
        find_model(
            str(write_gguf_of(write_quantized_model(folder, **TIED, vocab_size=64), folder / "model.gguf"))
        ).folder.path
    ),
}
CHANGES = [
    ((0, 2), (0, 4)),
    ((2, 5), (1, 3)),
    ((1, 3), (3, 5)),
    ((0, 2), (2, 5)),
    ((2, 5), (0, 3)),
    ((1, 4), (0, 5)),
]
"""Layers before and after: more, fewer and others, of first, middle and last stages."""


def load(folder: ModelFolder, layers: tuple[int, int], *, plain: bool) -> StageModel:
    return load_stage(folder, LayerRange(*layers), "float32", lambda _d, _t: None, dequantized=plain)


def outputs(stage: StageModel) -> mx.array:
    """Return what a stage computes of the same tokens, or of the same activations."""
    tokens = mx.array([[3, 14, 15, 9, 26, 5]], mx.int32)
    hidden = mx.random.normal((*tokens.shape, stage.hidden_size), key=mx.random.key(7))
    return stage.forward(tokens, None if stage.is_first else hidden, stage.make_layer_caches(), None)


@pytest.mark.parametrize("plain", [False, True], ids=["as stored", "as float32"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_changed_stage_computes_what_a_fresh_one_does_bit_for_bit(
    tmp_path: Path, kind: str, *, plain: bool
) -> None:
    folder = read_model_folder(MODELS[kind](tmp_path / "model"))
    for before, after in CHANGES:
        present = load(folder, before, plain=plain)
        held = needed_weights(present)
        reported: list[tuple[int, int]] = []

        def progress(done: int, total: int, into: list[tuple[int, int]] = reported) -> None:
            into.append((done, total))

        loading = StageLoading(folder, LayerRange(*after), "float32", progress, dequantized=plain, held=held)
        for _ in loading.parts():
            pass
        fresh = load(folder, after, plain=plain)
        assert mx.array_equal(outputs(loading.stage), outputs(fresh)), (kind, before, after)
        needed, wanted = needed_weights(loading.stage), needed_weights(fresh)
        assert {path: array.shape for path, array in needed.items()} == {
            path: array.shape for path, array in wanted.items()
        }
        read = {path for path, array in needed.items() if array is not held.get(path)}
        in_both = {
            path
            for path in held.keys() & wanted.keys()
            if (held[path].shape, held[path].dtype) == (wanted[path].shape, wanted[path].dtype)
        }
        assert read == wanted.keys() - in_both
        assert reported[-1] == (loading.read_bytes,) * 2
        assert loading.read_bytes == sum(needed[path].nbytes for path in read)
        # The present stage still computes the same.
        assert mx.array_equal(outputs(present), outputs(load(folder, before, plain=plain)))


class Worker:
    """Worker whose compute thread is the test's: each job runs when the test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.server = WorkerServer(WorkerIdentity("here", 0, 0, "none"))
        self.epoch, self.digest = 0, ""
        self._answers: Iterator[worker_pb2.StepsReply] = iter(())

        def open_links(opener: LinkOpener, *_: object) -> OpenedLinks:
            return OpenedLinks(StageLinks(opener.inbox, cast("LinkSender", Sink())), lambda: None)

        monkeypatch.setattr(LinkOpener, "open_links", open_links)

    def assignment(self, layers: tuple[int, int]) -> worker_pb2.StageAssignment:
        first, end = layers
        whole = (0, QWEN3["num_hidden_layers"])
        return worker_pb2.StageAssignment(
            instance="demo-1",
            epoch=self.epoch + 1,
            stage=0 if not first else 1,
            stages=1 if layers == whole else 2,
            first_layer=first,
            end_layer=end,
            dtype="float32",
            plan_digest=f"plan {first}-{end}",
            model_digest=self.digest,
        )

    def ask(
        self, layers: tuple[int, int], gain: worker_pb2.LoadRequest.Gain, folder: Path | None = None
    ) -> queue.SimpleQueue[worker_pb2.LoadProgress]:
        """Ask for a stage, and return its progress; the work waits for `run`."""
        path = self.folder if folder is None else folder
        request = worker_pb2.LoadRequest(
            hello=make_hello(fencing_id=1),
            model_path=str(path),
            assignment=self.assignment(layers),
            gain=gain,
        )
        progress, asked = queue.SimpleQueue[worker_pb2.LoadProgress](), threading.Event()

        def read() -> None:
            for report in self.server.load(request, cast("Any", LocalCall())):
                progress.put(report)
                asked.set()
            asked.set()

        before = self.server._next.stage
        threading.Thread(target=read, daemon=True).start()
        while not asked.is_set() and not self.server._jobs._waiting:
            asked.wait(0.01)
        assert before is None or gain != worker_pb2.LoadRequest.ANNOUNCED
        return progress

    def run(self) -> None:
        """Run jobs until none is left, and answer the step that is under way."""
        while self.server._jobs._waiting:
            self.server._jobs.get()()
        self.server._finish_step()

    def relink(self, layers: tuple[int, int], *, commit: bool) -> str:
        """Let it enter the stage's epoch, or prepare it; return the kind of the failure."""
        request = worker_pb2.RelinkRequest(
            hello=make_hello(fencing_id=1), assignment=self.assignment(layers), commit=commit
        )
        found: list[worker_pb2.RelinkReply] = []
        thread = threading.Thread(
            target=lambda: found.append(self.server.relink(request, cast("Any", LocalCall())))
        )
        thread.start()
        while thread.is_alive():
            self.run()
            thread.join(0.01)
        if commit:
            self.epoch += 1
        return found[0].failure.kind

    def greet(self, head: int = 1) -> None:
        """Open a head's stream of steps for the present epoch."""
        hello = make_hello(instance="demo-1", epoch=self.epoch, fencing_id=head)
        requests = queue.SimpleQueue[worker_pb2.StepsRequest]()
        requests.put(worker_pb2.StepsRequest(hello=hello))
        self._answers = self.server.steps(iter(requests.get, None), cast("Any", LocalCall()))
        assert not next(self._answers).HasField("failure")
        self.run()

    def execute(self, step: int) -> None:
        """Queue a step with a whole prompt of a sequence of its own."""
        stream = self.server._stream
        assert stream is not None
        made = step_pb2.Step(
            instance="demo-1",
            epoch=self.epoch,
            step=step,
            operations=[open_sequence(step)],
            rows=[chunk(step, 0, PROMPT, want(), want(step_pb2.Want.LOGITS))],
        )
        self.server._jobs.put(lambda: self.server.execute(stream, made, 0))

    def keep_left(self, *sequences: int) -> None:
        """Free what it has of the stage before, but some sequences."""
        stream = self.server._stream
        assert stream is not None
        self.server._jobs.put(lambda: self.server._keep_left(stream, sequences))
        self.run()

    def change(self, before: tuple[int, int], after: tuple[int, int], steps: int) -> None:
        """Execute steps on one stage, and change to another one."""
        for layers in (before, after):
            progress = self.ask(layers, worker_pb2.LoadRequest.BESIDE)
            self.run()
            assert last_report(progress).ready
            assert [self.relink(layers, commit=commit) for commit in (False, True)] == ["", ""]
            self.greet()
            for step in range(1, steps + 1) if layers == before else ():
                self.execute(step)
                self.run()
                self.answer()

    def adopt(self, sequence: int, destination: int, layers: tuple[int, int]) -> str:
        """Read a sequence of the stage before for a sequence of the present one; return why that failed."""
        transfers, answers = self.server._transfers, list[str]()
        source = worker_pb2.KvSource(stage=0, first_layer=layers[0], end_layer=layers[1], key="key")
        transfers.export(
            worker_pb2.ExportKv(key="key", sequence=sequence, length=len(PROMPT), within_s=60, left=True)
        )
        wanted = worker_pb2.FetchKv(id=1, sources=[source], start=0, end=len(PROMPT), within_s=60)
        transfers.fetch(wanted, lambda blocks, problem: answers.append(problem if not blocks else ""))
        if answers != [""]:
            return answers[0]
        assert self.server._built is not None
        store = self.server._built.store
        store.open(destination, 64)
        try:
            for part in (0, 1):
                adopt = step_pb2.Adopt(
                    sequence=destination, fetch=1, length=len(PROMPT), moved=True, part=part, parts=2
                )
                transfers.adopt(store, adopt)
        except RingError as error:
            return str(error)
        return ""

    def answer(self) -> step_pb2.StepDone:
        done = next(self._answers).done
        assert not done.HasField("failure"), done.failure.message
        return done

    @property
    def weight_bytes(self) -> int:
        return self.server.status(worker_pb2.StatusRequest(), cast("Any", LocalCall())).weight_bytes

    @property
    def wait(self) -> str:
        """Kind of the wait that it reports; empty if there is none."""
        return self.server.status(worker_pb2.StatusRequest(), cast("Any", LocalCall())).waits.kind


class Sink:
    """Link that ends nowhere."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, _key: object, tensor: object) -> None:
        self.sent.append(tensor)

    def fail(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def weights_of(folder: Path, layers: tuple[int, int]) -> int:
    stage = load(read_model_folder(folder), layers, plain=False)
    return sum(array.nbytes for array in needed_weights(stage).values())


def last_report(progress: queue.SimpleQueue[worker_pb2.LoadProgress]) -> worker_pb2.LoadProgress:
    report = progress.get(timeout=60)
    while not (report.ready or report.HasField("failure")):
        report = progress.get(timeout=60)
    return report


def test_a_worker_computes_steps_while_it_loads_what_it_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    worker = Worker(folder, monkeypatch)
    # A worker without a stage loads its whole one, and serves once it is linked.
    progress = worker.ask((0, 3), worker_pb2.LoadRequest.BESIDE)
    worker.run()
    assert last_report(progress).bytes_loaded == weights_of(folder, (0, 3))
    assert worker.server._runner is None
    assert [worker.relink((0, 3), commit=commit) for commit in (False, True)] == ["", ""]
    worker.greet()
    worker.execute(1)
    worker.run()
    worker.answer()
    sent = cast("Any", worker.server._runner)._answers._links.next.sent[-1].data.tobytes()

    progress = worker.ask((0, 5), worker_pb2.LoadRequest.BESIDE)
    jobs = worker.server._jobs
    for step in (2, 3, 4):
        # A part of the load, the step, and the part that follows, which first answers the step.
        worker.execute(step)
        for _ in range(3):
            jobs.get()()
        assert worker.answer().step == step
        assert worker.server._next.stage is not None
        assert not worker.server._next.stage.is_loaded
    assert cast("Any", worker.server._runner)._answers._links.next.sent[-1].data.tobytes() == sent
    worker.run()
    gained = weights_of(folder, (0, 5)) - weights_of(folder, (0, 3))
    assert last_report(progress).bytes_loaded == gained
    assert worker.weight_bytes == weights_of(folder, (0, 5))

    assert [worker.relink((0, 5), commit=commit) for commit in (False, True)] == ["", ""]
    status = worker.server.status(worker_pb2.StatusRequest(), cast("Any", LocalCall()))
    assert (status.hello.epoch, status.hello.plan_digest, status.phase) == (2, "plan 0-5", "ready")
    # The KV of the stage before counts until the head wants none of it.
    assert status.sequences == 0
    assert status.kv_bytes == worker.server._transfers.left_bytes > 0
    worker.greet()
    worker.keep_left()
    assert worker.server.status(worker_pb2.StatusRequest(), cast("Any", LocalCall())).kv_bytes == 0
    worker.execute(1)
    worker.run()
    request = worker_pb2.LoadRequest(
        hello=make_hello(), model_path=str(folder), assignment=worker.assignment((0, 5))
    )
    fresh = build_stage(request, Inbox("demo-1", 3), make_hello(), lambda _: None)
    step = step_pb2.Step(
        instance="demo-1",
        epoch=3,
        step=1,
        operations=[open_sequence(1)],
        rows=[chunk(1, 0, PROMPT, want(), want(step_pb2.Want.LOGITS))],
    )
    assert worker.answer().results == fresh.runner.run(step, 0).results


def test_a_worker_reads_what_it_kept_of_the_stage_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(write_random_model(tmp_path / "model", QWEN3), monkeypatch)
    worker.change((0, 4), (0, 2), steps=3)
    left = worker.server._transfers._left
    assert left is not None
    assert {*left.kv.sequences} == {1, 2, 3}
    assert worker.adopt(2, 7, (0, 2)) == ""
    assert worker.server._built is not None
    store, tokens = worker.server._built.store, (0, len(PROMPT))
    assert store.length(7) == len(PROMPT)
    for layer in (0, 1):
        pairs = zip(
            store.layer_content(7, layer, tokens), left.kv.layer_content(2, layer, tokens), strict=True
        )
        assert all(mx.array_equal(ours, theirs) for ours, theirs in pairs)
    worker.keep_left(2, 3)
    assert {*left.kv.sequences} == {2, 3}
    assert worker.adopt(1, 8, (0, 2)) == "Sequence 1 is not open here."
    worker.keep_left()
    assert (worker.server._transfers._left, worker.server._transfers.left_bytes) == (None, 0)
    assert "was freed" in worker.adopt(2, 9, (0, 2))


def test_kv_of_the_stage_before_is_freed_with_the_next_epoch_and_for_another_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    relinked, taken_over = (Worker(folder, monkeypatch) for _ in range(2))
    for worker in (relinked, taken_over):
        worker.change((0, 4), (0, 2), steps=1)
        assert worker.server._transfers._left is not None
    assert relinked.relink((0, 2), commit=False) == ""
    assert relinked.server._transfers._left is None
    taken_over.greet(head=2)
    assert taken_over.server._transfers._left is None


def test_a_worker_frees_the_layers_that_it_loses_before_it_loads_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_random_model(tmp_path / "model", {**QWEN3, "hidden_size": 256})
    worker = Worker(folder, monkeypatch)
    worker.ask((0, 4), worker_pb2.LoadRequest.BESIDE)
    worker.run()
    assert [worker.relink((0, 4), commit=commit) for commit in (False, True)] == ["", ""]
    before = weights_of(folder, (0, 4))
    gc.collect()
    mx.clear_cache()
    loaded = mx.get_active_memory()
    # Announced layers are accepted in the first phase, and not in the second one before they are loaded.
    assert last_report(worker.ask((3, 5), worker_pb2.LoadRequest.ANNOUNCED)).ready
    assert worker.relink((2, 5), commit=False) == "StaleMessage"
    assert worker.relink((3, 5), commit=False) == ""
    progress = worker.ask((3, 5), worker_pb2.LoadRequest.AFTER)
    worker.server._jobs.get()()
    kept = worker.weight_bytes
    assert kept < before / 3
    assert mx.get_active_memory() < loaded - (before - kept) * 0.9
    worker.run()
    assert last_report(progress).ready
    assert worker.weight_bytes == weights_of(folder, (3, 5))
    assert worker.relink((3, 5), commit=True) == ""
    assert worker.server.hello().stage == 1


@pytest.mark.parametrize("gain", [worker_pb2.LoadRequest.BESIDE, worker_pb2.LoadRequest.AFTER])
def test_a_worker_says_that_it_loads_while_a_step_would_have_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: worker_pb2.LoadRequest.Gain
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    worker = Worker(folder, monkeypatch)
    worker.ask((0, 3), worker_pb2.LoadRequest.BESIDE)
    worker.run()
    assert [worker.relink((0, 3), commit=commit) for commit in (False, True)] == ["", ""]
    seen: list[str] = []

    def look_before(work: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            seen.append(worker.wait)
            return work(*arguments)

        return look

    # The parts that may take minutes: to read the folder and the weights, and to compile kernels.
    for name in ("read_folder", "warm_up"):
        monkeypatch.setattr(stage, name, look_before(getattr(stage, name)))
    progress = worker.ask((0, 5), gain)
    worker.run()
    assert last_report(progress).ready
    assert seen == ["load", "load"]
    assert not worker.wait


@pytest.mark.parametrize("has_dropped", [False, True])
def test_a_worker_that_is_prepared_for_a_stage_goes_back_to_its_own_unless_it_has_dropped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_dropped: bool
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    worker = Worker(folder, monkeypatch)
    worker.ask((0, 3), worker_pb2.LoadRequest.BESIDE)
    worker.run()
    assert [worker.relink((0, 3), commit=commit) for commit in (False, True)] == ["", ""]
    # Another worker fails in the pause, or this one does.
    worker.ask((0, 5), worker_pb2.LoadRequest.ANNOUNCED if has_dropped else worker_pb2.LoadRequest.BESIDE)
    worker.run()
    assert worker.relink((0, 5), commit=False) == ""
    if has_dropped:

        def fail(*_: object) -> None:
            raise RuntimeError("No memory is left.")

        monkeypatch.setattr(stage, "warm_up", fail)
        progress = worker.ask((0, 5), worker_pb2.LoadRequest.AFTER)
        worker.run()
        assert "No memory is left" in last_report(progress).failure.message
        assert worker.relink((0, 3), commit=False) == "NotReady"
        return
    assert [worker.relink((0, 3), commit=commit) for commit in (False, True)] == ["", ""]
    worker.greet()
    worker.execute(1)
    worker.run()
    assert worker.answer().step == 1
    assert worker.weight_bytes == weights_of(folder, (0, 3))


def test_a_load_that_fails_or_is_no_longer_wanted_leaves_the_present_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    worker = Worker(folder, monkeypatch)
    worker.ask((0, 3), worker_pb2.LoadRequest.BESIDE)
    worker.run()
    assert [worker.relink((0, 3), commit=commit) for commit in (False, True)] == ["", ""]
    worker.greet()
    weight_bytes = worker.weight_bytes
    progress = worker.ask((0, 5), worker_pb2.LoadRequest.BESIDE, tmp_path / "missing")
    worker.run()
    assert last_report(progress).failure.kind == "ModelNotFound"
    assert worker.relink((0, 5), commit=False) == "StaleMessage"
    progress = worker.ask((0, 5), worker_pb2.LoadRequest.BESIDE)
    for _ in range(4):
        worker.server._jobs.get()()
    assert worker.weight_bytes > weight_bytes
    # Its present layers are announced: it drops what it has gained.
    assert last_report(worker.ask((0, 3), worker_pb2.LoadRequest.BESIDE)).ready
    worker.run()
    assert last_report(progress).failure.kind == "NotReady"
    assert worker.weight_bytes == weight_bytes
    worker.execute(1)
    worker.run()
    assert worker.answer().step == 1


def test_a_stage_of_changed_weights_is_refused_so_that_no_stage_has_some_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(write_random_model(tmp_path / "model", QWEN3), monkeypatch)
    worker.ask((0, 3), worker_pb2.LoadRequest.BESIDE)
    worker.run()
    assert [worker.relink((0, 3), commit=commit) for commit in (False, True)] == ["", ""]
    worker.digest = "other"
    for gain in (worker_pb2.LoadRequest.ANNOUNCED, worker_pb2.LoadRequest.BESIDE):
        refused = last_report(worker.ask((0, 5), gain)).failure
        assert (refused.kind, "load the whole model again" in refused.message) == ("NotReady", True)
