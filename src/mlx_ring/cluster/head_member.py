"""The agent of the head's own machine in a cluster, which the head starts and which outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from mlx_ring.core.cluster_folders import AGENT_LOCK, node_folder
from mlx_ring.core.environment import environment_with_grpc_logs, inherited_environment
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.machine import share_cores
from mlx_ring.host.private_files import try_lock
from mlx_ring.host.trusted_interfaces import FLAG, Trust, TrustedInterface
from mlx_ring.settings.config import Settings

_MODULE = "mlx_ring.agent.head_member"


def ensure_head_member(
    settings: Settings, state: Path, node: str, head: HeadAddress
) -> subprocess.Popen[bytes] | None:
    """Start the agent; return None if one already runs, perhaps an earlier head's.

    It leads its own session and shares no open file with the head, so it survives the head's end.
    """
    lock = try_lock(node_folder(state) / AGENT_LOCK)
    if lock is None:
        return None
    os.close(lock)
    run_dir = () if settings.run_dir is None else ("--run-dir", str(settings.run_dir))
    limit = () if settings.memory_limit is None else ("--memory-limit", str(settings.memory_limit))
    trusted = [word for name in settings.trusted_interface for word in ("--trusted-interface", name)]
    disk = () if settings.weights_limit is None else ("--weights-limit", str(settings.weights_limit))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", _MODULE, "--head", head.cluster, "--node", node, "--state", str(state)),
            *("--log-dir", str(settings.log_dir.absolute()), "--log-level", settings.log_level),
            *("--log-format", settings.log_format),
            *("--blas", settings.blas, "--blas-threads", str(settings.blas_threads or share_cores(1))),
            *("--load-timeout", str(settings.model_load_timeout)),
            *("--memory-utilization", str(settings.memory_utilization), *run_dir),
            *("--listen", settings.cluster_host, *limit, *disk, *trusted),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment_with_grpc_logs(inherited_environment({})),
    )


def stale_trust(kept: Iterable[TrustedInterface], named: tuple[str, ...]) -> str:
    """Return a warning if an earlier head's agent trusts other interfaces than this head names; otherwise empty."""
    trusted, wanted = (sorted(map(str, found)) for found in (kept, Trust(named).now()[0]))
    if trusted == wanted:
        return ""
    return (
        "This machine's agent was started by an earlier head. "
        f"It trusts {', '.join(trusted) or 'nothing'} with collectives, and this head names {', '.join(wanted) or 'nothing'}. "
        "The agent's setting applies. To change it, stop this head, which also stops the agent, and start it again with "
        f"the new {FLAG}."
    )
