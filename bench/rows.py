"""Rows of `engine.py`: the comparisons."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import tensor_rows
from contestants import Stock
from copying_model import make_copying
from measuring import (
    Bench,
    Ratio,
    decode_speed,
    in_both_orders,
    jobs_of,
    load,
    note_round,
    running,
    steady_speed,
    summary_of,
    ttft,
)
from product_limits import limit_of_stages
from random_model import CACHE, Shape, make
from servers import MlxLmServer, RingServer, pin_self
from simulated import MeasuredCost, steady_throughput

from mlx_ring.cli.bench.summary import Record, Summary, percentile
from mlx_ring.cli.bench.workload import Job, Range, Workload, make_jobs

FLOAT = Shape(layers=8, hidden=1024, vocabulary=4096, dtype="float32")
DEEP = Shape(layers=16, hidden=768, intermediate=2304, heads=12, kv_heads=6, vocabulary=4096, dtype="float32")
SPLIT = Shape(layers=24, hidden=2560, intermediate=9728, heads=32, vocabulary=32768)
"""Two thirds of Qwen3-4B's layers."""
_PLAIN = ("--prefix-cache", "off", "--num-speculative-tokens", "0")
_STREAMS = 128
"""Streams of two stages, in two groups: with 64 rows in each, products wait for computation, and not for memory."""
_HOP_US = 300.0
"""One-way delay between processes of this machine, including their wake-up."""


def row_loop(bench: Bench) -> list[Ratio]:
    """Compare one stage and one stream with mlx-lm's own loop."""
    model, tokens = make(FLOAT), 48 if bench.quick else 128
    loop = Stock(model, bench.one, dtype="float32", fast_blas=True)
    pin_self(bench.other)
    ratios: list[float] = []
    try:
        with running(lambda: RingServer(model, *_PLAIN, cores=bench.one, head_core=bench.other)) as (ring,):
            for number in range(bench.rounds + 1):
                (job,) = jobs_of(number, 1, 64, tokens, FLOAT.vocabulary)
                ours = decode_speed(load(ring, [job], 1)[0])
                theirs = loop.run(list(job.prompt), tokens).decode  # pyright: ignore[reportArgumentType]
                note_round(number, {"mlx-ring tok/s": ours, "mlx-lm's loop": theirs})
                ratios.append(ours / theirs)
    finally:
        loop.stop()
    return [Ratio("loop", "decode through HTTP over mlx-lm's loop", ratios[1:], at_least=0.97)]


def row_server(bench: Bench) -> list[Ratio]:
    """Compare one stage and eight streams with mlx_lm.server."""
    model, tokens, requests = make(FLOAT), 32 if bench.quick else 64, 8 if bench.quick else 16
    pin_self(bench.other)
    speed: list[float] = []
    first: list[float] = []
    for number, ring, theirs in in_both_orders(
        bench,
        lambda: RingServer(model, *_PLAIN, cores=bench.one, head_core=bench.other),
        lambda: MlxLmServer(model, core=bench.shared),
    ):
        jobs = jobs_of(number, requests, 64, tokens, None)
        ours, other = (summary_of(load(server, jobs, 8)) for server in (ring, theirs))
        note_round(
            number,
            {
                "mlx-ring tok/s": ours.output_tokens_per_s,
                "mlx_lm.server": other.output_tokens_per_s,
                "TTFT p95": _p95(ours),
                "theirs": _p95(other),
            },
        )
        if number:
            speed.append(ours.output_tokens_per_s / other.output_tokens_per_s)
            first.append(_p95(ours) / _p95(other))
    return [
        Ratio("server", "8 streams, throughput over mlx_lm.server", speed, at_least=1.0),
        Ratio("server", "8 streams, p95 TTFT over mlx_lm.server", first, at_most=1.0),
    ]


def row_quantized(bench: Bench) -> list[Ratio]:
    """Compare one stage and eight streams with mlx_lm.server: 281 M parameters of 4 bits, a vocabulary of 151,936."""
    model, tokens = quantized(Shape(dtype="float32")), 8 if bench.quick else 16
    pin_self(bench.other)
    ratios: list[float] = []
    for number, ring, theirs in in_both_orders(
        bench,
        lambda: RingServer(model, *_PLAIN, cores=bench.one, head_core=bench.other),
        lambda: MlxLmServer(model, core=bench.shared),
    ):
        jobs = jobs_of(number, 8, 16, tokens, None)
        ours, other = (summary_of(load(server, jobs, 8)).output_tokens_per_s for server in (ring, theirs))
        note_round(number, {"mlx-ring tok/s": ours, "mlx_lm.server": other})
        if number:
            ratios.append(ours / other)
    return [Ratio("quantized", "8 streams of 4 bits, over mlx_lm.server", ratios, at_least=15.0)]


