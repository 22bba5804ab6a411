"""Compare stock MLX with MLX on OpenBLAS, on a Linux CPU.

    python bench/blas.py [--rounds 3] [--threads 1] [--core-type native]

Each variant runs in its own process, in turn; results are medians over the rounds. Measures matrix products with
many, one and four rows, and prefill and decode of a Qwen3 with 285 M random parameters in mlx-lm's own `generate_step`.
With one thread, pin it to a core (`taskset`). Compare the ratios, because absolute numbers depend on the machine's load.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (mlx's stubs do not type `eval` and its trees)
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

STOCK = "stock"
FAST = "fast"
STOCK_BFLOAT16 = "stock bf16"

PROMPT_TOKENS = 512
DECODE_PROMPT_TOKENS = 16
DECODE_TOKENS = 16

VOCABULARY = 32768

# 16 layers of 15.7 M parameters and a tied embedding of 33.5 M.
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}

# Together larger than any cache, so that each product reads its weights from memory.
WEIGHT_COPIES = 8
WEIGHT_SHAPE = (3072, 1024)

Measurements = dict[str, float]


def main() -> None:
    arguments = _parse_arguments()
    if arguments.measure:
        print(json.dumps(_measure(arguments.measure, arguments.threads)))
        return
    variants = [STOCK, FAST, *([STOCK_BFLOAT16] if arguments.bfloat16 else [])]
    rounds: dict[str, list[Measurements]] = {variant: [] for variant in variants}
    for number in range(arguments.rounds):
        for variant in variants:
            print(f"round {number + 1} of {arguments.rounds}: {variant}", file=sys.stderr)
            rounds[variant].append(_measure_in_subprocess(variant, arguments))
    _print_table({variant: _medians(results) for variant, results in rounds.items()})


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--core-type", help="set OPENBLAS_CORETYPE; 'native' unsets it")
    parser.add_argument("--bfloat16", action="store_true", help="also measure stock MLX in bfloat16")
    parser.add_argument("--measure", choices=[STOCK, FAST, STOCK_BFLOAT16], help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure_in_subprocess(variant: str, arguments: argparse.Namespace) -> Measurements:
    """Measure in a separate process, because an installed BLAS cannot be removed."""
    command = [sys.executable, __file__, "--measure", variant, "--threads", str(arguments.threads)]
    environment = dict(os.environ)  # noqa: TID251 - the child's environment, with one change
    if arguments.core_type:
        environment["OPENBLAS_CORETYPE"] = arguments.core_type
    if arguments.core_type == "native":
        environment.pop("OPENBLAS_CORETYPE", None)
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output)


def _measure(variant: str, threads: int) -> Measurements:
    if variant == FAST:
        from mlx_cpu_kernels.blas import install_fast_blas

        print(install_fast_blas(threads), file=sys.stderr)
    import mlx.core as mx

    dtype = mx.bfloat16 if variant == STOCK_BFLOAT16 else mx.float32
    return _measure_products(dtype) | _measure_model(dtype)


def _measure_products(dtype: mx.Dtype) -> Measurements:
    import mlx.core as mx

    rows, columns = WEIGHT_SHAPE
    weights = [mx.random.normal(WEIGHT_SHAPE).astype(dtype) for _ in range(WEIGHT_COPIES)]
    mx.eval(weights)
    turn = count()

    def seconds(tokens: int) -> float:
        inputs = mx.random.normal((tokens, columns)).astype(dtype)
        mx.eval(inputs)
        return _median_seconds(lambda: mx.eval(inputs @ weights[next(turn) % WEIGHT_COPIES].T))

    weight_gigabytes = weights[0].nbytes / 1e9
    return {
        "GEMM, 512 rows (GFLOP/s)": 2 * 512 * rows * columns / seconds(512) / 1e9,
        "1 row, weights read (GB/s)": weight_gigabytes / seconds(1),
        "4 rows, weights read (GB/s)": weight_gigabytes / seconds(4),
    }


def _measure_model(dtype: mx.Dtype) -> Measurements:
    import mlx.core as mx
    from mlx_lm.models.qwen3 import Model, ModelArgs

    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(QWEN3))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    _generate_seconds(model, 8, 2)
    prefill, _ = _generate_seconds(model, PROMPT_TOKENS, 1)
    _, decode = _generate_seconds(model, DECODE_PROMPT_TOKENS, DECODE_TOKENS)
    return {
        f"prefill of {PROMPT_TOKENS} tokens (tok/s)": PROMPT_TOKENS / prefill,
        "decode (tok/s)": 1 / decode,
    }


def _generate_seconds(model: nn.Module, prompt_tokens: int, tokens: int) -> tuple[float, float]:
    """Return the seconds until the first token and the median between tokens, in mlx-lm's own loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    prompt = mx.random.randint(0, VOCABULARY, (prompt_tokens,))
    mx.eval(prompt)
    start = time.perf_counter()
    stamps = [start, *(time.perf_counter() for _ in generate_step(prompt, model, max_tokens=tokens))]
    first, *others = [after - before for before, after in pairwise(stamps)]
    return first, statistics.median(others) if others else 0.0


def _median_seconds(work: Callable[[], None]) -> float:
    """Return the median seconds of `work`, repeated for two seconds but at most 41 times."""
    work()
    seconds: list[float] = []
    while len(seconds) < 41 and sum(seconds) < 2:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _medians(results: list[Measurements]) -> Measurements:
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def _print_table(medians: dict[str, Measurements]) -> None:
    """Print all measurements of all variants, and the ratio of the fast BLAS to each other variant."""
    others = [variant for variant in medians if variant != FAST]
    columns = [*medians, *(f"{FAST} / {other}" for other in others)]
    print(f"{'':34}" + "".join(f"{column:>18}" for column in columns))
    for name in medians[FAST]:
        values = [medians[variant][name] for variant in medians]
        ratios = [medians[FAST][name] / medians[other][name] for other in others]
        cells = [*(f"{value:18.1f}" for value in values), *(f"{ratio:17.1f}x" for ratio in ratios)]
        print(f"{name:34}" + "".join(cells))


if __name__ == "__main__":
    main()
