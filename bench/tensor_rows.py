"""Rows of `engine.py` for tensor parallelism: decode, prefill, and a comparison with mlx_lm.server under `mlx.launch`.

They use a model of 872 M parameters of 4 bits, so that products take most of a step. The output head, with 32,768 tokens,
is a thirteenth of it. A worker that waits in an all-reduce keeps its core busy. In all configurations, the head shares the
first worker's core.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from measuring import Bench, Ratio, decode_speed, jobs_of, load, note_round, running, steady_speed, ttft
from product_limits import limit_of_ranks
from random_model import Shape
from servers import LaunchedServer, RingServer, Server, pin_self

LARGE = Shape(layers=16, hidden=2048, intermediate=6144, vocabulary=32768, dtype="float32")
"""Model whose products take most of a step, also with native kernels."""
_PLAIN = ("--prefix-cache", "off", "--num-speculative-tokens", "0")
_PROMPT = 512
_STREAMS, _MANY_STREAMS = 8, 32
"""The second makes products take most of a step: sums, Python and the head take the same time for any number of rows."""
_MANY_FLAGS = ("--max-num-seqs", str(_MANY_STREAMS))
_LAUNCH_PROMPT = 64
"""Shorter prompt, because mlx_lm.server takes three minutes for 512 tokens of this model."""


def rows(quantized: Callable[[Shape], Any]) -> dict[str, Callable[[Bench], list[Ratio]]]:
    """Return the rows by name; `quantized` creates the model."""

    def row_tensor(bench: Bench) -> list[Ratio]:
        """Compare two ranks with one: 32 and 8 streams, one stream, and a prompt of 512 tokens."""
        tokens = 16 if bench.quick else 48
        alone, together, most = (
            limit_of_ranks(LARGE, rows, bench.cores) for rows in (1, _STREAMS, _MANY_STREAMS)
        )
        crowd: list[float] = []
        batch: list[float] = []
        decode: list[float] = []
        prefill: list[float] = []
        with _one_and_two(bench, quantized(LARGE)) as (one, two):
            for number in range(bench.rounds + 1):
                everyone = jobs_of(2000 + number, _MANY_STREAMS, 16, tokens, LARGE.vocabulary)
                jobs = jobs_of(1000 + number, _STREAMS, 16, tokens, LARGE.vocabulary)
                (job,) = jobs_of(number, 1, _PROMPT, 2 * tokens, LARGE.vocabulary)
                most_of_one, most_of_two = (
                    steady_speed(load(server, everyone, _MANY_STREAMS)) for server in (one, two)
                )
                many, many_of_two = (steady_speed(load(server, jobs, _STREAMS)) for server in (one, two))
                single, double = (load(server, [job], 1)[0] for server in (one, two))
                note_round(
                    number,
                    {
                        f"{_MANY_STREAMS} streams, one tok/s": most_of_one,
                        "by two": most_of_two,
                        f"{_STREAMS} streams, one tok/s": many,
                        "two": many_of_two,
                        "one stream, one tok/s": decode_speed(single),
                        "of two": decode_speed(double),
                        "one s": ttft(single),
                        "two s": ttft(double),
                    },
                )
                crowd.append(most_of_two / most_of_one)
                batch.append(many_of_two / many)
                decode.append(decode_speed(double) / decode_speed(single))
                prefill.append(ttft(single) / ttft(double))
        return [
            Ratio(
                "tensor", f"{_MANY_STREAMS} streams, decode of two ranks over one", crowd[1:], at_least=1.6
            ),
            Ratio("tensor", "  the products alone, on these cores", [most]),
            Ratio(
                "tensor", "  of the products' own gain", [ratio / most for ratio in crowd[1:]], at_least=0.92
            ),
            Ratio("tensor", f"{_STREAMS} streams, decode of two ranks over one", batch[1:], at_least=1.6),
            Ratio("tensor", "  the products alone, on these cores", [together]),
            Ratio("tensor", "one stream, decode of two ranks over one", decode[1:], at_least=1.0),
            Ratio("tensor", "  the products alone, on these cores", [alone]),
            Ratio("tensor", f"{_PROMPT}-token prompt, TTFT of one rank over two", prefill[1:], at_least=1.7),
        ]

    def row_launch(bench: Bench) -> list[Ratio]:
        """Compare two ranks with two of mlx_lm.server under `mlx.launch`: one stream."""
        model, tokens = quantized(LARGE), 32 if bench.quick else 96
        decode: list[float] = []
        prefill: list[float] = []
        pin_self(bench.shared)
        with running(
            lambda: RingServer(model, *_PLAIN, ranks=2, cores=bench.cores, head_core=bench.shared),
            lambda: LaunchedServer(model, ranks=2, cores=bench.cores),
        ) as (ours, theirs):
            for number in range(bench.rounds + 1):
                job_for_us, job_for_them = (
                    jobs_of(number, 1, _LAUNCH_PROMPT, tokens, vocabulary)[0]
                    for vocabulary in (LARGE.vocabulary, None)
                )
                with paused(theirs):
                    own = load(ours, [job_for_us], 1)[0]
                other = load(theirs, [job_for_them], 1)[0]
                note_round(
                    number,
                    {
                        "mlx-ring tok/s": decode_speed(own),
                        "mlx_lm.server": decode_speed(other),
                        "s to the first": ttft(own),
                        "theirs": ttft(other),
                    },
                )
                decode.append(decode_speed(own) / decode_speed(other))
                prefill.append(ttft(other) / ttft(own))
        return [
            Ratio("launch", "one stream, two ranks over mlx_lm.server's two", decode[1:], at_least=1.0),
            Ratio("launch", "  its time to the first token over ours", prefill[1:], at_least=1.0),
        ]

    return {"tensor": row_tensor, "launch": row_launch}


@contextmanager
def _one_and_two(bench: Bench, model: Any) -> Generator[list[Any]]:
    pin_self(bench.shared)
    with running(
        *(
            lambda ranks=ranks: RingServer(
                model, *_PLAIN, *_MANY_FLAGS, ranks=ranks, cores=bench.cores, head_core=bench.shared
            )
            for ranks in (1, 2)
        )
    ) as servers:
        yield servers


@contextmanager
def paused(server: Server) -> Generator[None]:
    """Stop the server's processes meanwhile, because idle ranks of mlx_lm.server each use a core."""
    processes = server.processes()
    with ExitStack() as resumed:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
            resumed.callback(process.send_signal, signal.SIGCONT)
        yield
