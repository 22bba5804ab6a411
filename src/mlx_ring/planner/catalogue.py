"""Machines, links and engines that are known without a measurement: `catalogue.yaml`, as the planner's profiles."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, cast

import yaml

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import CHUNK_TOKENS, LONG_CHUNK_TOKENS
from mlx_ring.host.machine_profile import StepCosts, WeightRate
from mlx_ring.host.process import METAL_SHARE
from mlx_ring.planner.profiles import LAYERS_AHEAD_WITH_CUDA, NodeProfile
from mlx_ring.rpc.link_profile import LinkProfile

FAST_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Safe loader of YAML, in C where it is there."""
Fitted = Mapping[str, Mapping[str, Mapping[str, Any]]]
OWN_ENGINE = "mlx-ring"
"""Engine of predictions: its factors are those of mlx-lm, whose layers it computes, with its own chunks of a prompt."""
_HALF, _EIGHT = 16, 8
_KINDS = {16: "bfloat16", 8: "8-bit", 4: "4-bit"}
_ATTENTION_OPERATIONS = 4
"""Operations for each number of a query and each token before it: a score and a weighted value."""
_MOST_OF_NOMINAL = 0.98
_OVERLAP = 8.0
"""Order of the norm of two times that overlap: 1 for one after the other, without end for the longer one alone."""
_NEAREST = 3


@dataclass(frozen=True, slots=True)
class Chip:
    """Processor in one of its GPU bins."""

    name: str
    backend: str
    """Backend of its engine: "metal", "cuda", "vulkan" or "cpu"."""
    generation: str
    gb_s: float
    """Nominal bandwidth of its memory."""
    tflops: float
    """Nominal speed of matrices in half precision."""
    plain_tflops: float | None = None
    """The same without tensor cores or neural accelerators, where it has them."""
    tier: str = "usual"
    gpu_cores: int | None = None


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """Machine as it is sold."""

    name: str
    bins: Mapping[str, tuple[int, ...]]
    """Gigabytes of memory that it is sold with, by chip."""

    @property
    def gb(self) -> tuple[int, ...]:
        return tuple(size for sizes in self.bins.values() for size in sizes)

    def chip_with(self, gigabytes: int) -> Chip | None:
        """Return the chip with which this memory is sold."""
        return next((chips()[name] for name, sizes in self.bins.items() if gigabytes in sizes), None)


@cache
def _catalogue() -> Mapping[str, Any]:
    return yaml.load(files("mlx_ring.planner").joinpath("catalogue.yaml").read_text("utf-8"), FAST_LOADER)  # noqa: S506 - it is a safe loader


@cache
def chips() -> Mapping[str, Chip]:
    """Return all chips by name, as `m4-max-40`."""
    entries = cast("dict[str, dict[str, Any]]", _catalogue()["chips"])
    return {name: Chip(name, **entry) for name, entry in entries.items()}


@cache
def known_machines() -> Mapping[str, KnownMachine]:
    """Return the machines by name."""
    entries = cast("dict[str, dict[str, list[int]]]", _catalogue()["machines"])
    return {
        name: KnownMachine(name, {chip: tuple(sizes) for chip, sizes in bins.items()})
        for name, bins in entries.items()
    }


@cache
def named_links() -> Mapping[str, LinkProfile]:
    """Return the links by name, such as `tb5-rdma`. One that only collectives use counts as trusted."""
    entries = cast("dict[str, dict[str, Any]]", _catalogue()["links"])
    return {
        name: LinkProfile(
            entry["round_trip_ms"] / 1e3,
            entry["gbit_s"] * 1e9 / 8,
            trusted=bool(entry.get("mesh")),
            is_mesh=bool(entry.get("mesh")),
        )
        for name, entry in entries.items()
    }


def fitted_numbers() -> Fitted:
    """Return the numbers that were fitted to published speeds."""
    return _catalogue()["fitted"]


