"""PMIx's library as a server for the ranks of one job on this machine.

Structures and keys are those of PMIx 4 (`pmix_common.h`), which Open MPI 4.1 and 5 come with.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, WorkerStuck
from mlx_ring.host.child import ChildProcess
from mlx_ring.rpc.backends import BACKENDS, backend_of, joined_ranks
from mlx_ring.rpc.protos import worker_pb2

_LIBRARIES = ("libpmix.so.2", "libpmix.dylib", "/opt/homebrew/lib/libpmix.dylib")
_STRING, _UINT16, _UINT32, _ARRAY, _RANK, _REGEX = 3, 13, 14, 39, 40, 49
"""PMIx's numbers for types of values, ..."""
_INFO = 24
"""... and of an array's elements."""
_DONE = (0, -157)
"""Success, and success at once."""
_MODULE_BYTES = 4096
"""More than the table of a server's functions takes; all may be missing, for ranks on one machine need none."""


class _PmixUnion(ctypes.Union):
    _fields_ = [
        ("number", ctypes.c_uint64),
        ("text", ctypes.c_char_p),
        ("pointer", ctypes.c_void_p),
        ("longest", ctypes.c_byte * 24),
    ]


class _Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("content", _PmixUnion)]


class _Info(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_char * 512),
        ("flags", ctypes.c_uint32),
        ("value", _Value),
    ]


