"""mlx-lm's own loop, in a process of its own: reads jobs as JSON lines, answers with seconds.

    python bench/stock.py MODEL float32|stored [fast-blas]

With `fast-blas` it computes with the library that our workers use, otherwise with what its wheel brings.

Prefill ends at the first token and decode is what follows, as mlx-lm counts its own tokens per second.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (the stubs of mlx leave `eval` and its trees without types)
import json
import sys
import time

if "fast-blas" in sys.argv:
    from mlx_ring.worker.platform.blas.install import install_fast_blas

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
