"""Stages of GGUF files: the same weights and results as mlx-lm's folder of the same model."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import weakref
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.eventually import eventually
from tests.models.gguf.encoding import Floats, encode_k
from tests.models.gguf.writing import (
    F32,
    TOKENIZER,
    Stored,
    gguf_bytes,
    metadata_of,
    write_gguf_of,
    write_with,
)
from tests.smollm2 import smollm2
from tests.worker.random_models import QWEN3, write_random_model
from tests.worker.tensor.models import write_family
from tests.worker.test_gguf_blocks import NUMBERS, by_definition, random_blocks
from tests.worker.test_sparse_folders import write_sparse_copy
from tests.worker.test_weights import assert_planned_as_loaded

from mlx_ring.core.errors import ModelCorrupt
from mlx_ring.core.types import DType, LayerRange
from mlx_ring.models.gguf import QUANTIZED, read_gguf, read_range
from mlx_ring.models.layer_tensors import write_stage_folder
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.worker.gguf_weights import GgufWeights, to_groups
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.weights import load_stage

SMALL: dict[str, Any] = {**QWEN3, "vocab_size": 64, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gemma3_text": {
        "sliding_window": 4,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
    },
    "phi3": {"tie_word_embeddings": False},
}
TOKENS = mx.array([[3, 14, 15, 9, 26, 5, 35]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_of(file: Path) -> ModelFolder:
    return find_model(str(file)).folder


def load(folder: ModelFolder, start: int = 0, end: int | None = None) -> StageModel:
    layers = LayerRange(start, folder.num_layers if end is None else end)
    return load_stage(folder, layers, "float32", lambda _done, _total: None)


def logits(model: Any) -> mx.array:
    return cast("mx.array", model(TOKENS))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_folder_the_file_was_made_of(tmp_path: Path, family: str) -> None:
    config = SMALL | {"model_type": family} | FAMILIES[family]
    folder = write_random_model(tmp_path / "model", config, spread=0.1, norm=1.0)
    stage = load(folder_of(write_gguf_of(folder, tmp_path / f"{family}.gguf")))
    # The norms of Gemma are stored with 1 added, which rounds.
    same = mx.allclose(logits(stage.model), logits(load_model(folder)[0]), rtol=1e-4, atol=1e-4)
    assert same.item()
    if family != "gemma3_text":
        assert mx.array_equal(logits(stage.model), logits(load_model(folder)[0])).item()


@pytest.mark.parametrize("bits", [4, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe"])
def test_quantized_weights_are_those_of_the_file_exactly(tmp_path: Path, family: str, bits: int) -> None:
    folder = write_family(tmp_path / "model", family, bits, mlp_bias=False, mlp_only_layers=[])
    weights = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    half = {
        name: array.astype(mx.float16) if array.dtype == mx.float32 else array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), half)
    stage = load(folder_of(write_gguf_of(folder, tmp_path / "model.gguf")))
    theirs = cast("Any", load_model(folder)[0])
    expected = dict(cast("Any", tree_flatten(theirs.parameters())))
    for name, array in cast("Any", tree_flatten(stage.model.parameters())):
        wanted = expected[name].astype(mx.float32) if expected[name].dtype == mx.float16 else expected[name]
        assert mx.array_equal(array, wanted).item(), name


K_MODEL: dict[str, Any] = SMALL | {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 1,
}


def write_k_quants(folder: Path, target: Path) -> Path:
    """Write a model of K_MODEL whose queries are Q4_K and keys Q6_K, of random bits, with its other weights plain."""
    write_random_model(folder, K_MODEL, spread=0.1, norm=1.0)
    read = read_gguf(write_gguf_of(folder, target))
    tensors: dict[str, Stored] = {}
    for name, tensor in read.tensors.items():
        data = read_range(target, tensor.offset, tensor.nbytes)
        tensors[name] = Stored(NUMBERS[tensor.kind.name], tensor.shape, data)
    for name, kind, rows in (("attn_q", "Q4_K", 256), ("attn_k", "Q6_K", 128)):
        blocks = random_blocks(QUANTIZED[kind], rows=rows, columns=256)
        tensors[f"blk.0.{name}.weight"] = Stored(NUMBERS[kind], (rows, 256), blocks.tobytes())
    target.write_bytes(gguf_bytes({**metadata_of(K_MODEL), **TOKENIZER}, tensors))
    return target


def test_k_quants_are_served_with_their_rows_in_order(tmp_path: Path) -> None:
    folder = folder_of(write_k_quants(tmp_path / "model", tmp_path / "k.gguf"))
    attention = cast("Any", load(folder).model).model.layers[0].self_attn
    for layer, kind, rows, heads, allowed in (
        (attention.q_proj, "Q4_K", 256, 4, 1e-6),
        (attention.k_proj, "Q6_K", 128, 2, 8e-3),
    ):
        found = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=layer.bits)
        stored = mx.array(
            by_definition(QUANTIZED[kind], random_blocks(QUANTIZED[kind], rows=rows, columns=256))
        )
        pairs = stored.reshape(heads, 32, 2, 256)
        expected = mx.contiguous(pairs.swapaxes(1, 2)).reshape(rows, 256)
        limit = allowed * cast("float", mx.max(mx.abs(expected)).item())
        assert mx.allclose(found, expected, rtol=0, atol=limit).item()
    assert folder.rounding.startswith("16% of the weights are Q4_K (scales exact in float32")
    assert "8% of the weights are Q6_K (half of the groups" in folder.rounding


def write_large_scale(tmp_path: Path) -> tuple[ModelFolder, Any]:
    """Write a file in which -8 times one scale is beyond float16. Return its folder, and the matrix's blocks."""
    folder = write_random_model(tmp_path / "model", K_MODEL, spread=0.1, norm=1.0)
    target = tmp_path / "model.gguf"
    read = read_gguf(write_gguf_of(folder, target))
    tensors = {
        name: Stored(
            NUMBERS[tensor.kind.name], tensor.shape, read_range(target, tensor.offset, tensor.nbytes)
        )
        for name, tensor in read.tensors.items()
    }
    blocks = random_blocks(QUANTIZED["Q4_0"], rows=256, columns=256)
    blocks.reshape(-1, 18)[5, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    tensors["blk.0.ffn_up.weight"] = Stored(NUMBERS["Q4_0"], (256, 256), blocks.tobytes())
    target.write_bytes(gguf_bytes({**metadata_of(K_MODEL), **TOKENIZER}, tensors))
    return folder_of(target), blocks


def test_scales_whose_multiple_is_beyond_float16_become_float32(tmp_path: Path) -> None:
    folder, blocks = write_large_scale(tmp_path)
    layer = cast("Any", load(folder).model).model.layers[0].mlp.up_proj
    found = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4)
    expected = mx.array(by_definition(QUANTIZED["Q4_0"], blocks)).reshape(256, 256)
    assert mx.allclose(found, expected, rtol=1e-6, atol=0).item()


