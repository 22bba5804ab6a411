"""Construction of the stage that a plan assigns to this worker: weights, KV, links, a first pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import mlx.core as mx

from mlx_cpu_kernels.operations import are_installed
from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.core.types import DTYPES, DType, LayerRange, MemberRange
from mlx_ring.models.architectures import require_cuttable
from mlx_ring.models.layer_tensors import dequantized_bytes, tensors_of_stage
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.tensor_shares import TensorShare, part_of_kv, read_tensor_sizes, share_out
from mlx_ring.rpc.backends import DirectLink, direct_link, joined_ranks
from mlx_ring.rpc.frames import Packer
from mlx_ring.rpc.hello import check_hello
from mlx_ring.rpc.links import FanOut, GrpcLink, Inbox, LinkLoss, LinkSender, Opening
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.worker.collective import over_collectives
from mlx_ring.worker.grammars import GrammarCompiler
from mlx_ring.worker.group import GroupPort, join_group, join_stages
from mlx_ring.worker.kv import STEP_BYTES, KVStore
from mlx_ring.worker.platform.device import compiles_kernels, free_memory
from mlx_ring.worker.replies import StageLinks
from mlx_ring.worker.runner import StageRunner
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensor import Group, split
from mlx_ring.worker.weights import load_stage

if TYPE_CHECKING:
    from mlx_ring.worker.kv.disk import KvDisk

log = logging.getLogger(__name__)

Report = Callable[[worker_pb2.LoadProgress], None]
Sends = Callable[[], worker_pb2.LinkUse | None]
"""Function that reports the use of a stage's link to the next one; any thread may call it."""
_WARM_UP_SEQUENCE = (1 << 64) - 1
_WARM_UP_ROWS = (2, 1)
_KERNEL_ROWS = (64, 32, 16)
"""Rows of passes for which CUDA compiles a kernel each; more rows use that of 64, and fewer than 8 a compiled one."""


