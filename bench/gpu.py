"""Check this machine's GPU in about five minutes: equal tokens, speed, groups, and memory.

    scripts/gpu_check                       # all parts; needs MLX's build for the GPU (scripts/setup --cuda)
    scripts/gpu_check --parts tokens nccl   # some parts
    scripts/gpu_check --json report.json

- `tokens`: greedy answers in float32 by workers on the GPU, under several splits, beside mlx-lm's on the CPU. Scores
  closer than 1e-4 may change places.
- `nccl`: a sum in a group of one rank; CUDA only.
- `products`: products with 4-bit weights, by MLX's own operation and by that of workers.
- `speed`: decode and prefill of random models with 1 and 8 billion weights beside mlx-lm in one process, and beside the
  time that reading the weights takes. Memory: what MLX has held at most, and what the driver counts.
- `plan`: the same speeds and memory as the planner predicts and promises from this machine's profile.

With CUDA, MLX compiles kernels for quantized weights at their first use, half a minute to a minute each.

Exit code 1 if tokens differ beyond such ties, or a part fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_roles import ANSWER, BUILT_IN, MODELS, PROMPT, TOKENS, run_apart
from measuring import decode_speed, jobs_of, load, running, steady_speed, ttft
from predictions import predict
from servers import RingServer

from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import Demand, PlanRequest

PARTS = ("tokens", "nccl", "products", "speed", "plan")
TIE = 1e-4
"""Difference of two tokens' scores up to which they may change places in float32."""
SPLITS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two stages": {"stages": 2},
    "tensor, two ranks": {"ranks": 2, "flags": ("--backend", "ring")},
}
STREAMS = 8, 32
_MARGIN = 256
"""Tokens of context beyond prompt and answer."""


