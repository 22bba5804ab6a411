"""Configurations of GGUF files, and the names of their tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.rope_utils import YarnRoPE
from tests.models.gguf.writing import (
    F32,
    Q4_1,
    TOKENIZER,
    Stored,
    Typed,
    Value,
    gguf_bytes,
    metadata_of,
)

from mlx_ring.core.errors import ModelCorrupt, ModelError, ModelUnsupported
from mlx_ring.core.types import Sampling
from mlx_ring.head.served_model import sampling_defaults
from mlx_ring.models.gguf import read_gguf
from mlx_ring.models.gguf.model_config import config_of, small_files_of
from mlx_ring.models.gguf.tensors import layout_of
from mlx_ring.models.pooling import read_pooling

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}
EMBEDDING = {"token_embd.weight": Stored(F32, (4, 64), bytes(1024))}


def factors(values: list[float]) -> Stored:
    return Stored(F32, (len(values),), struct.pack(f"<{len(values)}f", *values))


def config(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Stored] | None = None,
    metadata: Mapping[str, Value] | None = None,
) -> dict[str, Any]:
    """Return the configuration of a model with these changes."""
    model = {**MODEL, **(changes or {})}
    prefix = str(metadata_of(model)["general.architecture"])
    own = {name.replace("own.", f"{prefix}."): value for name, value in (metadata or {}).items()}
    (folder / "a.gguf").write_bytes(
        gguf_bytes({**metadata_of(model), **own}, {**EMBEDDING, **(tensors or {})})
    )
    return config_of([read_gguf(folder / "a.gguf")])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 32},
        {
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        {"model_type": "gemma3_text", "sliding_window": 512, "head_dim": 32, "query_pre_attn_scalar": 32},
        {"model_type": "phi3", "partial_rotary_factor": 0.75},
    ],
    ids=lambda changes: changes.get("model_type", "llama"),
)
def test_a_configuration_has_the_values_of_the_metadata(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = config(tmp_path, changes)
    expected = MODEL | changes | {"vocab_size": 4, "tie_word_embeddings": True}
    assert {name: found[name] for name in expected} == expected


def test_a_file_with_a_head_is_not_tied(tmp_path: Path) -> None:
    assert not config(tmp_path, tensors={"output.weight": Stored(F32, (4, 64), bytes(1024))})[
        "tie_word_embeddings"
    ]


def test_quantization_is_that_of_most_weights(tmp_path: Path) -> None:
    assert "quantization" not in config(tmp_path)
    block = {"blk.0.attn_q.weight": Stored(Q4_1, (1, 32), bytes(20))}
    assert config(tmp_path, tensors=block)["quantization"] == {"group_size": 32, "bits": 4}


def test_numbers_that_are_equal_in_all_layers_may_be_lists(tmp_path: Path) -> None:
    assert config(tmp_path, metadata={"own.attention.head_count_kv": [2, 2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ModelUnsupported, match="differ by layer"):
        config(tmp_path, metadata={"own.attention.head_count_kv": [2, 1, 2]})


def test_the_largest_gemma_scales_attention_by_another_width(tmp_path: Path) -> None:
    changes = {"model_type": "gemma3_text", "sliding_window": 512, "head_dim": 32, "num_hidden_layers": 62}
    assert config(tmp_path, changes)["query_pre_attn_scalar"] == 16


def llama3_factors(base: float, factor: float, half: int = 8, context: int = 8192) -> list[float]:
    """Return the factors as llama.cpp's converter computes them."""
    found: list[float] = []
    for index in range(half):
        wavelength = 2 * math.pi * base ** (index / half)
        if wavelength < context / 4:
            found.append(1.0)
        elif wavelength > context:
            found.append(factor)
        else:
            smooth = (context / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotations_of_llama_3_are_recognized(tmp_path: Path, factor: float) -> None:
    found = config(tmp_path, tensors={"rope_freqs.weight": factors(llama3_factors(500000.0, factor))})
    assert found["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_factors_of_rotations_are_refused(tmp_path: Path) -> None:
    for wrong in (llama3_factors(500000.0, 8.0, context=4096), [1.0, 2.0, 3.0, 4.0], [0.5] * 8, [1.0, 0.5]):
        with pytest.raises(ModelUnsupported, match=r"factor .* of rotation"):
            config(tmp_path, tensors={"rope_freqs.weight": factors(wrong)})
    assert "rope_scaling" not in config(tmp_path, tensors={"rope_freqs.weight": factors([1.0] * 8)})
    for value in (math.nan, math.inf, -1.0, 0.0):
        with pytest.raises(ModelCorrupt, match=r"rope_freqs\.weight"):
            config(tmp_path, tensors={"rope_freqs.weight": factors([1.0, value])})


def test_long_rotations_have_both_lists_of_factors(tmp_path: Path) -> None:
    long, short = [1.0, 2.5, 40.25], [1.0, 1.1, 1.2]
    tensors = {"rope_factors_long.weight": factors(long), "rope_factors_short.weight": factors(short)}
    found = config(
        tmp_path,
        {"model_type": "phi3", "max_position_embeddings": 131072},
        tensors,
        {"own.rope.scaling.original_context_length": 4096},
    )
    assert found["rope_scaling"]["long_factor"] == long
    assert found["rope_scaling"]["short_factor"] == short
    assert (found["max_position_embeddings"], found["original_max_position_embeddings"]) == (131072, 4096)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"own.rope.scaling.type": "none"}, None),
        ({"own.rope.scaling.type": "none", "own.rope.scaling.factor": 4.0}, None),
        ({"own.rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"own.rope.scaling.type": "yarn", "own.rope.scaling.factor": 4.0},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
        (
            {"own.rope.scaling.type": "linear", "own.rope.scaling.factor": 8.0},
            {"type": "linear", "factor": 8.0},
        ),
        ({"own.rope.scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"own.rope.scaling.type": "linear", "own.rope.scaling.factor": 0.0}, None),
        ({"own.rope.scaling.factor": 0.0, "own.rope.scale_linear": 4.0}, None),
        (
            {
                "own.rope.scaling.type": "yarn",
                "own.rope.scaling.factor": 4.0,
                "own.rope.scaling.original_context_length": 32768,
            },
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_scaled_rotations(
    tmp_path: Path, metadata: dict[str, Value], expected: dict[str, Any] | None
) -> None:
    assert config(tmp_path, metadata=metadata).get("rope_scaling") == expected


@pytest.mark.parametrize("ratio", [1.0, 0.8782488562869419, 1.25, 0.5])
def test_the_magnitude_of_yarns_rotations_is_that_of_the_file(tmp_path: Path, ratio: float) -> None:
    yarn: dict[str, Value] = {"own.rope.scaling.type": "yarn", "own.rope.scaling.factor": 4.0}
    metadata: dict[str, Value] = {**yarn, "own.rope.scaling.attn_factor": ratio}
    scaling = config(tmp_path, {"model_type": "qwen3", "head_dim": 16}, metadata=metadata)["rope_scaling"]
    usual = 1 + 0.1 * math.log(4)
    assert (scaling.pop("type"), scaling.pop("factor")) == ("yarn", 4.0)
    rope: Any = YarnRoPE(16, scaling_factor=4.0, **scaling)
    assert rope.mscale == pytest.approx(ratio * usual, rel=1e-6)


def test_a_cap_of_logits_is_ignored_in_gemma_3_1b_alone(tmp_path: Path) -> None:
    """Follow ollama, whose own file of this model has a cap that the model does not have."""
    gemma = {"model_type": "gemma3_text", "sliding_window": 512, "head_dim": 16}
    cap: dict[str, Value] = {"own.final_logit_softcapping": 30.0}
    smallest = {**gemma, "num_hidden_layers": 26}
    assert config(tmp_path, smallest, metadata=cap) == config(tmp_path, smallest)
    with pytest.raises(ModelUnsupported, match="final_logit_softcapping 30"):
        config(tmp_path, {**gemma, "num_hidden_layers": 32}, metadata=cap)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"general.architecture": "mamba"}, ModelUnsupported, "'mamba'.*llama, qwen2"),
        ({"general.type": "adapter"}, ModelUnsupported, "adapter"),
        ({"llama.block_count": 0}, ModelCorrupt, "block_count as 0"),
        ({"llama.block_count": "many"}, ModelCorrupt, "block_count as 'many'"),
        ({"llama.attention.head_count": Typed(5, -4)}, ModelCorrupt, "head_count as -4"),
        ({"llama.attention.value_length": 8}, ModelUnsupported, "values of 8 numbers"),
        ({"llama.rope.dimension_count": 8}, ModelUnsupported, "rotations of 8"),
        ({"llama.rope.freq_base": math.nan}, ModelCorrupt, "freq_base as nan"),
        (
            {"llama.rope.freq_base": -10000.0},
            ModelCorrupt,
            r"rope\.freq_base as -10000; it must be 0 or more",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, ModelCorrupt, "rms_epsilon as -1e-05"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -4.0},
            ModelCorrupt,
            r"rope\.scaling\.factor as -4",
        ),
        ({"llama.attention.scale": 0.5}, ModelUnsupported, r"llama\.attention\.scale 0\.5, which is not"),
        ({"llama.logit_scale": 3.0}, ModelUnsupported, r"llama\.logit_scale 3, which is not"),
        ({"llama.attention.clamp_kqv": 1.0}, ModelUnsupported, r"attention\.clamp_kqv 1, which is not"),
        (
            {"llama.attention.sliding_window": 7},
            ModelUnsupported,
            r"attention\.sliding_window 7, which is not",
        ),
        ({"llama.attention.causal": False}, ModelUnsupported, r"attention\.causal False"),
        ({"llama.attention.max_alibi_bias": 8.0}, ModelUnsupported, r"max_alibi_bias 8"),
        ({"llama.attention.output_scale": 2.0}, ModelUnsupported, r"output_scale 2"),
        ({"llama.attention.temperature_scale": 0.1}, ModelUnsupported, r"temperature_scale 0\.1"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 1.0,
                "llama.rope.scaling.attn_factor": 2.0,
            },
            ModelUnsupported,
            "attn_factor 2",
        ),
        ({"llama.expert_weights_norm": False}, ModelUnsupported, r"expert_weights_norm False"),
        ({"llama.expert_weights_scale": 2.5}, ModelUnsupported, r"expert_weights_scale 2\.5"),
        ({"llama.expert_gating_func": 2}, ModelUnsupported, r"expert_gating_func 2"),
        ({"llama.leading_dense_block_count": 1}, ModelUnsupported, "leading_dense_block_count 1"),
        ({"llama.attention.key_length_swa": 8}, ModelUnsupported, "key_length_swa 8"),
        ({"llama.rope.scaling.attn_factor": 2.0}, ModelUnsupported, "attn_factor 2"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, ModelUnsupported, r"yarn_ext_factor 0\.5"),
        ({"llama.classifier.output_labels": ["yes", "no"]}, ModelUnsupported, "output_labels with several"),
        ({"llama.pooling_type": 4}, ModelUnsupported, "pooling_type 4"),
        ({"split.count": 3}, ModelCorrupt, "one of 3 parts, but 1 found"),
        ({"llama.rope.scaling.type": "dynamic"}, ModelUnsupported, "'dynamic'"),
        ({"llama.rope.scaling.type": "linear"}, ModelUnsupported, "'linear' with factor None"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, metadata: dict[str, Value], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        config(tmp_path, metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "metadata"),
    [
        (
            {},
            {"own.attention.scale": 0.25, "own.logit_scale": 1.0, "own.attention.clamp_kqv": 0.0},
        ),
        ({}, {"own.attention.scale": 0.0, "own.logit_scale": 0.0, "own.attention.sliding_window": 4096}),
        (
            {},
            {"own.vocab_size": 4, "own.rope.scaling.finetuned": True, "own.rope.dimension_sections": [4, 4]},
        ),
        ({}, {"own.attention.causal": True, "own.expert_gating_func": 1, "own.expert_weights_norm": True}),
        ({}, {"own.attention.key_length_swa": 16, "own.rope.scaling.yarn_ext_factor": Typed(6, -1.0)}),
        ({}, {"own.tensor_data_layout": "Meta AI original pth", "own.expert_count": 0, "split.count": 1}),
        ({}, {"own.expert_used_count": 0, "own.nextn_predict_layers": 0, "own.pooling_type": 0}),
        ({}, {"own.vision.block_count": 27, "quantize.imatrix.file": "a", "general.tags": ["a"]}),
        ({"model_type": "qwen2"}, {"own.use_parallel_residual": True}),
        ({"model_type": "phi3", "partial_rotary_factor": 1.0}, {"own.attention.sliding_window": 2047}),
        (
            {"model_type": "gemma3_text", "sliding_window": 512, "head_dim": 16, "query_pre_attn_scalar": 16},
            {"own.attention.scale": 0.25},
        ),
    ],
)
def test_numbers_that_change_nothing_are_accepted(
    tmp_path: Path, changes: dict[str, Any], metadata: dict[str, Value]
) -> None:
    """Ignore the window of Phi-3, as mlx-lm's model of the same folder does."""
    assert config(tmp_path, changes, metadata=metadata) == config(tmp_path, changes)


@pytest.mark.parametrize(
    ("pattern", "expected"), [(None, 6), (2, 2), ([True, True, False], 3), ([True, False, True], 2)]
)
def test_the_layers_without_a_window_are_those_of_the_file(
    tmp_path: Path, pattern: Value | None, expected: int
) -> None:
    changes = {"model_type": "gemma3_text", "sliding_window": 512, "head_dim": 16}
    metadata = {} if pattern is None else {"own.attention.sliding_window_pattern": pattern}
    assert config(tmp_path, changes, metadata=metadata)["sliding_window_pattern"] == expected
    with pytest.raises(ModelUnsupported, match="does not repeat"):
        config(tmp_path, changes, metadata={"own.attention.sliding_window_pattern": [False, True, True]})


def test_the_magnitude_of_long_rotations_is_that_of_mlx_lm(tmp_path: Path) -> None:
    changes = {"model_type": "phi3", "max_position_embeddings": 131072}
    tensors = {"rope_factors_long.weight": factors([1.0, 2.5])}
    metadata: dict[str, Value] = {"own.rope.scaling.original_context_length": 4096}
    same = {"own.rope.scaling.attn_factor": math.sqrt(1 + math.log(32) / math.log(4096))}
    assert config(tmp_path, changes, tensors, metadata | same) == config(tmp_path, changes, tensors, metadata)
    with pytest.raises(ModelUnsupported, match="attn_factor 2"):
        config(tmp_path, changes, tensors, metadata | {"own.rope.scaling.attn_factor": 2.0})


def small_files(folder: Path, metadata: Mapping[str, Value], rows: int = 8) -> dict[str, Any]:
    tensors = {"token_embd.weight": Stored(F32, (rows, 64), bytes(256 * rows))}
    (folder / "a.gguf").write_bytes(gguf_bytes({**metadata_of(MODEL), **TOKENIZER, **metadata}, tensors))
    return small_files_of([read_gguf(folder / "a.gguf")])


@pytest.mark.parametrize(("kind", "expected"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_the_pooling_of_an_embedding_model_is_that_of_the_file(
    tmp_path: Path, kind: int, expected: str
) -> None:
    written = small_files(tmp_path, {"llama.pooling_type": kind})
    for name in ("modules.json", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(written[name]))
    found = read_pooling(tmp_path)
    assert (found.kind, found.normalize, found.refusal) == (expected, True, "")
    assert "modules.json" not in small_files(tmp_path, {"llama.pooling_type": 0})


def test_advised_sampling_is_that_of_the_file(tmp_path: Path) -> None:
    advised: dict[str, Value] = {
        "temp": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "penalty_repeat": 1.1,
    }
    written = small_files(tmp_path, {f"general.sampling.{name}": value for name, value in advised.items()})
    assert sampling_defaults(written["generation_config.json"]) == Sampling(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1
    )
    assert "generation_config.json" not in small_files(tmp_path, {})


def test_all_chat_templates_are_kept(tmp_path: Path) -> None:
    named: dict[str, Value] = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    written = small_files(tmp_path, {**named, "tokenizer.chat_template": "plain"})
    assert written["tokenizer_config.json"]["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    one = small_files(tmp_path, {"tokenizer.chat_template": "plain"})
    assert one["tokenizer_config.json"]["chat_template"] == "plain"


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    assert small_files(tmp_path, {}, rows=5)["config.json"]["vocab_size"] == 5
    with pytest.raises(ModelCorrupt, match=r"has 5 tokens, but rows for 4 in token_embd\.weight"):
        small_files(tmp_path, {}, rows=4)


def test_an_unknown_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    tensors = {**EMBEDDING, "blk.0.ssm_in.weight": Stored(F32, (1,), bytes(4))}
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({**metadata_of(MODEL), **TOKENIZER}, tensors))
    with pytest.raises(ModelUnsupported, match=r"'blk\.0\.ssm_in\.weight'"):
        small_files_of([read_gguf(tmp_path / "a.gguf")])


def test_rows_of_queries_and_keys_are_interleaved_in_llama_alone() -> None:
    llama = {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3}
    assert layout_of(llama, "model.layers.0.self_attn.q_proj.weight").heads == 9
    assert layout_of(llama, "model.layers.0.self_attn.k_proj.bias").heads == 3
    assert layout_of(llama, "model.layers.0.self_attn.v_proj.weight").heads == 0
    assert layout_of(llama | {"model_type": "qwen2"}, "model.layers.0.self_attn.q_proj.weight").heads == 0
    gemma = llama | {"model_type": "gemma3_text"}
    assert layout_of(gemma, "model.layers.0.self_attn.q_norm.weight").offset == 1
    assert layout_of(gemma, "model.norm.weight").offset == 1
    assert layout_of(gemma, "model.layers.0.input_layernorm.weight").offset == 1
    assert layout_of(gemma, "model.layers.0.mlp.up_proj.weight").offset == 0
