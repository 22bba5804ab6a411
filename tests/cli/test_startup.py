"""Text that `mlx-ring serve` prints once a model is served."""

from __future__ import annotations

from pathlib import Path

from mlx_ring.cli.startup import sample_commands


def test_example_commands_name_the_certificate_and_the_key_variable() -> None:
    plain = sample_commands("http://127.0.0.1:8100", None, asks_for_key=False)
    assert plain[0] == "Ask it:"
    assert plain[1].startswith("  curl http://127.0.0.1:8100/v1/chat/completions -H 'Content-Type")
    assert plain[3].endswith(" chat")
    guarded = sample_commands("https://127.0.0.1:8200", Path("/etc/my server.pem"), asks_for_key=True)
    assert "MLX_RING_API_KEY" in guarded[0]
    assert " --cacert '/etc/my server.pem' -H \"Authorization: Bearer $MLX_RING_API_KEY\" " in guarded[1]
    assert guarded[3].endswith(" chat --url https://127.0.0.1:8200 --cacert '/etc/my server.pem'")
