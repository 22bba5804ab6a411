"""Quantized blocks as MLX's groups, against the definitions of the formats and MLX's own reader of GGUF."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.models.gguf.writing import Stored, gguf_bytes

from mlx_ring.models.gguf import QUANTIZED, TYPES, BlockType
from mlx_ring.worker.gguf_weights import pack, to_groups

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
ROWS, COLUMNS = 6, 512
Bytes = NDArray[np.uint8]


def random_blocks(kind: BlockType, seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> Bytes:
    """Return (blocks, bytes) for a matrix: random bits, and scales of usual sizes."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // kind.weights, kind.nbytes), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind.name, (0, 2)):
        scales = generator.normal(0, 0.02, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def nibbles(data: bytes) -> list[int]:
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def of_32(block: bytes, kind: str) -> Iterator[float]:
    """Yield the weights of a block with one scale, as the format defines them."""
    scale = half(block, 0)
    if kind == "Q8_0":
        yield from (scale * value for value in struct.unpack("<32b", block[2:]))
        return
    low = half(block, 2) if kind in ("Q4_1", "Q5_1") else 0.0
    bits = 0
    if kind in ("Q5_0", "Q5_1"):
        bits = struct.unpack_from("<I", block, len(block) - 20)[0]
    middle = {"Q4_0": 8, "Q5_0": 16}.get(kind, 0)
    for place, value in enumerate(nibbles(block[-16:])):
        yield scale * (value + ((bits >> place & 1) << 4) - middle) + low


def factors(data: bytes, group: int) -> tuple[int, int]:
    """Return the factors of a group's scale and minimum."""
    if group < 4:
        return data[group] & 63, data[group + 4] & 63
    high = data[group + 4]
    return (high & 15) | (data[group - 4] >> 6) << 4, (high >> 4) | (data[group] >> 6) << 4


def of_k(block: bytes, kind: str) -> Iterator[float]:
    """Yield the weights of a block of Q4_K or Q5_K, as the format defines them."""
    scale, low = half(block, 0), half(block, 2)
    values = block[-128:]
    for group in range(8):
        factor, minimum = factors(block[4:16], group)
        part = values[group // 2 * 32 : group // 2 * 32 + 32]
        for place, byte in enumerate(part):
            value = byte >> 4 if group % 2 else byte & 15
            if kind == "Q5_K":
                value |= (block[16 + place] >> group & 1) << 4
            yield scale * factor * value - low * minimum


def of_6(block: bytes) -> Iterator[float]:
    """Yield the weights of a block of Q6_K, as the format defines them."""
    scales, scale = struct.unpack("<16b", block[192:208]), half(block, 208)
    for place in range(256):
        side, inside = divmod(place, 128)
        quarter, at = divmod(inside, 32)
        low = block[64 * side + 32 * (quarter % 2) + at] >> (4 if quarter > 1 else 0) & 15
        high = block[128 + 32 * side + at] >> (2 * quarter) & 3
        yield scale * scales[place // 16] * ((low | high << 4) - 32)


def weights_of(kind: str) -> Callable[[bytes], Iterator[float]]:
    if kind == "Q6_K":
        return of_6
    return lambda block: of_k(block, kind) if kind.endswith("K") else of_32(block, kind)


def by_definition(kind: BlockType, blocks: Bytes) -> NDArray[np.float64]:
    weights = weights_of(kind.name)
    return np.array([value for block in blocks for value in weights(block.tobytes())])


def numbers(array: mx.array) -> NDArray[Any]:
    return np.array(cast("Any", array))


def by_mlx(kind: BlockType, blocks: Bytes) -> NDArray[np.float32]:
    """Return the weights that MLX computes with."""
    integers, scales, biases = to_groups(kind, blocks.reshape(-1))
    words = np.ascontiguousarray(pack(integers, kind.bits)).view("<u4").reshape(ROWS, -1)
    parts = (mx.array(part.reshape(ROWS, -1)) for part in (words, scales, biases))
    return numbers(mx.dequantize(*parts, group_size=32, bits=kind.bits))


@pytest.mark.parametrize("name", sorted(QUANTIZED.keys() - {"Q6_K"}))
def test_weights_are_those_that_the_format_defines(name: str) -> None:
    """Allow for float32, in which MLX multiplies and adds."""
    blocks = random_blocks(QUANTIZED[name])
    expected = by_definition(QUANTIZED[name], blocks).reshape(ROWS, COLUMNS)
    np.testing.assert_allclose(
        by_mlx(QUANTIZED[name], blocks), expected, rtol=0, atol=2e-7 * np.abs(expected).max()
    )


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_scales_and_biases_are_exact_in_float16(name: str) -> None:
    _, *scales_and_biases = to_groups(QUANTIZED[name], random_blocks(QUANTIZED[name]).reshape(-1))
    for values in scales_and_biases:
        assert np.array_equal(values, values.astype(np.float16).astype(np.float32))


def test_of_two_blocks_of_16_the_one_with_the_larger_scale_is_exact() -> None:
    kind = QUANTIZED["Q6_K"]
    blocks = random_blocks(kind)
    found, expected = by_mlx(kind, blocks).reshape(-1, 2, 16), by_definition(kind, blocks).reshape(-1, 2, 16)
    signed = blocks[:, 192:208].view(np.int8).astype(np.float64)
    scales = np.abs(signed * blocks[:, 208:210].copy().view("<f2").astype(np.float64)).reshape(-1, 2)
    larger = scales.max(axis=1, keepdims=True)
    steps = cast("NDArray[np.float64]", np.abs(found - expected).max(axis=2) / larger)
    assert steps[scales == larger].max() < 1e-5
    # Weights of the other block are rounded to a quarter. The largest one may need one more step than there are.
    assert steps.max() < 0.2501
    assert np.sqrt(np.mean(np.square(steps))) < 0.125


def test_a_block_of_zeros_is_zeros() -> None:
    for kind in QUANTIZED.values():
        blocks = np.zeros((ROWS * COLUMNS // kind.weights, kind.nbytes), np.uint8)
        assert not by_mlx(kind, blocks).any()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_groups_are_those_of_mlx_own_reader(tmp_path: Path, name: str) -> None:
    """MLX reads these types as they are."""
    kind, blocks = QUANTIZED[name], random_blocks(QUANTIZED[name], seed=1)
    stored = Stored(NUMBERS[name], (ROWS, COLUMNS), blocks.tobytes())
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({"general.architecture": "llama"}, {"t.weight": stored}))
    theirs = cast("dict[str, mx.array]", mx.load(str(tmp_path / "a.gguf")))
    integers, scales, biases = to_groups(kind, blocks.reshape(-1))
    words = np.ascontiguousarray(pack(integers, kind.bits)).view("<u4").reshape(ROWS, -1)
    assert np.array_equal(numbers(theirs["t.weight"]), words)
    for part, values in (("scales", scales), ("biases", biases)):
        assert np.array_equal(numbers(theirs[f"t.{part}"]).astype(np.float32), values.reshape(ROWS, -1))


def test_k_blocks_are_near_those_of_mlx_own_reader(tmp_path: Path) -> None:
    """MLX reads Q6_K as float16. Of Q4_K it reads other weights than llama.cpp."""
    kind, blocks = QUANTIZED["Q6_K"], random_blocks(QUANTIZED["Q6_K"], seed=2)
    stored = Stored(NUMBERS["Q6_K"], (ROWS, COLUMNS), blocks.tobytes())
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({"general.architecture": "llama"}, {"t.weight": stored}))
    theirs = np.array(cast("Any", mx.load(str(tmp_path / "a.gguf")))["t.weight"].astype(mx.float32))
    np.testing.assert_allclose(by_mlx(kind, blocks), theirs, rtol=0, atol=1.5e-2 * np.abs(theirs).max())