@dataclass
class Report:
    """Findings, printed line by line and as JSON."""

    found: dict[str, Any] = field(default_factory=dict[str, Any])
    failures: list[str] = field(default_factory=list[str])
    started: float = field(default_factory=time.monotonic)

    def add(self, part: str, name: str, values: dict[str, Any]) -> None:
        self.found.setdefault(part, {})[name] = values
        listed = "  ".join(f"{key} {_short(value)}" for key, value in values.items())
        print(f"{time.monotonic() - self.started:4.0f} s  {part:9}{name:32}{listed}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_tokens(report: Report, folders: dict[str, Path]) -> None:
    """Compare each split's greedy answers with mlx-lm's on the CPU."""
    for model, folder in folders.items():
        expected = run_apart("tokens", str(folder), device="cpu")
        stock = run_apart("tokens", str(folder))
        found = compare([answer["texts"][-1] for answer in stock], expected)
        report.add("tokens", f"{model}, mlx-lm", found | {"largest_shift": largest_shift(stock, expected)})
        for split, options in SPLITS.items():
            flags = ("--dtype", "float32", "--prefix-cache", "off", *options.get("flags", ()))
            start = RingServer(
                folder,
                *flags,
                stages=options.get("stages", 1),
                ranks=options.get("ranks", 1),
                cores=[],
                head_core=None,
            )
            try:
                found = compare(served_texts(start.url, [answer["prompt"] for answer in expected]), expected)
            finally:
                start.stop()
            report.add("tokens", f"{model}, {split}", found)
            if found["differ"] > found["ties"]:
                report.failures.append(f"{model} with {split} gives other tokens than mlx-lm on the CPU")


def served_texts(url: str, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the server's greedy answers to prompts that are sent at the same time, as one request."""
    body = {"model": "any", "prompt": prompts, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True}
    body["model"] = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    answer.raise_for_status()
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [choice["text"] for choice in choices]


def compare(texts: Sequence[str], expected: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count answers that differ, those whose first other token is a tie, and give the largest gap there."""
    gaps: list[float] = []
    for text, answer in zip(texts, expected, strict=True):
        whole: list[str] = answer["texts"]
        if text != whole[-1]:
            place = next(
                (index for index, begun in enumerate(whole) if not text.startswith(begun.rstrip("\ufffd"))),
                len(whole) - 1,
            )
            gaps.append(answer["gaps"][place])
    return {
        "answers": len(texts),
        "differ": len(gaps),
        "ties": sum(gap <= TIE for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
    }


def largest_shift(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> float:
    """Return the largest difference of the chosen tokens' scores in equal answers."""
    return max(
        (
            abs(one - other)
            for answer, same in zip(found, expected, strict=True)
            if answer["texts"][-1] == same["texts"][-1]
            for one, other in zip(answer["scores"], same["scores"], strict=True)
        ),
        default=0.0,
    )


def check_speed(report: Report, folders: dict[str, Path]) -> None:
    """Measure models beside mlx-lm and the device's bandwidth."""
    bandwidth = run_apart("bandwidth")
    report.add("speed", "reads", {"GB/s": bandwidth / 1e9})
    for name, folder in folders.items():
        stock = run_apart("stock", str(folder))
        ours, used = served_speeds(folder)
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        ratios = {
            "over mlx-lm, prefill": ours["prefill"] / stock["prefill"],
            "over mlx-lm, decode": ours["decode"] / stock["decode"],
            "share of bandwidth": ours["decode"] * weights / bandwidth,
        }
        report.add("speed", name, ours | ratios)
        report.add("memory", name, used | {"mlx-lm GB": stock["peak_bytes"] / 1e9})


def check_plans(report: Report, folders: dict[str, Path], machine: str) -> None:
    """Predict the same speeds and memory from this machine's profile, and from the catalogue's machine if one is given."""
    profile = profile_machine()
    rates = {rate.weights: rate.bandwidth / 1e9 for rate in profile.rates}
    costs = profile.costs.model_dump()
    report.add(
        "plan",
        "profile",
        {"seconds": profile.seconds, **{f"{name} GB/s": gb for name, gb in rates.items()}, **costs},
    )
    for name, folder in folders.items():
        model = profile_folder(read_model_folder(folder), name)
        plans = {"profile": predict(model, profile, (MODELS[name][0].layers,), PROMPT + ANSWER)}
        if machine:
            demand = Demand(2 * (PROMPT + ANSWER), 1)
            cluster = ClusterProfile((known_profile(machine),))
            plans[machine] = place(model, cluster, PlanRequest(demand, prompt_tokens=PROMPT))
        for source, plan in plans.items():
            prediction = plan.prediction
            report.add(
                "plan",
                f"{name}, {source}",
                {
                    "decode": 1 / prediction.token_s,
                    "prefill": prediction.prompt_tokens / prediction.first_token_s,
                    "promised GB": plan.stages[0].memory_bytes / 1e9,
                },
            )


def profile_machine() -> MachineProfile:
    output = subprocess.run(
        [sys.executable, "-m", "mlx_ring.worker.profile", "--blas", "auto", "--blas-threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return MachineProfile.from_json(output)


def served_speeds(folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return tokens per second of one stream and of several, and the memory in use after one stream."""
    flags = (
        "--max-num-seqs",
        str(max(STREAMS)),
        "--prefix-cache",
        "off",
        "--num-speculative-tokens",
        "0",
        "--max-model-len",
        str(PROMPT + ANSWER + _MARGIN),
    )
    with running(lambda: RingServer(folder, *flags, cores=[], head_core=None)) as (server,):
        rounds = [
            load(server, jobs_of(number, 1, PROMPT, ANSWER, 1000), 1, temperature=0.0)[0]
            for number in range(4)
        ][1:]
        speeds = {
            "prefill": statistics.median(PROMPT / ttft(record) for record in rounds),
            "decode": statistics.median(decode_speed(record) for record in rounds),
        }
        used = memory_used(server)
        for streams in STREAMS:
            for number in (5, 6):
                records = load(
                    server, jobs_of(number, streams, 64, 2 * ANSWER, 1000), streams, temperature=0.0
                )
                speeds[f"decode x{streams}"] = steady_speed(records)
    return speeds, used


def memory_used(server: RingServer) -> dict[str, Any]:
    """Return gigabytes of the worker: the most that MLX held, and what the driver counts for its process."""
    (device,) = httpx.get(f"{server.url}/cluster/status", trust_env=False).json()["devices"]
    used: dict[str, Any] = {
        "peak GB": device["peak_memory_bytes"] / 1e9,
        "resident GB": device["rss_bytes"] / 1e9,
    }
    if shutil.which("nvidia-smi"):
        used["driver MiB"] = dict(processes_on_gpu()).get(device["pid"])
        used["all on GPU MiB"] = sum(mib for _, mib in processes_on_gpu())
    return used


def processes_on_gpu() -> Iterator[tuple[int, int]]:
    """Yield processes and their MiB, as NVIDIA's driver lists them."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    for line in subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines():
        pid, _, mib = line.partition(",")
        if mib.strip().isdigit():
            yield int(pid), int(mib)


def check_nccl(report: Report) -> None:
    found = run_apart("nccl")
    report.add("nccl", "one rank", found)
    if not found["sum_is_exact"]:
        report.failures.append("a sum over NCCL with one rank changes the values")


def check(report: Report, parts: Sequence[str], machine: str) -> None:
    """Run the parts that were asked for."""
    device = run_apart("device")
    if not device["gpu"]:
        raise SystemExit("MLX computes on the CPU here. With an NVIDIA GPU, run scripts/setup --cuda first.")
    report.add("device", str(device["info"].get("device_name")), {"mlx": device["mlx"], **device["info"]})
    if "tokens" in parts:
        check_tokens(report, {name: BUILT_IN / name for name in ("demo", "demo-moe")})
    if "nccl" in parts and device["nccl"]:
        check_nccl(report)
    if "products" in parts:
        for name, values in run_apart("products").items():
            report.add("products", name, values)
    if "speed" not in parts and "plan" not in parts:
        return
    with tempfile.TemporaryDirectory(prefix="mlx-ring-gpu-") as scratch:
        folders = {name: Path(scratch) / name.replace(" ", "-") for name in MODELS}
        for name, folder in folders.items():
            run_apart("write", str(folder), name)
        if "speed" in parts:
            check_speed(report, folders)
        if "plan" in parts:
            check_plans(report, folders, machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--machine", default="", help="known machine to predict from as well, such as nvidia-h100"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report()
    check(report, options.parts, options.machine)
    if options.json:
        options.json.write_text(json.dumps(report.found, indent=2))
    if report.failures:
        raise SystemExit("\n".join(report.failures))


if __name__ == "__main__":
    main()
