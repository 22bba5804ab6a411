"""Memory that products with quantized weights take beside their results, for plans of a process's memory."""

TILE_BYTES = 64 << 20
"""Memory of the tiles of a product without native kernels, about: several are under way at once."""
_BLOCK, _STRIDE, _MOST_ROWS = 256, 272, 768
"""Depth of the blocks in which `native/panel_product.h` keeps x, numbers from row to row, and rows at once."""
_FLOAT_BYTES = 4


def scratch_bytes(inputs: int, rows: int) -> int:
    """Return the bytes that products of `rows` rows with up to `inputs` inputs keep, with native kernels or without."""
    blocks = -(-inputs // _BLOCK)
    return max(TILE_BYTES, _FLOAT_BYTES * blocks * _STRIDE * min(rows, _MOST_ROWS))
