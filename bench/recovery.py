"""Measure recoveries from faults, and moves of layers, on three machines in network namespaces. Needs root.

    python bench/recovery.py [--rounds 3] [--only "worker killed"] [--large] [--resume off] [--spare-worker off]

For each fault it prints medians in seconds. First come the parts of the recovery that the metric `recovery_seconds` has.
Then come the times until the client is notified, and until the next token of its stream. They count from the fault, or
from its end if it passes by itself. Such a fault has no parts: the answer continues in place. The row "all workers
killed" is a reload of the whole model.

Each machine is idle before, until it has a spare worker.

Then follow the ways back that were taken, with their predicted and taken seconds from the metrics `way_back_predicted_seconds`
and `way_back_taken_seconds`. Before the row "all workers killed, KV on disk", the stream's prompt was answered once, so that
the disks have its KV.

The column "gap" is the longest time between two tokens of the stream.

The last rows are moves on purpose, in which the gap is the pause. "machine drained" moves the layers of a machine to the
others. The rows "split changed" begin on two machines, which a third one has joined. The stages change to three: beside the
present split, or in place where memory has no room for both. The time until the next token is that of most of the move.

The last columns are of the workers that the fault spared: how many were replaced, and the megabytes that the others read
from files. `--large` takes a model of a gigabyte with random weights. With `--resume off`, the stream ends with an error.
Its time is then that of the first token of a new request.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from random_model import DEMO, Shape, make

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.lan_cluster import LanCluster, make_cluster
from tests.eventually import eventually
from tests.faults.injection import FAULTS, Rank, ServedCluster
from tests.processes import give_profile

from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.planner.model_sizes import profile_folder

_MACHINES = 3
_SPARES = ("--spare-worker", "on")
_BODY = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
_MOVE_TOKENS = 3000
_FAULT_AFTER = 20
"""Number of events before the fault."""
_ASK_AGAIN_S = 0.05
_LONG_PROMPT = 1500
"""Tokens of the prompt whose KV is on the disks."""
_LONGEST_S = 300.0
_PARTS = ("detect", "plan", "load", "replay", "first_token")
_TWO_INSTANCES = ("--kv-cache-memory", "64MiB", "--max-model-len", "4096")
_ONE_INSTANCE = 1.45
"""Memory for models, as a multiple of the weights, where there is no room for a second instance."""
_BETTER_SPLIT = (
    "--optimize-for",
    "throughput",
    "--expected-users",
    "4",
    "--replicas",
    "1",
    "--replan",
    "ask",
)
"""Flags with which three machines are predicted to be better than two."""


@dataclass(frozen=True)
class Fault:
    """A fault, and the seconds after which it passes by itself; 0 if it does not."""

    inject: Callable[[ServedCluster, Rank], None]
    passes_after_s: float = 0.0
    end: Callable[[ServedCluster, Rank], None] | None = None
    victims: int = 1
    """Number of workers that it ends."""
    has_disk: bool = False
    """True if machines keep KV on disk, and the stream has a long prompt that was answered before."""
    is_move: bool = False
    """True if layers move on purpose, so that the workers that they leave end."""
    is_first_unused: bool = False
    """True if a machine joins after the model has been loaded, before the stream begins."""
    has_room: bool = True
    """False if memory has room for a single instance of the model."""


def _stop_worker(_served: ServedCluster, victim: Rank) -> None:
    victim.process.suspend()


def _continue_worker(_served: ServedCluster, victim: Rank) -> None:
    victim.process.resume()


def _cut(served: ServedCluster, victim: Rank) -> None:
    served.machine_of(victim).host.cut()


def _mend(served: ServedCluster, victim: Rank) -> None:
    served.machine_of(victim).host.mend()


def _head(served: ServedCluster) -> psutil.Process:
    """Return the head, a child of the program that enters its namespace."""
    started = psutil.Process(served.server.process.pid)
    return next(each for each in (started, *started.children()) if "serve" in each.cmdline()[1:])


def _stop_head(served: ServedCluster, _victim: Rank) -> None:
    _head(served).suspend()


def _continue_head(served: ServedCluster, _victim: Rank) -> None:
    _head(served).resume()


def _kill_all(served: ServedCluster, _victim: Rank) -> None:
    processes = [rank.process for rank in served.ranks()]
    for process in processes:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes)


def _post(served: ServedCluster, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    answer = served.http.post(served.server.url + path, json=body, timeout=_LONGEST_S)
    return answer.raise_for_status().json()


def _drain(served: ServedCluster, victim: Rank) -> None:
    _post(served, "/cluster/drain", {"node": victim.node})


def _split_beside(served: ServedCluster, _victim: Rank) -> None:
    _split_again(served, "beside")


def _split_in_place(served: ServedCluster, _victim: Rank) -> None:
    _split_again(served, "ranges")


def _split_again(served: ServedCluster, way: str) -> None:
    """Change to the better split; it must be in this way."""
    moved = _post(served, "/cluster/replan", {})["moved"]
    if moved is None or moved["way"] != way:
        raise RuntimeError(f"The split did not change in the way {way}: {moved}")


_FAULTS: Mapping[str, Fault] = {
    "worker killed": Fault(FAULTS["worker killed"].inject),
    "worker stopped": Fault(FAULTS["worker stopped"].inject),
    "worker stopped, 2.5 s": Fault(_stop_worker, 2.5, _continue_worker, 0),
    "cable cut": Fault(FAULTS["cable cut"].inject),
    "cable cut, 2.5 s": Fault(_cut, 2.5, _mend, 0),
    "link reset": Fault(FAULTS["link reset"].inject, victims=0),
    "agent killed": Fault(FAULTS["agent killed"].inject),
    "head stopped, 5 s": Fault(_stop_head, 5.0, _continue_head, 0),
    "all workers killed": Fault(_kill_all, victims=_MACHINES),
    "all workers killed, KV on disk": Fault(_kill_all, victims=_MACHINES, has_disk=True),
    "machine drained": Fault(_drain, is_move=True),
    "split changed, beside": Fault(_split_beside, is_move=True, is_first_unused=True),
    "split changed, in place": Fault(_split_in_place, is_move=True, is_first_unused=True, has_room=False),
}


@dataclass(slots=True)
class Measured:
    """Result of one fault. Times are in seconds from the fault, or from its end if it passes by itself."""

    notified_s: float | None = None
    """Until the client was notified of a pause or of an error; None if the stream continued."""
    token_s: float = 0.0
    """Until the next token."""
    gap_s: float = 0.0
    """Longest time between two tokens."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    ways: dict[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    """Predicted and taken seconds by way back."""
    replaced: int = 0
    """Workers that were replaced although the fault spared them."""
    read_mb: float = 0.0
    """Megabytes that the others have read from files since."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=_FAULTS, action="append", help="a fault; may be repeated")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--resume", choices=("on", "off"), default="on")
    parser.add_argument("--spare-worker", choices=("on", "off"), default="on")
    arguments = parser.parse_args()
    model = make(Shape(layers=24)) if arguments.large else DEMO
    flags = ("--strategy", "uniform", "--resume", arguments.resume)
    with tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder, ExitStack() as stack:
        cluster = make_cluster(model, Path(folder), stack, [None] * _MACHINES)
        cluster.join_flags = ("--spare-worker", arguments.spare_worker)
        for machine in cluster.machines:
            give_profile(machine.state)
        print(
            f"{model.name}, a stage on each of {_MACHINES} machines, medians of {arguments.rounds} rounds, in seconds"
        )
        titles = "".join(f"{part:>12}" for part in (*_PARTS, "notified", "next token", "gap"))
        print(f"{'fault':32}{titles}{'replaced':>10}{'read MB':>9}  way: predicted, taken")
        for name in arguments.only or _FAULTS:
            measured = [
                measure(cluster, _FAULTS[name], flags, arguments.spare_worker)
                for _ in range(arguments.rounds)
            ]
            print(_row(name, measured), flush=True)