def accuracy(kind: str) -> float:
    """Return the factor by which predictions may be off.

    Args:
        kind: "decode" or "prefill" for the mean factor of machines that were not measured; "measured" for the bound that
            `bench/predictions.py` sets for machines that were.
    """
    return float(_catalogue()["accuracy"][kind])


def known_profile(text: str, name: str | None = None, *, wired_gb: float | None = None) -> NodeProfile:
    """Return the profile of a known machine or chip, such as `m4-mac-mini-16`, `m3-ultra-512` or `m3-ultra-60-256`.

    Without gigabytes it is the machine as the catalogue lists it first.

    Args:
        text: a machine's or a chip's name, with or without its GPU cores, and gigabytes of memory.
        name: name of the node; that of the machine by default.
        wired_gb: gigabytes that the GPU may use, as set on the machine (`iogpu.wired_limit_mb`).

    Raises:
        ConfigError: it is not known.
    """
    if not text.strip():
        raise ConfigError("The name of a machine is empty; `mlx-ring plan` lists the known ones.")
    written = as_listed(text)
    chip, gigabytes = _sold(written)
    if chip is None:
        raise ConfigError(f"The machine {text} is unknown; {_nearest(written)}.")
    return chip_profile(chip, gigabytes, name or written, wired_gb=wired_gb)


def as_listed(text: str) -> str:
    """Write a machine's name as the catalogue does: `m4-max-128` for `Apple M4 Max, 128 GB` or `M4Max_128G`."""
    joined = re.sub(r"[\s_,()-]+", "-", text.lower()).strip("-").removeprefix("apple-")
    chip = re.sub(r"\b(m\d)(pro|max|ultra)\b", r"\1-\2", joined)
    return re.sub(r"(?<=\d)-?(?:g|gb|gib)$", "", chip)


def _sold(text: str) -> tuple[Chip | None, int]:
    """Return the chip and the gigabytes of a machine, a chip in one of its bins, or a chip's family as `m3-ultra`."""
    machines = _of_family(text)
    if machines:
        gigabytes = machines[0].gb[0]
        return machines[0].chip_with(gigabytes), gigabytes
    model, _, last = text.rpartition("-")
    if not last.isdecimal():
        return None, 0
    sold = (machine.chip_with(int(last)) for machine in _of_family(model))
    return next(filter(None, sold), chips().get(model)), int(last)


def _of_family(name: str) -> list[KnownMachine]:
    """Return the machines with this name, or with a chip of this family."""
    return [machine for machine in known_machines().values() if name in (machine.name, *_families(machine))]


def _families(machine: KnownMachine) -> list[str]:
    """Return the names of a machine's chips without their GPU cores: `m3-ultra` of `m3-ultra-80`."""
    return [name.removesuffix(f"-{chips()[name].gpu_cores}") for name in machine.bins]


def machine_names() -> list[str]:
    """Return machines by the family of their chip and their gigabytes, as `m3-ultra-512`."""
    names = {
        f"{family}-{size}"
        for machine in known_machines().values()
        for family, sizes in zip(_families(machine), machine.bins.values(), strict=True)
        for size in sizes
    }
    order = list(chips())
    return sorted(names, key=lambda name: (_chip_place(order, name), int(name.rpartition("-")[2])))


def _chip_place(order: Sequence[str], name: str) -> int:
    family = name.rpartition("-")[0]
    return next(place for place, chip in enumerate(order) if chip == family or chip.startswith(f"{family}-"))


def _nearest(text: str) -> str:
    """Return the known names that are most like an unknown one."""
    if same := _of_family(text.rpartition("-")[0]):
        sizes = sorted({size for machine in same for size in machine.gb})
        return f"it is known with {', '.join(map(str, sizes))} GB"
    sold = [f"{each.name}-{size}" for each in known_machines().values() for size in each.gb]
    near = difflib.get_close_matches(text, [*machine_names(), *sold], n=_NEAREST, cutoff=0.5)
    return f"the nearest known ones are {', '.join(near)}" if near else "`mlx-ring plan` lists the known ones"


