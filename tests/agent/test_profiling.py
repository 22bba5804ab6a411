"""Profiles of a machine: measured in a process of their own, stored, and measured again when they are stale."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.eventually import eventually
from tests.processes import command_of
from tests.profiles import made_up_profile

from mlx_ring.agent import profiling as profile_store
from mlx_ring.agent.profiling import (
    MOST_MEASUREMENTS,
    PROFILE_FILE,
    ProfileKey,
    ProfileOptions,
    ProfileStore,
    measure_machine,
    recall_or_measure,
)
from mlx_ring.core.errors import ProtocolError, RingError, WorkerLost, WorkerStuck
from mlx_ring.host.machine_profile import MachineProfile

QUICK = ProfileOptions("auto", 1, seconds=0.1, memory_share=0.05)
WRITE_CODE = "import sys; out = sys.argv[sys.argv.index('--output') + 1]; open(out, 'w').write({!r})"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the module `measuring`, which child processes can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "measuring.py"


def measure(options: ProfileOptions = QUICK, module: str = "measuring") -> object:
    return asyncio.run(measure_machine(options, module))


@pytest.mark.processes
def test_the_machine_is_measured_with_the_threads_of_workers() -> None:
    found = asyncio.run(measure_machine(ProfileOptions("auto", 2, seconds=0.1, memory_share=0.05)))
    assert found.blas_threads == 2
    assert found.memory_bytes > 0
    assert not left_behind("mlx_ring.worker.profile")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "error", "sentence"),
    [
        ("import sys; sys.exit('no memory is left')", WorkerLost, "exit code 1: no memory is left"),
        ("import os; os.kill(os.getpid(), 9)", WorkerLost, "signal 9 .* Memory may have run out: "),
        ("pass", ProtocolError, "left no profile"),
        (WRITE_CODE.format("{}"), ProtocolError, "This is not a machine's profile"),
        (WRITE_CODE.format("rubbish"), ProtocolError, "This is not a machine's profile"),
    ],
)
def test_a_failed_measurement_is_an_error_with_its_cause(
    code: str, error: type[RingError], sentence: str, module: Path
) -> None:
    module.write_text(code)
    with pytest.raises(error, match=sentence):
        measure()


def test_a_gpu_for_which_kernels_are_compiled_first_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ProfileOptions("auto", 1)
    monkeypatch.setattr(profile_store, "has_cuda_build", lambda: False)
    assert options.limit_s() == options.timeout_s
    monkeypatch.setattr(profile_store, "has_cuda_build", lambda: True)
    assert options.limit_s() > 10 * options.timeout_s


@pytest.mark.processes
def test_a_measurement_that_takes_too_long_is_ended(module: Path) -> None:
    module.write_text("import threading; threading.Event().wait()")
    with pytest.raises(WorkerStuck, match="took longer than 1 s and was stopped"):
        measure(ProfileOptions("auto", 1, timeout_s=1.0))
    assert not left_behind("measuring")


def left_behind(module: str) -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if [sys.executable, "-m", module] == command_of(child)[:3]
    ]


OPTIONS = ProfileOptions("auto", 2)
KEY = ProfileKey.of_here(OPTIONS)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ProfileOptions]:
    """Replace the measurement; return the list of its calls. The results differ in their seconds."""
    calls: list[ProfileOptions] = []

    async def measure(options: ProfileOptions) -> MachineProfile:
        calls.append(options)
        return made_up_profile(seconds=float(len(calls)))

    monkeypatch.setattr(profile_store, "measure_machine", measure)
    return calls


def recall(folder: Path, options: ProfileOptions = OPTIONS, *, again: bool = False) -> MachineProfile:
    return asyncio.run(recall_or_measure(ProfileStore(folder), options, again=again, accepts_noise=False))


def test_a_machine_is_measured_once(tmp_path: Path, measured: list[ProfileOptions]) -> None:
    first, second = recall(tmp_path / "state"), recall(tmp_path / "state")
    assert first == second
    assert measured == [OPTIONS]


def test_a_machine_is_measured_again_on_request(tmp_path: Path, measured: list[ProfileOptions]) -> None:
    recall(tmp_path)
    assert recall(tmp_path, again=True).seconds == 2.0
    assert recall(tmp_path).seconds == 2.0
    assert len(measured) == 2


def test_a_profile_made_without_native_kernels_is_measured_again_once_they_are_there(
    tmp_path: Path, measured: list[ProfileOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def build_nothing(_blas: str) -> None: ...

    def none(_target: object) -> None:
        return None

    def binary(_target: object) -> Path:
        return tmp_path / "kernels.so"

    monkeypatch.setattr(profile_store, "build_kernels", build_nothing)
    monkeypatch.setattr(profile_store, "find_binary", none)
    recall(tmp_path)
    recall(tmp_path)
    assert len(measured) == 1
    monkeypatch.setattr(profile_store, "find_binary", binary)
    assert profile_store.recall(ProfileStore(tmp_path), OPTIONS) is None
    assert recall(tmp_path).seconds == 2.0
    unused = ProfileOptions("openblas", 2)
    recall(tmp_path, unused)
    monkeypatch.setattr(profile_store, "find_binary", none)
    assert profile_store.recall(ProfileStore(tmp_path), unused) is not None, "kernels that are not used"


def test_another_number_of_threads_has_its_own_profile(
    tmp_path: Path, measured: list[ProfileOptions]
) -> None:
    others = [ProfileOptions("auto", threads) for threads in (1, 3)]
    for options in (OPTIONS, *others, OPTIONS, *others):
        recall(tmp_path, options)
    assert measured == [OPTIONS, *others]
    again = recall(tmp_path, others[0], again=True).seconds
    assert [recall(tmp_path, options).seconds for options in (OPTIONS, *others)] == [1.0, again, 3.0]


def test_profiles_of_another_version_are_dropped_with_the_next_measurement(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.save(replace(KEY, mlx="another"), made_up_profile())
    store.save(KEY, made_up_profile())
    store.save(replace(KEY, blas_threads=7), made_up_profile())
    kept = json.loads((tmp_path / PROFILE_FILE).read_text())
    assert [each["key"]["blas_threads"] for each in (kept, *kept["others"])] == [7, KEY.blas_threads]
    assert "others" not in kept["others"][0]


def test_the_profile_of_a_gpu_is_that_of_any_number_of_threads(tmp_path: Path) -> None:
    store, on_gpu = ProfileStore(tmp_path), made_up_profile().model_copy(update={"device": "gpu"})
    store.save(KEY, on_gpu)
    other = replace(KEY, blas_threads=7)
    assert store.load(other) == on_gpu
    assert store.load(replace(other, cores=KEY.cores + 1)) is None
    store.save(other, on_gpu)
    assert json.loads((tmp_path / PROFILE_FILE).read_text())["others"] == []


@pytest.mark.parametrize("others", [None, "many", [None, 1, {}, {"key": {}}]])
def test_unreadable_other_profiles_are_ignored(others: object, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.save(KEY, made_up_profile())
    kept: dict[str, Any] = json.loads((tmp_path / PROFILE_FILE).read_text())
    (tmp_path / PROFILE_FILE).write_text(json.dumps(kept | {"others": others}))
    assert store.load(KEY) == made_up_profile()
    assert store.load(replace(KEY, blas_threads=7)) is None
    store.save(replace(KEY, blas_threads=7), made_up_profile())
    assert store.load(KEY) == made_up_profile()


@pytest.mark.parametrize("name", [field.name for field in fields(ProfileKey)])
def test_a_change_of_any_key_field_makes_a_profile_stale(name: str, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.save(KEY, made_up_profile())
    value: Any = getattr(KEY, name)
    other: Any = (*value, "card") if isinstance(value, tuple) else value * 2 + type(value)(1)
    changes: dict[str, Any] = {name: other}
    assert store.load(KEY) == made_up_profile()
    assert store.load(replace(KEY, **changes)) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": {}}', "\udcff", json.dumps({"key": "KEY", "profile": {"version": 1}})],
)
def test_a_broken_file_is_replaced_by_a_new_measurement(
    text: str, tmp_path: Path, measured: list[ProfileOptions]
) -> None:
    key = json.dumps(KEY.as_json())
    content = text.replace('"KEY"', key)
    (tmp_path / PROFILE_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert recall(tmp_path) == recall(tmp_path)
    assert len(measured) == 1


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, measured: list[ProfileOptions]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert recall(tmp_path / "file" / "state").seconds == 1.0
    assert len(measured) == 1


def test_the_folder_holds_only_the_profile(tmp_path: Path, measured: list[ProfileOptions]) -> None:
    recall(tmp_path)
    recall(tmp_path, again=True)
    assert [path.name for path in tmp_path.iterdir()] == [PROFILE_FILE]
    assert len(measured) == 2


def with_spread(spread: float) -> MachineProfile:
    profile = made_up_profile()
    rates = tuple(rate.model_copy(update={"spread": spread}) for rate in profile.rates)
    return profile.model_copy(update={"rates": rates})


def measure_with(monkeypatch: pytest.MonkeyPatch, spreads: list[float]) -> None:
    """Let the next measurements have these spreads; a negative one fails."""

    async def measure(_options: ProfileOptions) -> MachineProfile:
        if (spread := spreads.pop(0)) < 0:
            raise WorkerLost("Measuring this machine failed: it ended by signal 9")
        return with_spread(spread)

    monkeypatch.setattr(profile_store, "measure_machine", measure)


def test_a_noisy_profile_is_measured_again_until_it_is_steady(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spreads = [0.6, 0.1, 0.0]
    measure_with(monkeypatch, spreads)
    with caplog.at_level(logging.INFO):
        assert [recall(tmp_path).spread for _ in range(3)] == [0.6, 0.1, 0.1]
    assert spreads == [0.0]
    assert "its rates varied by +- 30 %; now by +- 5 %" in caplog.text


def test_a_machine_that_stays_noisy_keeps_the_steadiest_of_a_few_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spreads = [0.6, 0.5, 0.9, 0.0]
    measure_with(monkeypatch, spreads)
    assert [recall(tmp_path).spread for _ in range(MOST_MEASUREMENTS + 1)] == [0.6, 0.5, 0.5, 0.5]
    assert spreads == [0.0]


def test_a_noisy_profile_stays_in_use_if_measuring_again_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_with(monkeypatch, [0.6, -1.0, -1.0])
    assert [recall(tmp_path).spread for _ in range(4)] == [0.6] * 4


@pytest.mark.parametrize("count", [None, "many"])
def test_a_noisy_profile_without_a_count_of_measurements_is_measured_again(
    count: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_with(monkeypatch, [0.6, 0.1])
    recall(tmp_path)
    kept: dict[str, Any] = json.loads((tmp_path / PROFILE_FILE).read_text())
    del kept["measurements"]
    (tmp_path / PROFILE_FILE).write_text(
        json.dumps(kept if count is None else {**kept, "measurements": count})
    )
    assert recall(tmp_path).spread == 0.1


def test_a_noisy_profile_is_shown_as_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_with(monkeypatch, [0.6, 0.1])
    store = ProfileStore(tmp_path)
    assert [asyncio.run(recall_or_measure(store, OPTIONS)).spread for _ in range(2)] == [0.6, 0.6]


def test_a_failed_measurement_keeps_the_stored_profile(
    tmp_path: Path, measured: list[ProfileOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = recall(tmp_path)

    async def fail(_options: ProfileOptions) -> MachineProfile:
        raise WorkerLost("it ended by signal 9")

    monkeypatch.setattr(profile_store, "measure_machine", fail)
    with pytest.raises(WorkerLost):
        recall(tmp_path, again=True)
    assert recall(tmp_path) == stored
    assert len(measured) == 1


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that no kernels are there, and that building them fails. Return the file that has a line for each try."""
    tries, program = tmp_path / "tries", tmp_path / "python"
    reason = "The native kernels cannot be built: g++ failed: a.cpp:1: error: no such thing."
    program.write_text(f"#!/bin/sh\necho \"$@\" >> {tries}\necho '{reason}' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(profile_store, "find_binary", dict[object, None]().get)
    monkeypatch.setattr(profile_store, "_tried", set[str]())
    return tries


def _warning(caplog: pytest.LogCaptureFixture) -> str:
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return warning


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.processes
def test_kernels_that_cannot_be_compiled_are_tried_and_reported_once(
    builds: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_store, "check_tools", dict[object, None]().get)
    monkeypatch.setattr(profile_store, "advice", lambda: "Mend it.")
    for _ in range(2):
        asyncio.run(profile_store.build_kernels("auto"))
    assert builds.read_text() == "-m mlx_cpu_kernels.build\n"
    assert _warning(caplog) == (
        "Without native kernels, models with quantized weights compute many times slower on this CPU: The native "
        "kernels cannot be built: g++ failed: a.cpp:1: error: no such thing. Mend it."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.processes
def test_kernels_that_nothing_waits_for_are_compiled_at_the_lowest_priority(
    builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(sys.executable).write_text(f"#!/bin/sh\nnice > {builds}\n")
    monkeypatch.setattr(profile_store, "check_tools", dict[object, None]().get)
    asyncio.run(profile_store.build_kernels("auto", is_urgent=False))
    assert builds.read_text() == "19\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
def test_without_a_compiler_one_line_says_what_that_costs_and_what_to_install(
    builds: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    caplog.set_level("INFO")
    for _ in range(2):
        asyncio.run(profile_store.build_kernels("auto"))
    assert not builds.exists()
    assert [record.levelname for record in caplog.records if record.name.startswith("mlx_ring")] == [
        "WARNING"
    ]
    assert _warning(caplog) == (
        "Without native kernels, models with quantized weights compute many times slower on this CPU: "
        "no C++ compiler was found (g++, c++, clang++). Install a C++ compiler and Python's headers "
        "(`apt install g++ python3-dev`), then run `python -m mlx_cpu_kernels.build`."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.processes
def test_a_build_that_takes_too_long_is_asked_to_end(
    builds: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask first: it removes its files and ends its compilers then."""
    script = f'sleep 600 & trap "kill $!; echo cleaned >> {builds}; exit 1" TERM; wait'
    Path(sys.executable).write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr(profile_store, "check_tools", dict[object, None]().get)
    monkeypatch.setattr(profile_store, "_COMPILE_S", 1)
    asyncio.run(profile_store.build_kernels("auto"))
    assert builds.read_text() == "cleaned\n"
    assert "took longer than 1 s" in _warning(caplog)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.processes
def test_a_build_that_nothing_waits_for_takes_as_long_as_it_needs_and_is_tried_again_if_it_was_cancelled(
    builds: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_store, "check_tools", dict[object, None]().get)
    monkeypatch.setattr(profile_store, "_COMPILE_S", 0)
    Path(sys.executable).write_text(f"#!/bin/sh\necho begun >> {builds}\nexec sleep 600\n")

    async def cancel_once_begun() -> None:
        building = asyncio.create_task(profile_store.build_kernels("auto", is_urgent=False))
        await asyncio.to_thread(eventually, builds.exists, bool)
        building.cancel()
        await asyncio.wait((building,))

    asyncio.run(cancel_once_begun())
    Path(sys.executable).write_text(f"#!/bin/sh\necho again >> {builds}\n")
    asyncio.run(profile_store.build_kernels("auto", is_urgent=False))
    assert builds.read_text() == "begun\nagain\n"
    assert "took longer" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.processes
def test_a_build_that_was_cancelled_while_its_process_started_is_tried_again(
    builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_store, "check_tools", dict[object, None]().get)
    Path(sys.executable).write_text(f"#!/bin/sh\necho begun >> {builds}\n")

    async def cancel_at_the_start() -> None:
        is_starting = asyncio.Event()

        async def start(*_: object, **__: object) -> None:
            is_starting.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", start)
            building = asyncio.create_task(profile_store.build_kernels("auto"))
            await is_starting.wait()
            building.cancel()
            await asyncio.wait((building,))

    asyncio.run(cancel_at_the_start())
    asyncio.run(profile_store.build_kernels("auto"))
    assert builds.read_text() == "begun\n"


@pytest.mark.parametrize("blas", ["openblas", "off"])
def test_kernels_that_are_not_used_are_not_compiled(builds: Path, blas: str) -> None:
    asyncio.run(profile_store.build_kernels(blas))
    assert not builds.exists()