def test_a_load_that_scales_interrupt_leaves_no_memory_to_the_next(tmp_path: Path) -> None:
    folder, _ = write_large_scale(tmp_path)
    loads: list[weakref.ref[StageModel]] = []
    earlier: list[StageModel | None] = []

    def divide(stage: StageModel) -> None:
        earlier.extend(load() for load in loads)
        loads.append(weakref.ref(stage))

    load_stage(folder, LayerRange(0, folder.num_layers), "float32", lambda _d, _t: None, divide)
    assert earlier == [None]


@pytest.mark.parametrize(("dtype", "widened"), [("float32", True), ("float16", False)])
def test_the_memory_that_is_planned_is_the_memory_that_is_taken(
    tmp_path: Path, dtype: DType, *, widened: bool
) -> None:
    folder = write_family(tmp_path / "model", "llama", 4, mlp_bias=False)
    model = folder_of(write_gguf_of(folder, tmp_path / "model.gguf"))
    totals: list[int] = []
    load_stage(model, LayerRange(0, 2), dtype, lambda _done, total: totals.append(total))
    plain = sum(entry.nbytes for entry in model.tensors if entry.dtype == "F32")
    planned = sum(entry.loaded_bytes(widened=widened) for entry in model.tensors)
    # Float32 in the file is planned as it is, and becomes half precision.
    assert totals[-1] == planned - (0 if widened else plain // 2)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False], ids=["native kernels", "no kernels"])
@pytest.mark.parametrize("cpu_weights", ["quantized", "float32"])
def test_plans_count_the_bytes_that_blocks_of_32_weights_take(
    tmp_path: Path, cpu_weights: Literal["quantized", "float32"], *, kernels: bool
) -> None:
    folder = write_family(tmp_path / "model", "llama", 4, mlp_bias=False)
    target = write_gguf_of(folder, tmp_path / "model.gguf")
    tensors: dict[str, Stored] = {}
    for name, tensor in read_gguf(target).tensors.items():
        kind, data = tensor.kind.name, read_range(target, tensor.offset, tensor.nbytes)
        if kind == "Q4_1":
            rows, columns = tensor.shape
            kind, data = "Q4_0", random_blocks(QUANTIZED["Q4_0"], rows=rows, columns=columns).tobytes()
        tensors[name] = Stored(NUMBERS[kind], tensor.shape, data)
    metadata = {**metadata_of(read_model_folder(folder).config), **TOKENIZER}
    target.write_bytes(gguf_bytes(metadata, tensors))
    found = folder_of(target)
    assert "Q4_0" in {entry.dtype for entry in found.tensors}
    assert_planned_as_loaded(found, kernels=kernels, cpu_weights=cpu_weights)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_read_as_it_is(tmp_path: Path, dtype: mx.Dtype) -> None:
    folder = write_random_model(tmp_path / "model", SMALL, spread=0.1, norm=1.0)
    weights = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    narrow = {name: array.astype(dtype) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), narrow)
    stage = load(folder_of(write_gguf_of(folder, tmp_path / "model.gguf")))
    for name, array in cast("Any", tree_flatten(stage.model.parameters())):
        assert mx.array_equal(array, narrow[name].astype(mx.float32)).item(), name


