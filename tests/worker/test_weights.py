"""Loading of a stage's weights: its share alone, also in memory, with quantization, and from bare checkpoints."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.conformance.families import configuration
from tests.profiles import made_up_profile
from tests.worker.random_models import QWEN3, write_in_format, write_random_model
from tests.worker.stages import CUTS, PROMPT, Pipeline, Want, chunk, open_sequence, want

from mlx_cpu_kernels import operations
from mlx_ring.core.errors import ModelCorrupt, NotReady, VersionMismatch
from mlx_ring.core.types import LayerRange
from mlx_ring.head.served_model import describe_model, memory_for_weights
from mlx_ring.models.layer_tensors import mark_stage_folder
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.weights_manifest import WeightsSample, join_digests
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.profiles import measured_node
from mlx_ring.planner.request import Demand
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.config import Settings
from mlx_ring.worker.shard import StageModel, model_errors
from mlx_ring.worker.tensors import from_message
from mlx_ring.worker.weights import load_stage, read_folder

BIG: dict[str, Any] = {
    **QWEN3,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
}
"""235 million parameters: 0.9 GB in float32."""
MEASURE = """
import json, sys
from pathlib import Path
from mlx_ring.core.lean_imports import import_mlx_lm
import_mlx_lm()
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.core.types import LayerRange
from mlx_ring.worker.weights import load_stage
shares = []
start, end = int(sys.argv[2]), int(sys.argv[3])
load_stage(read_model_folder(Path(sys.argv[1])), LayerRange(start, end), "float32", lambda _, total: shares.append(total))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps([shares[-1], int(peak.split()[1]) * 1024]))
"""


def write_big_model(folder: Path, dtype: mx.Dtype) -> Path:
    """Write the model's folder, one array at a time; values do not matter here."""
    from mlx_lm.models.qwen3 import Model, ModelArgs  # a big import for one test

    folder.mkdir()
    parameters: Any = tree_flatten(Model(ModelArgs.from_dict(BIG)).parameters(), destination={})
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {name: mx.zeros(value.shape, dtype) for name, value in parameters.items()},
    )
    (folder / "config.json").write_text(json.dumps(BIG))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32 on disk", "bfloat16 on disk"])
def test_peak_memory_stays_near_the_stages_share(tmp_path: Path, dtype: mx.Dtype) -> None:
    folder = write_big_model(tmp_path / "big", dtype)
    for start, end in ((0, 2), (2, 4)):
        printed = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder), str(start), str(end)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        share, peak = json.loads(printed)
        print(f"layers [{start}, {end}): share {share / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")  # noqa: T201 - the figures to read with `pytest -s`
        assert peak <= 1.05 * share + 150e6


def save(folder: Path, model: Any) -> None:
    weights: Any = tree_flatten(model.parameters(), destination={})
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_quantized_stages_equal_the_whole_model(tmp_path: Path, bits: int, tied: bool) -> None:  # noqa: FBT001 - pytest passes parameters by name
    config = {**QWEN3, "tie_word_embeddings": tied, "quantization": {"group_size": 32, "bits": bits}}
    plain = {**config}
    del plain["quantization"]
    folder = write_random_model(tmp_path / "model", plain)
    model: Any = load_model(folder)[0]
    nn.quantize(model, group_size=32, bits=bits)
    save(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    whole: Any = load_model(folder)[0]
    tokens = mx.array([[3, 1, 4, 1, 5]])
    hidden: mx.array | None = None
    for start, end in ((0, 2), (2, 5)):
        stage = load_stage(read_model_folder(folder), LayerRange(start, end), "float32", lambda _d, _t: None)
        hidden = stage.forward(tokens, hidden, stage.make_layer_caches(), None)
    assert hidden is not None
    assert mx.array_equal(hidden, whole(tokens))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_weights_held_as_float32_give_the_whole_quantized_model(
    tmp_path: Path, bits: int, *, tied: bool
) -> None:
    folder = write_quantized_model(tmp_path / "model", bits=bits, tie_word_embeddings=tied)
    whole: Any = load_model(folder)[0]
    whole.set_dtype(mx.float32)
    tokens, hidden = mx.array([[3, 1, 4, 1, 5]]), None
    for start, end in ((0, 2), (2, 5)):
        stage = load_plain(folder, start, end)
        # A row of the embedding is looked up as it is stored.
        quantized = {"model.embed_tokens"} if not (tied and end == 5) else set[str]()
        assert quantized_paths(stage) == quantized
        hidden = stage.forward(tokens, hidden, stage.make_layer_caches(), None)
    assert hidden is not None
    assert mx.allclose(hidden, whole(tokens), rtol=1e-4, atol=1e-5)


def test_experts_are_held_as_float32_too(tmp_path: Path) -> None:
    family = configuration("qwen3_moe")
    folder = write_quantized_model(tmp_path / "model", base=family)
    whole: Any = load_model(folder)[0]
    whole.set_dtype(mx.float32)
    stage = load_plain(folder, 0, family["num_hidden_layers"])
    assert not any("switch_mlp" in path for path in quantized_paths(stage))
    tokens = mx.array([[3, 1, 4, 1, 5] * 5])
    logits = stage.forward(tokens, None, stage.make_layer_caches(), None)
    assert mx.allclose(logits, whole(tokens), rtol=1e-4, atol=1e-5)


def load_plain(folder: Path, start: int, end: int) -> StageModel:
    model = read_model_folder(folder)
    return load_stage(model, LayerRange(start, end), "float32", lambda _d, _t: None, dequantized=True)


def quantized_paths(stage: StageModel) -> set[str]:
    flat: Any = tree_flatten(stage.model.parameters(), destination={})
    return {name.removesuffix(".scales") for name in flat if name.endswith(".scales")}


def write_quantized_model(
    folder: Path, *, bits: int = 4, group: int = 32, base: dict[str, Any] = QWEN3, **changes: Any
) -> Path:
    """Write a model of few bits whose scales are bfloat16."""
    config = {**base, **changes}
    write_random_model(folder, config)
    model: Any = load_model(folder)[0]
    nn.quantize(model, group_size=group, bits=bits)
    model.set_dtype(mx.bfloat16)
    save(folder, model)
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization": {"group_size": group, "bits": bits}})
    )
    return folder


