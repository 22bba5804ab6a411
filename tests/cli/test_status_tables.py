"""The tables of `mlx-ring cluster status`."""

from __future__ import annotations

from copy import deepcopy
from io import StringIO
from typing import Any

from rich.console import Console

from mlx_ring.cli.status_tables import show_status

STATUS: dict[str, Any] = {
    "models": [{"model": "demo", "state": "ready", "reason": None}],
    "nodes": [
        {
            "id": "mini-1",
            "state": "attending",
            "is_head": True,
            "reason": None,
            "address": "10.0.0.1",
            "memory": {
                "usable_bytes": 10.9e9,
                "promised_bytes": 2.5e9,
                "used_bytes": 2.4e9,
                "free_bytes": None,
            },
        },
        {
            "id": "mini-2",
            "state": "gone",
            "is_head": False,
            "reason": "it was cut off",
            "address": None,
            "memory": None,
        },
    ],
    "instances": [
        {
            "name": "demo-1",
            "epoch": 3,
            "state": "ready",
            "stream": {"predicted_tokens_per_s": 20.0, "measured_tokens_per_s": 18.24},
            "stages": [
                {
                    "stage": 0,
                    "node": "mini-1",
                    "layers": [0, 8],
                    "alive": True,
                    "loading": {
                        "phase": "ready",
                        "bytes_fetched": 0,
                        "bytes_to_fetch": 0,
                        "bytes_loaded": 9,
                        "bytes_to_load": 9,
                    },
                    "memory": {
                        "promised": {"total_bytes": 2_500_000_000},
                        "used": {"resident_bytes": 2_400_000_000},
                    },
                    "times": {
                        "decode": [
                            {"rows": 4, "predicted_ms": 99.0, "measured_ms": 98.0},
                            {"rows": 1, "predicted_ms": 50.0, "corrected_ms": 55.1, "measured_ms": 54.8},
                        ]
                    },
                }
            ],
        }
    ],
    "links": [
        {
            "from": "mini-1",
            "to": "mini-2",
            "problem": None,
            "round_trip_us": 310.0,
            "bytes_per_s": 1.2e9,
            "compresses": False,
            "why": "it would take longer",
        },
        {"from": "mini-2", "to": "mini-1", "problem": "nothing answers"},
    ],
}


def table_lines(status: dict[str, Any]) -> list[str]:
    out = StringIO()
    show_status(status, Console(file=out, width=200))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_predictions_and_promises_stand_beside_measured_values() -> None:
    lines = table_lines(STATUS)
    lost = STATUS["nodes"][1]
    assert "demo is ready" in lines
    assert "mini-1 the head's 10.9 2.5 2.4 - 10.0.0.1" in lines
    assert f"mini-2 {lost['state']}, it was cut off - - - -" in lines
    assert "demo-1 (epoch 3) is ready; one stream: 20.0 tokens/s predicted, 18.2 tokens/s measured" in lines
    assert "0 mini-1 0-7 ready 2,500 2,400 50.0 55.1 54.8" in lines
    assert "mini-1 mini-2 0.31 9.60 off: it would take longer" in lines
    assert "mini-2 mini-1 - - nothing answers" in lines


def test_unknown_values_are_dashes_and_loading_shows_its_progress() -> None:
    status = deepcopy(STATUS)
    instance = status["instances"][0]
    instance["stream"] = None
    stage = instance["stages"][0]
    stage["loading"] |= {"phase": "weights", "bytes_loaded": 1, "bytes_to_load": 4}
    stage["memory"] = {"promised": None, "used": None}
    stage["times"]["decode"] = []
    lines = table_lines(status)
    assert "demo-1 (epoch 3) is ready" in lines
    assert "0 mini-1 0-7 weights 25% - - - - -" in lines
    stage["alive"] = False
    assert "0 mini-1 0-7 dead - - - - -" in table_lines(status)
