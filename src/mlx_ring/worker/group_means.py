"""With what this worker can join others in a group of MLX's collectives."""

from __future__ import annotations

import ctypes
import sys

import mlx.core as mx

from mlx_ring.core.backends import BACKENDS
from mlx_ring.core.environment import library_variable, set_for_libraries
from mlx_ring.rpc.protos import worker_pb2

_MPI, _JACCL = "mpi", "jaccl"
_MPI_LIBRARIES = ("libmpi.so.40", "libmpi.so", "libmpi.dylib", "/opt/homebrew/lib/libmpi.dylib")
"""Open MPI's, where MLX looks for the second or third alone. Debian has a file for those who compile only by that name."""
_RDMA_LIBRARY = "librdma.dylib"


def group_means(asked: str) -> worker_pb2.GroupMeans:
    """What there is; of MPI, whose library brings much along, only where it was asked for."""
    if asked == _MPI:
        _name_mpi_library()
    wanted = [backend for backend in BACKENDS if backend in (asked, "ring", "nccl") or backend == _JACCL]
    return worker_pb2.GroupMeans(
        backends=[backend for backend in wanted if mx.distributed.is_available(backend)],
        gpu=_own_gpu(),
        rdma_devices=rdma_devices(),
    )


def _own_gpu() -> str:
    """The one that the agent gave this worker."""
    visible = library_variable("CUDA_VISIBLE_DEVICES")
    return "" if "," in visible else visible


def _name_mpi_library() -> None:
    """Tell MLX the first of Open MPI's libraries that can be loaded. What a person has set stays."""
    if library_variable("MLX_MPI_LIBNAME"):
        return
    for name in _MPI_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        set_for_libraries({"MLX_MPI_LIBNAME": name})
        return


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices, as macOS's library lists them; none where RDMA is not enabled."""
    if sys.platform != "darwin":
        return []
    try:
        library = ctypes.CDLL(_RDMA_LIBRARY)
    except OSError:
        return []
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_list.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.ibv_get_device_name.restype = ctypes.c_char_p
    library.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    count = ctypes.c_int()
    listed = library.ibv_get_device_list(ctypes.byref(count))
    return (
        [library.ibv_get_device_name(listed[place]).decode() for place in range(count.value)]
        if listed
        else []
    )
