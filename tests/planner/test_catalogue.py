"""Machines by the family of their chip."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_ring.planner.catalogue import (
    chip_profile,
    chips,
    known_machines,
    known_profile,
    machine_names,
)

OTHER_WAYS = (
    "M4 Max 128G",
    "m4_max_128",
    "Apple M4 Max 128 GB",
    "M4Max 128GB",
    "M4 Max, 128 GiB",
    "M4 Max (128 GB)",
)


@pytest.mark.parametrize(
    "typed", ["M4-MAX-128", "M4 Max 128GB", " m4 max 128 GB ", "m4-max-128gb", *OTHER_WAYS]
)
def test_a_machine_is_known_as_people_write_it(typed: str) -> None:
    assert known_profile(typed) == known_profile("m4-max-128")
    assert known_profile(typed, "mine") == known_profile("m4-max-128", "mine")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("m3-ultra-512", "m3-ultra-mac-studio-512"),
        ("m4-16", "m4-mac-mini-16"),
        ("m4-max-36", "m4-max-macbook-pro-36"),
        ("rtx-4090", "geforce-rtx-4090-24"),
        ("m3-max", "m3-max-macbook-pro-48"),
    ],
)
def test_a_chip_family_names_a_machine(text: str, same: str) -> None:
    assert known_profile(text, "x") == known_profile(same, "x")


def test_names_of_machines_are_known_once_each_in_the_order_of_chips() -> None:
    names = machine_names()
    assert len(set(names)) == len(names)
    assert (
        names.index("m1-8") < names.index("m3-ultra-96") < names.index("m3-ultra-512") < names.index("m4-16")
    )
    sold = {
        (chip, size)
        for each in known_machines().values()
        for chip, sizes in each.bins.items()
        for size in sizes
    }
    assert len(names) <= len(sold)
    for name in names:
        known_profile(name)
    families = {name.rpartition("-")[0] for name in names}
    assert all(chip in families or chip.rpartition("-")[0] in families for chip, _ in sold)
    assert {chip for chip, _ in sold} <= chips().keys()


def test_only_our_engine_takes_long_chunks_and_only_on_gpus() -> None:
    names = ("m4-max-128", "nvidia-h200", "linux-desktop-32")
    assert [known_profile(name).long_chunk_tokens for name in names] == [2048, 2048, 0]
    others = [chip_profile(chip, 64, "x", engine="mlx-lm") for chip in chips().values()]
    assert {node.long_chunk_tokens for node in others} == {0}


def test_a_known_machine_without_gpu_computes_in_float32_as_its_workers_would() -> None:
    for name, is_cpu in (("linux-desktop-32", True), ("m4-max-128", False)):
        node = known_profile(name)
        assert (node.widens, node.keeps_scales) == (is_cpu, is_cpu)


@pytest.mark.parametrize("bits", ["4-bit", "8-bit"])
@pytest.mark.parametrize("name", ["m2-pro-19", "m4-max-40", "rtx-4090"])
def test_weights_are_unpacked_while_they_are_read(name: str, bits: str) -> None:
    """Compare with a chip of endless arithmetic, which only reads, and one of endless bandwidth, which only unpacks."""
    chip, much = chips()[name], 1e9

    def byte_s(gb_s: float, plain: float) -> float:
        made = replace(chip, gb_s=gb_s, plain_tflops=plain)
        return 1 / chip_profile(made, 64, name).rate(bits).bandwidth

    plain = chip.plain_tflops or chip.tflops
    both_s, read_s, unpacked_s = (
        byte_s(chip.gb_s, plain),
        byte_s(chip.gb_s, much * plain),
        byte_s(much * chip.gb_s, plain),
    )
    longer_s = max(read_s, unpacked_s)
    assert longer_s < both_s < 1.2 * longer_s


def test_scales_that_are_packed_themselves_take_longer_to_unpack_on_gpus() -> None:
    """Compare on an M2 Max, whose arithmetic is the limit, with a CPU, to which nothing is fitted."""

    def speed(name: str, packing: str | None) -> float:
        return chip_profile(chips()[name], 64, name, packing=packing).rate("4-bit").bandwidth

    assert speed("m2-max-30", "k-quants") < 0.8 * speed("m2-max-30", None)
    assert speed("cpu-server", "k-quants") == speed("cpu-server", None)
