"""Measurement of this machine in a separate process, set up like its workers, so that a crash affects nothing else.

Profiles are kept between runs, in a file in the node's state folder. An unusable profile is measured again, and is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from mlx_cpu_kernels.build import Target, advice, check_tools, find_binary
from mlx_cpu_kernels.packages import Unavailable
from mlx_ring.core.environment import has_cuda_build, package_version, worker_environment
from mlx_ring.core.errors import ProtocolError, RingError, WorkerLost, WorkerStuck
from mlx_ring.host.child import ChildProcess, advice_for
from mlx_ring.host.machine import machine_identity
from mlx_ring.host.machine_profile import PROFILE_VERSION, MachineProfile
from mlx_ring.host.process import cpu_quota, own_memory, usable_cores, usable_memory
from mlx_ring.settings.process_settings import BlasMode

log = logging.getLogger(__name__)

PROFILE_MODULE = "mlx_ring.worker.profile"
_COMPILE_S, _CLEAN_UP_S = 300, 10
_LAST = ("nice", "-n", "19")
"""Command that runs another one at the lowest priority (POSIX)."""
_tried: set[str] = set()
"""Identities of the kernels that this process has tried to compile."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of a measurement: the BLAS and the threads that workers will have."""

    blas: BlasMode
    blas_threads: int
    seconds: float = 2.5
    """That measuring takes, about; starting takes some more."""
    memory_share: float = 0.25
    """Share of the available memory that the measurement may use."""
    timeout_s: float = 60.0
    compile_s: float = 1800.0
    """Further seconds with an NVIDIA GPU, where MLX first compiles the kernels that are measured."""

    def limit_s(self) -> float:
        """Return the seconds after which a measurement of this machine is stopped."""
        return self.timeout_s + (self.compile_s if has_cuda_build() else 0.0)


