"""Sizes of models from their configuration and from the headers of their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its signature has unknown parts
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType] - the one way to a class
from tests.conformance.families import configuration

from mlx_ring.core.errors import ModelCorrupt
from mlx_ring.models.architectures import known_architectures
from mlx_ring.models.model_folder import ModelFolder, TensorEntry, read_model_config
from mlx_ring.models.model_source import builtin_names, describe_model
from mlx_ring.planner.layer_parts import WeightFormat, look_back
from mlx_ring.planner.model_sizes import profile_folder

QWEN3_14B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_14B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def profile_of(config: dict[str, Any], folder: Path, bits: int | None = None) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    read = read_model_config(folder / "config.json")
    return profile_folder(read, "model", None if bits is None else WeightFormat(bits))


def test_a_configuration_gives_the_published_size(tmp_path: Path) -> None:
    """Expect 14.8 billion parameters of two bytes; in 4 bits the files have 8.3 GB."""
    assert profile_of(QWEN3_14B, tmp_path).weight_bytes == pytest.approx(2 * 14.77e9, rel=0.01)
    assert profile_of(QWEN3_14B, tmp_path, 4).weight_bytes == pytest.approx(8.31e9, rel=0.01)


def test_scales_stay_as_stored_where_native_kernels_run(tmp_path: Path) -> None:
    stored = profile_of(QWEN3_14B, tmp_path, 4)
    kept, widened = (form.layers[0].weight_bytes for form in (stored.with_scales, stored.widened))
    assert kept == pytest.approx(stored.layers[0].weight_bytes, rel=1e-3)
    # 4 bits, and a scale and a bias for 64 weights, each of 16 or 32 bits.
    assert widened / kept == pytest.approx(5 / 4.5, rel=1e-3)
    assert stored.with_scales.number_bytes == 4


def test_a_token_reads_some_of_the_experts(tmp_path: Path) -> None:
    """Expect 30.5 billion parameters, of which a token reads 3.3, embedding included."""
    profile = profile_of(QWEN3_30B_A3B, tmp_path)
    assert profile.weight_bytes == pytest.approx(2 * 30.5e9, rel=0.01)
    active = sum(layer.read_bytes for layer in profile.layers) + profile.head_bytes + profile.embedding_bytes
    assert active == pytest.approx(2 * 3.35e9, rel=0.03)


@pytest.mark.parametrize(
    ("said", "places"),
    [
        ({}, range(48)),
        ({"moe_layer_freq": 2}, range(0, 48, 2)),
        ({"decoder_sparse_step": 2}, range(1, 48, 2)),
        ({"first_k_dense_replace": 3}, range(3, 48)),
        ({"mlp_only_layers": [0, 5]}, [1, 2, 3, 4, *range(6, 48)]),
        ({"moe_layer_freq": [0] + 47 * [1]}, range(1, 48)),
        ({"mlp_layer_types": 2 * ["dense"] + 46 * ["sparse"]}, range(2, 48)),
    ],
)
def test_the_layers_with_experts_are_those_that_the_model_says(
    said: dict[str, Any], places: Sequence[int], tmp_path: Path
) -> None:
    layers = profile_of(QWEN3_30B_A3B | said, tmp_path).layers
    assert [index for index, layer in enumerate(layers) if layer.has_experts] == list(places)


def test_a_token_uses_no_more_experts_than_there_are(tmp_path: Path) -> None:
    layer = profile_of(QWEN3_30B_A3B | {"num_experts_per_tok": 500}, tmp_path).layers[0]
    assert layer.read_by(1) == layer.read_by(4) == layer.weight_bytes


def test_sliding_layers_cache_one_window(tmp_path: Path) -> None:
    config = {**QWEN3_14B, "sliding_window": 1024, "sliding_window_pattern": 6, "num_hidden_layers": 12}
    config["model_type"] = "gemma3_text"
    layers = profile_of(config, tmp_path).layers
    assert [layer.kv_bytes_per_token > 0 for layer in layers] == [False] * 5 + [True] + [False] * 5 + [True]
    assert layers[0].kv_bytes_per_sequence == 1024 * layers[5].kv_bytes_per_token


@pytest.mark.parametrize("name", builtin_names())
def test_headers_and_configuration_agree(name: str) -> None:
    folder = describe_model(name).folder
    by_headers = profile_folder(folder, name)
    by_config = profile_folder(folder, name, WeightFormat(16))
    assert by_headers.weight_bytes == pytest.approx(folder.weight_bytes, rel=0.01)
    assert by_headers.weight_bytes == pytest.approx(by_config.weight_bytes, rel=0.01)
    for one, other in zip(by_headers.layers, by_config.layers, strict=True):
        assert one.read_bytes == pytest.approx(other.read_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("entry", "has_byte_scales"),
    [
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, True),
        ({"quantization": {"bits": 4, "group_size": 16, "mode": "nvfp4"}}, True),
        ({"quantization": {"bits": 8, "group_size": 32, "mode": "mxfp8"}}, True),
        ({"quantization": {"bits": 4, "group_size": 64}}, False),
        ({}, False),
    ],
)
def test_scales_of_a_byte_are_those_of_their_modes(
    entry: dict[str, Any], *, has_byte_scales: bool, tmp_path: Path
) -> None:
    assert profile_of({**QWEN3_14B, **entry}, tmp_path).has_byte_scales is has_byte_scales


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 16.0),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, 8.25),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.25),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.125),
        ({"mode": "mxfp8", "group_size": 32, "bits": 8}, 8.25),
        ({"group_size": 32, "bits": 6}, 7.0),
        ({"quant_method": "unheard-of"}, 16.0),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, 16.0),
        ({"quant_method": "fp8", "ignore": 7}, 16.0),
        ({"mode": ["affine"], "group_size": 32, "bits": 6}, 7.0),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"all": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            5.0,
        ),
        ({"quant_method": "compressed-tensors", "config_groups": ["all"]}, 16.0),
        ({"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": "int4"}}}, 16.0),
    ],
)
def test_each_quantization_has_its_size(quantization: dict[str, Any], bits: float, tmp_path: Path) -> None:
    profile = profile_of({**QWEN3_14B, "quantization_config": quantization}, tmp_path)
    layer = profile.layers[0]
    rest = 3 * 5120 * 17408
    assert 8 * (layer.weight_bytes - layer.attention_bytes - layer.whole_bytes) / rest == pytest.approx(
        bits, rel=1e-3
    )


def test_a_named_matrix_has_its_own_format(tmp_path: Path) -> None:
    mixed = {
        "group_size": 64,
        "bits": 4,
        "language_model.model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": 64},
    }
    first, second = profile_of({**QWEN3_14B, "quantization": mixed}, tmp_path).layers[:2]
    assert first.weight_bytes - second.weight_bytes == 5120 * 5120 // 2


def test_latent_attention_has_its_own_weights_and_look_back(tmp_path: Path) -> None:
    config = {
        **QWEN3_14B,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
    }
    layer = profile_of(config, tmp_path).layers[0]
    # DeepSeek-V3's 187 million weights of attention, in two bytes.
    assert layer.attention_bytes == pytest.approx(2 * 187.1e6, rel=1e-3)
    assert layer.kv_bytes_per_token == 2 * (512 + 64)
    assert (layer.query_width, layer.score_width) == (128 * 576, 128 * (192 + 128))


@pytest.mark.parametrize("entry", ["o_groups", "linear_num_value_heads", "q_lora_rank", "index_n_heads"])
def test_a_wrong_size_is_refused(entry: str, tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match=entry):
        profile_of({**QWEN3_14B, entry: -1}, tmp_path)


_OTHER_CACHES = {
    "iquestloopcoder": "two caches for each layer",
    "deepseek_v41": "caches of its own",
    "afm7": "its last layers read the KV of others",
    "hunyuan": "every second layer reads the KV of another",
    "llama4": "counted as full: the cache of a chunk",
    "llama4_text": "counted as full: the cache of a chunk",
    "nemotron-nas": "its configuration has a list for each layer",
    "olmo": "its module needs a package that is not here",
    "prism_hadamard_qwen35": "no small configuration",
}


def _kept(cache: Any) -> list[int | None]:
    """Return the window of a layer's cache of keys, None for all tokens; nothing for a state."""
    if isinstance(cache, CacheList):
        parts: list[list[int | None]] = [_kept(part) for part in cast("Any", cache).caches]
        return next((part for part in parts if part), list[int | None]())
    kind = type(cache).__name__
    if kind == "RotatingKVCache":
        return [cache.max_size]
    return [None] if kind == "KVCache" else []


