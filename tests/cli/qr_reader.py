"""Reads a QR code of bytes with medium error correction, without correcting errors (ISO/IEC 18004)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

_FORMAT_MASK = 0b101010000010010
_LEVEL_M = 0b00
_BLOCKS = {1: (16,), 2: (28,), 3: (44,), 4: (32, 32), 5: (43, 43), 6: (27,) * 4, 7: (31,) * 4}
"""Data codewords of each block, by version."""
_ALIGNED = {1: (), 2: (6, 18), 3: (6, 22), 4: (6, 26), 5: (6, 30), 6: (6, 34), 7: (6, 22, 38)}
"""Rows and columns of the alignment patterns' centres."""
_MASKS: tuple[Callable[[int, int], int], ...] = (
    lambda row, column: (row + column) % 2,
    lambda row, _column: row % 2,
    lambda _row, column: column % 3,
    lambda row, column: (row + column) % 3,
    lambda row, column: (row // 2 + column // 3) % 2,
    lambda row, column: row * column % 2 + row * column % 3,
    lambda row, column: (row * column % 2 + row * column % 3) % 2,
    lambda row, column: ((row + column) % 2 + row * column % 3) % 2,
)
"""Masks; a module is inverted where its mask is 0."""

Modules = Sequence[Sequence[int]]


def read_qr(modules: Modules) -> str:
    """Return the text of a code. Rows are from the top, and 1 is a dark module."""
    version = (len(modules) - 17) // 4
    places = [(8, column) for column in (0, 1, 2, 3, 4, 5, 7, 8)] + [
        (row, 8) for row in (7, 5, 4, 3, 2, 1, 0)
    ]
    form = _number(modules[row][column] for row, column in places) ^ _FORMAT_MASK
    assert form >> 13 == _LEVEL_M
    mask = _MASKS[form >> 10 & 0b111]
    bits = [modules[row][column] ^ (mask(row, column) == 0) for row, column in _data_places(version)]
    words = [_number(bits[at : at + 8]) for at in range(0, len(bits) - 7, 8)]
    blocks = _BLOCKS[version]
    data = [
        words[place * len(blocks) + block] for block in range(len(blocks)) for place in range(blocks[block])
    ]
    bits = [word >> shift & 1 for word in data for shift in range(7, -1, -1)]
    assert _number(bits[:4]) == 0b0100, "bytes"
    count = _number(bits[4:12])
    return bytes(_number(bits[at : at + 8]) for at in range(12, 12 + 8 * count, 8)).decode()


def _data_places(version: int) -> Iterator[tuple[int, int]]:
    """Yield rows and columns in the order of the bits: two columns at a time from the right, up and down by turns."""
    size = 4 * version + 17
    rights = [right - (right <= 6) for right in range(size - 1, 0, -2)]
    for turn, right in enumerate(rights):
        rows = range(size) if turn % 2 else range(size - 1, -1, -1)
        for row in rows:
            yield from (
                (row, column) for column in (right, right - 1) if not _is_pattern(row, column, version, size)
            )


def _is_pattern(row: int, column: int, version: int, size: int) -> bool:
    in_corner = (row <= 8 and (column <= 8 or column >= size - 8)) or (row >= size - 8 and column <= 8)
    centres = _ALIGNED[version]
    last = size - 7
    aligned = any(
        abs(row - y) <= 2 and abs(column - x) <= 2
        for y in centres
        for x in centres
        if (y, x) not in {(6, 6), (6, last), (last, 6)}
    )
    has_version = version >= 7 and (
        (row < 6 and size - 11 <= column < size - 8) or (column < 6 and size - 11 <= row < size - 8)
    )
    return in_corner or aligned or has_version or 6 in (row, column)


def _number(bits: Iterator[int] | Sequence[int]) -> int:
    number = 0
    for bit in bits:
        number = 2 * number + bit
    return number