@pytest.mark.parametrize("layers", [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 5)])
def test_a_stage_reads_the_bytes_of_its_own_tensors_alone(tmp_path: Path, layers: LayerRange) -> None:
    folder = write_random_model(tmp_path / "model", SMALL, spread=0.1, norm=1.0)
    whole = folder_of(write_gguf_of(folder, tmp_path / "model.gguf"))
    sparse = write_sparse_copy(whole, layers, tmp_path / "sparse")
    expected, found = (load(each, layers.start, layers.end) for each in (whole, sparse))
    parameters = dict(cast("Any", tree_flatten(expected.model.parameters())))
    needed = [path for path in parameters if expected.needs(path)]
    assert needed
    there = dict(cast("Any", tree_flatten(found.model.parameters())))
    assert all(mx.array_equal(parameters[path], there[path]).item() for path in needed)


def test_a_stage_loads_from_the_folder_that_preshard_writes(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", SMALL, spread=0.1, norm=1.0)
    whole, layers = folder_of(write_gguf_of(folder, tmp_path / "model.gguf")), LayerRange(2, 4)
    write_stage_folder(whole, layers, tmp_path / "stage", lambda _count: None)
    stage = load(read_model_folder(tmp_path / "stage"), 2, 4)
    expected = dict(cast("Any", tree_flatten(load(whole, 2, 4).model.parameters())))
    there = dict(cast("Any", tree_flatten(stage.model.parameters())))
    needed = [path for path in expected if stage.needs(path)]
    assert all(mx.array_equal(expected[path], there[path]).item() for path in needed)
    with pytest.raises(ModelCorrupt, match="made for layers"):
        load(read_model_folder(tmp_path / "stage"), 0, 2)


def test_an_array_is_not_read_outside_its_turn(tmp_path: Path) -> None:
    """Fail if an array is evaluated too early or too late, instead of giving zeros."""
    folder = folder_of(write_gguf_of(write_random_model(tmp_path / "model", SMALL), tmp_path / "model.gguf"))
    weights = GgufWeights(folder)
    array = weights.arrays["model.norm.weight"]
    with pytest.raises(RuntimeError, match="read"):
        mx.eval(array + 1)
    with weights.readable("model.norm"):
        mx.eval(array)
    assert array.shape == (64,)
    with pytest.raises(RuntimeError, match="read"):
        mx.eval(weights.arrays["model.embed_tokens.weight"])


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_no_file_is_left_and_no_descriptor(tmp_path: Path) -> None:
    def open_files() -> int:
        """Return the number of this model's files, and of those in memory, that this process has open."""
        targets: list[str] = []
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # another thread's, closed meanwhile
                targets.append(str(entry.readlink()))
        return sum("memfd:" in target or str(tmp_path) in target for target in targets)

    before = open_files()
    folder = folder_of(write_gguf_of(write_random_model(tmp_path / "model", SMALL), tmp_path / "model.gguf"))
    for _ in range(3):
        load(folder)

    def is_closed() -> bool:
        gc.collect()
        return open_files() <= before  # of earlier tests, some may be closed meanwhile

    eventually(is_closed)  # MLX's thread closes the last one


def test_a_file_without_a_tensor_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", SMALL)
    weights = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    del weights["model.layers.3.mlp.up_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    file = write_gguf_of(folder, tmp_path / "model.gguf")
    with pytest.raises(ModelCorrupt, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        load(folder_of(file))


def test_a_file_that_shrinks_before_it_is_read_is_an_error(tmp_path: Path) -> None:
    file = write_gguf_of(write_random_model(tmp_path / "model", SMALL), tmp_path / "model.gguf")
    folder = folder_of(file)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    with pytest.raises(ModelCorrupt, match="ends before byte"):
        load(folder)


def test_a_tensor_of_another_size_than_the_metadata_says_is_refused(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", SMALL)
    file = write_gguf_of(folder, tmp_path / "model.gguf", {"qwen3.feed_forward_length": 64})
    with pytest.raises(ModelCorrupt, match="cannot be loaded"):
        load(folder_of(file))


def test_heads_of_an_odd_size_whose_rows_would_be_paired_are_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {**SMALL, "model_type": "llama", **FAMILIES["llama"]}
    folder = write_random_model(tmp_path / "model", config)
    size = int(config["hidden_size"]) // int(config["num_attention_heads"])
    metadata: dict[str, int] = {
        "llama.attention.head_count": config["num_attention_heads"] * size,
        "llama.attention.head_count_kv": config["num_key_value_heads"] * size,
        "llama.attention.key_length": 1,
        "llama.attention.value_length": 1,
        "llama.rope.dimension_count": 1,
    }
    file = write_gguf_of(folder, tmp_path / "model.gguf", metadata)
    with pytest.raises(ModelCorrupt, match=r"rows, which are not \d+ heads of pairs"):
        load(folder_of(file))


DOWN = re.compile(r"blk\.(?:0|14)\.ffn_down\.weight")
"""Some of the matrices of SmolLM2 whose rows are whole blocks of 256."""
PROMPT = mx.array([[504, 3575, 282, 4649, 314, 7042]])


@pytest.fixture(scope="module")
def down_weights() -> dict[str, Floats]:
    """Return the weights of a real model, by their names in its file."""
    file = read_gguf(smollm2())
    found: dict[str, Floats] = {}
    for name, tensor in file.tensors.items():
        if DOWN.fullmatch(name):
            data = np.frombuffer(read_range(file.path, tensor.offset, tensor.nbytes), np.uint8)
            integers, scales, biases = to_groups(tensor.kind, data)
            found[name] = (
                (integers * scales[:, None] + biases[:, None]).astype(np.float64).reshape(tensor.shape)
            )
    return found


def real_logits(file: Path) -> mx.array:
    return cast("mx.array", cast("Any", load(folder_of(file)).model)(PROMPT))[0].astype(mx.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "allowed"),
    [("Q4_K", 2e-5), pytest.param("Q5_K", 2e-5, marks=pytest.mark.thorough), ("Q6_K", 1.5e-2)],
)
def test_a_real_models_k_quants_are_served_as_they_are_defined(
    tmp_path: Path, down_weights: dict[str, Floats], kind: str, allowed: float
) -> None:
    """Encode some of SmolLM2's matrices; compare its logits with those of the same weights in float32."""
    quantized: dict[str, Stored] = {}
    exact: dict[str, Stored] = {}
    for name, weights in down_weights.items():
        blocks, meant = encode_k(kind, weights)
        quantized[name] = Stored(NUMBERS[kind], weights.shape, blocks.tobytes())
        exact[name] = Stored(F32, weights.shape, meant.astype("<f4").tobytes())
        if name.startswith("blk.0."):
            np.testing.assert_allclose(by_definition(QUANTIZED[kind], blocks[:20]), meant[:20].reshape(-1))
            assert np.abs(meant.reshape(weights.shape) - weights).max() < 0.1 * np.abs(weights).max()
    expected = real_logits(write_with(smollm2(), tmp_path / "exact.gguf", exact))
    found = real_logits(write_with(smollm2(), tmp_path / "quantized.gguf", quantized))
    largest = cast("float", mx.max(mx.abs(expected)).item())
    error = cast("float", mx.max(mx.abs(found - expected)).item())
    assert error <= allowed * largest
    assert mx.array_equal(mx.argmax(found, axis=1), mx.argmax(expected, axis=1))