@dataclass(frozen=True, slots=True)
class OpenedLinks:
    """Links to the neighbours."""

    links: StageLinks
    sends: Sends


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
    trust: Credentials | None = None,
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
    folder = _read_folder(request, hello)
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
    architecture = require_cuttable(folder, assignment.stages)
    kv = KVStore(
        model.make_layer_caches(),
        model.dtype,
        kv_bits=assignment.kv_bits or None,
        ragged=architecture.batches,
        step_bytes=part_of_kv(shares, assignment.rank, STEP_BYTES) if shares else STEP_BYTES,
    )
    neighbours = _Neighbours(model, inbox, trust, loss_recorder)
    opened = neighbours.open_links(assignment, hello)
    links = opened.links
    if stages is not None:
        links = over_collectives(links, assignment, model, stages)
    grammars = GrammarCompiler(folder)
    heads = (shares[assignment.rank].kv_heads, shares[-1].kv_heads.end) if shares else None
    disk = open_disk(disk_settings, request, kv, model.cache_numbers, dtype, heads)
    runner = StageRunner(assignment, model, kv, links, group, grammars, disk)
    if compiles_kernels():
        report(worker_pb2.LoadProgress(phase="kernels"))
        compile_kernels(model, kv)
    report(worker_pb2.LoadProgress(phase="warm-up"))
    _run_passes(model, kv, _WARM_UP_ROWS)

    return BuiltStage(
        runner, dtype, cpu_weights, kv.traits(), opened.sends, grammars, neighbours.open_links, kv, disk
    )


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Where a worker saves KV."""

    folder: Path
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of this worker, for greetings and status, and where it saves KV."""

    node: str
    stage: int
    rank: int
    blas: str
    kernels: str = ""
    disk: DiskSettings | None = None


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
        request: the request to load the stage.
        kv: the stage's store.
        layers: the numbers of its caches in the model's list.
        dtype: the type of keys and values.
        heads: KV heads of this rank, and the number of the model's; None: it has all.
    """
    if settings is None:
        return None
    if kv.unsaved_layers:
        log.warning("The KV of this model is not saved on the disk, because it has %s", kv.unsaved_layers)
        return None
    from mlx_ring.worker.kv.block_files import (  # with NumPy, which takes 0.1 s
        HeadShare,
        fingerprint,
        kinds_of,
    )
    from mlx_ring.worker.kv.disk import KvDisk

    hello = request.hello
    versions = hello.mlx, hello.mlx_lm, hello.mlx_ring
    name = fingerprint(hello.model_digest, *versions, dtype, request.assignment.kv_bits)
    share = None if heads is None else HeadShare(*heads)
    return KvDisk(settings.folder, settings.limit_bytes, name, layers, kinds_of(kv, layers), share)


def _read_folder(request: worker_pb2.LoadRequest, hello: hello_pb2.Hello) -> ModelFolder:
    """Read the model, and check that it is the one that the head serves."""
    folder = read_model_folder(Path(request.model_path))
    check_hello(
        hello_pb2.Hello(
            protocol=hello.protocol,
            mlx_ring=hello.mlx_ring,
            mlx=hello.mlx,
            mlx_lm=hello.mlx_lm,
            model_digest=folder.digest,
        ),
        request.hello,
        f"the model folder {folder.path}",
    )
    return folder


def _packer(assignment: worker_pb2.StageAssignment) -> Packer | None:
    """Return a packer, or None if frames to the next stage are never compressed."""
    if assignment.link_compression == "off" or not assignment.next_node or assignment.next_bytes_per_s <= 0:
        return None
    return Packer(assignment.next_bytes_per_s)


def _sends(assignment: worker_pb2.StageAssignment, packer: Packer | None) -> worker_pb2.LinkUse | None:
    if packer is not None:
        return packer.use()
    if not assignment.next_address:
        return None
    if not assignment.next_node:
        return worker_pb2.LinkUse(why="both stages are on one machine")
    is_off = assignment.link_compression == "off"
    return worker_pb2.LinkUse(why="--link-compression is off" if is_off else "the link was not measured")


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Links to the neighbours of a stage, which are opened anew for each assignment."""

    model: StageModel
    inbox: Inbox
    trust: Credentials | None
    loss_recorder: Callable[[], LinkLoss] | None

    def open_links(
        self,
        assignment: worker_pb2.StageAssignment,
        hello: hello_pb2.Hello,
        opening: Opening | None = None,
    ) -> OpenedLinks:
        """Open the links to the neighbours of an assignment. Only rank 0 sends, to every rank of the other stage.

        Args:
            assignment: the stage's assignment.
            hello: this worker's greeting.
            opening: the attempt, which is given up if a link cannot be opened.
        """
        packer = _packer(assignment)
        try:
            links = self._open(assignment, hello, packer, opening)
        except RingError:
            if opening is not None:
                opening.give_up()
            raise
        return OpenedLinks(links, partial(_sends, assignment, packer))

    def _open(
        self,
        ours: worker_pb2.StageAssignment,
        hello: hello_pb2.Hello,
        packer: Packer | None,
        opening: Opening | None,
    ) -> StageLinks:
        if ours.rank:
            return StageLinks(self.inbox)
        opener = partial(self._open_one, direct_link(ours), hello, opening)
        to_next = back = None
        if not self.model.is_last:
            speed = ours.next_bytes_per_s
            to_next = _to_all(opener, ours.next_address, ours.next_node, ours.next_ranks, packer, speed)
        elif not self.model.is_first:
            back = _to_all(opener, ours.first_address, ours.first_node, ours.first_ranks)
        return StageLinks(self.inbox, to_next, back)

    def _open_one(
        self,
        kind: DirectLink,
        hello: hello_pb2.Hello,
        opening: Opening | None,
        address: str,
        node: str,
        packer: Packer | None,
        bytes_per_s: float,
    ) -> LinkSender:
        match kind:
            case "grpc":
                return GrpcLink(
                    address,
                    hello,
                    trust=self.trust,
                    node=node,
                    packer=packer,
                    bytes_per_s=bytes_per_s,
                    on_lost=None if self.loss_recorder is None else self.loss_recorder(),
                    opening=opening,
                )
            case _:
                assert_never(kind)


def _to_all(
    open_link: Callable[[str, str, Packer | None, float], LinkSender],
    address: str,
    node: str,
    others: Iterable[worker_pb2.RankEnd],
    packer: Packer | None = None,
    bytes_per_s: float = 0.0,
) -> LinkSender:
    """Open a link to each rank of a stage: rank 0 at this address, and the others."""
    # A packer belongs to one thread, so each link has its own; status shows the first one's.
    ends = [(address, node, packer)]
    ends += [
        (other.address, other.node, Packer(packer.bytes_per_s) if packer and other.node else None)
        for other in others
    ]
    opened = [open_link(address, node, packer, bytes_per_s) for address, node, packer in ends]
    return opened[0] if len(opened) == 1 else FanOut(opened)


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
