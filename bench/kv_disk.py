"""Measure what KV on disk saves and costs: the first token of a long prompt after a restart, and the speed of writing beside.

    python bench/kv_disk.py [MODEL] [--tokens 7000] [--rounds 3] [--only restart] [--only machines] [--only moved] [--only steady]

The model is SmolLM2-135M-Instruct by default. Dropping the system's cache of files needs root.

- `restart`: two stages save a prompt. Then each round starts three stages, drops the cache of files, and asks for the same
  prompt: the time to the first token without and with saved KV, and their ratio. The speed of the restore is compared with
  that of plain reads of the same files, before which the cache is dropped again.
- `machines`: the same for two machines on loopback that have saved, and a third one that has not.
- `moved`: the layers of a machine move to another while a stream runs behind the prompt: the KV that was sent, and its time.
- `steady`: tokens per second of eight streams with new prompts, with writing and without, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.loopback_cluster import running_cluster
from tests.eventually import eventually
from tests.machines import free_pair_of_ports
from tests.processes import Server, client_of, serving
from tests.smollm2 import smollm2

_DISK = ("--kv-disk", "2GiB")
_BLOCK = 256
_CHUNK = 1 << 20
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = 8, 512, 96
_WAY = re.compile(r"Ways back of \S+: .*?(disk|peers|move) \(1\), predicted ([\d.]+) s, took ([\d.]+) s")
_FEW_TOKENS = 600


@dataclass(frozen=True, slots=True)
class Asked:
    """Answer to a long prompt."""

    first_token_s: float
    cached: int
    """Tokens of the prompt that were not computed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=smollm2())
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=_ROWS, action="append", help="a row; may be repeated")
    given = parser.parse_args()
    for name in given.only or _ROWS:
        with tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder:
            _ROWS[name](given.model, given.tokens, given.rounds, Path(folder))


# ---- rows


def _restart(model: Path, tokens: int, rounds: int, folder: Path) -> None:
    kept = folder / "kv"
    flags = (*_DISK, "--kv-disk-dir", str(kept))
    with serving(model, "--stages", "2", *flags, folder=_new(folder)) as server:
        ask(server, tokens)
        _wait_for_blocks([kept], tokens, parts=2)
        server.stop()
    _compare(
        "restart, three stages instead of two",
        tokens,
        rounds,
        [kept],
        lambda: serving(model, "--stages", "3", folder=_new(folder)),
        lambda: serving(model, "--stages", "3", *flags, folder=_new(folder)),
    )


def _machines(model: Path, tokens: int, rounds: int, folder: Path) -> None:
    kept = [folder / name / "kv" for name in ("state", "node-1/state", "node-2/state")]

    @contextmanager
    def cluster(nodes: int, *flags: str) -> Generator[Server]:
        # The third machine has saved them in the round before.
        for file in kept[2].glob("*/*/*"):
            file.unlink()
        ports = free_pair_of_ports()
        with running_cluster(
            model, nodes, folder, ports, "--strategy", "uniform", *flags, join_flags=flags
        ) as server:
            yield server
            server.stop()

    with cluster(2, *_DISK) as server:
        ask(server, tokens)
        _wait_for_blocks(kept[:2], tokens, parts=1)
    _compare(
        "restart, three machines instead of two",
        tokens,
        rounds,
        kept[:2],
        lambda: cluster(3),
        lambda: cluster(3, *_DISK),
    )


def _moved(model: Path, tokens: int, rounds: int, folder: Path) -> None:
    print(
        "moved: requests, seconds of the move, predicted and taken seconds of the KV, tokens that were moved"
    )
    flags = ("--strategy", "uniform", "--max-num-seqs", "2")
    for _ in range(rounds):
        ports, place = free_pair_of_ports(), _new(folder)
        with running_cluster(model, 3, place, ports, *flags) as server:
            body = {**_body(tokens), "max_tokens": _FEW_TOKENS, "stream": True}
            arrived = threading.Event()
            stream = threading.Thread(target=_read, args=(server, body, arrived))
            stream.start()
            arrived.wait()
            node = next(
                each["id"] for each in server.status()["nodes"] if each["stages"] and not each["is_head"]
            )
            answer = server.http.post("/cluster/drain", json={"node": node}, timeout=600).raise_for_status()
            (moved,) = answer.json()["moved"]
            stream.join()
            sent = _metric(server, "kv_moved_tokens_total")
            server.stop()
        found = _WAY.findall(_log(place))
        print(f"  {moved['requests']} {moved['seconds']:8.2f}  {found}  {sent:.0f} of {tokens}", flush=True)