def row_streams(bench: Bench) -> list[Ratio]:
    """Compare two stages with one: as many streams as make even the groups of a stage compute-bound.

    The fewer rows a product has, the more of its time goes into reading weights, which a group of half the rows does
    again. So the row also prints what the products alone would gain on these cores.
    """
    tokens, streams = (12, 16) if bench.quick else (24, _STREAMS)
    products = limit_of_stages(tensor_rows.LARGE, streams, bench.cores)
    ratios: list[float] = []
    limits: list[float] = []
    of_simulation: list[float] = []
    with _one_and_two(bench, None, "--max-num-seqs", str(streams)) as (one, two):
        for number in range(bench.rounds + 1):
            jobs = jobs_of(number, streams, 16, tokens, tensor_rows.LARGE.vocabulary)
            single, double = (steady_speed(load(server, jobs, streams)) for server in (one, two))
            means = decode_means_us(two)
            limit = sum(means) / max(means)
            predicted = steady_throughput(
                [MeasuredCost(mean) for mean in means], streams=streams, hop_us=_HOP_US
            )
            note_round(
                number,
                {"one tok/s": single, "two": double, "the cut's limit": limit, "simulated tok/s": predicted},
            )
            ratios.append(double / single)
            limits.append(double / single / limit)
            of_simulation.append(double / predicted)
    return [
        Ratio("streams", f"{streams} streams, two stages over one", ratios[1:], at_least=1.8),
        Ratio("streams", "  the products alone, on these cores", [products]),
        Ratio(
            "streams",
            "  of the products' own gain",
            [ratio / products for ratio in ratios[1:]],
            at_least=0.92,
        ),
        Ratio("streams", "  of the cut's own limit", limits[1:], at_least=0.92),
        Ratio(
            "streams",
            "  over the simulated scheduler, with these stages",
            of_simulation[1:],
            at_least=0.9,
            at_most=1.1,
        ),
    ]


def row_prompt(bench: Bench) -> list[Ratio]:
    """Compare the time to first token of a long prompt on one and two stages, in float32, where prefill is compute-bound.

    In the last layer, a chunk without sampling needs only keys and values. With 8 layers this would make the second
    stage lighter by a seventh, whatever the split. This model has 16, about half of a small production model.
    """
    length = 1000 if bench.quick else 4000
    ratios: list[float] = []
    with _one_and_two(bench, make(DEEP)) as (one, two):
        for number in range(bench.rounds):
            jobs = jobs_of(number, 1, length, 1, DEEP.vocabulary)
            single, double = (ttft(load(server, jobs, 1)[0]) for server in (one, two))
            note_round(number, {"one s": single, "two": double})
            ratios.append(single / double)
    return [Ratio("prompt", f"{length}-token prompt, TTFT of one stage over two", ratios, at_least=1.7)]


def row_stream(bench: Bench) -> list[Ratio]:
    """Compare two stages with one: one stream of 2.5 G parameters of 4 bits.

    Two stages add the same time to every token, whatever the model. So this one is of a size that people would split.
    """
    tokens = 32 if bench.quick else 96
    ratios: list[float] = []
    with _one_and_two(bench, None if bench.quick else quantized(SPLIT)) as (one, two):
        for number in range(bench.rounds + 1):
            jobs = jobs_of(number, 1, 16, tokens, tensor_rows.LARGE.vocabulary)
            single, double = (decode_speed(load(server, jobs, 1)[0]) for server in (one, two))
            note_round(number, {"one tok/s": single, "two": double})
            ratios.append(double / single)
    return [Ratio("stream", "one stream, decode of two stages over one", ratios[1:], at_least=0.97)]


def row_prefix(bench: Bench) -> list[Ratio]:
    """Send two prompts with the same long prefix."""
    length = 500 if bench.quick else 2000
    pin_self(bench.other)
    ratios: list[float] = []
    with running(lambda: RingServer(make(FLOAT), cores=bench.one, head_core=bench.other)) as (ring,):
        for number in range(bench.rounds):
            workload = Workload(
                2, Range(length + 16, length + 16), Range(4, 4), shared_prefix=length, seed=number
            )
            first, second = load(ring, list(make_jobs(workload, FLOAT.vocabulary)), 1)
            note_round(number, {"first s": ttft(first), "second": ttft(second)})
            if second.cached_tokens < length:
                raise SystemExit(f"Only {second.cached_tokens} tokens came from the prefix cache.")
            ratios.append(ttft(second) / ttft(first))
    return [Ratio("prefix", f"{length} tokens again, TTFT over the first", ratios, at_most=0.1)]