@pytest.mark.slow
def test_layers_keep_the_tokens_that_mlx_lm_keeps_of_every_family() -> None:
    for family in sorted(known_architectures().keys() - _OTHER_CACHES.keys()):
        config = configuration(family)
        model_class, arguments = cast("tuple[Any, Any]", cast("object", _get_classes(config)))
        caches: list[Any] = make_prompt_cache(
            model_class(arguments.from_dict(json.loads(json.dumps(config))))
        )
        folder = ModelFolder(Path(), config, {}, ())
        counted = [look_back(folder, index) for index in range(folder.num_layers)]
        windows = [back.window for back in counted if back.kept_per_token]
        assert windows == [window for cache in caches for window in _kept(cache)], family
        assert all(
            back.kept_per_token or back.state or back.state_floats or family in _WITHOUT_STATE
            for back in counted
        )


_WITHOUT_STATE = {"gemma3n", "gemma4", "gemma4_text", "nemotron_h"}
"""Families with layers that keep nothing: they read the KV of others, or have no attention."""


@pytest.mark.parametrize(
    ("model_type", "is_tied"),
    [
        ("gemma", True),
        ("gemma2", True),
        ("gemma3_text", True),
        ("mistral", True),
        ("qwen3_moe", False),
        ("phi3", False),
    ],
)
def test_a_head_is_tied_by_default_as_in_mlx_lm(model_type: str, is_tied: bool, tmp_path: Path) -> None:  # noqa: FBT001 - pytest passes parameters by name
    config = {**QWEN3_14B, "model_type": model_type}
    del config["tie_word_embeddings"]
    assert profile_of(config, tmp_path).is_tied == is_tied


