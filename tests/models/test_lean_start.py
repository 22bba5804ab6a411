"""Imports of a worker's process, at its start and later."""

from __future__ import annotations

import subprocess
import sys

from tests.processes import clean_environment

START = "import sys; from mlx_ring.models.lean_imports import import_mlx_lm; import_mlx_lm(); "


def said(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_worker_starts_without_tokenizers_and_the_hubs_client() -> None:
    unused = {"transformers", "tokenizers", "huggingface_hub", "httpx", "mlx_lm.tokenizer_utils"}
    code = f"import mlx_ring.worker.server; print(*sorted({unused!r} & set(sys.modules)))"
    assert said(code) == []


def test_what_was_left_out_comes_in_when_it_is_asked_for() -> None:
    code = "import mlx_lm; from mlx_lm.tokenizer_utils import TokenizerWrapper as T; print(T.__name__, callable(mlx_lm.load))"
    assert said(code) == ["TokenizerWrapper", "True"]