def _row(fault: str, measured: Sequence[Measured]) -> str:
    columns = [[each.parts[part] for each in measured if part in each.parts] for part in _PARTS]
    columns.append([each.notified_s for each in measured if each.notified_s is not None])
    columns.append([each.token_s for each in measured])
    columns.append([each.gap_s for each in measured if each.gap_s])
    cells = "".join(f"{median(column):12.2f}" if column else f"{'-':>12}" for column in columns)
    names = sorted({way for each in measured for way in each.ways})
    ways = "; ".join(
        f"{way}: {', '.join(f'{median(times):.2f}' for times in zip(*(each.ways[way] for each in measured if way in each.ways), strict=True))}"
        for way in names
    )
    most = max(each.replaced for each in measured), max(each.read_mb for each in measured)
    return f"{fault:32}{cells}{most[0]:10}{most[1]:9.1f}  {ways}"


def measure(cluster: LanCluster, fault: Fault, flags: Sequence[str], spare_worker: str) -> Measured:
    """Interrupt a stream once, on a server of its own."""
    before = _spares(cluster)
    of_all = ("--spare-worker", spare_worker, *(("--kv-disk", "1GiB") if fault.has_disk else ()))
    cluster.join_flags = of_all
    more = _TWO_INSTANCES if fault.is_move else ()
    if fault.is_first_unused:
        more += _BETTER_SPLIT
    if not fault.has_room:
        more += ("--model-memory", str(int(_ONE_INSTANCE * _weight_bytes(cluster.model))))
    joining = cluster.machines[1:-1] if fault.is_first_unused else cluster.machines[1:]
    server = cluster.serve(len(joining) + 1, *flags, *of_all, *more, joining=joining)
    served = ServedCluster(server, Path(), cluster.http, cluster.head.threads, cluster)
    try:
        victim = next(rank for rank in served.wait_until_ready() if served.can_lose(rank))
        if fault.is_first_unused:
            cluster.join(cluster.machines[-1], *of_all)
            eventually(lambda: len(cluster.get(server, "/cluster/status")["nodes"]), _MACHINES.__eq__)
        elif _SPARES in pairwise(of_all):  # made while the machines are idle
            eventually(lambda: _spares(cluster), lambda now: now == [count + 1 for count in before])
        return cluster.head.threads.submit(_interrupt, served, victim, fault).result()
    finally:
        for machine in cluster.machines:
            machine.host.mend()
        server.stop()
        for machine in cluster.machines:
            for process in machine.processes:
                process.kill()
            (machine.state / "cluster" / "losses.json").unlink(missing_ok=True)