def _steady(model: Path, _tokens: int, rounds: int, folder: Path) -> None:
    numbers, ratios = count(1), list[float]()
    flags = ("--stages", "2", "--max-num-seqs", str(_STREAMS))
    with ExitStack() as stack:
        off = stack.enter_context(serving(model, *flags, folder=_new(folder)))
        on = stack.enter_context(
            serving(model, *flags, *_DISK, "--kv-disk-dir", str(folder / "kv"), folder=_new(folder))
        )
        for number in range(rounds + 1):
            # Each begins in turn. Round 0 warms up.
            order = (off, on) if number % 2 else (on, off)
            paces = {id(server): _pace(server, numbers) for server in order}
            if number:
                ratios.append(paces[id(on)] / paces[id(off)])
                print(f"  off {paces[id(off)]:8.1f} tokens/s, on {paces[id(on)]:8.1f}", flush=True)
    print(f"steady: with writing over without {median(ratios):.3f} (aim 0.97)")


_ROWS: dict[str, Callable[[Path, int, int, Path], None]] = {
    "restart": _restart,
    "machines": _machines,
    "moved": _moved,
    "steady": _steady,
}


# ---- parts of rows


def _compare(
    title: str,
    tokens: int,
    rounds: int,
    kept: Sequence[Path],
    cold: Callable[[], AbstractContextManager[Server]],
    warm: Callable[[], AbstractContextManager[Server]],
) -> None:
    """Print the times to the first token without and with saved KV, and the speed of reading."""
    print(f"{title}: first token of {tokens} tokens, seconds")
    ratios, shares = list[float](), list[float]()
    for _ in range(rounds):
        with cold() as server:
            computed = ask(server, tokens)
        with warm() as server:
            _drop_cache()
            restored = ask(server, tokens)
            way = _WAY.search(_log(server.folder))
        if way is None or restored.cached < tokens // 2:
            raise SystemExit(
                f"{restored.cached} of {tokens} tokens were restored: {_log(server.folder)[-2000:]}"
            )
        nbytes, speed = _plain_read(kept)
        ratios.append(computed.first_token_s / restored.first_token_s)
        shares.append(nbytes / float(way[3]) / speed)
        print(
            f"  computed {computed.first_token_s:7.2f}, restored {restored.first_token_s:6.3f}: {ratios[-1]:5.1f} times sooner;"
            f" {way[1]} predicted {way[2]}, took {way[3]}, {nbytes / 1e6:.0f} MB;"
            f" plain reads {speed / 1e6:.0f} MB/s, share {shares[-1]:.2f}",
            flush=True,
        )
    print(
        f"  medians: {median(ratios):.1f} times sooner (aim 20), share of the disk {median(shares):.2f} (aim 0.50)"
    )


def ask(server: Server, tokens: int) -> Asked:
    """Return when the first token of a prompt came, and how many of its tokens were cached."""
    began, first_s, cached = time.perf_counter(), 0.0, 0
    body = {**_body(tokens), "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            first_s = first_s or time.perf_counter() - began
            if usage := event.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(first_s, cached)


def _body(tokens: int, first: int = 0, answer: int = 2) -> dict[str, object]:
    return {
        "prompt": [100 + (first * 37 + place * place) % 1000 for place in range(tokens)],
        "max_tokens": answer,
        "ignore_eos": True,
        "temperature": 0,
    }


def _read(server: Server, body: dict[str, object], arrived: threading.Event) -> None:
    with (
        client_of(server.url) as client,
        client.stream("POST", "/v1/completions", json=body, timeout=600) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                arrived.set()


def _pace(server: Server, numbers: count[int]) -> float:
    """Return the tokens per second of streams with new prompts."""
    bodies = [_body(_STREAM_PROMPT, next(numbers), _STREAM_TOKENS) for _ in range(_STREAMS)]
    threads = [
        threading.Thread(target=_read, args=(server, {**body, "stream": True}, threading.Event()))
        for body in bodies
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _STREAMS * (_STREAM_PROMPT + _STREAM_TOKENS) / (time.perf_counter() - began)


def _wait_for_blocks(kept: Sequence[Path], tokens: int, *, parts: int) -> None:
    """Wait until each folder has all whole blocks, of as many parts."""
    for folder in kept:
        eventually(partial(_complete, folder, parts), lambda blocks: blocks >= tokens // _BLOCK)


def _complete(folder: Path, parts: int) -> int:
    return sum(len(list(path.glob("*-*"))) >= parts for path in folder.glob("*/*"))


def _drop_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _plain_read(folders: Sequence[Path]) -> tuple[int, float]:
    """Return the bytes of all files, and the bytes per second of reading them one after the other, without the cache."""
    files = [path for folder in folders for path in sorted(folder.glob("*/*/*-*"))]
    _drop_cache()
    room, nbytes, began = bytearray(_CHUNK), 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(room):
                nbytes += read
    return nbytes, nbytes / (time.perf_counter() - began)


def _metric(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"mlx_ring_{name}{{"))


def _log(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob("head*.log"))


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


if __name__ == "__main__":
    main()
