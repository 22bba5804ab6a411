"""A model that is fetched while the head serves: the head can end at any moment, and takes no half for a whole."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tests.core.fake_hub import FakeHub, find_elsewhere, running_hub
from tests.processes import serving

PATIENCE_S = 60
HALF_SENT = threading.Event()
LET_GO = threading.Event()


class StallingHub(FakeHub):
    """Sends half of the weights, and no more until it is let go; then it sends all."""

    def send(self, status: int, data: bytes, *, with_body: bool, code: str = "") -> None:
        if not with_body or not self.path.endswith(".safetensors") or LET_GO.is_set():
            super().send(status, data, with_body=with_body, code=code)
            return
        super().send(status, data, with_body=False, code=code)
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        HALF_SENT.set()
        LET_GO.wait(PATIENCE_S)


def test_a_head_that_fetches_ends_at_once_and_the_next_one_fetches_the_rest(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "hub"
    with running_hub(tiny_model, StallingHub) as (endpoint, _), ThreadPoolExecutor(2) as clients:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HOME", str(home))
        try:
            with serving(tiny_model, folder=tmp_path) as server:
                load = f"{server.url}/models/load"
                missing = httpx.post(load, json={"model": "someone/private"}, timeout=PATIENCE_S)
                assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
                assert "HF_TOKEN" in missing.json()["error"]["message"]
                asked = [
                    clients.submit(httpx.post, load, json={"model": "someone/tiny"}, timeout=2 * PATIENCE_S)
                    for _ in range(2)
                ]
                assert HALF_SENT.wait(PATIENCE_S)
                family = psutil.Process(server.process.pid).children(recursive=True)
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(PATIENCE_S) == 0
                for each in asked:
                    told = each.result(PATIENCE_S)
                    assert (told.status_code, told.json()["error"]["message"]) == (
                        503,
                        "The server is shutting down.",
                    )
                assert not any(process.is_running() for process in family)
        finally:
            LET_GO.set()
        found = find_elsewhere("someone/tiny", endpoint, home)
        assert found.returncode == 0, found.stderr
        fetched = Path(found.stdout.strip())
        for file in (*fetched.iterdir(), fetched / "model.safetensors"):
            assert file.read_bytes() == (tiny_model / file.name).read_bytes()