def _weight_bytes(model: Path) -> int:
    """Return the bytes of a model's weights in float32."""
    folder = read_model_folder(model)
    return profile_folder(folder, model.name).weight_bytes * (2 if "16" in folder.config["dtype"] else 1)


def _spares(cluster: LanCluster) -> list[int]:
    """Return the number of spare workers that each machine has announced."""
    logs = [(machine.folder / "logs").glob("*.log") for machine in cluster.machines]
    return [sum(file.read_text().count("A spare worker waits") for file in files) for files in logs]


def _interrupt(served: ServedCluster, victim: Rank, fault: Fault) -> Measured:
    """Cause the fault in a stream. Runs in the head's host."""
    body = (
        {**_BODY, "prompt": [5 + number % 200 for number in range(_LONG_PROMPT)]} if fault.has_disk else _BODY
    )
    if fault.has_disk:
        served.http.post(
            served.server.url + "/v1/completions", json={**body, "max_tokens": 2, "stream": False}
        )
        eventually(
            lambda: served.metric("kv_disk_saved_tokens_total"), lambda tokens: tokens >= _LONG_PROMPT - 256
        )
    if fault.is_move:
        body = {**body, "max_tokens": _MOVE_TOKENS}
    before, ranks, result = _parts(served), served.ranks(), Measured()
    ways = _ways(served)
    read = {rank.pid: _read_bytes(rank) for rank in ranks}
    with served.http.stream("POST", served.server.url + "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(_FAULT_AFTER):
            next(lines)
        began = time.monotonic() + fault.passes_after_s
        move = threading.Thread(target=fault.inject, args=(served, victim))
        move.start()
        if not fault.is_move:
            move.join()
        if fault.end is not None:
            threading.Timer(fault.passes_after_s, fault.end, (served, victim)).start()
        result.notified_s, token_s, result.gap_s = _follow(lines, began)
    move.join()
    result.token_s = _ask_again(served, began) if token_s is None else token_s
    ready = served.wait_until_ready()
    if result.notified_s is not None and served.metric("requests_resumed_total"):
        after = eventually(lambda: _parts(served), lambda parts: parts != before)
        result.parts = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
    result.ways = {
        way: (predicted - ways[way][0], taken - ways[way][1])
        for way, (predicted, taken) in _ways(served).items()
        if taken > ways[way][1]
    }
    stayed = {rank.pid for rank in ready} & read.keys()
    result.replaced = 0 if fault.is_move else len(ranks) - len(stayed) - fault.victims
    result.read_mb = sum(_read_bytes(rank) - read[rank.pid] for rank in ready if rank.pid in stayed) / 1e6
    return result


def _read_bytes(rank: Rank) -> int:
    """Return the bytes that a worker has read, from files or their cache."""
    return int(re.findall(r"rchar: (\d+)", Path(f"/proc/{rank.pid}/io").read_text())[0])


def _parts(served: ServedCluster) -> dict[str, float]:
    """Return the seconds of all recoveries, by part."""
    text = served.http.get(served.server.url + "/metrics").text
    found = re.findall(r'^mlx_ring_recovery_seconds_sum{.*part="(\w+)".*} (\S+)$', text, re.MULTILINE)
    return {part: float(seconds) for part, seconds in found}


def _ways(served: ServedCluster) -> dict[str, tuple[float, float]]:
    """Return the predicted and the taken seconds of all ways back, by way."""
    text = served.http.get(served.server.url + "/metrics").text
    found = re.findall(r'^mlx_ring_way_back_(\w+)_seconds_sum{.*way="(\w+)".*} (\S+)$', text, re.MULTILINE)
    seconds = {(kind, way): float(value) for kind, way, value in found}
    return {way: (seconds["predicted", way], seconds["taken", way]) for _, way in seconds}


def _follow(lines: Iterator[str], began: float) -> tuple[float | None, float | None, float]:
    """Return the times until the client was notified, if it was, and until the next token, and the longest gap.

    There is no next token after an error. A stream that continues in place stands still while processes do: its longest
    gap ends with the next token.
    """
    last, longest, token = time.monotonic(), 0.0, began
    notified_s: float | None = None
    token_s: float | None = None
    for line in lines:
        now = time.monotonic()
        if line == ": resuming":
            notified_s = notified_s or now - began
            continue
        if '"error"' in line:
            return now - began, None, 0.0
        if not line.startswith("data: {"):
            continue
        if notified_s is not None and token_s is None:
            token_s = now - began
        if now - last > longest:
            longest, token = now - last, now
        last = now
    return notified_s, token - began if token_s is None else token_s, longest


def _ask_again(served: ServedCluster, began: float) -> float:
    """Ask until a new stream has its first token, and return the time until then."""
    while True:
        with served.http.stream("POST", served.server.url + "/v1/completions", json=_BODY) as answer:
            if answer.is_success:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                        return time.monotonic() - began
        time.sleep(_ASK_AGAIN_S)


if __name__ == "__main__":
    main()
