"""Roles of `gpu.py`: what mlx-lm and MLX compute by themselves, each in its own process and on a chosen device."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from random_model import Shape, write_tokenizer

from mlx_ring.core.environment import package_version

BUILT_IN = Path(__file__).parents[1] / "src" / "mlx_ring" / "builtin_models"
TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "Question: what is two plus two? Answer:",
    "In 1969 the first people",
    "A list of fruits: apple,",
)
MODELS: dict[str, tuple[Shape, int | None]] = {
    "1 B bfloat16": (
        Shape(
            layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64, vocabulary=128_256
        ),
        None,
    ),
    "8 B 4-bit": (Shape(layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8), 4),
}
PROMPT, ANSWER = 2048, 128


def run_apart(role: str, *arguments: str, device: str = "gpu") -> Any:
    """Run a role of this file in another process and return the JSON value that it prints last."""
    command = [sys.executable, str(Path(__file__)), "--device", device, role, *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def device_role() -> dict[str, Any]:
    import mlx.core as mx

    is_gpu = mx.default_device() != mx.Device(mx.cpu)
    return {
        "gpu": is_gpu,
        "nccl": mx.distributed.is_available("nccl"),
        "mlx": package_version("mlx"),
        "info": mx.device_info() if is_gpu else {},
    }


def tokens_role(folder: str) -> list[dict[str, Any]]:
    """Return mlx-lm's greedy answers in float32, and by how much each token's score exceeds the second."""
    import mlx.core as mx
    from mlx_lm import load as load_model
    from mlx_lm.generate import generate_step

    model, tokenizer = load_model(folder)[:2]
    model.set_dtype(mx.float32)
    answers: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        ids = list(tokenizer.encode(prompt))
        answer: dict[str, Any] = {"prompt": ids, "texts": [], "gaps": [], "scores": []}
        tokens: list[int] = []
        begin = len(tokenizer.decode(ids, skip_special_tokens=True))
        for token, scores in generate_step(mx.array(ids), model, max_tokens=TOKENS):
            second, first = cast("list[float]", mx.sort(scores)[-2:].tolist())
            tokens.append(int(token))
            answer["gaps"].append(first - second)
            answer["scores"].append(first)
            answer["texts"].append(tokenizer.decode(ids + tokens, skip_special_tokens=True)[begin:])
        answers.append(answer)
    return answers


def write_role(folder: str, name: str) -> int:
    """Write a random model and return its number of weights."""
    import mlx.core as mx

    shape, bits = MODELS[name]
    target = Path(folder)
    target.mkdir(parents=True)
    write_tokenizer(BUILT_IN / "demo", target, shape.vocabulary)
    config = shape.config() | {
        "eos_token_id": json.loads((BUILT_IN / "demo" / "config.json").read_text())["eos_token_id"]
    }
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, mx.array] = {}
    for tensor, dimensions in shape.tensors():
        values = (0.02 * mx.random.normal(dimensions) + float("norm" in tensor)).astype(mx.bfloat16)
        if bits and len(dimensions) > 1:
            stem = tensor.removesuffix("weight")
            weight, scales, biases = mx.quantize(values, group_size=64, bits=bits)
            tensors |= {f"{stem}weight": weight, f"{stem}scales": scales, f"{stem}biases": biases}
        else:
            tensors[tensor] = values
        mx.eval(tensors)
    mx.save_safetensors(str(target / "model.safetensors"), tensors, {"format": "mlx"})
    return shape.parameters


def stock_role(folder: str) -> dict[str, float]:
    """Return mlx-lm's speeds in this process: medians of three rounds after one that warms up."""
    import mlx.core as mx
    from mlx_lm import load as load_model
    from mlx_lm.generate import generate_step

    model = load_model(folder)[0]
    rounds: list[tuple[float, float]] = []
    for number in range(4):
        mx.random.seed(number)
        prompt = mx.random.randint(3, 1000, (PROMPT,))
        mx.eval(prompt)
        started = time.perf_counter()
        arrivals = [time.perf_counter() - started for _ in generate_step(prompt, model, max_tokens=ANSWER)]
        rounds.append((PROMPT / arrivals[0], (ANSWER - 1) / (arrivals[-1] - arrivals[0])))
    prefill, decode = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    return {"prefill": prefill, "decode": decode, "peak_bytes": mx.get_peak_memory()}


