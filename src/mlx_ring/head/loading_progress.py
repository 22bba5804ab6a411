"""How far an instance is loaded, from what agents report. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_ring.core.types import RankId
from mlx_ring.rpc.protos import agent_pb2

_FETCH = "fetch"


@dataclass(frozen=True, slots=True)
class Loaded:
    """How far one rank is. Bytes; a total of 0 is not known yet."""

    phase: str = "starting"
    """`starting`, `fetch`, then as the worker says: `weights`, `warm-up`, `ready`."""
    bytes_fetched: int = 0
    """By its node, from other machines: of all ranks there together."""
    bytes_to_fetch: int = 0
    bytes_loaded: int = 0
    """Into memory, by the rank."""
    bytes_to_load: int = 0


class LoadingProgress:
    """Of all ranks of an instance."""

    def __init__(self) -> None:
        self._ranks: dict[RankId, Loaded] = {}

    def hear(self, told: agent_pb2.StageProgress) -> None:
        """Take in a report."""
        rank, report = RankId(told.stage, told.rank), told.progress
        before = self._ranks.get(rank, Loaded())
        if report.phase == _FETCH:
            self._ranks[rank] = replace(
                before, phase=_FETCH, bytes_fetched=report.bytes_loaded, bytes_to_fetch=report.bytes_total
            )
            return
        self._ranks[rank] = replace(
            before,
            phase="ready" if report.ready else report.phase or before.phase,
            bytes_loaded=max(before.bytes_loaded, report.bytes_loaded),
            bytes_to_load=max(before.bytes_to_load, report.bytes_total),
        )

    def of(self, rank: RankId) -> Loaded:
        """How far it is."""
        return self._ranks.get(rank, Loaded())
