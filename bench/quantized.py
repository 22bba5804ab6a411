"""Compare products with quantized weights and quantized models: native kernels, MLX's own operations, and float32.

    taskset -c 1 python bench/quantized.py [TABLE ...] [--rounds 5]

Each table measures its variants in turn, in one process, and prints medians. Run it pinned to a core.

- `products`: 4096 x 4096 weights of 4 bits in groups of 64, with 1, 8 and 512 rows. Several matrices in turn keep the
  weights out of the cache. The share of memory's speed is that of a plain sum over as many bytes.
- `modes`: products with weights of the modes mxfp4, nvfp4 and mxfp8, beside those of 4 bits. Then the experts of a
  gpt-oss-20b layer in mxfp4: 32 of 2880 x 2880, four a token.
- `fallback`: the products on a machine without kernels: by MLX's own operation, with tiles of weights converted first,
  and with the weights held as float32.
- `layers`: what a layer of SmolLM2-135M computes beside products, for one token behind 128.
- `attention`: over keys and values of 8 and 4 bits, with 24 heads and 8 KV heads of 128 numbers: one token, 4 sequences,
  and 128 tokens, behind 2048. Beside MLX's own operations, mlx-lm's function with the kernels' products.
- `model`: a Qwen3 with 285 M random parameters: 4 bits with the kernels, and float32 with OpenBLAS.
- `folder`: a model's folder, with the kernels and with MLX's own operations.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (mlx's stubs do not type `eval` and its trees)
import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any, cast

import mlx.core as mx
import numpy as np
from blas import QWEN3
from mlx import nn

from mlx_cpu_kernels import fallback, operations, speed_up
from mlx_ring.core.environment import library_variable, worker_environment

SIDE = 4096
COPIES = 8
"""Number of matrices: together larger than the last cache."""
PROMPT_TOKENS = 512
NEW_TOKENS = 24
Variants = dict[str, Callable[[], object]]


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def compare(variants: Variants, rounds: int) -> dict[str, float]:
    """Return the median seconds of each variant, measured in turn after one warm-up."""
    for action in variants.values():
        action()
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, action in variants.items():
            taken[name].append(seconds(action))
    return {name: statistics.median(each) for name, each in taken.items()}


@contextmanager
def own_operations() -> Iterator[None]:
    """Give MLX its own operations for a while."""
    operations.uninstall()
    try:
        yield
    finally:
        operations.install()


def products(rounds: int) -> None:
    weights = [mx.quantize(mx.random.normal((SIDE, SIDE)), group_size=64, bits=4) for _ in range(COPIES)]
    dense = [mx.random.normal((SIDE, SIDE)) for _ in range(2)]
    mx.eval(weights, dense)
    matrices, floats = cycle(weights), cycle(dense)
    own = operations.stock("quantized_matmul")
    nbytes = sum(part.nbytes for part in weights[0])
    bandwidth = memory_speed(rounds)
    print(
        f"memory: {bandwidth / 1e9:.1f} GB/s\n\nrows   kernels ms     GB/s  GFLOP/s  over MLX's  over float32's"
    )
    for rows in (1, 2, 4, 8, 16, 64, 512):
        x = mx.random.normal((rows, SIDE))
        mx.eval(x)
        variants: Variants = {
            "kernels": lambda x=x: mx.eval([mx.quantized_matmul(x, *next(matrices)) for _ in range(COPIES)]),
            "float32": lambda x=x: mx.eval([x @ next(floats).T for _ in range(2)]),
        }
        if rows <= 16:  # MLX's own takes seconds for more
            variants["own"] = lambda x=x: mx.eval(own(x, *weights[0]))
        taken = compare(variants, rounds)
        each, rate = taken["kernels"] / COPIES, 2 * rows * SIDE**2 / 1e9
        over_own = f"{taken['own'] / each:9.1f}" if "own" in taken else "        -"
        share = f" ({nbytes / each / bandwidth:.0%} of memory)" if rows == 1 else ""
        print(
            f"{rows:4d} {each * 1e3:12.3f} {nbytes / each / 1e9:8.1f} {rate / each:8.1f}   {over_own}"
            f" {taken['float32'] / 2 / each:15.2f}{share}"
        )


def modes(rounds: int) -> None:
    print("\nweights        rows   kernels ms  G weights/s   MLX's own ms   over MLX's")
    options: dict[str, dict[str, Any]] = {
        "affine, 4 bits": {"group_size": 64, "bits": 4},
        **{mode: {"mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")},
    }
    own = operations.stock("quantized_matmul")
    matrices = {
        name: [mx.quantize(mx.random.normal((SIDE, SIDE)), **given) for _ in range(4)]
        for name, given in options.items()
    }
    mx.eval(matrices)
    for rows in (1, 8):
        x = mx.random.normal((rows, SIDE))
        mx.eval(x)
        variants: Variants = {}
        for name, given in options.items():
            both = {"kernels": mx.quantized_matmul, "own": own}
            for variant, multiply in both.items():
                variants[f"{name} {variant}"] = partial(_multiply_all, multiply, x, matrices[name], given)
        taken = compare(variants, rounds)
        for name in options:
            kernels, slow = taken[f"{name} kernels"] / 4, taken[f"{name} own"] / 4
            _print_mode(name, rows, kernels, slow, SIDE**2)
    experts = mx.quantize(mx.random.normal((32, 2880, 2880)), mode="mxfp4")
    for tokens in (1, 128):
        x = mx.random.normal((tokens, 1, 1, 2880))
        chosen = mx.random.randint(0, 32, (tokens, 4))
        mx.eval(experts, x, chosen)

        def gather(multiply: Callable[..., mx.array], x: mx.array = x, chosen: mx.array = chosen) -> None:
            mx.eval(multiply(x, *experts, rhs_indices=chosen, mode="mxfp4"))

        variants = {"kernels": partial(gather, mx.gather_qmm)}
        taken = compare(variants, rounds)
        slow = compare(
            {"own": partial(gather, operations.stock("gather_qmm"))}, rounds if tokens == 1 else 1
        )["own"]
        _print_mode("mxfp4 experts", tokens, taken["kernels"], slow, 4 * 2880**2)


def _multiply_all(
    multiply: Callable[..., mx.array], x: mx.array, matrices: list[Any], given: dict[str, Any]
) -> None:
    mx.eval([multiply(x, *matrix, **given) for matrix in matrices])


def _print_mode(name: str, rows: int, kernels: float, slow: float, weights: int) -> None:
    print(
        f"{name:14} {rows:4d} {kernels * 1e3:12.3f} {weights / kernels / 1e9:12.1f} {slow * 1e3:14.2f}"
        f" {slow / kernels:12.1f}"
    )


def without_kernels(rounds: int) -> None:
    weights = [mx.quantize(mx.random.normal((SIDE, SIDE)), group_size=64, bits=4) for _ in range(2)]
    dense = [mx.random.normal((SIDE, SIDE)) for _ in range(2)]
    mx.eval(weights, dense)
    matrices, floats = cycle(weights), cycle(dense)
    own = operations.stock("quantized_matmul")
    print("\nwithout kernels: rows   own ms  converted ms  float32 ms  over MLX's: converted  float32")
    with own_operations():
        for rows in (1, 2, 3, 4, 8, 16, 64, 512):
            x = mx.random.normal((rows, SIDE))
            mx.eval(x)
            variants: Variants = {
                "converted": lambda x=x: mx.eval(fallback.multiply(own, x, *next(matrices))),
                "float32": lambda x=x: mx.eval(x @ next(floats).T),
                "own": lambda x=x: mx.eval(own(x, *next(matrices))),
            }
            taken = compare(variants, rounds if rows <= 16 else 1)
            converted, plain, slow = (taken[name] for name in ("converted", "float32", "own"))
            print(
                f"{rows:21d} {slow * 1e3:8.2f} {converted * 1e3:13.2f} {plain * 1e3:11.2f}"
                f" {slow / converted:22.1f} {slow / plain:8.1f}"
            )


def memory_speed(rounds: int) -> float:
    """Return the bytes a second of a plain sum over more memory than caches hold."""
    numbers = np.ones(64 << 20, np.float32)
    return numbers.nbytes / statistics.median(seconds(numbers.max) for _ in range(rounds + 1))


def layers(rounds: int) -> None:
    """Measure norms, rotations, attention and activation of one layer, as graphs of 20 such layers."""
    hidden = mx.random.normal((1, 1, 576))
    weight = mx.random.normal((576,))
    gate = mx.random.normal((1, 1, 1536))
    queries, keys = mx.random.normal((1, 9, 1, 64)), mx.random.normal((1, 3, 129, 64))
    mx.eval(hidden, weight, gate, queries, keys)
    activations: Any = import_module("mlx_lm.models.activations")

    def layer() -> list[mx.array]:
        rope = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 128}
        return [
            mx.fast.rms_norm(hidden, weight, 1e-5),
            mx.fast.rms_norm(hidden, weight, 1e-5),
            mx.fast.rope(queries, 64, **rope),
            mx.fast.rope(keys[:, :, :1], 64, **rope),
            mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.125),
            activations.swiglu(gate, gate),
        ]

    def measure() -> None:
        mx.eval([layer() for _ in range(20)])

    kernels = compare({"kernels": measure}, rounds)["kernels"] / 20
    with own_operations():
        own = compare({"own": measure}, rounds)["own"] / 20
    print(f"\na layer beside products: {kernels * 1e3:.3f} ms, MLX's own operations {own * 1e3:.3f} ms")


def quantized_attention(rounds: int) -> None:
    base: Any = import_module("mlx_lm.models.base")
    name = "quantized_scaled_dot_product_attention"
    own = operations.stock(name)

    def measure(attend: Callable[..., mx.array], q: mx.array, kv: Any, options: Any) -> None:
        mx.eval([attend(q * 1, *kv, scale=0.09, mask="causal", **options) for _ in range(4)])

    print(
        "\nattention over quantized keys and values    kernels ms   products' kernels   MLX's own   over both"
    )
    for bits in (8, 4):
        for batch, tokens in ((1, 1), (4, 1), (1, 128)):
            queries = mx.random.normal((batch, 24, tokens, 128))
            options = {"group_size": 64, "bits": bits}
            kv = [mx.quantize(mx.random.normal((batch, 8, 2048 + tokens, 128)), **options) for _ in range(2)]
            mx.eval(queries, kv)

            given = (queries, kv, options)
            both = {
                "kernels": partial(measure, getattr(base, name), *given),
                "products": partial(measure, own, *given),
            }
            taken = compare(both, rounds)
            with own_operations():
                slow = compare({"own": both["products"]}, 1)["own"]
            kernels, products = taken["kernels"], taken["products"]
            print(
                f"{bits} bits, {batch} x {tokens:3d} tokens behind 2048 {kernels / 4 * 1e3:18.3f} {products / 4 * 1e3:19.3f}"
                f" {slow / 4 * 1e3:11.3f}   {products / kernels:.1f} {slow / kernels:.0f}"
            )


def random_model(*, quantized: bool) -> nn.Module:
    qwen3 = import_module("mlx_lm.models.qwen3")
    mx.random.seed(0)
    model = cast("nn.Module", qwen3.Model(qwen3.ModelArgs(**QWEN3)))
    if quantized:
        nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def generate(model: nn.Module, prompt: mx.array, new_tokens: int) -> tuple[float, float]:
    """Return the tokens a second of prefill and of decode."""
    step = import_module("mlx_lm.generate").generate_step
    begin = time.perf_counter()
    moments = [time.perf_counter() for _ in step(prompt, model, max_tokens=new_tokens)]
    return len(prompt) / (moments[0] - begin), (new_tokens - 1) / (moments[-1] - moments[0])


def report(name: str, measured: list[tuple[float, float]]) -> tuple[float, float]:
    prefill, decode = (statistics.median(column) for column in zip(*measured, strict=True))
    print(f"{name:28} prefill {prefill:8.1f} tokens/s   decode {decode:7.2f} tokens/s")
    return prefill, decode


def random_models(rounds: int) -> None:
    prompt = mx.arange(PROMPT_TOKENS) * 7 % QWEN3["vocab_size"]
    models = {
        "4 bits, kernels": random_model(quantized=True),
        "float32, OpenBLAS": random_model(quantized=False),
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            with own_operations() if "float32" in name else _as_it_is():
                measured[name].append(generate(model, prompt, NEW_TOKENS))
    print(f"\nQwen3, 285 M random parameters, {PROMPT_TOKENS} tokens of prompt")
    (prefill, decode), (float_prefill, float_decode) = (report(*each) for each in measured.items())
    print(
        f"{'ratio':28} prefill {prefill / float_prefill:8.2f}            decode {decode / float_decode:7.2f}"
    )


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def folder(path: str, rounds: int) -> None:
    model = cast("nn.Module", import_module("mlx_lm").load(path)[0])
    cast("Any", model).set_dtype(mx.float32)
    mx.eval(model.parameters())
    print(f"\n{path}")
    for count in (128, 512):
        prompt = mx.arange(count) % 1000 + 100
        report(f"kernels, prompt of {count}", [generate(model, prompt, NEW_TOKENS) for _ in range(rounds)])
    with own_operations():
        report("MLX's own, prompt of 128", [generate(model, mx.arange(128) + 100, 6)])


def run_as_a_worker() -> None:
    """Start this program again with the environment of a worker, unless it runs with it.

    glibc reads it when a process starts. A worker's weights lie in large pages, as NumPy's arrays always do.
    """
    environment = worker_environment(1)
    if any(library_variable(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606 (no shell is wanted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables", nargs="*", default=["products", "modes", "fallback", "layers", "attention", "model"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    run_as_a_worker()
    mx.set_default_device(mx.Device(mx.cpu))
    import_module("mlx_lm")
    print(speed_up(1))
    tables = iter(options.tables)
    for table in tables:
        match table:
            case "products":
                products(options.rounds)
            case "modes":
                modes(options.rounds)
            case "fallback":
                without_kernels(options.rounds)
            case "layers":
                layers(options.rounds)
            case "attention":
                quantized_attention(options.rounds)
            case "model":
                random_models(options.rounds)
            case "folder":
                folder(next(tables), options.rounds)
            case _:
                parser.error(
                    f"{table} is no table: products, modes, fallback, layers, attention, model or folder FOLDER."
                )


if __name__ == "__main__":
    main()
