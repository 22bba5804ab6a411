"""Profile mode: complete, positive figures within bounds. No test asserts how fast this machine is."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_cpu_kernels import SpeedReport, operations
from mlx_cpu_kernels.packages import Unavailable
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.worker.platform.device import free_memory
from mlx_ring.worker.profile import measure as measure_module
from mlx_ring.worker.profile.measure import Bounds, Products, WeightKind, measure
from mlx_ring.worker.profile.rounds import stopwatch
from mlx_ring.worker.profile.steps import SmallStage, attending, drawing

CLOCK = stopwatch(1, None)
BLAS = ("--blas", "auto", "--blas-threads", "1")
KINDS = ["float32", "bfloat16", "float16", "8-bit", "4-bit"]


@pytest.fixture(scope="module")
def profile() -> MachineProfile:
    return measure(Bounds(seconds=0.1, memory_share=0.05), products=SpeedReport("as it is"), blas_threads=1)


def test_every_kind_of_weights_has_rates(profile: MachineProfile) -> None:
    assert [rate.weights for rate in profile.rates] == KINDS
    for rate in profile.rates:
        for value in (rate.bandwidth, rate.flops):
            assert math.isfinite(value)
            assert value > 1e6
        assert rate.row_s >= 0


def test_costs_are_finite_and_none_is_negative(profile: MachineProfile) -> None:
    for value in profile.costs.model_dump().values():
        assert math.isfinite(value)
        assert 0 <= value < 1
    assert profile.costs.attention_s > 0


def test_memory_and_device_are_reported(profile: MachineProfile) -> None:
    assert profile.memory_bytes >= profile.memory_available_bytes > 0
    assert profile.device == mx.default_device().type.name
    assert profile.computes_in == "float32"
    assert profile.device_name


def test_profile_survives_the_json_round_trip(profile: MachineProfile) -> None:
    assert MachineProfile.from_json(profile.model_dump_json()) == profile


@pytest.mark.slow
def test_measuring_stays_within_its_share_of_memory() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    left = free_memory()
    measure(Bounds(seconds=0.0, memory_share=0.02), products=SpeedReport(""), blas_threads=1)
    assert mx.get_peak_memory() - before < max(0.02 * left, 300e6)


def test_too_little_memory_is_reported_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "free_memory", lambda: 100_000_000)
    with pytest.raises(ConfigError, match="100 MB of memory are left, of which measuring may take 25%"):
        measure(Bounds(), products=SpeedReport(""), blas_threads=1)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_products_have_the_size_of_their_weights_and_take_time(bits: int) -> None:
    products = Products(WeightKind("any", mx.float32, bits), 128, 1, CLOCK)
    each = 128 * 128 * 4 if not bits else 128 * 128 * bits // 8 + 2 * 4 * 128 * 128 // 64
    assert products.nbytes == each
    assert products.read() > 0
    assert products.compute() > 0


def test_small_stage_continues_beyond_its_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.worker.profile.steps._LONGEST", 16)
    stage = SmallStage(2, mx.float32, CLOCK)
    assert all(stage.seconds() > 0 for _ in range(5))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Compute with native kernels, which are this module, meanwhile; skip the test if they are not built."""
    try:
        module = operations._load()  # pyright: ignore[reportPrivateUsage]
    except Unavailable:
        pytest.skip("the native kernels are not built")
    monkeypatch.setattr(operations, "_load", lambda: module)
    assert operations.install().active
    try:
        yield module
    finally:
        operations.uninstall()


def test_steps_are_measured_with_the_layers_that_native_kernels_fuse(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused: Counter[str] = Counter()

    def count(name: str, own: Callable[..., Any], *arguments: Any) -> Any:
        result = own(*arguments)
        fused[name] += result is not None
        return result

    for name in ("heads", "gated_layer", "attended_token"):
        monkeypatch.setattr(kernels, name, partial(count, name, getattr(kernels, name)))
    SmallStage(2, mx.float32, CLOCK).seconds()
    assert not fused.total()
    SmallStage(2, mx.float32, CLOCK, quantized=True).seconds()
    assert fused.total() > 0


class _MadeUpStage:
    def __init__(self, layers: int, _dtype: object, _stopwatch: object, *, quantized: bool) -> None:
        self._seconds = 0.5 + layers * (0.01 if quantized else 0.03)

    def seconds(self) -> float:
        return self._seconds


def _measured_layers() -> tuple[float, float]:
    found = measure(Bounds(seconds=0.0, memory_share=0.05), products=SpeedReport(""), blas_threads=1).costs
    assert found.step_s == pytest.approx(0.5)
    return found.layer_s, found.quantized_layer_s


@pytest.mark.slow
def test_layers_of_quantized_weights_are_measured_apart_where_native_kernels_run(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(measure_module, "SmallStage", _MadeUpStage)
    assert _measured_layers() == pytest.approx((0.03, 0.03))
    request.getfixturevalue("kernels")
    assert _measured_layers() == pytest.approx((0.03, 0.01))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", [4, 8])
def test_native_kernels_are_measured_with_scales_as_models_store_them(bits: int) -> None:
    products = Products(WeightKind("any", mx.float32, bits), 128, 1, CLOCK)
    assert products.nbytes == 128 * 128 * bits // 8 + 2 * 2 * 128 * 128 // 64
    assert products.compute() > 0


def test_drawing_and_attending_take_time() -> None:
    assert drawing(300, CLOCK)() > 0
    assert attending(mx.float32, CLOCK)() > 0


def test_command_prints_one_profile() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mlx_ring.worker.profile",
            *BLAS,
            "--seconds",
            "0.1",
            "--memory-share",
            "0.05",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed = MachineProfile.from_json(done.stdout)
    assert printed.blas_threads == 1
    assert "OpenBLAS" in printed.blas or printed.blas


def test_failure_is_one_message_and_an_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_ring.worker.profile", *BLAS, "--memory-share", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.strip().endswith("raise the container's limit.")
