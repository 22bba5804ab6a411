"""Construction of the stage that a plan assigns to this worker: weights, KV, links, a first pass.

A worker that has a stage can load the next plan's (`NextStage`). It reads only the layers that it gains, one array after
the other, so that steps can be computed in between. The other weights are those in memory, as the same arrays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_cpu_kernels.operations import are_installed
from mlx_ring.core.errors import NotReady, ProtocolError
from mlx_ring.core.types import DTYPES, DType, LayerRange, MemberRange
from mlx_ring.models.architectures import require_cuttable
from mlx_ring.models.layer_tensors import dequantized_bytes, tensors_of_stage
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.tensor_shares import TensorShare, part_of_kv, read_tensor_sizes, share_out
from mlx_ring.rpc.backends import joined_ranks
from mlx_ring.rpc.links import Inbox, LinkLoss, Opening
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.worker.collective import over_collectives
from mlx_ring.worker.grammars import GrammarCompiler
from mlx_ring.worker.group import GroupPort, join_group, join_stages
from mlx_ring.worker.kv import STEP_BYTES, KVStore
from mlx_ring.worker.neighbours import LinkOpener, OpenedLinks, Sends
from mlx_ring.worker.platform.device import compiles_kernels, free_memory
from mlx_ring.worker.runner import StageRunner
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensor import Group, split
from mlx_ring.worker.weights import StageLoading, load_stage, needed_weights, read_folder

if TYPE_CHECKING:
    from mlx_ring.worker.kv.disk import KvDisk

log = logging.getLogger(__name__)

Report = Callable[[worker_pb2.LoadProgress], None]
Parts = Iterator[None]
_WARM_UP_SEQUENCE = (1 << 64) - 1
_WARM_UP_ROWS = (2, 1)
_KERNEL_ROWS = (64, 32, 16)
"""Rows of passes for which CUDA compiles a kernel each; more rows use that of 64, and fewer than 8 a compiled one."""


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """Stage that can execute steps."""

    runner: StageRunner
    dtype: DType
    """Type in which it computes."""
    cpu_weights: str
    """Form of quantized weights on a CPU: `quantized` or `float32`; empty on a GPU, and for other models."""
    kv: worker_pb2.KvTraits
    sends: Sends
    grammars: GrammarCompiler
    """Compiler that any thread may ask for grammars; the runner uses them by id."""
    model: StageModel
    open_links: Callable[[worker_pb2.StageAssignment, hello_pb2.Hello, Opening], OpenedLinks]
    """Function that opens links to other neighbours, in any thread, for an assignment with this worker's greeting."""
    store: KVStore
    disk: KvDisk | None = None
    """Saved KV, which any thread may fetch; None if none is saved here."""


def resolve_dtype(asked: str, folder: ModelFolder) -> DType:
    """Return the type in which the stage computes: as requested, or by device.

    On a CPU half precision has scalar kernels and slows quantized products tenfold, so
    `auto` is float32 there. Elsewhere it is the type that the model was saved in.
    """
    if asked != "auto":
        return parse_dtype(asked)
    if mx.default_device() == mx.Device(mx.cpu):
        return "float32"
    saved = folder.config.get("dtype") or folder.config.get("torch_dtype")
    return saved if saved in DTYPES else "bfloat16"


def parse_dtype(name: str) -> DType:
    """Return the type of that name. Raises `ProtocolError` if no stage computes in it."""
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise ProtocolError(f"The plan requests dtype {name!r}; supported are {', '.join(DTYPES)}.")