def bandwidth_role() -> float:
    """Return the bytes that the device reads in a second: the best of several sums over 4 GB."""
    import mlx.core as mx

    values = mx.zeros((1 << 16, 1 << 15), mx.bfloat16)
    mx.eval(values)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        mx.eval(mx.max(values))
        best = min(best, time.perf_counter() - started)
    return values.nbytes / best


def products_role() -> dict[str, dict[str, float]]:
    """Return microseconds and errors of products with 4-bit weights: MLX's own, and those of mlx-ring's workers.

    The errors are parts of the largest result.
    """
    import mlx.core as mx

    from mlx_ring.worker.platform.device import choose_products, own_product

    choose_products("auto", 1)
    weights = mx.quantize((0.02 * mx.random.normal((12288, 4096))).astype(mx.bfloat16), bits=4)
    exact = mx.dequantize(*weights, bits=4).astype(mx.float32)
    found: dict[str, dict[str, float]] = {}
    for sequences, tokens in ((1, 1), (4, 1), (8, 1), (32, 1), (1, 128), (1, 512), (1, 2048)):
        x = mx.random.normal((sequences, tokens, 4096)).astype(mx.bfloat16)
        right = x.astype(mx.float32) @ exact.T
        values: dict[str, float] = {}
        for name, multiply in (("mlx", own_product), ("mlx-ring", mx.quantized_matmul)):
            product = partial(multiply, x, *weights, bits=4)
            error = mx.abs(product() - right).max() / mx.abs(right).max()
            values |= {
                f"{name} error": cast("float", error.item()),
                f"{name} us": 1e6 * _median_seconds(product),
            }
        found[f"{sequences} x {tokens} rows"] = values
    return found


def _median_seconds(compute: Callable[[], Any], rounds: int = 7, repeats: int = 10) -> float:
    """Return the median time of one of several results that are computed together."""
    import mlx.core as mx

    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        mx.eval([compute() for _ in range(repeats)])
        times.append((time.perf_counter() - started) / repeats)
    return statistics.median(times)


def nccl_role() -> dict[str, Any]:
    """Join a group of one rank by the variables that workers set, and sum in it."""
    from mlx_ring.core.environment import set_for_libraries
    from mlx_ring.rpc.protos import worker_pb2
    from mlx_ring.worker.group import group_variables

    with tempfile.TemporaryDirectory() as scratch:
        assignment = worker_pb2.StageAssignment(group=["127.0.0.1:29543"])
        set_for_libraries(group_variables("nccl", 0, assignment, Path(scratch)))
        import mlx.core as mx

        started = time.perf_counter()
        group = mx.distributed.init(strict=True, backend="nccl")
        joined_s = time.perf_counter() - started
        values = mx.random.normal((4, 4096)).astype(mx.bfloat16)
        total = mx.distributed.all_sum(values, group=group)
        return {
            "rank": group.rank(),
            "size": group.size(),
            "joined_s": joined_s,
            "sum_is_exact": bool(mx.array_equal(total, values).item()),
        }


ROLES: dict[str, Callable[..., Any]] = {
    "device": device_role,
    "tokens": tokens_role,
    "write": write_role,
    "stock": stock_role,
    "bandwidth": bandwidth_role,
    "nccl": nccl_role,
    "products": products_role,
}


def main() -> None:
    """Run a role in this process, and print its result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    if options.device == "cpu":
        import mlx.core as mx

        mx.set_default_device(mx.Device(mx.cpu))
    print(json.dumps(ROLES[options.role](*options.arguments)))


if __name__ == "__main__":
    main()
