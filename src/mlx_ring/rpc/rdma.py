"""Matrix of RDMA devices that MLX's jaccl reads: which device of each rank leads to each other one. Pure.

    [[null, "rdma_en2"],
     ["rdma_en2", null]]

An entry may also be a list of names, one for each cable between the two. MLX takes a mesh, in which every two are
connected, and a ring, in which neighbours are, all by equally many cables.
(`mlx/distributed/jaccl/lib/jaccl/jaccl.cpp`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, cast

from mlx_ring.core.errors import ConfigError

Matrix = tuple[tuple[tuple[str, ...], ...], ...]
"""Devices by rank and other rank, one for each cable."""

_DEVICE: Final = re.compile(r"rdma_en\d+")
_MEND: Final = "`mlx.distributed_config --backend jaccl` writes such a file"


def read_matrix(rows: Sequence[object], hosts: Sequence[str], where: str) -> Matrix:
    """Read the matrix from the rows of a hostfile.

    Args:
        rows: `rdma` of each host.
        hosts: their names, for errors.
        where: the file.

    Raises:
        ConfigError: it is not square, or makes neither a mesh nor a ring. It leads from a host to itself, or connects
            two from one side only. It names something other than an RDMA device.
    """
    matrix = tuple(_read_row(row, place, hosts, where) for place, row in enumerate(rows))
    for one, row in enumerate(matrix):
        for other in range(one):
            if len(row[other]) != len(matrix[other][one]):
                raise ConfigError(
                    f"{where}: rdma connects {hosts[one]} to {hosts[other]} by {_cables(row[other])}, and {hosts[other]} to "
                    f"{hosts[one]} by {_cables(matrix[other][one])}; {_MEND}."
                )
    if not (is_mesh(matrix) or is_ring(matrix)):
        one, other = _first_gap(matrix)
        raise ConfigError(
            f"{where}: rdma lists no device from {hosts[one]} to {hosts[other]}; every two hosts must be connected, or each with "
            f"the next one of the list in a ring, all by equally many cables. {_MEND}."
        )
    return matrix


def is_mesh(matrix: Matrix) -> bool:
    """Report whether every two are connected."""
    return all(
        bool(devices) != (one == other) for one, row in enumerate(matrix) for other, devices in enumerate(row)
    )


def is_ring(matrix: Matrix) -> bool:
    """Report whether each is connected with the next, and all by equally many cables."""
    size = len(matrix)
    cables = {len(matrix[one][(one + step) % size]) for one in range(size) for step in (1, -1)}
    return len(cables) == 1 and cables != {0}


def as_json(matrix: Matrix) -> list[list[str | list[str] | None]]:
    """Return the matrix as MLX reads it from the file of MLX_IBV_DEVICES."""
    return [[_entry(devices) for devices in row] for row in matrix]


def part_of(matrix: Matrix, ranks: Sequence[int]) -> Matrix:
    """Return the matrix of some of the ranks, in their order."""
    return tuple(tuple(matrix[one][other] for other in ranks) for one in ranks)


def _entry(devices: Sequence[str]) -> str | list[str] | None:
    if not devices:
        return None
    return devices[0] if len(devices) == 1 else list(devices)


def _read_row(row: object, place: int, hosts: Sequence[str], where: str) -> tuple[tuple[str, ...], ...]:
    listed = cast("list[object]", row) if isinstance(row, list) else []
    if len(listed) != len(hosts) or listed[place] not in (None, []):
        raise ConfigError(
            f"{where}: rdma of {hosts[place]} is {row!r}; it must be a list of {len(hosts)} with null at place {place}, its own."
        )
    return tuple(_read_entry(entry, hosts[place], where) for entry in listed)


def _read_entry(entry: object, host: str, where: str) -> tuple[str, ...]:
    names = () if entry is None else cast("list[object]", entry) if isinstance(entry, list) else (entry,)
    for name in names:
        if not isinstance(name, str) or not _DEVICE.fullmatch(name):
            raise ConfigError(
                f"{where}: rdma of {host} names {name!r}, which is no RDMA device; these have names such as rdma_en2."
            )
    return cast("tuple[str, ...]", tuple(names))


def _first_gap(matrix: Matrix) -> tuple[int, int]:
    """Return two that are not connected, or neighbours with unequal numbers of cables if all are."""
    size = len(matrix)
    gaps = (
        (one, other)
        for one in range(size)
        for other in range(size)
        if one != other and not matrix[one][other]
    )
    return next(gaps, (0, 1 % size))


def _cables(devices: Sequence[str]) -> str:
    return " and ".join(devices) or "none"
