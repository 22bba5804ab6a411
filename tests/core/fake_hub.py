"""Hub with one repository, `someone/tiny`, on loopback, and a program that fetches from it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

from mlx_ring.core.environment import inherited_environment

COMMIT = "a" * 40


class FakeHub(BaseHTTPRequestHandler):
    """Hub with the repository `someone/tiny`; it records every requested path."""

    ranges: ClassVar[list[int]] = []
    """First bytes of the requests for parts of files, of all hubs."""
    commit = COMMIT
    """Newest commit."""
    dtypes: ClassVar[dict[str, int]] = {}
    """Numbers of weights by their types, where the hub knows them."""

    def __init__(self, files: dict[str, bytes], requested: list[str], *arguments: object) -> None:
        self.files, self.requested = files, requested
        super().__init__(*arguments)  # pyright: ignore[reportArgumentType] - the server's own three

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.split("?", maxsplit=1)[0]
        self.requested.append(path)
        if path.startswith("/api/models/someone/tiny"):
            siblings = [self.sibling(name, data) for name, data in self.files.items()]
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0"}
                for name, data in self.files.items()
            ]
            asked = path.rpartition("/revision/")[2]
            commit = asked if len(asked) == len(COMMIT) else self.commit
            info: dict[str, object] = {
                "id": "someone/tiny",
                "sha": commit,
                "siblings": siblings,
                "private": False,
            }
            if self.dtypes:
                info["safetensors"] = {"parameters": self.dtypes, "total": sum(self.dtypes.values())}
            self.send(200, json.dumps(tree if "/tree/" in path else info).encode(), with_body=with_body)
        elif path.startswith("/someone/tiny/resolve/") and (name := path.rsplit("/", 1)[1]) in self.files:
            self.send(200, self.files[name], with_body=with_body)
        else:
            self.send(404, b"{}", with_body=with_body, code="RepoNotFound")

    def sibling(self, name: str, data: bytes) -> dict[str, object]:
        """Return a file as the hub lists it; large ones have their SHA-256."""
        listed: dict[str, object] = {"rfilename": name, "size": len(data)}
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(data).hexdigest()
            listed["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 134}
        return listed

    def send(self, status: int, data: bytes, *, with_body: bool, code: str = "") -> None:
        etag, begin = hashlib.sha256(data).hexdigest(), 0
        if with_body and self.headers["Range"]:
            begin = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            status, data = 206, data[begin:]
            self.ranges.append(begin)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if code:
            self.send_header("X-Error-Message" if " " in code else "X-Error-Code", code)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        del format, args


@contextmanager
def running_hub(model: Path, kind: type[FakeHub] = FakeHub) -> Generator[tuple[str, list[str]]]:
    """Run a hub; yield its address and the requested paths.

    Its repository also has files that must never be fetched.
    """
    files = {path.name: path.read_bytes() for path in sorted(model.iterdir())}
    files |= {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "README.md": b"#"}
    requested: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, files, requested))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def find_elsewhere(name: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run `find_model` in a process of its own, because the hub's client reads its address once."""
    code = "import sys; from mlx_ring.models.model_source import find_model; print(find_model(sys.argv[1]).folder.path)"
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env=inherited_environment({"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HOME": str(home)}),
        capture_output=True,
        text=True,
        check=False,
    )