def test_files_without_a_head_have_a_tied_one() -> None:
    config = {**QWEN3_14B, "tie_word_embeddings": False, "num_hidden_layers": 1}
    layer = TensorEntry("model.layers.0.mlp.up_proj.weight", "BF16", (4, 4), "model", 0, 32)
    embedding = TensorEntry("model.embed_tokens.weight", "BF16", (151936, 8), "model", 32, 1000)
    head = TensorEntry("lm_head.weight", "BF16", (151936, 8), "model", 1032, 1000)
    for tensors, nbytes in (((layer, embedding), 1032), ((layer, embedding, head), 2032)):
        assert profile_folder(ModelFolder(Path(), config, {}, tensors), "model").weight_bytes == nbytes


# ---- state-space models and convolutions

_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_epsilon"), 1e-5),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "conv_bias", "mamba_proj_bias"), False),
    **dict.fromkeys(("use_conv_bias", "mamba_conv_bias"), True),
}
_MAMBA_2: dict[str, Any] = {
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 64),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 128),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel"), 4),
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_JAMBA: dict[str, Any] = {
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 32,
}
_LFM2: dict[str, Any] = {
    "conv_L_cache": 3,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_dim": 512,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_ff_dim": 1600,
}
_NEMOTRON: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 768,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_GRANITE: dict[str, Any] = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    **dict.fromkeys(
        ("embedding_multiplier", "attention_multiplier", "logits_scaling", "residual_multiplier"), 1.0
    ),
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 64,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
}
_PLAMO: dict[str, Any] = {
    "hidden_size_per_head": 128,
    "mamba_num_heads": 8,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "tie_word_embeddings": True,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_KIMI: dict[str, Any] = {
    **_LATENT,
    "head_dim": 64,
    "rope_theta": 1e4,
    "model_max_length": 4096,
    "moe_intermediate_size": 256,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
}
_LING: dict[str, Any] = {
    **_EXPERTS,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "group_norm_size": 4,
    "rope_theta": 1e4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}
_HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", {**_MAMBA_2, "head_dim": 64, "mamba_d_ssm": 1024}),
    "nemotron_h": ("nemotron_h", {**_MAMBA_2, "hybrid_override_pattern": list("M-*-")}),
    "nemotron_h with experts": (
        "nemotron_h",
        {**_MAMBA_2, **_NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
    ),
    "nemotron_h with latent experts": (
        "nemotron_h",
        {**_MAMBA_2, **_NEMOTRON, "hybrid_override_pattern": list("ME*E"), "moe_latent_size": 128},
    ),
    "jamba": ("jamba", {**_JAMBA, **_EXPERTS}),
    "jamba without experts": ("jamba", {**_JAMBA, **_EXPERTS, "num_experts": 1}),
    "lfm2": ("lfm2", {**_LFM2, "block_auto_adjust_ff_dim": True}),
    "lfm2 with a given width": ("lfm2", {**_LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **_EXPERTS,
            "moe_intermediate_size": 256,
            "num_dense_layers": 1,
            "use_expert_bias": True,
            "conv_L_cache": 3,
            "layer_types": _LFM2["layer_types"],
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA_2,
            **_GRANITE,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 768,
        },
    ),
    "granitemoehybrid without experts": (
        "granitemoehybrid",
        {**_MAMBA_2, **_GRANITE, "num_local_experts": 0, "shared_intermediate_size": 1024},
    ),
    "mamba": ("mamba", {"state_size": 16, "conv_kernel": 4, "time_step_rank": 32}),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 16,
            "head_dim": 64,
            "state_size": 128,
            "conv_kernel": 4,
            "n_groups": 1,
            "time_step_limit": [0.0, 1e9],
            "time_step_rank": 32,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **_DELTA,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_allow_neg_eigval": True,
        },
    ),
    "qwen3_5": ("qwen3_5", {"text_config": {"model_type": "qwen3_5_text", **_SIZES, **_DELTA}}),
    "plamo2": ("plamo2", {**_PLAMO, "mamba_step": 2}),
    "plamo2 with more states": ("plamo2", {**_PLAMO, "mamba_step": 4, "tie_word_embeddings": False}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": 64,
            "num_key_value_heads": 1,
            "rope_theta": 1e4,
            "block_types": ["recurrent", "recurrent", "attention"],
            "tie_word_embeddings": False,
        },
    ),
    "kimi_linear": ("kimi_linear", {**_KIMI, "num_experts": 8}),
    "kimi_linear without experts": ("kimi_linear", {**_KIMI, "num_experts": 0}),
    "bailing_moe_linear": ("bailing_moe_linear", {**_LING, "layer_group_size": 2}),
    "bailing_moe_linear with wide shared experts": (
        "bailing_moe_linear",
        {**_LING, "layer_group_size": 3, "num_shared_experts": 2, "moe_shared_expert_intermediate_size": 320},
    ),
    "bailing_hybrid": ("bailing_hybrid", {**_LING, **_LATENT, "layer_group_size": 2}),
    "rwkv7": (
        "rwkv7",
        {
            "head_dim": 64,
            "a_low_rank_dim": 32,
            "v_low_rank_dim": 16,
            "gate_low_rank_dim": 64,
            "decay_low_rank_dim": 32,
            "tie_word_embeddings": False,
        },
    ),
}
_WITHOUT_HEADS = ("mamba", "mamba2", "rwkv7")
"""Families whose published configurations have no attention heads."""


