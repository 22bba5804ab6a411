"""Measure how far an answer that is continued after a loss differs from the undisturbed one, in each precision.

    python bench/tolerance.py                        # the built-in models, and a random one with many experts
    python bench/tolerance.py --models ~/models/SmolLM2-135M-Instruct
    python bench/tolerance.py --quick                # few answers, to check that it runs

The first ranks of an engine are a twin that gives the tokens of undisturbed answers, and is lost at a position. Real
stages in this process then continue all answers, as workers do. They compute prompt and delivered tokens in chunks. The
undisturbed run computed one token at a time, so sums are rounded in another order. They have the same layers as in
the undisturbed run, or those of three stages instead of two. Half of the answers are greedy, and half are drawn.

A CPU has only slow kernels for bfloat16, which compute every row alone, so that chunks change nothing there. GPUs add
up in float32, in an order that depends on the number of rows, and round sums to bfloat16. On a CPU, products are
therefore computed in float32 here, and rounded. `--own-kernels` leaves this out.

Scores are log-probabilities over the temperature plus the noise of the position, in nats. The highest one is drawn.
"""

# ruff: noqa: E402 - MLX must load after the BLAS

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlx_cpu_kernels import speed_up

speed_up()

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear
from tests.default_settings import make_policy
from tests.engine.twin import TwinExecutor
from tests.worker.random_models import QWEN3_MOE, write_random_model
from tests.worker.stages import make_stages
from tokenizers import Tokenizer

from mlx_ring.core.errors import WorkerLost
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.types import DType, RankId, SamplingParams, TokenLogprob
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.worker.platform import attention
from mlx_ring.worker.platform.device import keep_freed_memory
from mlx_ring.worker.sampler.draw import gumbel, keys

if TYPE_CHECKING:
    from mlx_ring.engine.executor import Listener
    from mlx_ring.engine.live_request import LiveRequest
    from mlx_ring.rpc.protos import step_pb2, worker_pb2
    from mlx_ring.worker.runner import StageRunner

ROOT = Path(__file__).parents[1]
BUILT_IN = ("demo", "demo-moe")
EXPERTS: dict[str, Any] = {
    **QWEN3_MOE,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "vocab_size": 3072,
}
"""A random model whose router chooses often, and between experts that are almost equal."""
PRECISIONS: Sequence[tuple[DType, int | None]] = (
    ("float32", None),
    ("float32", 8),
    ("float32", 4),
    ("bfloat16", None),
    ("bfloat16", 8),
    ("bfloat16", 4),
)
SPLITS = {"same": 2, "other": 3}
"""Number of stages after the loss; before it there are as many as in `same`."""
_TEXT = ROOT / "docs" / "architecture.md"
_POLICY = make_policy(prefix_cache=False, num_speculative_tokens=0)
_TOP_K, _TOP = 256, 1000
"""Number of tokens that may be drawn, and of those whose log-probability is recorded, at each position.

Of more tokens than these, a sampler draws in two levels, and no score of one token decides.
"""
_LOSS = WorkerLost("The worker was lost.")


@dataclass(frozen=True)
class Sizes:
    """Number of answers, their lengths in tokens, and the losses in each."""

    answers: int = 8
    prompt: int = 96
    tokens: int = 32
    losses: int = 4


