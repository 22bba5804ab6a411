"""Open MPI for tests: the machine's own, or the one that `scripts/setup_openmpi` has unpacked."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from mlx_ring.agent.mpi.pmix import give_places
from mlx_ring.rpc.protos import worker_pb2

_UNPACKED = Path(__file__).parent.parent / ".debian" / "root"


def use_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes started from now on find Open MPI. Skip the test where there is none."""
    libraries = sorted(_UNPACKED.glob("usr/lib/*/libmpi.so.40"))
    if not libraries:
        try:
            ctypes.CDLL("libmpi.so.40")
        except OSError:
            pytest.skip("Open MPI is not installed here: see scripts/setup_openmpi")
        return
    library = libraries[0].parent
    plugins = library / "openmpi" / "lib"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}:{_UNPACKED / 'lib' / library.name}:{plugins}")
    for name, path in {
        "OPAL_PREFIX": _UNPACKED / "usr",
        "OPAL_LIBDIR": plugins,
        "OPAL_DATADIR": _UNPACKED / "usr" / "share",
        "OPAL_SYSCONFDIR": _UNPACKED / "etc" / "openmpi",
    }.items():
        monkeypatch.setenv(name, str(path))


@contextlib.contextmanager
def mpi_places(ranks: int) -> Generator[list[dict[str, str]]]:
    """Yield the environment of each rank of a group, made by the agent's own code."""
    members = [worker_pb2.StageAssignment(tp_size=ranks, rank=rank, backend="mpi") for rank in range(ranks)]
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="mpi-") as folder,
        asyncio.Runner() as runner,
    ):
        use_open_mpi(patch)
        (child,) = runner.run(give_places(members, Path(folder)))
        try:
            yield [dict(member.group_environment) for member in members]
        finally:
            runner.run(child.stop())
