"""Text that `mlx-ring serve` prints once a model is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.cli.startup import network_lines, products_of, sample_commands
from mlx_ring.core.types import LayerRange
from mlx_ring.core.worker_status import WorkerInfo, WorkerMemory


def test_example_commands_name_the_certificate_and_the_key_variable() -> None:
    plain = sample_commands("http://127.0.0.1:8100", None, asks_for_key=False)
    assert plain[0] == "Ask it:"
    assert plain[1].startswith("  curl http://127.0.0.1:8100/v1/chat/completions -H 'Content-Type")
    assert plain[3].endswith(" chat")
    guarded = sample_commands("https://127.0.0.1:8200", Path("/etc/my server.pem"), asks_for_key=True)
    assert "MLX_RING_API_KEY" in guarded[0]
    assert " --cacert '/etc/my server.pem' -H \"Authorization: Bearer $MLX_RING_API_KEY\" " in guarded[1]
    assert guarded[3].endswith(" chat --url https://127.0.0.1:8200 --cacert '/etc/my server.pem'")


@pytest.mark.parametrize(
    ("kernels", "weights", "expected"),
    [
        ("AVX2", "quantized", "OpenBLAS"),
        ("", "", "OpenBLAS"),
        ("", "float32", "OpenBLAS; quantized weights take seven times the memory, as float32"),
        ("", "quantized", "OpenBLAS; quantized weights take many times as long for a token"),
    ],
)
def test_one_line_says_what_quantized_weights_cost_without_kernels(
    kernels: str, weights: str, expected: str
) -> None:
    names = ("weight_bytes", "device_memory_bytes", "peak_memory_bytes", "rss_bytes", "kv_bytes")
    memory: WorkerMemory = dict.fromkeys(names, 0)  # pyright: ignore[reportAssignmentType]
    worker = WorkerInfo(
        *(0, 0, LayerRange(0, 2), "here", 1, "cpu", "float32"),
        alive=True,
        phase="ready",
        memory=memory,
        blas="OpenBLAS",
        kernels=kernels,
        cpu_weights=weights,
    )
    assert products_of(worker) == expected


def test_a_server_for_the_network_names_its_addresses_and_warns_without_a_key() -> None:
    assert network_lines((), asks_for_key=False) == []
    urls = ("http://mini.local:8100", "http://192.168.1.7:8100")
    open_to_all = network_lines(urls, asks_for_key=False)
    assert open_to_all[1:3] == ["  http://mini.local:8100", "  http://192.168.1.7:8100"]
    assert "No API key is set" in open_to_all[3]
    assert network_lines(urls, asks_for_key=True) == open_to_all[:3]