def choose_weights(
    assignment: worker_pb2.StageAssignment, folder: ModelFolder, layers: LayerRange, dtype: DType
) -> str:
    """Return the form in which this CPU holds the quantized weights of its layers, and log why.

    It is `quantized` or `float32`; empty on a GPU, in half precision, and for models without quantized weights.
    """
    sizes = dequantized_bytes(folder)
    if not sizes or dtype != "float32" or mx.default_device() != mx.Device(mx.cpu):
        return ""
    asked = assignment.cpu_weights
    if asked != "float32" and are_installed():
        return "quantized"
    held = tensors_of_stage(folder, layers)
    nbytes = sum(sizes.get(entry.name, entry.loaded_bytes(widened=True)) for entry in held)
    nbytes = (
        nbytes * assignment.shares[assignment.rank] / sum(assignment.shares) if assignment.shares else nbytes
    )
    size = f"{nbytes / 1e9:.2f} GB"
    if asked == "float32" or (asked == "auto" and nbytes <= free_memory()):
        why = "as asked" if asked == "float32" else "because no native kernels run here"
        log.info("Quantized weights are held as float32, %s in all, %s", size, why)
        return "float32"
    log.warning(
        "Quantized weights are multiplied without native kernels, so a token takes many times as long. As float32 they "
        "would take %s, which is more than the memory left, or not wanted (--cpu-weights).",
        size,
    )
    return "quantized"


def build_stage(
    request: worker_pb2.LoadRequest,
    inbox: Inbox,
    hello: hello_pb2.Hello,
    report: Report,
    *,
    trust: ChannelTrust | None = None,
    group_port: GroupPort | None = None,
    loss_recorder: Callable[[], LinkLoss] | None = None,
    disk_settings: DiskSettings | None = None,
) -> BuiltStage:
    """Load the assigned layers and join the links.

    Args:
        request: the plan's part for this rank.
        inbox: receives from the stage before.
        hello: this worker's greeting, for the links it opens.
        report: receives progress, in bytes of weights.
        trust: for links to other machines.
        group_port: where the other ranks of the stage connect, if there are any.
        loss_recorder: returns a function that records the loss of a link that is opened now.
        disk_settings: where KV is saved; None: nowhere.

    Raises:
        RingError: the stage cannot be built as requested.
    """
    assignment = request.assignment
    folder = read_folder(request, hello)
    dtype = resolve_dtype(assignment.dtype, folder)
    layers = LayerRange(assignment.first_layer, assignment.end_layer)
    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        report(worker_pb2.LoadProgress(phase="weights", bytes_loaded=done, bytes_total=total))

    if joined_ranks(assignment):
        report(worker_pb2.LoadProgress(phase="group"))
    group = join_group(assignment, group_port)
    stages = join_stages(assignment, group_port)
    shares: Sequence[TensorShare] = (
        () if group is None else share_out(read_tensor_sizes(folder), assignment.shares)
    )
    divide = None if group is None else partial(_divide, shares, group)
    cpu_weights = choose_weights(assignment, folder, layers, dtype)
    model = load_stage(folder, layers, dtype, progress, divide, dequantized=cpu_weights == "float32")
    log.info("Loaded layers %s of %s in %s in %.2f s", layers, folder.path, dtype, time.monotonic() - started)
    step_bytes = part_of_kv(shares, assignment.rank, STEP_BYTES) if shares else STEP_BYTES
    kv = make_kv(folder, assignment, model, step_bytes)
    neighbours = LinkOpener(model, inbox, trust, loss_recorder)
    opened = neighbours.open_links(assignment, hello)
    links = opened.links if stages is None else over_collectives(opened.links, assignment, model, stages)
    grammars = GrammarCompiler(folder)
    heads = (shares[assignment.rank].kv_heads, shares[-1].kv_heads.end) if shares else None
    disk = open_disk(disk_settings, request, kv, model.cache_numbers, dtype, heads)
    runner = StageRunner(assignment, model, kv, links, group, grammars, disk)
    warm_up(model, kv, report)
    return BuiltStage(
        *(runner, dtype, cpu_weights, kv.traits(), opened.sends, grammars, model, neighbours.open_links),
        *(kv, disk),
    )


def make_kv(
    folder: ModelFolder,
    assignment: worker_pb2.StageAssignment,
    model: StageModel,
    step_bytes: int = STEP_BYTES,
) -> KVStore:
    """Return an empty KV store for a stage, which grows by `step_bytes`."""
    return KVStore(
        model.make_layer_caches(),
        model.dtype,
        kv_bits=assignment.kv_bits or None,
        ragged=require_cuttable(folder, assignment.stages).batches and model.takes_row_offsets,
        step_bytes=step_bytes,
    )