class _Process(ctypes.Structure):
    _fields_ = [("job", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Array(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint16),
        ("size", ctypes.c_size_t),
        ("elements", ctypes.c_void_p),
    ]


class PmixServer:
    """Server of one job, from its creation to the end of the process."""

    def __init__(self, ranks: int, folder: Path) -> None:
        """Start a server for a number of ranks; files and sockets are in the folder.

        Raises:
            ConfigError: the library is missing, or refuses.
        """
        self._library = _load()
        self._job = str((os.getpid() & 0x7FFF) << 16 | 1).encode()
        """A number: Open MPI 4 reads its own job's out of the name."""
        self._kept: list[Any] = []
        self._begin(folder)
        self._register(ranks, folder)
        self.places: Sequence[Mapping[str, str]] = [self._place(rank) for rank in range(ranks)]
        """Return the environment of each rank."""

    def _begin(self, folder: Path) -> None:
        where = os.fsencode(folder)
        infos = _infos([_info("pmix.srvr.tmpdir", _STRING, where), _info("pmix.sys.tmpdir", _STRING, where)])
        module = (ctypes.c_byte * _MODULE_BYTES)()
        self._kept += [infos, module]
        self._check("PMIx_server_init", ctypes.byref(module), infos, ctypes.c_size_t(len(infos)))

    def _register(self, ranks: int, folder: Path) -> None:
        """Register all ranks as one program on this machine."""
        machine, everyone = socket.gethostname().encode(), ",".join(map(str, range(ranks))).encode()
        infos = _infos(
            [
                *(
                    _info(key, _UINT32, ranks)
                    for key in ("pmix.univ.size", "pmix.max.size", "pmix.job.size", "pmix.local.size")
                ),
                _info("pmix.num.nodes", _UINT32, 1),
                _info("pmix.appnum", _UINT32, 0),
                _info("pmix.lpeers", _STRING, everyone),
                _info("pmix.nsdir", _STRING, os.fsencode(folder)),
                _info("pmix.nmap", _REGEX, self._regex("PMIx_generate_regex", machine)),
                _info("pmix.pmap", _REGEX, self._regex("PMIx_generate_ppn", everyone)),
                *(self._about(rank, machine) for rank in range(ranks)),
            ]
        )
        self._kept.append(infos)
        self._check(
            "PMIx_server_register_nspace", self._job, ranks, infos, ctypes.c_size_t(len(infos)), None, None
        )

    def _about(self, rank: int, machine: bytes) -> _Info:
        infos = _infos(
            [
                _info("pmix.rank", _RANK, rank),
                _info("pmix.lrank", _UINT16, rank),
                _info("pmix.nrank", _UINT16, rank),
                _info("pmix.hname", _STRING, machine),
                _info("pmix.nodeid", _UINT32, 0),
            ]
        )
        array = _Array(_INFO, len(infos), ctypes.cast(infos, ctypes.c_void_p))
        self._kept += [infos, array]
        return _info("pmix.pdata", _ARRAY, ctypes.addressof(array))

    def _regex(self, function: str, content: bytes) -> int:
        made = ctypes.c_void_p()
        self._check(function, content, ctypes.byref(made))
        return made.value or 0

    def _place(self, rank: int) -> dict[str, str]:
        process = _Process(self._job, rank)
        self._check(
            "PMIx_server_register_client",
            ctypes.byref(process),
            ctypes.c_uint32(os.getuid()),
            ctypes.c_uint32(os.getgid()),
            None,
            None,
            None,
        )
        variables = ctypes.POINTER(ctypes.c_char_p)()
        self._check("PMIx_server_setup_fork", ctypes.byref(process), ctypes.byref(variables))
        return dict(os.fsdecode(entry).split("=", 1) for entry in _strings(variables)) | self._for_open_mpi()

    def _for_open_mpi(self) -> dict[str, str]:
        """Return the variables of an Open MPI 4 daemon.

        Without them, Open MPI 4 assumes a job of one rank. It never calls the daemon.
        """
        no_daemon = f"{int(self._job) - 1}.0;tcp://127.0.0.1:9"
        return {
            "OMPI_MCA_orte_launch": "1",
            "OMPI_MCA_orte_hnp_uri": no_daemon,
            "OMPI_MCA_orte_local_daemon_uri": no_daemon,
        }

    def _check(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status not in _DONE:
            raise ConfigError(
                f"MPI: PMIx's {function} failed with {status}: use --backend ring, or mend Open MPI."
            )


def _load() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise ConfigError(
        f"MPI: PMIx's library, {_LIBRARIES[0]}, is not on this machine: {BACKENDS['mpi'].remedy}."
    )


def _info(key: str, kind: int, value: bytes | int) -> _Info:
    info = _Info(key.encode())
    info.value.type = kind
    if isinstance(value, bytes):
        info.value.content.text = value
    else:
        info.value.content.number = value
    return info


def _infos(infos: Sequence[_Info]) -> ctypes.Array[_Info]:
    return (_Info * len(infos))(*infos)


def _strings(array: Any) -> Sequence[bytes]:
    """Return the items of a null-terminated C array."""
    found: list[bytes] = []
    while (entry := array[len(found)]) is not None:
        found.append(entry)
    return found


COMMON: Final = {
    # Between processes of one machine: shared memory, and nothing that listens on a network.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader",
    # Reading another process's memory is forbidden in many containers, and is then an error, not another way.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    # Ranks that wait leave the core to those that work, where there are more of them than cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_mca_base_component_show_load_errors": "0",
    "PMIX_MCA_mca_base_component_show_load_errors": "0",
    "PMIX_MCA_pcompress_base_silence_warning": "1",
}
"""Environment of every rank, and of the server."""

_MODULE = "mlx_ring.agent.mpi"
_MPI = "mpi"
_READY_WITHIN_S = 20.0


async def give_places(assignments: Iterable[worker_pb2.StageAssignment], run_dir: Path) -> list[ChildProcess]:
    """Fill in the environment variables of MPI ranks.

    Returns:
        The MPI server processes, one for each group; the caller stops them after the workers.

    Raises:
        ConfigError: Open MPI is not installed.
        WorkerStuck: An MPI server process is not ready in time.
    """
    groups: dict[tuple[tuple[int, int], ...], list[worker_pb2.StageAssignment]] = {}
    for assignment in assignments:
        if joined := joined_ranks(assignment):
            groups.setdefault(tuple(joined), []).append(assignment)
    serving: list[ChildProcess] = []
    try:
        for joined, members in groups.items():
            if backend_of(members[0]) == _MPI:
                serving.append(await _serve(joined, members, run_dir))
    except BaseException:
        await asyncio.gather(*(child.stop() for child in serving))
        raise
    return serving


async def _serve(
    joined: Sequence[tuple[int, int]], members: Sequence[worker_pb2.StageAssignment], run_dir: Path
) -> ChildProcess:
    folder = tempfile.mkdtemp(prefix="mpi-", dir=run_dir)
    socket = f"{folder}/s"
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.read())
        writer.close()

    async with await asyncio.start_unix_server(receive, socket):
        child = await ChildProcess.start(
            _MODULE,
            ["--ranks", str(len(joined)), "--folder", folder, "--socket", socket],
            name="mpi",
            rank=None,
            environment=inherited_environment(COMMON),
        )
        try:
            places = await _places(child, received)
        except BaseException:
            await child.stop()
            raise
    for member in members:
        place = places[joined.index((member.stage, member.rank))]
        member.group_environment.update({**COMMON, **place})
    return child


async def _places(child: ChildProcess, received: asyncio.Future[bytes]) -> Sequence[Mapping[str, str]]:
    end = asyncio.ensure_future(child.wait())
    await asyncio.wait((received, end), timeout=_READY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    if received.done():
        return json.loads(received.result())
    if child.exit_reason:
        raise ConfigError(child.exit_reason.partition(": ")[2] or child.exit_reason)
    raise WorkerStuck(
        f"MPI: the process that assigns the ranks (pid {child.pid}) was not ready within {_READY_WITHIN_S:g} s: see the logs."
    )
