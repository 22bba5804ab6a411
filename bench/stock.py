"""Run mlx-lm's own loop: read jobs as JSON lines, and write the measured seconds.

    python bench/stock.py MODEL float32|stored [fast-blas]

With `fast-blas` it uses the BLAS of mlx-ring's workers, otherwise the one in MLX's wheel.

Prefill ends at the first token, and decode is the rest, as in mlx-lm's own tokens per second.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (mlx's stubs do not type `eval` and its trees)
import json
import sys
import time

if "fast-blas" in sys.argv:
    from mlx_cpu_kernels.blas.install import install_fast_blas

    install_fast_blas(1)

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step


def main() -> None:
    folder, dtype = sys.argv[1:3]
    model = load(folder)[0]
    if dtype == "float32":
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    _answer({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        steps = generate_step(mx.array(job["prompt"]), model, max_tokens=job["new_tokens"])
        _answer({"arrivals_s": [time.perf_counter() - started for _ in steps]})


def _answer(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