def warm_up(model: StageModel, kv: KVStore, report: Report) -> None:
    """Run first passes of a stage, so that no request pays for first-time work."""
    if compiles_kernels():
        report(worker_pb2.LoadProgress(phase="kernels"))
        compile_kernels(model, kv)
    report(worker_pb2.LoadProgress(phase="warm-up"))
    _run_passes(model, kv, _WARM_UP_ROWS)


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Where a worker saves KV, and the credentials of its node with which it asks other machines for theirs, if any."""

    folder: Path
    limit_bytes: int
    node: str = ""
    trust: ChannelTrust | None = None


def open_disk(
    settings: DiskSettings | None,
    request: worker_pb2.LoadRequest,
    kv: KVStore,
    layers: Sequence[int],
    dtype: DType,
    heads: tuple[MemberRange, int] | None = None,
) -> KvDisk | None:
    """Return the disk for a stage's KV, or None if none is wanted, or if the model's layers cannot be restored.

    Args:
        settings: where KV is saved.
        layers: the numbers of its caches in the model's list.
        dtype: the type of keys and values.
        heads: KV heads of this rank, and the number of the model's; None: it has all.
    """
    if settings is None:
        return None
    if kv.unsaved_layers:
        log.warning("The KV of this model is not saved on the disk, because it has %s", kv.unsaved_layers)
        return None
    # With NumPy, which takes 0.1 s.
    from mlx_ring.worker.kv.block_files import HeadShare, content_name, kinds_of
    from mlx_ring.worker.kv.block_reader import PeerDisks
    from mlx_ring.worker.kv.disk import KvDisk

    name = content_name(request.hello, dtype, request.assignment.kv_bits)
    share = None if heads is None else HeadShare(*heads)
    peers = PeerDisks(settings.node, name, settings.trust) if settings.trust else None
    return KvDisk(settings.folder, settings.limit_bytes, name, layers, kinds_of(kv, layers), share, peers)


def _divide(shares: Sequence[TensorShare], group: Group, stage: StageModel) -> None:
    """Keep only this rank's part of the stage."""
    stage.head = split(stage.model, shares, group, looks_up=stage.is_first)


def compile_kernels(model: StageModel, kv: KVStore) -> None:
    """Run passes for which MLX compiles all kernels of this model, and log how long that took.

    Prompts would otherwise wait for it, for minutes with quantized weights, and the worker would count as stuck.
    """
    started = time.monotonic()
    log.info("Compiling kernels for this GPU, which takes minutes the first time with quantized weights")
    _run_passes(model, kv, _KERNEL_ROWS)
    log.info("Compiled them in %.0f s", time.monotonic() - started)


def _run_passes(model: StageModel, kv: KVStore, rows: Sequence[int]) -> None:
    """Run passes of so many tokens, with results for each, so that no request pays for first-time work."""
    kv.open(_WARM_UP_SEQUENCE, sum(rows))
    try:
        for count in rows:
            (batch,) = kv.batches([(_WARM_UP_SEQUENCE, count)])
            tokens = mx.zeros((1, count), mx.int32)
            hidden = None if model.is_first else mx.zeros((1, count, model.hidden_size), model.dtype)
            positions = mx.arange(count, dtype=mx.int32)[None] if model.is_last else None
            values = model.forward(tokens, hidden, batch.caches, positions, offset=batch.offset)
            mx.eval(values, *batch.arrays)
            kv.commit(batch)
    finally:
        kv.free(_WARM_UP_SEQUENCE)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Connections of a worker, which stay when its stage changes."""

    inbox: Inbox
    trust: ChannelTrust | None = None
    loss_recorder: Callable[[], LinkLoss] | None = None
    disk_settings: DiskSettings | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Stage whose weights are in memory, before its links are opened."""

    model: StageModel
    kv: KVStore
    opener: LinkOpener
    dtype: DType
    cpu_weights: str
    grammars: GrammarCompiler