def chip_of_bin(gigabytes: float, gpu_cores: int) -> Chip | None:
    """Return the Mac's chip with this memory and number of GPU cores; of several, the one with the slowest memory.

    Predictions then hold on each of them. None if no Mac has as many cores.
    """
    alike = [chip for chip in chips().values() if chip.backend == "metal" and chip.gpu_cores == gpu_cores]
    sold = [
        chip
        for chip in alike
        if any(gigabytes in machine.bins.get(chip.name, ()) for machine in known_machines().values())
    ]
    return min(sold or alike, key=lambda chip: chip.gb_s, default=None)


def nearest_chip(gb_s: float, tflops: float, backend: str | None = None) -> Chip:
    """Return the chip whose nominal numbers have the smallest factors to these; of several, the first.

    Args:
        gb_s: nominal bandwidth of the memory.
        tflops: nominal speed of matrices in half precision.
        backend: backend of its engine; None for any.
    """

    def distance(chip: Chip) -> float:
        return math.hypot(math.log(chip.gb_s / gb_s), math.log(chip.tflops / tflops))

    return min((chip for chip in chips().values() if backend in (None, chip.backend)), key=distance)


def described_profile(
    gb_s: float,
    tflops: float,
    gigabytes: float,
    name: str,
    *,
    backend: str | None = None,
    wired_gb: float | None = None,
) -> NodeProfile:
    """Return the profile of a machine that is described by nominal numbers, with the efficiencies of the nearest chip.

    Args:
        gb_s: nominal bandwidth of its memory.
        tflops: nominal speed of matrices in half precision.
        gigabytes: memory, as sold.
        name: name of the node.
        backend: backend of its engine, one of `backends()`; that of the nearest chip by default.
        wired_gb: gigabytes that the GPU may use, where that is set on the machine.

    Raises:
        ConfigError: the GPU may use more than the machine has.
    """
    near = nearest_chip(gb_s, tflops, backend)
    # Tensor cores are assumed to be as many times faster than plain arithmetic as on the nearest chip.
    plain = None if near.plain_tflops is None else near.plain_tflops * (tflops / near.tflops)
    chip = replace(near, gb_s=gb_s, tflops=tflops, plain_tflops=plain)
    return replace(chip_profile(chip, gigabytes, name, wired_gb=wired_gb), nearest_chip=near.name)


def backends() -> list[str]:
    """Return the backends of all chips."""
    return list(dict.fromkeys(chip.backend for chip in chips().values()))


