"""`python -m tests.end_to_end.yielding_member HEAD TOKEN STATE USE`: a machine that joins, and whose use is that in a file.

It is what `mlx-ring join --yield-to-user` runs, with another reader of the machine's use and shorter times.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from mlx_ring.core.environment import enable_grpc_logs, quieten_grpc
from mlx_ring.core.folders import node_folder
from mlx_ring.host.addresses import parse_head_address
from mlx_ring.host.head_announcement import HeadPlace
from mlx_ring.host.machine import Use
from mlx_ring.host.yielding import YieldDecision, YieldWatch
from mlx_ring.settings.process_settings import MemberSettings, select_settings
from mlx_ring.settings.settings_sources import load_settings

LASTING_S, LEFT_S = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class FileUse:
    """Use that a test writes to a file, as JSON."""

    file: Path

    def read(self) -> Use:
        return Use(**json.loads(self.file.read_text()))


def main() -> None:
    """Join, and compute until a signal comes."""
    head, token, state, use = sys.argv[1], sys.argv[2], Path(sys.argv[3]), FileUse(Path(sys.argv[4]))
    quieten_grpc()
    enable_grpc_logs()
    # gRPC reads its log level on import, and these modules import it.
    from mlx_ring.agent.enrolment import join
    from mlx_ring.agent.member import run_member
    from mlx_ring.rpc.tls.peers import open_identity

    folder, address = node_folder(state), parse_head_address(head)
    join(str(address), token, folder)
    settings = load_settings({"yielding": "on"})
    run_member(
        HeadPlace(address),
        open_identity(folder).node,
        state,
        select_settings(MemberSettings, settings, blas_threads=1),
        listen="[::]",
        make_yields=lambda pids: YieldWatch(pids, use, YieldDecision(LASTING_S, LEFT_S), look_s=0.1),
    )


if __name__ == "__main__":
    main()
