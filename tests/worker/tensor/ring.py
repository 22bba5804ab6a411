"""Processes that are the ranks of a ring on loopback. All of them are ended, even if one hangs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.eventually import eventually
from tests.ports import free_ports

from mlx_ring.core.environment import inherited_environment

_RANK = Path(__file__).with_name("rank.py")
_TIMEOUT_S = 270.0
"""Time for the ranks, which share few cores with all other tests. It is less than that of a test."""


def run_ranks(cases: Sequence[dict[str, Any]], size: int, folder: Path) -> None:
    """Have `size` ranks run the cases, with their results in `folder`.

    If one of them fails, the others would wait for it forever. So all are ended, and its output is raised.
    """
    (folder / "cases.json").write_text(json.dumps(list(cases)))
    (folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    with contextlib.ExitStack() as stack:
        ranks = [_start(rank, folder, stack) for rank in range(size)]
        deadline = time.monotonic() + _TIMEOUT_S
        codes = eventually(
            lambda: [rank.poll() for rank in ranks],
            lambda codes: any(codes) or None not in codes or time.monotonic() > deadline,
        )
    assert codes == [0] * size, "\n".join(
        f"rank {rank} ended with {code}: {(folder / f'rank{rank}.txt').read_text()[-2000:]}"
        for rank, code in enumerate(codes)
    )


def _start(rank: int, folder: Path, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    output = stack.enter_context((folder / f"rank{rank}.txt").open("wb"))
    environment = inherited_environment(
        {
            "MLX_RANK": str(rank),
            "MLX_HOSTFILE": str(folder / "hosts.json"),
            # One thread each, because ranks that wait occupy a core anyway.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
    )
    process = subprocess.Popen(
        [sys.executable, str(_RANK), str(folder / "cases.json"), str(folder)],
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process