def chip_profile(
    chip: Chip,
    gigabytes: float,
    name: str,
    *,
    wired_gb: float | None = None,
    engine: str = OWN_ENGINE,
    packing: str | None = None,
    fitted: Fitted | None = None,
) -> NodeProfile:
    """Return the profile of a chip with an amount of memory.

    Args:
        chip: processor and GPU bin.
        gigabytes: memory, as sold.
        name: name of the node.
        wired_gb: gigabytes that the GPU may use, where that is set on the machine.
        engine: engine whose factors count.
        packing: "k-quants" if weights are packed as llama.cpp's, with scales of scales; None for groups of numbers with one.
        fitted: numbers to use instead of the catalogue's.

    Raises:
        ConfigError: the GPU may use more than the machine has.
    """
    if wired_gb and wired_gb > gigabytes:
        raise ConfigError(f"wired_limit_gb of {name} is {wired_gb:g}, but it has {gigabytes:g} GB of memory.")
    numbers = fitted or fitted_numbers()
    generation, tier = numbers["generations"][chip.generation], numbers["tiers"][chip.tier]
    backend = numbers["backends"][chip.backend]
    factors = numbers["engines"].get(engine, {})
    if engine == OWN_ENGINE:
        factors = {**numbers["engines"].get("mlx-lm", {}), "chunk": CHUNK_TOKENS}
    decode, prefill = float(factors.get("decode", 1.0)), float(factors.get("prefill", 1.0))
    attention, overhead = float(factors.get("attention", 1.0)), float(factors.get("overhead", 1.0))
    look_back = attention * float(factors.get("look_back", 1.0))
    unpack = backend["unpack"] * generation["unpack"]
    if packing is not None and chip.backend != "cpu":
        # Nothing is fitted to CPUs, whose kernels are others.
        unpack *= numbers["packings"][packing]["unpack"]
    nominal, operations = chip.gb_s * 1e9, chip.tflops * 1e12
    plain = (chip.plain_tflops or chip.tflops) * 1e12
    instructions = _catalogue()["instructions"]
    is_older = engine in instructions["older"].get(chip.generation, ())
    matrix = operations * generation["older" if is_older else "matrix"] / prefill
    eight = instructions["eight_bits"]
    in_eight_bits = engine in eight["engines"] and chip.generation in eight["generations"]

    def rate(bits: int) -> WeightRate:
        share = min(_MOST_OF_NOMINAL, generation["read"] * tier["read"] * backend["read"][bits])
        read_s, unpacked_s = 1 / (nominal * share), 0.0 if bits == _HALF else 8 / bits * unpack / plain
        return WeightRate(
            weights=_KINDS[bits],
            bandwidth=1 / _overlapped(read_s, unpacked_s) / decode,
            row_s=0.0,
            spread=0.0,
            flops=matrix
            * backend["matrix"][bits]
            * (eight["gain"] if in_eight_bits and bits == _EIGHT else 1.0),
        )

    overhead *= decode * generation["layer"] / 1e6
    layer_s = backend["layer_us"] * overhead
    rates = tuple(rate(bits) for bits in _KINDS)
    usable = gigabytes
    if chip.backend == "metal":
        usable = METAL_SHARE * (wired_gb or gigabytes * _granted_share(gigabytes))
    return NodeProfile(
        name=name,
        memory_bytes=int(usable * 2**30),
        bandwidth=min(_MOST_OF_NOMINAL * nominal, rates[0].bandwidth / attention),
        flops=matrix * backend["scores"] / attention,
        rates=rates,
        costs=StepCosts(
            step_s=backend["step_us"] * overhead,
            layer_s=layer_s,
            quantized_layer_s=layer_s,
            draw_s=0.0,
            logit_s=0.0,
            attention_s=_ATTENTION_OPERATIONS * decode * look_back / (plain * backend["attention"]),
            row_s=backend["row_us"] * decode / 1e6,
            states_s=backend["states_us"] * overhead,
            experts_s=backend["experts_us"] * overhead,
        ),
        experts_pace=backend["experts_pace"],
        experts_rows=backend["experts_rows"],
        activation_s=backend["activations"] * prefill / nominal,
        vector_s=decode / (plain * backend["vector"]),
        # CUDA's kernels update states of many tokens at once, in matrices; others do it in plain arithmetic.
        scan_s=backend["scans"] * prefill / (operations if chip.backend == "cuda" else plain),
        narrow=backend["narrow"],
        prompt_s=float(factors.get("prompt_ms", 0.0)) / 1e3,
        chunk_tokens=int(factors.get("chunk", CHUNK_TOKENS)),
        long_chunk_tokens=LONG_CHUNK_TOKENS if engine == OWN_ENGINE and chip.backend != "cpu" else 0,
        layers_ahead=LAYERS_AHEAD_WITH_CUDA if chip.backend == "cuda" else 0.0,
        # As workers load weights on a CPU, with native kernels. Other engines compute with them as they are stored.
        widens=chip.backend == "cpu" and engine == OWN_ENGINE,
        keeps_scales=chip.backend == "cpu" and engine == OWN_ENGINE,
    )


def _overlapped(read_s: float, unpacked_s: float) -> float:
    """Return the seconds in which weights are read, and unpacked meanwhile: little more than the longer of the two."""
    return (read_s**_OVERLAP + unpacked_s**_OVERLAP) ** (1 / _OVERLAP)


def _granted_share(gigabytes: float) -> float:
    memory = cast("dict[str, float]", _catalogue()["memory"])
    return memory["small_share"] if gigabytes <= memory["small_gb"] else memory["share"]
