"""Fetching of a model while the head serves: the head can end at any moment, and never takes a part for the whole."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tests.core.fake_hub import FakeHub, find_elsewhere, running_hub
from tests.eventually import eventually
from tests.processes import serving

WAIT_S = 60
HALF_SENT = threading.Event()
RELEASED = threading.Event()


class StallingHub(FakeHub):
    """A hub that sends half of the weights, and the rest once it is released."""

    def send(self, status: int, data: bytes, *, with_body: bool, code: str = "") -> None:
        if not with_body or not self.path.endswith(".safetensors") or RELEASED.is_set():
            super().send(status, data, with_body=with_body, code=code)
            return
        super().send(status, data, with_body=False, code=code)
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        HALF_SENT.set()
        RELEASED.wait(WAIT_S)


def test_head_ends_during_a_fetch_and_a_later_fetch_completes_the_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "hub"
    with running_hub(tiny_model, StallingHub) as (endpoint, _), ThreadPoolExecutor(2) as clients:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HOME", str(home))
        try:
            with serving(tiny_model, folder=tmp_path) as server:
                load = f"{server.url}/models/load"
                missing = httpx.post(load, json={"model": "someone/private"}, timeout=WAIT_S)
                assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
                assert "HF_TOKEN" in missing.json()["error"]["message"]
                loading = [
                    clients.submit(httpx.post, load, json={"model": "someone/tiny"}, timeout=2 * WAIT_S)
                    for _ in range(2)
                ]
                assert HALF_SENT.wait(WAIT_S)
                eventually(lambda: [part for part in home.rglob("*.part") if part.stat().st_size])
                children = psutil.Process(server.process.pid).children(recursive=True)
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(WAIT_S) == 0
                for request in loading:
                    answer = request.result(WAIT_S)
                    assert (answer.status_code, answer.json()["error"]["message"]) == (
                        503,
                        "The server is shutting down.",
                    )
                assert not any(process.is_running() for process in children)
        finally:
            RELEASED.set()
        StallingHub.ranges.clear()
        found = find_elsewhere("someone/tiny", endpoint, home)
        assert found.returncode == 0, found.stderr
        assert StallingHub.ranges == [256 << 10], "the second fetch continues after what the first one wrote"
        fetched = Path(found.stdout.strip())
        for file in (*fetched.iterdir(), fetched / "model.safetensors"):
            assert file.read_bytes() == (tiny_model / file.name).read_bytes()