def row_lookup(bench: Bench) -> list[Ratio]:
    """Compare prompt lookup on and off."""
    tokens = 48 if bench.quick else 128
    pin_self(bench.other)
    copying, plain = make_copying(), make(FLOAT)
    result: list[Ratio] = []
    for what, model, target, options, repeats in (
        ("text that repeats its prompt", copying, 1.5, {}, True),
        ("text that does not", plain, 0.95, {"temperature": 1.0}, False),
    ):
        ratios: list[float] = []
        for number, with_drafts, without in in_both_orders(
            bench,
            lambda model=model: RingServer(
                model, "--num-speculative-tokens", "8", cores=bench.one, head_core=bench.other
            ),
            lambda model=model: RingServer(
                model, "--num-speculative-tokens", "0", cores=bench.one, head_core=bench.other
            ),
        ):
            text = random.Random(number).sample(range(FLOAT.vocabulary), 300)
            # A text followed by its own beginning resembles an edit.
            job = Job(number, [*text, *text[:16]] if repeats else text, tokens, 0.0)
            fast, slow = (
                decode_speed(load(server, [job], 1, **options)[0]) for server in (with_drafts, without)
            )
            note_round(number, {"with tok/s": fast, "without": slow})
            if number:
                ratios.append(fast / slow)
        result.append(Ratio("lookup", f"drafts on over off, {what}", ratios, at_least=target))
    return result


def row_latency(bench: Bench) -> list[Ratio]:
    """Compare running streams during a long prefill with the same tokens of the same streams without it."""
    length, tokens = (600, 150) if bench.quick else (8000, 1200)
    pin_self(bench.other)
    ratios: list[float] = []
    with running(lambda: RingServer(make(FLOAT), *_PLAIN, cores=bench.one, head_core=bench.other)) as (ring,):
        for number in range(max(1, bench.rounds - 1)):
            streams = [
                replace(job, arrives_s=0.0) for job in jobs_of(number, 4, 16, tokens, FLOAT.vocabulary)
            ]
            long = Job(
                90_000 + number, jobs_of(500 + number, 1, length, 1, FLOAT.vocabulary)[0].prompt, 1, 4.0
            )
            alone = load(ring, streams, None)
            *beside, prompt = load(ring, [*streams, long], None)
            busy, quiet = _gaps_during_prefill(beside, prompt, alone)
            p95 = [percentile(sorted(gaps), 95) for gaps in (busy, quiet)]
            ratios.append(p95[0] / p95[1])
            note_round(
                number,
                {
                    "p95 ms": 1000 * p95[0],
                    "without": 1000 * p95[1],
                    "prompt s": ttft(prompt),
                    "tokens": len(busy),
                },
            )
    return [Ratio("latency", f"p95 between tokens while {length} tokens prefill", ratios, at_most=3.0)]


# ---- parts of rows


@contextmanager
def _one_and_two(bench: Bench, model: Path | None = None, *flags: str) -> Generator[list[Any]]:
    """Serve the same model on one stage and on two; quantized by default."""
    folder = model or quantized(tensor_rows.LARGE)
    pin_self(bench.shared)
    with running(
        *(
            lambda stages=stages: RingServer(
                folder, *_PLAIN, *flags, stages=stages, cores=bench.cores, head_core=bench.shared
            )
            for stages in (1, 2)
        )
    ) as servers:
        yield servers


def quantized(shape: Shape, bits: int = 4) -> Path:
    """Return the random model with quantized weights, group size 64, and everything else in float32."""
    folder = CACHE / f"{make(shape).name}-{bits}bit"
    if not (folder / "config.json").is_file():
        from mlx_lm import convert  # pyright: ignore[reportUnknownVariableType]

        convert(str(make(shape)), str(folder), quantize=True, q_bits=bits, q_group_size=64, dtype="float32")
    return folder


def decode_means_us(server: RingServer) -> list[float]:
    """Return the mean duration of a decode step on each stage, as the stages timed it."""
    steps = httpx.get(f"{server.url}/cluster/status", trust_env=False).json()["step_times"]
    return [stage["decode_compute_us"] for stage in steps]


def _p95(summary: Summary) -> float:
    if summary.ttft is None:
        raise SystemExit("No token arrived.")
    return summary.ttft.p95


def _gaps_during_prefill(
    streams: Sequence[Record], prompt: Record, alone: Sequence[Record]
) -> tuple[list[float], list[float]]:
    """Return the seconds between tokens during the prefill, and between the same tokens without it."""
    begin, end = prompt.sent_s, prompt.arrivals_s[0]
    busy: list[float] = []
    quiet: list[float] = []
    for record, other in zip(streams, alone, strict=True):
        if len(record.arrivals_s) != len(other.arrivals_s):
            raise SystemExit(
                "A stream arrived in different pieces the second time, so its tokens cannot be compared."
            )
        pairs = zip(pairwise(record.arrivals_s), pairwise(other.arrivals_s), strict=True)
        for (earlier, later), (earlier_alone, later_alone) in pairs:
            if earlier > begin and later < end:
                busy.append(later - earlier)
                quiet.append(later_alone - earlier_alone)
    if not busy:
        raise SystemExit("The streams ended before the long prompt arrived. Give them more tokens.")
    return busy, quiet


ROWS: dict[str, Callable[[Bench], list[Ratio]]] = {
    "loop": row_loop,
    "server": row_server,
    "quantized": row_quantized,
    "streams": row_streams,
    "prompt": row_prompt,
    "stream": row_stream,
    "prefix": row_prefix,
    "lookup": row_lookup,
    "latency": row_latency,
    **tensor_rows.rows(quantized),
}
