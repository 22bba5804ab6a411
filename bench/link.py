"""Measure the cost of a link: decode speed of one stream over two hosts, with 0.3 ms and 10 Gbit/s relative to no delay.

    python bench/link.py [--rounds 5] [--round-trip-ms 0.3] [--gbit-s 10] [--tokens 128] [--json FILE]

The hosts are network namespaces, connected by a switch whose delay changes between measurements while one cluster keeps
serving. The hosts join by token, use mutual TLS, and have equally many layers. The delay is added to the switch's own.
Each worker has its own core and one BLAS thread; the head, the agent and the load generator share the core of stage 0.
Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from emulated_lan import Host, Lan, emulated_lan
from machine import cores, pin
from random_model import Shape, make
from servers import blas_environment

SHAPE = Shape(layers=14, vocabulary=4096, dtype="float32")
"""Half of Qwen3-0.6B's layers and a small vocabulary: 224 M parameters, which gives the shortest realistic step."""
_TARGET = 0.95
_PROMPT = 32
_WAIT_S = 600
_PROGRAM = (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")


@dataclass(frozen=True)
class Round:
    """Decode speeds with and without the delay, measured in turn."""

    without: float
    """Tokens per second."""
    with_delay: float

    @property
    def ratio(self) -> float:
        return self.with_delay / self.without

    @property
    def added_ms(self) -> float:
        """Additional milliseconds per token."""
        return 1e3 / self.with_delay - 1e3 / self.without


@contextlib.contextmanager
def cluster(hosts: Sequence[Host], model: Path, folder: Path) -> Generator[str]:
    """Start a head on the first host and a member on the second; yield the server's address."""
    one, two = hosts
    plain = ("--blas-threads", "1", "--log-level", "warning")
    serve = [
        *(*_PROGRAM, "serve", str(model), "--nodes", "2", "--strategy", "uniform", "--port", "8100", *plain),
        *("--prefix-cache", "off", "--num-speculative-tokens", "0", "--link-compression", "off"),
        *("--state-dir", str(folder / "head"), "--log-dir", str(folder / "head-logs")),
    ]
    join = [*_PROGRAM, "join", one.address, *plain, "--state-dir", str(folder / "node")]
    join += ["--log-dir", str(folder / "node-logs")]
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(_process(one, serve, subprocess.PIPE))
        for line in head.stdout or ():
            found = re.search(r"--token (\S+)", line)
            if found:
                stack.enter_context(_process(two, [*join, "--token", found[1]], subprocess.DEVNULL))
                break
        for line in head.stdout or ():
            if line.startswith("Ctrl-C"):
                break
        else:
            raise SystemExit(f"The head ended before it was ready; its log is {folder / 'head-logs'}.")
        yield "http://127.0.0.1:8100"


@contextlib.contextmanager
def _process(host: Host, command: Sequence[str], output: int) -> Generator[subprocess.Popen[str]]:
    """Run a program in a host, and stop it with SIGINT at the end."""
    process = subprocess.Popen(host.command(*blas_environment(), *command), stdout=output, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pin_all(hosts: Sequence[Host], pinned: Sequence[int]) -> None:
    """Pin all processes of each host to that host's own core."""
    for host, core in zip(hosts, pinned, strict=False):
        listed = subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
        )
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if "mlx_ring" in " ".join(psutil.Process(pid).cmdline()):
                    pin(pid, core)


def decode_speed(host: Host, url: str, tokens: int, number: int, core: int | None) -> float:
    """Return the tokens per second of one stream after its first token."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [*_PROGRAM, "bench", "--url", url, "--requests", "1", "--concurrency", "1", "--warmup", "0"]
        command += ["--prompt-tokens", str(_PROMPT), "--output-tokens", str(tokens), "--seed", str(number)]
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        done = subprocess.run(
            host.command(*pinned, *command, "--json", report.name, "--no-progress"),
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"The load failed: {done.stdout}{done.stderr}")
        summary = json.loads(Path(report.name).read_text())["summary"]
    return float(summary["request_tokens_per_s"]["p50"])


def measure(lan: Lan, url: str, options: argparse.Namespace, core: int | None) -> Iterator[Round]:
    """Measure both configurations per round; alternate which one is first."""
    arms = {False: (0.0, 0.0), True: (options.round_trip_ms, 1e3 * options.gbit_s)}
    decode_speed(lan.hosts[0], url, options.tokens, 0, core)
    for number in range(1, options.rounds + 1):
        speeds: dict[bool, float] = {}
        for delayed in (False, True) if number % 2 else (True, False):
            round_trip_ms, mbit_s = arms[delayed]
            lan.set(round_trip_ms=round_trip_ms, mbit_s=mbit_s)
            speeds[delayed] = decode_speed(lan.hosts[0], url, options.tokens, number, core)
        made = Round(speeds[False], speeds[True])
        print(
            f"  round {number}: {made.without:.2f} tok/s without, {made.with_delay:.2f} with, {made.ratio:.3f}",
            file=sys.stderr,
        )
        yield made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--round-trip-ms", type=float, default=0.3, help="added to what the switch takes itself"
    )
    parser.add_argument("--gbit-s", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    model, pinned = make(SHAPE), cores()
    core = pinned[0] if pinned else None
    with emulated_lan(2) as lan, tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder:
        own_ms = lan.round_trip_ms()
        lan.set(round_trip_ms=options.round_trip_ms, mbit_s=1e3 * options.gbit_s)
        delayed_ms = lan.round_trip_ms()
        lan.set(round_trip_ms=0, mbit_s=0)
        with cluster(lan.hosts, model, Path(folder)) as url:
            pin_all(lan.hosts, pinned)
            before = [host.sent_bytes() for host in lan.hosts]
            decode_speed(lan.hosts[0], url, options.tokens, 0, core)
            sent = [host.sent_bytes() - earlier for host, earlier in zip(lan.hosts, before, strict=True)]
            rounds = list(measure(lan, url, options, core))
    _print(rounds, (own_ms, delayed_ms), sent, options)


def _print(
    rounds: Sequence[Round],
    round_trips_ms: tuple[float, float],
    sent: Sequence[int],
    options: argparse.Namespace,
) -> None:
    ratio = statistics.median(made.ratio for made in rounds)
    added_ms = statistics.median(made.added_ms for made in rounds)
    hops_ms = round_trips_ms[1] - round_trips_ms[0]
    step_ms = statistics.median(1e3 / made.without for made in rounds)
    each = [count / (options.tokens + _PROMPT) for count in sent]
    print(f"\n{SHAPE.parameters / 1e6:.0f} M random parameters in float32, 2 stages on 2 hosts, one stream")
    print(
        f"one byte there and back: {round_trips_ms[0]:.3f} ms, with the delay {round_trips_ms[1]:.3f} ms, "
        f"so {hops_ms:.3f} ms more"
    )
    print(
        f"floor: a token crosses twice, activations of {4 * SHAPE.hidden} bytes there and its number back: "
        f"{hops_ms:.3f} ms of a step of {step_ms:.1f} ms, a ratio of {step_ms / (step_ms + hops_ms):.3f} at best"
    )
    print(
        f"measured: {added_ms:.3f} ms more a token; {each[0]:.0f} bytes a token there and {each[1]:.0f} back in all"
    )
    listed = " ".join(f"{made.ratio:.3f}" for made in rounds)
    print(
        f"decode with {options.round_trip_ms:g} ms and {options.gbit_s:g} Gbit/s over without: {ratio:.3f}  "
        f"target >= {_TARGET}: {'met' if ratio >= _TARGET else 'missed'}  ({listed}; load {psutil.getloadavg()[0]:.1f})"
    )
    if options.json:
        figures = {
            "ratio": ratio,
            "added_ms": added_ms,
            "round_trips_ms": round_trips_ms,
            "bytes_a_token": each,
            "rounds": [asdict(made) for made in rounds],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
