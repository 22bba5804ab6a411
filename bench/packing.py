"""Measure the cost and savings of activation compression, on a real model between its first and second stage.

    python bench/packing.py [--model demo] [--tokens 512]

For each dtype, a decode step and a chunk are measured. It prints the compressed share, the speeds of packing and
unpacking, and the link throughput up to which compression is faster.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (mlx-lm is untyped, and mlx's stubs leave containers open)
import argparse
import time
from typing import Any

import mlx.core as mx
from mlx_lm import load

from mlx_ring.rpc.frames import pack, unpack
from mlx_ring.worker.tensors import to_wire

_TEXT = (
    "The river rises in the hills and runs through three towns before it meets the sea. In spring the snow melts, "
    "and for some weeks its water stands as high as the old bridge. "
)
_REPEATS = 50
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def activations(model: Any, tokens: list[int]) -> mx.array:
    """Return the activations `(tokens, hidden)` in the middle of the model."""
    inner = model.model
    hidden = inner.embed_tokens(mx.array([tokens]))
    for layer in inner.layers[: len(inner.layers) // 2]:
        hidden = layer(hidden, "causal", None)
    return hidden[0]


def seconds(work: Any) -> float:
    """Return the shortest of several durations."""
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="src/mlx_ring/builtin_models/demo")
    parser.add_argument("--tokens", type=int, default=512, help="of the chunk")
    options = parser.parse_args()
    model, tokenizer, *_ = load(options.model)
    tokens = (tokenizer.encode(_TEXT) * 100)[: options.tokens]
    found = activations(model, tokens)
    print(f"{'dtype':9} {'bytes':>9} {'left':>6} {'pack MB/s':>10} {'unpack MB/s':>12}  pays up to")
    for dtype in _DTYPES:
        for rows in (found[-1:], found):
            wire = to_wire(rows.astype(dtype))
            high, packed = pack(wire.dtype, wire.data)
            size = len(wire.data)
            if not high:
                print(f"{wire.dtype:9} {size:9} {'1.000':>6}")
                continue
            packing = seconds(lambda wire=wire: pack(wire.dtype, wire.data))
            unpacking = seconds(lambda wire=wire, high=high, packed=packed: unpack(wire.dtype, high, packed))
            pays_to = (size - len(packed)) / (packing + unpacking)
            print(
                f"{wire.dtype:9} {size:9} {len(packed) / size:6.3f} {size / packing / 1e6:10.0f} "
                f"{size / unpacking / 1e6:12.0f}  {8 * pays_to / 1e6:.0f} Mbit/s"
            )


if __name__ == "__main__":
    main()