class NextStage:
    """Stage that takes the place of a worker's present one."""

    def __init__(
        self,
        request: worker_pb2.LoadRequest,
        hello: hello_pb2.Hello,
        present: BuiltStage | None,
        surroundings: Surroundings,
    ) -> None:
        """Announce a stage; nothing is loaded yet.

        Args:
            request: the next plan's part for this rank.
            hello: this worker's greeting.
            present: the present stage; None in a worker that has none.
            surroundings: this worker's connections.
        """
        self.request = request
        self._hello, self._present, self._surroundings = hello, present, surroundings
        self._loaded: _Loaded | None = None
        self.kept_bytes = self.gained_bytes = 0
        """Bytes of weights that it takes over, and of those that were read for it so far."""

    @property
    def assignment(self) -> worker_pb2.StageAssignment:
        return self.request.assignment

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.assignment.first_layer, self.assignment.end_layer)

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def parts(self, report: Report, drop_present: Callable[[], None] | None = None) -> Parts:
        """Load in parts, on the compute thread. Yield after each of them.

        Args:
            report: receives progress, in bytes of the weights that are read.
            drop_present: drops the present stage; None to let it serve.

        Raises:
            RingError: it cannot be loaded.
        """
        if self.is_loaded:
            return
        started, present = time.monotonic(), self._present
        folder = read_folder(self.request, self._hello)
        assignment, layers = self.assignment, self.layers
        dtype = resolve_dtype(assignment.dtype, folder) if present is None else present.dtype
        weights = (
            choose_weights(assignment, folder, layers, dtype) if present is None else present.cpu_weights
        )

        def progress(done: int, total: int) -> None:
            self.gained_bytes = done
            report(worker_pb2.LoadProgress(phase="weights", bytes_loaded=done, bytes_total=total))

        loading = StageLoading(
            folder,
            layers,
            dtype,
            progress,
            dequantized=weights == "float32",
            held={} if present is None else needed_weights(present.model),
        )
        self.kept_bytes = loading.kept_bytes
        grammars = GrammarCompiler(folder) if present is None else present.grammars
        if drop_present is not None:
            self._present = present = None
            drop_present()
        yield
        yield from loading.parts()
        size = f"{loading.read_bytes / 1e6:.1f} MB"
        log.info("Read %s for layers %s in %.2f s", size, layers, time.monotonic() - started)
        kv = make_kv(folder, assignment, loading.stage)
        warm_up(loading.stage, kv, report)
        around = self._surroundings
        opener = LinkOpener(loading.stage, around.inbox, around.trust, around.loss_recorder)
        self._loaded = _Loaded(loading.stage, kv, opener, dtype, weights, grammars)
        self._present = None

    def open_links(
        self, assignment: worker_pb2.StageAssignment, hello: hello_pb2.Hello, opening: Opening
    ) -> OpenedLinks:
        """Open the links of the next epoch, in any thread.

        Raises:
            NotReady: the stage is not loaded.
        """
        return self._require().opener.open_links(assignment, hello, opening)

    def enter(self, links: OpenedLinks) -> BuiltStage:
        """Return the stage with its links, for the assignment of its request. Runs on the compute thread."""
        loaded, request, around = self._require(), self.request, self._surroundings
        disk = open_disk(
            around.disk_settings, request, loaded.kv, loaded.model.cache_numbers, loaded.dtype, None
        )
        runner = StageRunner(
            *(request.assignment, loaded.model, loaded.kv, links.links),
            grammars=loaded.grammars,
            disk=disk,
        )
        return BuiltStage(
            runner,
            loaded.dtype,
            loaded.cpu_weights,
            loaded.kv.traits(),
            links.sends,
            loaded.grammars,
            loaded.model,
            loaded.opener.open_links,
            loaded.kv,
            disk,
        )

    def _require(self) -> _Loaded:
        if self._loaded is None:
            raise NotReady(f"The layers {self.layers} of the next plan are not loaded.")
        return self._loaded