class LocalExecutor:
    """Executor whose ranks are stages in this process. Each step passes all of them before the next one begins."""

    def __init__(self, runners: Sequence[StageRunner]) -> None:
        self._runners = runners
        self._steps: deque[step_pb2.Step] = deque()
        self._listeners: list[Listener] = []

    @property
    def ranks(self) -> Sequence[RankId]:
        return [RankId(stage, 0) for stage in range(len(self._runners))]

    def set_listener(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        """Do nothing: the engine has no limits."""

    def prepare(self, wanted: worker_pb2.PrepareGrammar) -> None:
        raise ValueError(f"No request of this benchmark has a grammar, but one wants {wanted}.")

    def fetch_kv(self, wanted: worker_pb2.FetchKv) -> None:
        raise ValueError(f"No disk has KV for this benchmark, which wants {wanted}.")

    def drop_grammar(self, id_: int) -> None:
        raise ValueError(f"No request of this benchmark has a grammar, but {id_} ends.")

    def send(self, step: step_pb2.Step) -> None:
        self._steps.append(step)
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        step = self._steps.popleft()
        answers = [runner.run(step, 0) for runner in self._runners]
        for done in answers:
            if done.HasField("failure"):
                raise RuntimeError(done.failure.message)
            for listener in self._listeners:
                listener.answered(done)


@dataclass
class Differences:
    """Continued answers of one case, compared with the undisturbed ones."""

    runs: int = 0
    equal: int = 0
    redrawn: int = 0
    disagreements: int = 0
    after: list[int] = field(default_factory=list[int])
    """Number of equal new tokens before the first difference, of those that differ."""
    gaps: list[float] = field(default_factory=list[float])
    """Difference between the undisturbed run's scores of the two tokens at the first difference."""
    shifts: list[float] = field(default_factory=list[float])
    """Difference between both runs' log-probabilities of each equal token."""

    def add(
        self,
        sampling: SamplingParams,
        start: int,
        expected: Sequence[TokenLogprob],
        got: Sequence[TokenLogprob],
    ) -> None:
        """Compare new tokens, of which the first is at a position."""
        self.runs += 1
        for index, (first, second) in enumerate(zip(expected, got, strict=False)):
            if first.token != second.token:
                self.after.append(index)
                self.gaps.append(_gap(sampling, start + index, first, second.token))
                return
            self.shifts.append(abs(first.logprob - second.logprob))
        self.equal += len(expected) == len(got)

    def line(self) -> str:
        """Return the columns of the table."""
        after = f"{statistics.median(self.after):.0f}" if self.after else "-"
        gap = f"{max(self.gaps):.2g}" if self.gaps else "-"
        middle = f"{statistics.median(self.gaps):.2g}" if self.gaps else "-"
        shift = max(self.shifts, default=0.0)
        return (
            f"{self.runs:6}{self.equal / self.runs:8.0%}{self.disagreements:5}/{self.redrawn:<5}"
            f"{after:>8}{middle:>10}{gap:>10}{shift:10.2g}"
        )


def _gap(sampling: SamplingParams, position: int, first: TokenLogprob, second: int) -> float:
    """Return by how much the score of the drawn token was above another token's; infinite if that is not recorded.

    A token that was not likely enough to be drawn was as far away as it was from the least likely one of those.
    """
    known = dict(first.top) | {first.token: first.logprob}
    if second not in known:
        return math.inf
    if not sampling.temperature:
        return known[first.token] - known[second]
    likely = dict(first.top[:_TOP_K])
    if second not in likely:
        return min(likely.values()) - known[second]
    pair = mx.array([[first.token, second]])
    noise = gumbel(keys([(sampling.seed, position)])[:, :2], pair)[0].tolist()
    return (known[first.token] - known[second]) / sampling.temperature + noise[0] - noise[1]


def add_up_in_float32() -> None:
    """Let products of bfloat16 numbers add up in float32, and round the sums to bfloat16."""

    def rounded(product: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def compute(*operands: Any, **options: Any) -> mx.array:
            if all(getattr(each, "dtype", None) != mx.bfloat16 for each in operands):
                return product(*operands, **options)
            wide = {name: _widen(value) for name, value in options.items()}
            return product(*map(_widen, operands), **wide).astype(mx.bfloat16)

        return compute

    mx.array.__matmul__ = rounded(mx.array.__matmul__)
    for name in ("addmm", "gather_mm", "gather_qmm", "quantized_matmul"):
        setattr(mx, name, rounded(getattr(mx, name)))
    attention._stock = rounded(attention._stock)  # noqa: SLF001 - the product replaces the function of MLX


def _widen(value: Any) -> Any:
    return value.astype(mx.float32) if isinstance(value, mx.array) and value.dtype == mx.bfloat16 else value


def _widen_weights(runner: StageRunner) -> None:
    """Store matrices as float32, with the same values, so that products need not convert them each time."""
    for module in runner._model.model.modules():  # noqa: SLF001 - a worker has no use for it
        if isinstance(module, nn.Linear | SwitchLinear):
            module.weight = module.weight.astype(mx.float32)
            mx.eval(module.weight)


class Case:
    """A model in one precision: the engines before and after the loss."""

    def __init__(self, folder: Path, dtype: DType, kv_bits: int | None, *, widens: bool) -> None:
        found = read_model_folder(folder)
        self.vocabulary = Vocabulary(lambda tokens: "x" * len(tokens), frozenset(), found.vocab_size)
        self.limits = Limits(context_length=4096, vocab_size=found.vocab_size, eos=frozenset())
        self.engines: dict[int, Engine] = {}
        for stages in SPLITS.values():
            cuts = [round(found.num_layers * stage / stages) for stage in range(stages + 1)]
            runners = make_stages(folder, cuts, dtype=dtype, kv_bits=kv_bits)
            if widens:
                for runner in runners:
                    _widen_weights(runner)
            self.engines[stages] = self._engine(LocalExecutor(runners))

    def _engine(self, executor: LocalExecutor | TwinExecutor, **options: Any) -> Engine:
        return Engine(
            executor,
            self.vocabulary,
            self.limits,
            instance="test",
            epoch=1,
            policy=_POLICY,
            **options,
        )

    async def answer(self, requests: Sequence[GenerateRequest]) -> list[list[TokenLogprob]]:
        """Return the undisturbed answers to requests that run at the same time."""
        streams = self.engines[SPLITS["same"]].submit_all(*requests)
        return await asyncio.gather(*map(_read, streams))

    async def continue_answers(
        self,
        requests: Sequence[GenerateRequest],
        expected: Sequence[Sequence[TokenLogprob]],
        position: int,
        stages: int,
    ) -> list[tuple[int, list[TokenLogprob]]]:
        """Lose the ranks when each answer has some tokens or a few more; continue all of them on real stages.

        Returns:
            The number of delivered tokens of each answer, and those that follow, up to a difference.
        """
        known = {request.prompt_tokens: answer for request, answer in zip(requests, expected, strict=True)}
        length = len(requests[0].prompt_tokens)
        lives: list[LiveRequest] = []

        def next_token(history: Sequence[int]) -> int:
            return known[tuple(history[:length])][len(history) - length].token

        def hold(interrupted: Iterable[LiveRequest], _error: object) -> None:
            lives.extend(interrupted)

        twin = TwinExecutor((1,), next_token=next_token, automatic=False)
        streams = self._engine(twin, hold=hold).submit_all(*requests)
        delivered = [0] * len(streams)
        while min(delivered) < position:
            twin.run(twin.ranks[0])
            twin.deliver(twin.ranks[0])
            for index, stream in enumerate(streams):
                delivered[index] += sum(len(delta.token_ids) for delta in stream.take())
        twin.lose(_LOSS)
        self.engines[stages].take_over(lives)
        rest = [answer[count:] for answer, count in zip(expected, delivered, strict=True)]
        return list(zip(delivered, await asyncio.gather(*map(_read, streams, rest)), strict=True))


async def _read(stream: RequestStream, expected: Sequence[TokenLogprob] = ()) -> list[TokenLogprob]:
    """Return a stream's tokens, up to the first that is not the expected one, if any are expected."""
    tokens: list[TokenLogprob] = []
    async with stream:
        async for delta in stream:
            for token in delta.logprobs:
                tokens.append(token)
                if expected and token.token != expected[len(tokens) - 1].token:
                    return tokens
    return tokens


def make_requests(folder: Path, sizes: Sizes, vocabulary: int) -> list[GenerateRequest]:
    """Return requests that continue pieces of a text; half of them are greedy."""
    file = folder / "tokenizer.json"
    if file.is_file():
        ids = Tokenizer.from_file(str(file)).encode(_TEXT.read_text(), add_special_tokens=False).ids
    else:
        ids = np.random.default_rng(0).integers(3, vocabulary, sizes.answers * sizes.prompt).tolist()
    step = (len(ids) - sizes.prompt) // max(1, sizes.answers - 1)
    greedy = SamplingParams(max_tokens=sizes.tokens, ignore_eos=True, logprobs=True, top_logprobs=_TOP)
    drawn = replace(greedy, temperature=1.0, top_k=_TOP_K)
    return [
        GenerateRequest(
            f"r{number}",
            tuple(ids[number * step : number * step + sizes.prompt]),
            replace(drawn, seed=number) if number % 2 else greedy,
        )
        for number in range(sizes.answers)
    ]


async def measure(
    folder: Path, dtype: DType, kv_bits: int | None, sizes: Sizes, *, widens: bool
) -> dict[str, Differences]:
    """Continue answers after a loss at each position, on the same split and on the other one; then ask again without."""
    case = Case(folder, dtype, kv_bits, widens=widens)
    requests = make_requests(folder, sizes, case.vocabulary.size)
    expected = await case.answer(requests)
    found: dict[str, Differences] = {}

    def add(split: str, index: int, start: int, got: Sequence[TokenLogprob]) -> None:
        request = requests[index]
        at = len(request.prompt_tokens) + start
        found.setdefault(split, Differences()).add(request.sampling, at, expected[index][start:], got)

    for split, stages in SPLITS.items():
        for loss in range(sizes.losses):
            position = 1 + loss * sizes.tokens // (sizes.losses + 1)
            after = await case.continue_answers(requests, expected, position, stages)
            for index, (start, got) in enumerate(after):
                add(split, index, start, got)
        totals = case.engines[stages].totals()
        found[split].redrawn, found[split].disagreements = totals.resume_redrawn, totals.resume_disagreements
    for index, got in enumerate(await case.answer(requests)):
        add("no loss", index, 0, got)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*BUILT_IN, "experts"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--own-kernels", action="store_true", help="compute bfloat16 with MLX's CPU kernels")
    for name in ("answers", "prompt", "tokens", "losses"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    arguments = parser.parse_args()
    sizes = Sizes(arguments.answers, arguments.prompt, arguments.tokens, arguments.losses)
    if arguments.quick:
        sizes = Sizes(answers=2, prompt=64, tokens=16, losses=2)
    columns = f"{'model':24}{'computed in':13}{'KV':>5}{'split':>9}"
    print(
        f"{columns}{'runs':>6}{'equal':>8}{'redrawn':>11}{'after':>8}{'median':>10}{'max gap':>10}{'shift':>10}"
    )
    keep_freed_memory()
    widens = mx.default_device() == mx.Device(mx.cpu) and not arguments.own_kernels
    if widens:
        add_up_in_float32()
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.models:
            folder = _folder(name, Path(scratch))
            for dtype, kv_bits in (each for each in PRECISIONS if each[0] in arguments.dtypes):
                found = asyncio.run(measure(folder, dtype, kv_bits, sizes, widens=widens))
                for split, differences in found.items():
                    line = f"{folder.name:24}{dtype:13}{kv_bits or '':>5}{split:>9}{differences.line()}"
                    print(line, flush=True)


def _folder(name: str, scratch: Path) -> Path:
    if name in BUILT_IN:
        return ROOT / "src" / "mlx_ring" / "builtin_models" / name
    if name == "experts":
        return write_random_model(scratch / name, EXPERTS, spread=0.06, norm=1.0)
    return Path(name)


if __name__ == "__main__":
    main()
