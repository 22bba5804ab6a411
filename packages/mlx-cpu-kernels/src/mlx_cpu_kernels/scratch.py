"""Memory that products with quantized weights take beside their results, for plans of a process's memory."""

TILE_BYTES = 64 << 20
"""Memory of the tiles of a product without native kernels, about: several are under way at once."""
_BLOCK, _STRIDE = 256, 272
"""Depth of the blocks in which `native/panel_product.h` keeps x, and numbers from row to row."""
_LEAST_ROWS, _MOST_ROWS, _MOST_BYTES = 96, 768, 16 << 20
"""Rows that it keeps at once: so many that they take this memory, within bounds."""
_FLOAT_BYTES = 4


def scratch_bytes(inputs: int, rows: int) -> int:
    """Return the bytes that products of `rows` rows with up to `inputs` inputs keep, with native kernels or without."""
    row = _FLOAT_BYTES * _STRIDE * max(1, -(-inputs // _BLOCK))
    kept = max(_LEAST_ROWS, min(_MOST_ROWS, _MOST_BYTES // row))
    return max(TILE_BYTES, row * min(rows, kept))