@pytest.mark.parametrize("case", _HYBRIDS)
def test_hybrids_have_as_many_weights_as_the_modules_of_mlx_lm(case: str, tmp_path: Path) -> None:
    """Compare every layer, and the whole model with embedding and head, without files."""
    family, entries = _HYBRIDS[case]
    config = {"model_type": family, "torch_dtype": "bfloat16", **_SIZES, **entries}
    model_class, arguments = cast("tuple[Any, Any]", cast("object", _get_classes(config)))
    model: Any = model_class(arguments.from_dict(json.loads(json.dumps(config))))
    if family in _WITHOUT_HEADS:
        del config["num_attention_heads"], config["num_key_value_heads"]
    profile = profile_of(config, tmp_path)
    counted = [_parameters(layer) for layer in model.layers]
    assert [layer.weight_bytes / 2 for layer in profile.layers] == pytest.approx(counted, rel=0.01)
    assert profile.weight_bytes / 2 == pytest.approx(_parameters(model), rel=0.01)
    quantized = profile_of(config, tmp_path, 4)
    assert quantized.weight_bytes < 0.4 * profile.weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("case", _HYBRIDS)
def test_layers_keep_as_many_bytes_as_the_caches_of_mlx_lm(case: str) -> None:
    """Compare the states and the KV of some tokens in half precision."""
    family, entries = _HYBRIDS[case]
    config = {"model_type": family, **_SIZES, **entries}
    model_class, arguments = cast("tuple[Any, Any]", cast("object", _get_classes(config)))
    model: Any = model_class(arguments.from_dict(json.loads(json.dumps(config))))
    model.set_dtype(mx.bfloat16)
    for layer in model.layers:
        # MLX computes experts in float32 alone on a CPU, and caches do not depend on them.
        for name, part in list(layer.children().items()):
            paths = (
                dict(cast("list[tuple[str, Any]]", part.named_modules()))
                if isinstance(part, nn.Module)
                else ()
            )
            if any("switch" in path for path in paths):
                setattr(layer, name, nn.Identity())
    caches: list[Any] = make_prompt_cache(model)
    tokens = 3
    mx.eval(model(mx.array([list(range(tokens))]), cache=caches))
    folder = ModelFolder(Path(), config, {}, ())
    counted = [look_back(folder, index) for index in range(folder.num_layers)]
    kept = [
        2 * (tokens * back.kept_per_token + back.state) + 4 * back.state_floats
        for back in counted
        if back.kept_per_token or back.state or back.state_floats
    ]
    assert kept == pytest.approx([_cached_bytes(cache, tokens) for cache in caches], rel=0.01)


def _cached_bytes(cache: Any, tokens: int) -> int:
    """Return the bytes of a state, or of the keys and values of some tokens without the room behind them."""
    if isinstance(cache, CacheList):
        return sum(_cached_bytes(part, tokens) for part in cast("Any", cache).caches)
    arrays: list[Any] = [each for each in getattr(cache, "cache", ()) if each is not None]
    if not arrays:
        arrays = [cache.keys[..., :tokens, :], cache.values[..., :tokens, :]]
    return sum(each.nbytes for each in arrays)


def _parameters(module: Any) -> int:
    named = cast("list[tuple[str, Any]]", cast("object", tree_flatten(module.parameters())))
    return sum(values.size for _, values in named)