async def build_kernels(blas: str, *, is_urgent: bool = True) -> None:
    """Compile the native kernels that workers compute with, unless they are there or cannot be made here.

    Takes up to a minute, once for each version of MLX. A process tries it once: a recovery does not wait for it again.
    If the task is cancelled, the next call tries it again. Workers without them say why, and are slow with quantized
    weights.

    Args:
        blas: the setting of workers; only with "auto" they use the kernels.
        is_urgent: False to leave the processors to everything else, for as long as it takes: nobody waits.
    """
    if blas != "auto" or sys.platform != "linux":
        return
    try:
        target = Target.installed()
        key = target.key
    except Unavailable:
        return
    if key in _tried or await asyncio.to_thread(find_binary, target):
        return
    _tried.add(key)
    try:
        check_tools(target)
    except Unavailable as reason:
        _warn(f"{reason}.")
        return
    meanwhile = "this takes up to a minute" if is_urgent else "the model is served meanwhile"
    log.info("Compiling native kernels for quantized weights, once; %s", meanwhile)
    child = None
    try:
        child = await asyncio.create_subprocess_exec(
            *(() if is_urgent else _LAST),
            *(sys.executable, "-m", "mlx_cpu_kernels.build"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        async with asyncio.timeout(_COMPILE_S if is_urgent else None):
            _, errors = await child.communicate()
        if child.returncode:
            _warn(errors.decode(errors="replace").strip())
    except asyncio.CancelledError:
        _tried.discard(key)
        raise
    except TimeoutError:
        _warn(f"compiling them took longer than {_COMPILE_S} s.")
    finally:
        if child is not None and child.returncode is None:
            await _end(child)


def _warn(reason: str) -> None:
    """Log in one line why there are no kernels, what that costs, and what to do."""
    log.warning(
        "Without native kernels, models with quantized weights compute many times slower on this CPU: %s %s",
        reason,
        advice(),
    )


async def _end(child: asyncio.subprocess.Process) -> None:
    """Let the build end its compilers and remove its files; kill it if it does not."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(_CLEAN_UP_S):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


def _kernels(blas: str) -> str:
    """Return the identity of the native kernels that workers compute with; empty without them."""
    try:
        target = Target.installed()
        return target.key if blas == "auto" and find_binary(target) else ""
    except Unavailable:
        return ""


async def measure_machine(options: ProfileOptions, module: str = PROFILE_MODULE) -> MachineProfile:
    """Start a worker in profile mode and wait for its results.

    Raises:
        WorkerLost: it ended without a profile, and why.
        WorkerStuck: it took too long, and was ended.
        ProtocolError: what it left is no profile.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-ring-profile-") as folder:
        output = Path(folder) / "profile.json"
        await _run_to_its_end(options, output, module)
        try:
            text = output.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProtocolError(f"Measuring this machine left no profile: {error}.") from error
    found = MachineProfile.from_json(text)
    # An agent is about as large as this process.
    return found.model_copy(update={"agent_bytes": own_memory()})


async def _run_to_its_end(options: ProfileOptions, output: Path, module: str) -> None:
    child = await ChildProcess.start(
        module,
        [
            *("--output", str(output), "--seconds", str(options.seconds)),
            *("--memory-share", str(options.memory_share)),
            *("--blas", options.blas, "--blas-threads", str(options.blas_threads)),
        ],
        name="profile",
        rank=None,
        environment=worker_environment(options.blas_threads),
    )
    limit_s = options.limit_s()
    if limit_s > options.timeout_s:
        log.info(
            "Measuring this machine; with an NVIDIA GPU it takes minutes the first time, to compile kernels"
        )
    try:
        async with asyncio.timeout(limit_s):
            end = await child.wait()
    except TimeoutError:
        raise WorkerStuck(
            f"Measuring this machine took longer than {limit_s:g} s and was stopped: "
            "stop other work on it, and try again."
        ) from None
    finally:
        await child.stop()
    if end != "exit code 0":
        raise WorkerLost(f"Measuring this machine failed: {end}.{advice_for(end, 'this machine')}")


PROFILE_FILE = "profile.json"
MOST_MEASUREMENTS = 3
"""Measurements of a machine after which a noisy profile is kept, because its noise does not pass."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Values that a profile depends on; if any changes, the machine is measured again."""

    version: int
    machine: str
    processor: str
    gpus: tuple[str, ...]
    cores: int
    cpu_share: float
    cpu_period_s: float
    memory_bytes: int
    mlx: str
    mlx_ring: str
    blas: str
    blas_threads: int
    kernels: str

    @classmethod
    def of_here(cls, options: ProfileOptions) -> ProfileKey:
        """Return the key of this machine with these options."""
        identity, quota = machine_identity(), cpu_quota()
        return cls(
            version=PROFILE_VERSION,
            machine=identity.model,
            processor=identity.processor,
            gpus=identity.gpus,
            cores=usable_cores(),
            cpu_share=quota.cores if quota else 0.0,
            cpu_period_s=quota.period_s if quota else 0.0,
            memory_bytes=usable_memory().total_bytes,
            mlx=package_version("mlx"),
            mlx_ring=package_version("mlx-ring"),
            blas=options.blas,
            blas_threads=options.blas_threads,
            kernels=_kernels(options.blas),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the key as stored in JSON, with lists for tuples."""
        return cast("dict[str, Any]", json.loads(json.dumps(asdict(self))))


_OTHERS = "others"
"""Field with what is kept for other numbers of threads."""


class ProfileStore:
    """One machine's profiles: the last that was measured for each number of threads."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / PROFILE_FILE

    def load(self, key: ProfileKey) -> MachineProfile | None:
        """Return the profile kept under the key; None if there is none that can be read."""
        if (kept := self._read(key)) is None:
            return None
        try:
            return MachineProfile.from_json(json.dumps(kept.get("profile")))
        except ProtocolError as error:
            log.warning("%s is measured again: %s", self._file, error)
            return None

    def measurements(self, key: ProfileKey) -> int:
        """Return the number of measurements of which the kept profile is the steadiest; 0 without one."""
        kept = self._read(key)
        count = 0 if kept is None else kept.get("measurements", 1)
        return count if isinstance(count, int) else 1

    def _read(self, key: ProfileKey) -> dict[str, Any] | None:
        """Return what is kept under the key; None if nothing is, or the file cannot be read."""
        return next((kept for kept in self._all() if _is_of(kept, key)), None)

    def _all(self) -> list[dict[str, Any]]:
        """Return what is kept, the last measurement first. It contains the others, which earlier versions ignore."""
        try:
            last: Any = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError):
            return []
        if not isinstance(last, dict):
            return []
        content = cast("dict[str, Any]", last)
        others: Any = content.get(_OTHERS)
        entries = [content, *(cast("list[Any]", others) if isinstance(others, list) else ())]
        return [each for each in entries if isinstance(each, dict)]

    def save(self, key: ProfileKey, profile: MachineProfile, measurements: int = 1) -> None:
        """Replace the kept profile, the steadiest of some measurements.

        Profiles of this machine with other numbers of threads stay. A folder that cannot be written to is logged, and
        is no error.
        """
        kept = {
            "key": key.as_json(),
            "measurements": measurements,
            "profile": profile.model_dump(mode="json"),
            _OTHERS: [
                {name: value for name, value in other.items() if name != _OTHERS}
                for other in self._all()
                if _is_of(other, key, with_any_threads=True) and not _is_of(other, key)
            ],
        }
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _replace(self._file, json.dumps(kept, indent=1))
        except OSError as error:
            log.warning("Cannot keep the profile: %s cannot be written: %s", self._file, error.strerror)


def _is_of(kept: Mapping[str, Any], key: ProfileKey, *, with_any_threads: bool = False) -> bool:
    """Report whether this was kept under the key. The number of BLAS threads does not matter to a GPU."""
    theirs, ours, profile = kept.get("key"), key.as_json(), kept.get("profile")
    on_gpu = isinstance(profile, dict) and cast("dict[str, Any]", profile).get("device") == "gpu"
    if isinstance(theirs, dict) and (with_any_threads or on_gpu):
        theirs = cast("dict[str, Any]", theirs) | {"blas_threads": ours["blas_threads"]}
    return theirs == ours


def recall(store: ProfileStore, options: ProfileOptions) -> MachineProfile | None:
    """Return the kept profile if it is still valid."""
    return store.load(ProfileKey.of_here(options))


async def recall_or_measure(
    store: ProfileStore, options: ProfileOptions, *, again: bool = False, accepts_noise: bool = True
) -> MachineProfile:
    """Return the kept profile if it is still valid, or measure and keep a new one.

    Args:
        store: the kept profile.
        options: options of the measurement.
        again: measures in any case.
        accepts_noise: if False, a noisy profile is measured again by each call, until there are `MOST_MEASUREMENTS`.
            The steadiest is kept.

    Raises:
        RingError: the machine could not be measured.
    """
    await build_kernels(options.blas)
    key = ProfileKey.of_here(options)
    kept = None if again else store.load(key)
    if kept is None:
        profile = await measure_machine(options)
        store.save(key, profile)
        return profile
    measurements = store.measurements(key)
    if accepts_noise or kept.is_steady or measurements >= MOST_MEASUREMENTS:
        return kept
    profile = await _steadier(kept, options)
    store.save(key, profile, measurements + 1)
    return profile


async def _steadier(kept: MachineProfile, options: ProfileOptions) -> MachineProfile:
    """Measure again, and return the steadier profile. The kept one is used if the measurement fails."""
    try:
        profile = await measure_machine(options)
    except RingError as error:
        log.warning("The noisy profile of this machine stays in use: %s", error)
        return kept
    log.info(
        "Measured this machine again, because its rates varied by +- %.0f %%; now by +- %.0f %%",
        50 * kept.spread,
        50 * profile.spread,
    )
    return min(profile, kept, key=lambda each: each.spread)


def _replace(file: Path, text: str) -> None:
    """Replace the file atomically, because other processes may read it."""
    descriptor, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as unfinished:
            unfinished.write(text)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
