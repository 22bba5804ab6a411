"""Executor for tests with in-process ranks: a KV cache is a list of tokens, a model is a function.

It keeps the contract of real ranks:

- Each rank executes its steps in stream order.
- Each stage runs after the previous one.
- Each rank checks a row's `start` against its KV cache.
- Every rank answers every step.

With `automatic=False` a test decides when each rank continues.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from tests.engine.twin_rank import HeldSequence, NextToken, Reach, TwinRank, anywhere, hash_token

from mlx_ring.core.errors import ProtocolError, RingError, ServingError
from mlx_ring.core.types import KvPlace, LayerRange, RankId
from mlx_ring.engine.executor import Listener, sampling_ranks
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.protos import step_pb2, tensor_pb2, worker_pb2
from mlx_ring.rpc.protos.step_pb2 import Want

Draw = Callable[[step_pb2.Open, Sequence[int]], step_pb2.TokenLogprobs]
"""The token that follows a history of tokens under the parameters of a sequence, with its log-probability."""
FaultInjector = Callable[[step_pb2.Step, int], step_pb2.Failure | None]
"""Failure of a stage, given by its number, in a step, or None. All ranks of the stage fail together."""

_EXPORTS: dict[str, tuple[TwinExecutor, worker_pb2.ExportKv, int]] = {}
"""Sequences that other twins may read, by key, each with the number of steps that were sent before."""


class TwinExecutor:
    """Executor with in-process ranks; `tp_sizes` gives the number of ranks of each stage.

    With `pads`, every running sequence uses as much KV memory as the longest.
    `draw` takes the place of `next_token`, for a model whose tokens also depend on sampling parameters.
    Without `makes_grammars`, a test reports when a grammar is ready.
    """

    def __init__(
        self,
        tp_sizes: Sequence[int] = (1,),
        *,
        next_token: NextToken | None = None,
        draw: Draw | None = None,
        inject_fault: FaultInjector | None = None,
        reach: Reach = anywhere,
        pads: bool = False,
        automatic: bool = True,
        makes_grammars: bool = True,
    ) -> None:
        self._ranks = {
            RankId(stage, rank): TwinRank(RankId(stage, rank), reach, pads)
            for stage, size in enumerate(tp_sizes)
            for rank in range(size)
        }
        self._last = RankId(len(tp_sizes) - 1, 0)
        self._next_token = next_token or hash_token(256)
        self._draw = draw or self._sample
        self.inject_fault = inject_fault
        self._automatic = automatic
        self._makes_grammars = makes_grammars
        self.grammar_failure: step_pb2.Failure | None = None
        """Reason why the ranks compile no grammar; None if they compile every grammar."""
        self.grammars: dict[int, step_pb2.Grammar] = {}
        """Requested grammars by id, until they are dropped."""
        self.wanted: list[step_pb2.Grammar] = []
        """All requested grammars, in order."""
        self._woken = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._listener: Listener | None = None
        self._failures: dict[tuple[int, int], step_pb2.Failure | None] = {}
        """Failures by step and stage."""
        self._sampled: dict[int, dict[int, int]] = defaultdict(dict)
        """Sampled tokens by sequence and position."""
        self._row_before: dict[int, int] = {}
        """Latest earlier step, by step, with a row of a sequence whose `previous` token the step needs."""
        self._last_row: dict[int, int] = {}
        """Latest step with a row of a sequence, by sequence."""
        self.held_fetches: list[tuple[RankId, worker_pb2.KvFetched]] | None = None
        """Answers about KV on disks that are not sent, if they are held."""
        self.kv_limits: dict[RankId, int] = {}
        """KV limits set by `limit_kv`."""
        self.owners: set[bytes] = set()
        """Owners whose KV stays on disks; empty: all."""
        self.kv_places: Sequence[KvPlace] = ()
        self.left: TwinExecutor | None = None
        """Ranks with the stages that these had before."""
        self.fails_moves = ""
        """Reason why the ranks fail to fetch KV from another twin; empty if they do not."""
        self.sent: list[step_pb2.Step] = []
        """All sent steps, in order."""

    @property
    def ranks(self) -> Sequence[RankId]:
        return tuple(self._ranks)

    def set_listener(self, listener: Listener) -> None:
        self._listener = listener

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        self.kv_limits = dict(limits)

    def prepare(self, wanted: worker_pb2.PrepareGrammar) -> None:
        self.grammars[wanted.id] = wanted.grammar
        self.wanted.append(wanted.grammar)
        if self._makes_grammars:
            for rank in sampling_ranks(self.ranks):
                asyncio.get_running_loop().call_soon(
                    self.report_prepared, rank, wanted.id, self.grammar_failure
                )

    def drop_grammar(self, id_: int) -> None:
        del self.grammars[id_]

    def place_kv(self, layers: Sequence[LayerRange]) -> None:
        """Let KV move from and to the ranks; `layers` has each stage's layers."""
        sizes = Counter(rank.stage for rank in self._ranks)
        self.kv_places = [
            KvPlace(
                rank,
                layers[rank.stage],
                (1.0,) * sizes[rank.stage],
                f"node-{rank.stage}",
                lambda _node, rank=rank: (f"{rank.stage}/{rank.rank}", ""),
            )
            for rank in self._ranks
        ]

    def export_kv(self, export: worker_pb2.ExportKv) -> None:
        if export.sequence:
            source = self.left if export.left else self
            assert source is not None
            _EXPORTS[export.key] = (source, export, 0 if export.left else len(self.sent))
        else:
            _EXPORTS.pop(export.key, None)

    def keep_left(self, sequences: Iterable[int]) -> None:
        assert self.left is not None
        wanted = {*sequences}
        for rank in self.left._ranks.values():
            rank.held = {sequence: held for sequence, held in rank.held.items() if sequence in wanted}

    def _place(self, source: worker_pb2.KvSource) -> TwinRank:
        """Return the rank from which another one reads its own layers."""
        if self._listener is not None:
            return self._ranks[RankId(*map(int, source.address.split("/")))]
        # It had another stage before, so that its address says nothing about it.
        return next(
            self._ranks[place.rank]
            for place in self.kv_places
            if place.layers.start <= source.first_layer < place.layers.end and place.rank.rank == source.rank
        )

    def _report_moved(self, rank: TwinRank, wanted: worker_pb2.FetchKv) -> None:
        """Report that a rank has the tokens of all its sources, once these have executed the steps before."""
        problem, sources = (
            self.fails_moves,
            [each for each in wanted.sources if (each.stage, each.rank) == rank.id],
        )
        found: list[list[int]] = []
        for each in () if problem else sources:
            if each.key not in _EXPORTS:
                problem = "the export has ended"
                break
            source, export, steps = _EXPORTS[each.key]
            place = source._place(each)
            if place.executed < steps and source._listener is not None:
                asyncio.get_running_loop().call_soon(self._report_moved, rank, wanted)
                return
            held = place.held.get(export.sequence)
            found.append([] if held is None else held.tokens[wanted.start : wanted.end])
        if not problem and any(len(tokens) != wanted.end - wanted.start for tokens in found):
            problem = "the sequence has ended"
        if not problem:
            layers = [layer for each in sources for layer in range(each.first_layer, each.end_layer)]
            own = next(place.layers for place in self.kv_places if place.rank == rank.id)
            assert sorted(layers) == [*range(own.start, own.end)]
            assert all(tokens == found[0] for tokens in found)
            rank.moved[wanted.id] = found[0]
        if self._listener is not None:
            fetched = worker_pb2.KvFetched(id=wanted.id, blocks=int(not problem), problem=problem)
            self._listener.fetched(rank.id, fetched)

    def fetch_kv(self, wanted: worker_pb2.FetchKv) -> None:
        if wanted.sources:
            for rank in self._ranks.values():
                asyncio.get_running_loop().call_soon(self._report_moved, rank, wanted)
            return
        self.owners |= set(wanted.owners)
        for rank in self._ranks.values():
            asyncio.get_running_loop().call_soon(self._report_fetched, rank, wanted)

    def _report_fetched(self, rank: TwinRank, wanted: worker_pb2.FetchKv) -> None:
        fetched = rank.fetch(wanted)
        if self.held_fetches is not None:
            self.held_fetches.append((rank.id, fetched))
        elif self._listener is not None:
            self._listener.fetched(rank.id, fetched)

    @property
    def disks(self) -> dict[RankId, dict[bytes, list[int]]]:
        """Saved tokens by a block's digest, of each rank."""
        return {rank.id: rank.disk for rank in self._ranks.values()}

    def listed(self, rank_id: RankId) -> dict[bytes, list[int]]:
        """Return the tokens of the blocks that a rank has listed, by their place."""
        return self._ranks[rank_id].listed

    def copy_disks(self, before: TwinExecutor) -> None:
        """Let every rank have what all ranks of another split have saved."""
        saved = [rank.disk.keys() for rank in before._ranks.values()]
        first = next(iter(before._ranks.values()))
        for rank in self._ranks.values():
            rank.disk = {digest: first.disk[digest] for digest in set[bytes].intersection(*map(set, saved))}
            rank.listed = {place: list(tokens) for place, tokens in first.listed.items()}

    @property
    def ends(self) -> dict[RankId, set[bytes]]:
        """Last blocks at whose end layers that forget were saved, of each rank."""
        return {rank.id: rank.ends for rank in self._ranks.values()}

    @property
    def has_fetched(self) -> bool:
        """True if a rank keeps what it has read."""
        return any(rank.fetched or rank.moved for rank in self._ranks.values())

    def report_prepared(self, rank: RankId, id_: int, failure: step_pb2.Failure | None = None) -> None:
        """Report that a rank has compiled a grammar, or that it failed."""
        if self._listener is not None:
            self._listener.prepared(rank, worker_pb2.GrammarPrepared(id=id_, failure=failure))

    def send(self, step: step_pb2.Step) -> None:
        self.sent.append(step)
        waits_for = [self._last_row.get(row.sequence, 0) for row in step.rows if row.previous]
        self._row_before[step.step] = max(waits_for, default=0)
        self._last_row.update({row.sequence: step.step for row in step.rows})
        for rank in self._ranks.values():
            rank.queue.append(step)
        if self._automatic and not self._woken:
            self._woken = True
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._run_all)

    def lose(self, error: RingError) -> None:
        """Report to the listener that the instance is lost, and drop all steps and answers."""
        for rank in self._ranks.values():
            rank.queue.clear()
            rank.answers.clear()
        if self._listener is not None:
            self._listener.failed(error)

    def keep(self, before: TwinExecutor, kept: worker_pb2.KeptKv) -> None:
        """Keep KV of the ranks of the epoch before."""
        for id_, rank in self._ranks.items():
            rank.keep(before._ranks[id_].held, kept)

    async def idle(self) -> None:
        """Wait until every rank has answered every step."""
        await self._idle.wait()

    def held(self) -> dict[RankId, set[int]]:
        """Return the sequences of each rank."""
        return {id_: set(rank.held) for id_, rank in self._ranks.items()}

    def tokens(self, rank_id: RankId) -> dict[int, list[int]]:
        """Return the tokens of a rank's sequences."""
        return {sequence: list(held.tokens) for sequence, held in self._ranks[rank_id].held.items()}

    def kv_bytes(self, rank_id: RankId) -> int:
        """Return the size of a rank's KV cache."""
        return self._ranks[rank_id].kv_bytes

    # ---- single steps and answers

    def runnable(self) -> list[RankId]:
        """Return the ranks that can execute their next step: with rows, only after the previous stage."""
        return [id_ for id_, rank in self._ranks.items() if rank.queue and self._has_input(rank)]

    def _has_input(self, rank: TwinRank) -> bool:
        if rank.id.stage == 0 or not rank.rows(rank.queue[0]):
            step = rank.queue[0].step
            return rank.id == self._last or self._ranks[self._last].executed >= self._row_before[step]
        return self._ranks[RankId(rank.id.stage - 1, 0)].executed >= rank.queue[0].step

    def run(self, rank_id: RankId) -> None:
        """Execute a rank's next step and keep its answer for `deliver`."""
        rank = self._ranks[rank_id]
        step = rank.queue.popleft()
        rank.answers.append(self._execute(rank, step))
        rank.executed = step.step

    def answering(self) -> list[RankId]:
        """Return the ranks with undelivered answers."""
        return [id_ for id_, rank in self._ranks.items() if rank.answers]

    def deliver(self, rank_id: RankId) -> step_pb2.StepDone:
        """Deliver a rank's oldest answer to the listener."""
        done = self._ranks[rank_id].answers.popleft()
        if self._listener is not None:
            self._listener.answered(done)
        return done

    def _run_all(self) -> None:
        """Run every runnable step and deliver every answer.

        If the listener raises, the instance is lost: its streams end, and no test hangs.
        """
        self._woken = False
        try:
            while runnable := self.runnable():
                for rank_id in runnable:
                    self.run(rank_id)
            for rank_id in self.answering():
                while self._ranks[rank_id].answers:
                    self.deliver(rank_id)
        except Exception as error:
            self.lose(ServingError(f"The listener raised {error!r}."))
            raise
        finally:
            if not self._woken:
                self._idle.set()

    # ---- execution on a rank

    def _execute(self, rank: TwinRank, step: step_pb2.Step) -> step_pb2.StepDone:
        done = step_pb2.StepDone(
            instance=step.instance, epoch=step.epoch, step=step.step, stage=rank.id.stage, rank=rank.id.rank
        )
        try:
            rank.apply(step.operations)
        except ProtocolError as error:
            self._failures[step.step, rank.id.stage] = error_to_failure(error)
        rows = rank.rows(step)
        if step.rows and not rows:
            failure = self._failures.get((step.step, rank.id.stage))
        else:
            failure = self._failure(step, rank.id.stage)
        for row in rows:
            if failure is not None and (not failure.sequences or row.sequence in failure.sequences):
                continue
            try:
                held = rank.feed(row, self._sampled[row.sequence])
            except ProtocolError as error:
                named = [*(failure.sequences if failure is not None else ()), row.sequence]
                failure = self._failures[step.step, rank.id.stage] = error_to_failure(error, named)
                continue
            if rank.id == self._last and row.wants:
                done.results.append(self._result(row, held))
        if failure is not None:
            done.failure.CopyFrom(failure)
        done.kv_bytes = rank.kv_bytes
        return done

    def _failure(self, step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        """Return a stage's failure, if any: the previous stage's, its own, or that of an earlier step."""
        key = (step.step, stage)
        if key not in self._failures:
            before = self._failures.get((step.step, stage - 1))
            own = self.inject_fault(step, stage) if self.inject_fault is not None else None
            self._failures[key] = before or own or self._failure_before(step)
        return self._failures[key]

    def _failure_before(self, step: step_pb2.Step) -> step_pb2.Failure | None:
        """Return the failure of a step that needs a token of a failed step; None if every token is there.

        Both steps fail for the same reason.
        """
        missing = [row for row in step.rows if row.previous and row.start not in self._sampled[row.sequence]]
        if not missing:
            return None
        return self._failures.get((self._row_before[step.step], self._last.stage)) or error_to_failure(
            ProtocolError(f"No token was sampled for position {missing[0].start}.")
        )

    def _result(self, row: step_pb2.Row, held: HeldSequence) -> step_pb2.RowResult:
        result = step_pb2.RowResult(sequence=row.sequence)
        for want in row.wants:
            if want.what == Want.TOKEN:
                result.tokens.extend(self._verified(row, held))
            elif want.what == Want.LOGPROBS:
                result.logprobs.extend(
                    step_pb2.TokenLogprobs(token=token, logprob=-1.0) for token in want.targets
                )
            elif want.what == Want.HIDDEN_SUM:
                result.hidden.CopyFrom(self._hidden_sum(want, row, held))
        return result

    def _verified(self, row: step_pb2.Row, held: HeldSequence) -> Iterator[step_pb2.TokenLogprobs]:
        """Yield the sampled tokens up to the first that differs from its draft token."""
        for length in range(len(held.tokens) - len(row.draft), len(held.tokens) + 1):
            sampled = self._draw(held.opened, held.tokens[:length])
            self._sampled[row.sequence][length] = sampled.token
            yield sampled
            if length < len(held.tokens) and held.tokens[length] != sampled.token:
                return

    @staticmethod
    def _hidden_sum(want: step_pb2.Want, row: step_pb2.Row, held: HeldSequence) -> tensor_pb2.Tensor:
        """Return the sum of hidden states; a token's hidden state is the token, its position, and 1."""
        positions = range(row.start, len(held.tokens))
        if want.where != Want.ALL:
            offsets = want.listed if want.where == Want.LISTED else [-1]
            positions = [positions[offset] for offset in offsets]
        states = [(held.tokens[position], position, 1) for position in positions]
        total = np.array(states, "<f4").sum(axis=0)
        return tensor_pb2.Tensor(dtype="float32", shape=total.shape, data=total.tobytes())

    def _sample(self, opened: step_pb2.Open, history: Sequence[int]) -> step_pb2.TokenLogprobs:
        token = self._next_token(history)
        sampling, answer = opened.sampling, len(history) - opened.prompt_length
        while answer < sampling.min_tokens and token in opened.eos:
            token += 1
        top = sampling.top_logprobs if sampling.logprobs else 0
        return step_pb2.TokenLogprobs(
            token=token,
            logprob=-0.5 if sampling.logprobs else 0.0,
            top_tokens=range(top),
            top_logprobs=[-1.0] * top,
        )