Written = Callable[..., Path]
"""Writes a model by a function with these arguments, and returns its folder; tests that only read it share it."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folders: dict[str, Path] = {}

    def write(write_model: Callable[..., Path], **arguments: Any) -> Path:
        key = f"{write_model.__name__} {json.dumps(arguments)}"
        if key not in folders:
            folders[key] = write_model(tmp_path_factory.mktemp("written") / "model", **arguments)
        return folders[key]

    return write


@contextmanager
def native_kernels(*, wanted: bool) -> Generator[None]:
    """Compute with native kernels meanwhile if they are wanted; skip the test if they are not built."""
    if wanted and not operations.install().active:
        pytest.skip("the native kernels are not built")
    try:
        yield
    finally:
        operations.uninstall()


def assert_planned_as_loaded(
    folder: ModelFolder, *, kernels: bool, cpu_weights: Literal["quantized", "float32"] = "quantized"
) -> None:
    """Compare the bytes that a plan counts for all layers on such a CPU with those that MLX holds after loading, and meanwhile."""
    layers, plain = LayerRange(0, folder.num_layers), cpu_weights == "float32"
    with native_kernels(wanted=kernels):
        gc.collect()
        cache = mx.set_cache_limit(0)  # whose buffers may be larger than arrays that take them
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        stage = load_stage(folder, layers, "float32", lambda _d, _t: None, dequantized=plain)
        gc.collect()
        held, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
        mx.set_cache_limit(cache)
    assert stage.num_layers == folder.num_layers
    assert peak <= 1.05 * held
    settings = Settings(dtype="float32", cpu_weights=cpu_weights, blas="auto" if kernels else "openblas")
    assert held <= memory_for_weights(folder, settings) <= 1.02 * held
    node = measured_node(made_up_profile(kernels="AVX2" if kernels else ""), "box", cpu_weights=cpu_weights)
    planned = StageTables(profile_folder(folder, "model"), Demand(1, 1)).weight_bytes(
        node, 0, folder.num_layers
    )
    last_norm = 4 * folder.hidden_size  # counts to no layer
    assert held <= planned + last_norm <= 1.02 * held


_LATENT = {
    **configuration("deepseek_v3"),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32),
    "tie_word_embeddings": False,
}
"""Attention over latent keys and values, whose products have a matrix for each head."""


@pytest.mark.parametrize("kernels", [True, False], ids=["native kernels", "no kernels"])
@pytest.mark.parametrize("cpu_weights", ["quantized", "float32"])
@pytest.mark.parametrize(
    "build",
    [
        {"tie_word_embeddings": True, "num_attention_heads": 8},
        {"group": 64, "num_attention_heads": 8},
        {"bits": 8},
        {"base": _LATENT},
    ],
    ids=["tied", "group 64", "8 bits", "latent attention"],
)
def test_plans_count_the_bytes_that_quantized_weights_take(
    written: Written,
    build: dict[str, Any],
    cpu_weights: Literal["quantized", "float32"],
    *,
    kernels: bool,
) -> None:
    folder = written(write_quantized_model, **build)
    assert_planned_as_loaded(read_model_folder(folder), kernels=kernels, cpu_weights=cpu_weights)


_EXPERTS = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512, "vocab_size": 512}
_MINIMAX: dict[str, Any] = {
    **configuration("minimax"),
    **_EXPERTS,
    "num_hidden_layers": 18,
    "layer_types": None,
    "num_local_experts": 2,
}
"""Many layers, of which one matrix is a small part."""
_MINISTRAL: dict[str, Any] = {
    **configuration("ministral3"),
    "hidden_size": 256,
    "intermediate_size": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kernels", [True, False], ids=["native kernels", "no kernels"])
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            _MINIMAX,
            "fp8 blocks",
        ),
        ({**configuration("deepseek_v3"), **_EXPERTS}, "fp8 blocks"),
        ({**configuration("deepseek_v3"), **_EXPERTS, "n_routed_experts": 16}, "int4"),
        (_MINISTRAL, "fp8 tensors"),
    ],
    ids=["MiniMax in FP8", "DeepSeek in FP8", "DeepSeek in packed integers", "Ministral in FP8"],
)
def test_plans_count_the_bytes_that_decoded_weights_take(
    written: Written, config: dict[str, Any], kind: Any, *, kernels: bool
) -> None:
    """Expect what loading makes of weights in the formats of other programs."""
    folder = written(write_in_format, config={**config, "tie_word_embeddings": False}, kind=kind)
    assert_planned_as_loaded(read_model_folder(folder), kernels=kernels)


@pytest.mark.parametrize("kind", ["fp8 blocks", "int4"])
def test_packed_weights_count_as_the_parameters_that_they_hold(written: Written, kind: Any) -> None:
    config = {**configuration("deepseek_v3"), **_EXPERTS, "tie_word_embeddings": False}
    folders = [written(write_in_format, config=config, kind=name) for name in (kind, "bfloat16")]
    counts = [describe_model(read_model_folder(folder))["parameters"] for folder in folders]
    assert counts[0] == counts[1]


def test_parameters_of_modules_with_their_own_bits_are_counted_by_these(tmp_path: Path) -> None:
    folder = write_quantized_model(tmp_path / "model", bits=4)
    plain = describe_model(read_model_folder(write_random_model(tmp_path / "plain", QWEN3)))["parameters"]
    assert describe_model(read_model_folder(folder))["parameters"] == plain
    model: Any = load_model(write_random_model(tmp_path / "mixed", QWEN3))[0]
    usual, of_head = {"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 8}
    mixed = {**usual, "lm_head": of_head}

    def own(path: str, module: nn.Module) -> bool | dict[Any, Any]:
        return hasattr(module, "to_quantized") and (of_head if path == "lm_head" else usual)

    nn.quantize(model, class_predicate=own)
    save(tmp_path / "mixed", model)
    (tmp_path / "mixed" / "config.json").write_text(json.dumps({**QWEN3, "quantization": mixed}))
    assert describe_model(read_model_folder(tmp_path / "mixed"))["parameters"] == plain


def test_numbers_of_ministral_in_fp8_are_decoded(tmp_path: Path) -> None:
    loaded = [
        load_stage(
            read_model_folder(write_in_format(tmp_path / kind, _MINISTRAL, kind)),
            LayerRange(0, _MINISTRAL["num_hidden_layers"]),
            "float32",
            lambda _d, _t: None,
        )
        for kind in ("fp8 tensors", "bfloat16")
    ]
    fp8, plain = (
        cast("dict[str, mx.array]", tree_flatten(each.model.parameters(), destination={})) for each in loaded
    )
    assert fp8.keys() == plain.keys()
    assert all(mx.allclose(array, plain[name], rtol=0.01).item() for name, array in fp8.items())


@pytest.mark.parametrize("transpose", [True, False])
def test_latent_attention_takes_scales_as_stored(tmp_path: Path, *, transpose: bool) -> None:
    folder = read_model_folder(write_quantized_model(tmp_path / "model", base=_LATENT))
    with native_kernels(wanted=True):
        stage: Any = load_stage(folder, LayerRange(0, 1), "float32", lambda _d, _t: None)
        heads = stage.model.model.layers[0].self_attn.embed_q
        assert heads.scales.dtype == mx.bfloat16
        x = mx.sin(mx.arange(4 * 3 * 32)).reshape(1, 4, 3, 32)
        ours = heads(x, transpose=transpose)
    assert ours.dtype == mx.float32
    heads.set_dtype(mx.float32)
    assert mx.allclose(ours, heads(x, transpose=transpose), rtol=1e-5, atol=1e-5).item()


def scale_types(stage: StageModel) -> set[mx.Dtype]:
    flat: Any = tree_flatten(stage.model.parameters(), destination={})
    return {value.dtype for name, value in flat.items() if name.endswith(("scales", "biases"))}


def test_scales_of_quantized_weights_take_the_stages_dtype(tmp_path: Path) -> None:
    folder = write_quantized_model(tmp_path / "model")
    stage = load_stage(read_model_folder(folder), LayerRange(1, 3), "float32", lambda _d, _t: None)
    assert scale_types(stage) == {mx.float32}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scales_stay_as_stored_with_native_kernels(tmp_path: Path, *, tied: bool) -> None:
    folder = read_model_folder(write_quantized_model(tmp_path / "model", tie_word_embeddings=tied))
    tokens = mx.array([[3, 14, 15, 9, 26, 5]])

    def load() -> StageModel:
        return load_stage(folder, LayerRange(0, folder.num_layers), "float32", lambda _d, _t: None)

    widened = load()
    with native_kernels(wanted=True):
        stored = load()
        assert scale_types(stored) == {mx.bfloat16}
        logits, expected = (
            stage.forward(tokens, None, stage.make_layer_caches(), None) for stage in (stored, widened)
        )
        assert logits.dtype == mx.float32
        assert mx.array_equal(logits, expected).item()


def test_weights_that_a_model_keeps_in_float32_stay_float32(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", configuration("deepseek_v3"))
    stage = load_stage(read_model_folder(folder), LayerRange(2, 4), "bfloat16", lambda _d, _t: None)
    flat: Any = tree_flatten(stage.model.parameters(), destination={})
    kept = {name for name, value in flat.items() if value.dtype == mx.float32}
    assert kept == {name for name in flat if name.endswith("e_score_correction_bias")} != set()


def test_progress_is_reported_in_bytes_up_to_the_share(tmp_path: Path) -> None:
    folder = read_model_folder(write_random_model(tmp_path / "model", QWEN3))
    reported: list[tuple[int, int]] = []
    load_stage(folder, LayerRange(1, 3), "float32", lambda done, total: reported.append((done, total)))
    layers = [entry for entry in folder.tensors if ".layers.1." in entry.name or ".layers.2." in entry.name]
    assert reported[0][0] == 0
    assert reported[-1] == (reported[-1][1], sum(entry.nbytes for entry in layers))
    assert reported == sorted(reported)


@pytest.mark.parametrize("is_bare", [False, True])
def test_another_version_of_the_weights_beside_those_of_the_index_is_not_loaded(
    *, is_bare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_random_model(tmp_path / "whole", QWEN3)
    if is_bare:
        (tmp_path / "bare").mkdir()
        folder = write_bare_checkpoint(folder, tmp_path / "bare", with_head=True)
    expected = flat_parameters(load_plain(folder, 0, 5))
    other = folder / "model.safetensors"
    weights = cast("dict[str, mx.array]", mx.load(str(other)))
    parts, names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)], sorted(weights)
    for number, part in enumerate(parts):
        mx.save_safetensors(str(folder / part), {name: weights[name] for name in names[number::2]})
    index = {"weight_map": {name: parts[number % 2] for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    zeros = {name: mx.zeros_like(value) for name, value in weights.items()}
    mx.save_safetensors(str(other), zeros)

    def other_last(_pattern: str) -> list[str]:
        return [*(str(folder / part) for part in parts), str(other)]

    monkeypatch.setattr("mlx_lm.utils.glob.glob", other_last)  # else in the disk's order
    loaded = flat_parameters(load_plain(folder, 0, 5))
    assert loaded.keys() == expected.keys()
    assert all(mx.array_equal(loaded[path], expected[path]) for path in expected)


def flat_parameters(stage: StageModel) -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", tree_flatten(stage.model.parameters(), destination={}))


def test_wrong_number_of_layers_is_refused(tmp_path: Path) -> None:
    folder = read_model_folder(write_random_model(tmp_path / "model", QWEN3))
    planned = replace(folder, config={**folder.config, "num_hidden_layers": 4})
    with pytest.raises(ModelCorrupt, match="declares 4 layers, but its model has 5"):
        load_stage(planned, LayerRange(2, 4), "float32", lambda _d, _t: None)


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_weights_that_do_not_fit_the_configuration_are_refused_in_one_line(
    tmp_path: Path, change: str
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    if change == "missing":
        del weights["model.norm.weight"]
    elif change == "extra":
        weights["model.surplus"] = mx.zeros((2,))
    else:
        weights["model.norm.weight"] = mx.zeros((3,))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ModelCorrupt, match="cannot be loaded") as raised:
        load_stage(read_model_folder(folder), LayerRange(0, 5), "float32", lambda _d, _t: None)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**QWEN3, "rope_scaling": 2}, "AttributeError: 'int' object has no attribute 'get'"),
        (
            {**configuration("gemma3_text"), "sliding_window_pattern": 9},
            "IndexError: list index out of range",
        ),
    ],
    ids=["while the model is built", "in its first pass"],
)
def test_configurations_with_which_the_models_own_code_fails_are_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder = write_random_model(
        tmp_path / "model", {**config, "rope_scaling": None, "sliding_window_pattern": 2}
    )
    (folder / "config.json").write_text(json.dumps(config))
    described = read_model_folder(folder)
    with pytest.raises(ModelCorrupt) as raised:
        load_stage(described, LayerRange(0, described.num_layers), "float32", lambda _d, _t: None)
    assert str(raised.value) == f"{folder} cannot be loaded: mlx-lm fails with its configuration, {reason}"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("model.safetensors"),
        MemoryError(),
        RuntimeError("[malloc] Unable to allocate 4096 bytes."),
        NotReady("Wait."),
    ],
    ids=repr,
)
def test_errors_that_say_nothing_about_the_model_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, model_errors(Path("model")):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("Shapes differ."), "model cannot be loaded: Shapes differ."),
        (ValueError(), "model cannot be loaded: mlx-lm fails with its configuration, ValueError"),
        (KeyError("rope"), "model cannot be loaded: mlx-lm fails with its configuration, KeyError: 'rope'"),
    ],
    ids=repr,
)
def test_errors_of_the_models_code_name_the_folder(error: Exception, message: str) -> None:
    with pytest.raises(ModelCorrupt) as raised, model_errors(Path("model")):
        raise error
    assert str(raised.value) == message


def write_bare_checkpoint(whole: Path, folder: Path, *, with_head: bool) -> Path:
    """Write a model's weights again, as sentence-transformers saves them: the transformer alone, or with its head."""
    weights = cast("dict[str, mx.array]", mx.load(str(whole / "model.safetensors")))
    kept = {name: array for name, array in weights.items() if with_head or not name.startswith("lm_head")}
    renamed = {name.removeprefix("model."): array for name, array in kept.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return folder


@pytest.mark.parametrize("with_head", [True, False], ids=["with a head", "without a head"])
@pytest.mark.parametrize("stages", [1, 2])
def test_bare_checkpoint_gives_the_hidden_states_of_the_whole_model(
    tmp_path: Path, stages: int, *, with_head: bool
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "bare"
    write_random_model(whole, QWEN3)
    folder.mkdir()
    pipeline = Pipeline(write_bare_checkpoint(whole, folder, with_head=with_head), CUTS[stages])
    row = chunk(1, 0, PROMPT, want(Want.HIDDEN_SUM, Want.LAST))
    hidden = from_message(pipeline.results(row, operations=[open_sequence(1)])[1].hidden)
    model: Any = load_model(whole)[0]
    assert mx.allclose(hidden, model.model(mx.array([PROMPT]))[0, -1], rtol=0, atol=2e-5)


def test_a_folder_with_other_weights_than_the_heads_is_refused_unless_it_lacks_some(tmp_path: Path) -> None:
    folder, other = (
        read_model_folder(write_random_model(tmp_path / name, QWEN3, seed))
        for name, seed in (("served", 0), ("other", 1))
    )
    hello = make_hello(model_digest=join_digests(folder.digest, WeightsSample(folder).digest()))

    def read(path: Path, *, fetched: bool = False) -> Path:
        request = worker_pb2.LoadRequest(hello=hello, model_path=str(path), fetched=fetched)
        return read_folder(request, make_hello()).path

    assert read(folder.path) == folder.path
    with pytest.raises(VersionMismatch, match=f"{other.path} has other weights .*copy the head's files"):
        read(other.path)
    # An agent has verified these, and weights of other stages may be missing.
    assert read(other.path, fetched=True) == other.path
    mark_stage_folder(other.path, LayerRange(0, 2))
    assert read(other.path) == other.path
