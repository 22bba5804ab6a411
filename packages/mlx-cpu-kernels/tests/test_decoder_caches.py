"""Decoder layers with a cache of planes: results, and what is written, are those of mlx-lm with a cache a row."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import importlib
from typing import Any, cast

import mlx.core as mx
import pytest
from decoder_models import BUILDS, MODULES_ROTATE, SIZES, Planes, assert_operations, make_model, own_layers

from mlx_cpu_kernels import decoder_layers, operations

pytestmark = pytest.mark.usefixtures("installed")


def attended(layer: Any, x: mx.array, cache: Planes) -> mx.array:
    """Return what a layer computes of one token a row, with a cache of its own for each."""
    rows: list[mx.array] = []
    for row, begin in enumerate(cache.begins):
        own = importlib.import_module("mlx_lm.models.cache").KVCache()
        own.keys, own.values = (plane[row + 1 : row + 2, :, : begin + 1] + 0 for plane in cache.planes)
        own.offset = begin
        rows.append(layer(x[row : row + 1], None, own))
    return mx.concatenate(rows)


@pytest.mark.slow
@pytest.mark.parametrize("build", sorted(BUILDS.keys() - MODULES_ROTATE))
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=["float32", "float16"])
def test_tokens_of_planes_are_those_of_caches_of_their_own(build: str, dtype: mx.Dtype) -> None:
    family, changes = BUILDS[build]
    model = make_model(family, dtype, **changes)
    layer, x = model.layers[0], mx.cos(mx.arange(2 * 64)).reshape(2, 1, 64).astype(dtype)
    size = layer.self_attn.k_proj.weight.shape[0] // SIZES["num_key_value_heads"]
    cache = Planes([150, 3], 4, 160, size)
    cache.planes = [plane.astype(dtype) for plane in cache.planes]
    before = [mx.array(plane.tolist(), dtype) for plane in cache.planes]
    tolerance = 1e-5 if dtype == mx.float32 else 5e-3
    for step in (1, 2):
        with own_layers():
            expected = attended(layer, x, cache)
        ours = layer(x, None, cache)
        most = cast("float", mx.max(mx.abs(expected)).item())
        assert mx.allclose(ours, expected, rtol=0, atol=tolerance * most).item()
        assert cache.begins == [150 + step, 3 + step]
    for plane, old in zip(cache.planes, before, strict=True):
        changed = mx.any(plane != old, axis=(1, 3))
        places = {
            (slot, index)
            for slot, row in enumerate(cast("list[list[bool]]", changed.tolist()))
            for index, is_new in enumerate(row)
            if is_new
        }
        assert places == {(1, 150), (1, 151), (2, 3), (2, 4)}


def test_planes_are_changed_in_place_and_gradients_are_those_of_mlx() -> None:
    layer, cache = make_model("llama").layers[0], Planes([5], 2, 9, 16)
    keys, values = cache.planes
    x = mx.sin(mx.arange(64.0)).reshape(1, 1, 64)

    def loss(x: mx.array) -> mx.array:
        cache.planes, cache.begins = [keys, values], [5]
        return mx.sum(layer(x, None, cache) ** 2)

    ours = mx.grad(loss)(x)
    operations.uninstall()

    def own_loss(x: mx.array) -> mx.array:
        cache.planes, cache.begins = [keys, values], [5]
        return mx.sum(attended(layer, x, cache) ** 2)

    assert mx.allclose(ours, mx.grad(own_loss)(x), rtol=1e-3, atol=1e-3).item()
    operations.install()
    written = decoder_layers.append(keys, mx.ones((1, 2, 3, 16)), 1, 6)
    assert written is not None
    mx.eval(written)
    assert mx.all(keys[1, :, 6:] == 1).item()


@pytest.mark.parametrize(
    ("rows", "slot", "begin"),
    [((2, 2, 1, 16), 1, 0), ((1, 2, 2, 16), 0, 8), ((1, 2, 1, 16), 0, -1), ((1, 1, 1, 16), 0, 0)],
)
def test_rows_that_do_not_fit_a_plane_are_refused(rows: tuple[int, ...], slot: int, begin: int) -> None:
    with pytest.raises(ValueError, match="rows do not fit"):
        decoder_layers.append(mx.zeros((2, 2, 9, 16)), mx.zeros(rows), slot, begin)


def test_a_layer_with_its_cache_is_one_operation() -> None:
    assert_operations(make_model("llama").layers[0], Planes([5], 2, 9, 16), ["CpuAttendedToken"])
