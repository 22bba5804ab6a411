"""Reading of model folders: their contents, and every kind of corrupt, missing or unsafe file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm.utils as mlx_lm_utils  # not mlx_lm: pytest asks it for names, and then it imports everything
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer  # pyright: ignore[reportUnknownVariableType] - untyped
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.errors import ModelCorrupt, ModelNotFound, ModelUnsafe, ModelUnsupported
from mlx_ring.models.config_limits import quantization_kind
from mlx_ring.models.model_folder import ModelFolder, read_model_config, read_model_folder
from mlx_ring.models.model_source import describe_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", QWEN3)


def read_config(folder: Path) -> ModelFolder:
    return read_model_config(folder / "config.json")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_folder_has_the_values_of_its_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    model = read_model_folder(folder)
    assert (model.model_type, model.num_layers, model.hidden_size, model.vocab_size) == ("qwen3", 5, 64, 320)
    assert model.context_length == 4096
    assert model.eos_token_ids == {1, 2, 3}
    assert model.quantization is None
    assert model.weight_bytes == sum(entry.nbytes for entry in model.tensors) > 0
    assert {entry.dtype for entry in model.tensors} == {"F32"}


def test_a_nested_text_configuration_is_read(folder: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {**QWEN3, "eos_token_id": None}, "eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    model = read_model_folder(folder)
    assert (model.num_layers, model.context_length, model.eos_token_ids) == (5, 4096, {7})


@pytest.mark.parametrize(
    ("layers", "hidden", "vocabulary", "context"),
    [
        ("n_layer", "n_embd", "vocab_size", "n_positions"),
        ("n_layers", "d_model", "vocab_size", "max_seq_len"),
        ("num_transformer_layers", "model_dim", "vocab_size", "max_context_length"),
        ("num_layers", "hidden_size", "padded_vocab_size", "seq_length"),
        ("num_hidden_layers", "hidden_size", "vocab_size", "model_max_length"),
    ],
)
def test_sizes_are_read_under_several_names(
    folder: Path, layers: str, hidden: str, vocabulary: str, context: str
) -> None:
    config = {"model_type": "any", layers: 7, hidden: 48, vocabulary: 99, context: 640}
    (folder / "config.json").write_text(json.dumps(config))
    model = read_model_folder(folder)
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.context_length) == (7, 48, 99, 640)


def test_booleans_are_no_numbers(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=[True, [2], None, 3])
    assert read_model_folder(folder).eos_token_ids == {3}
    change(folder / "config.json", num_hidden_layers=True)
    with pytest.raises(ModelCorrupt, match="num_hidden_layers as True"):
        read_model_folder(folder)


def test_the_digest_depends_on_the_model_and_not_on_its_path(folder: Path, tmp_path: Path) -> None:
    again = write_random_model(tmp_path / "again", QWEN3)
    assert read_model_folder(again).digest == read_model_folder(folder).digest
    change(again / "config.json", rope_theta=5.0)
    assert read_model_folder(again).digest != read_model_folder(folder).digest


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="There is no folder"):
        read_model_folder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="file is no folder: give a model's folder, or a GGUF file"):
        read_model_folder(tmp_path / "file")


def test_a_folder_without_a_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json: .* `mlx-ring list` names models here\.$"):
        read_model_folder(tmp_path)
    for text, said in (("{}", "names no model_type: give the folder of a model"), ("{", "Fetch it again")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelCorrupt, match=said):
            read_model_folder(tmp_path)


def test_a_folder_without_weights_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelCorrupt, match=r"has no weights: no model\*\.safetensors is there"):
        read_model_folder(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(
        ModelCorrupt, match=r"has no weights: pytorch_model\.bin is of a format that is not read"
    ):
        read_model_folder(folder)


def test_a_git_lfs_pointer_is_called_so(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(ModelCorrupt, match="is a Git LFS pointer, not the weights: run `git lfs pull` in"):
        read_model_folder(folder)


def test_a_folder_that_may_not_be_read_is_called_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path, _: int) -> bool:
        return path != folder

    monkeypatch.setattr("os.access", refuses)  # root may read everything
    for read in (read_model_folder, read_config):
        with pytest.raises(ModelCorrupt, match="may not be read by this user: correct its permissions"):
            read(folder)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_a_truncated_file_is_detected_before_loading(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors .*truncated"):
        read_model_folder(folder)


def test_a_file_that_is_not_safetensors_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"not json")
    with pytest.raises(ModelCorrupt, match=r"header of .* cannot be read"):
        read_model_folder(folder)


def test_a_broken_symbolic_link_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "fetched_once")
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors cannot be read: No such file"):
        read_model_folder(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [6400]},
        {"shape": [1 << 62, 4]},
        {"shape": [-8, -8]},
        {"dtype": "F16"},
        {"data_offsets": [256, 0]},
        {"data_offsets": None},
    ],
)
def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_named(folder: Path, fields: dict[str, Any]) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header["model.norm.weight"].update(fields)
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[begin:])
    with pytest.raises(ModelCorrupt, match=r"tensor 'model\.norm\.weight'"):
        read_model_folder(folder)


def test_a_folder_of_a_gguf_file_names_it_and_not_what_macos_puts_beside_it(tmp_path: Path) -> None:
    for name in ("._llama.gguf", "llama.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=rf"To serve a GGUF file, name it: {tmp_path}/llama\.gguf\.$"):
        read_model_folder(tmp_path)


PARTS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def write_index(folder: Path, *files: str) -> None:
    index = {"weight_map": {f"tensor.{number}": file for number, file in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("present", "named"),
    [("model-00002-of-00002", PARTS), ("model-00001-of-00003", PARTS), ("model-b", PARTS)],
)
def test_a_missing_file_of_an_index_is_named(present: str, named: list[str], folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / f"{present}.safetensors")
    write_index(folder, *named)
    with pytest.raises(ModelCorrupt, match=r"names model-00001-of-00002\.safetensors, which is not there"):
        read_model_folder(folder)


def split_weights(folder: Path) -> None:
    """Write the weights into two files, as the index says, and leave the whole file beside them."""
    weights = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    names = sorted(weights)
    for number, part in enumerate(PARTS):
        mx.save_safetensors(str(folder / part), {name: weights[name] for name in names[number::2]})
    write_index(folder, *PARTS)


def test_an_index_of_other_files_than_a_whole_model_has_is_ignored(folder: Path) -> None:
    whole = read_model_folder(folder)
    write_index(folder, *PARTS)
    assert read_model_folder(folder).weight_bytes == whole.weight_bytes
    split_weights(folder)
    (folder / "model.safetensors").unlink()
    write_index(folder, *(f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)))
    assert read_model_folder(folder).weight_bytes == whole.weight_bytes


def test_another_version_of_the_weights_beside_those_of_the_index_is_left_out(folder: Path) -> None:
    whole = read_model_folder(folder)
    split_weights(folder)
    more = {"model.more.weight": mx.zeros(3)}
    mx.save_safetensors(str(folder / "model-more.safetensors"), more)
    model = read_model_folder(folder)
    assert sorted(entry.name for entry in model.tensors) == sorted(
        [*(entry.name for entry in whole.tensors), *more]
    )
    assert {file.name for file in model.weight_files} == {*PARTS, "model-more.safetensors"}


@pytest.mark.parametrize("content", ["{", "[]", "\x00", '{"hidden_size": 3}'])
def test_an_unreadable_configuration_is_an_error(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        read_model_folder(folder)


def test_an_invalid_number_of_layers_is_an_error(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers="five")
    with pytest.raises(ModelCorrupt, match="num_hidden_layers as 'five'"):
        _ = read_model_folder(folder).num_layers


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"model_file": "canary.py"}),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "canary.Model"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["canary.Tokenizer", None]}}),
    ],
)
def test_a_folder_with_custom_code_is_refused_and_nothing_runs(
    folder: Path, file: str, fields: dict[str, Any]
) -> None:
    written = folder / "written"
    (folder / "canary.py").write_text(f"open({str(written)!r}, 'w').write('ran')\n")
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    change(folder / file, **fields)
    with pytest.raises(ModelUnsafe, match="never run"):
        read_model_folder(folder)
    assert not written.exists()


def test_loading_a_tokenizer_runs_no_code_of_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    written = folder / "written"
    (folder / "canary.py").write_text(f"open({str(written)!r}, 'w').write('ran')\n")
    path = folder / "tokenizer_config.json"
    if not path.exists():
        path.write_text("{}")
    change(path, auto_map={"AutoTokenizer": ["canary.Tokenizer", None]})
    with contextlib.suppress(ValueError, OSError):
        load_tokenizer(folder)
    assert not written.exists()


# ---- kinds of quantized weights

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def _groups(**weights: Any) -> dict[str, Any]:
    return {**_PACKED, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("family", "given", "name"),
    [
        ("qwen3", _FP8, r"fp8 in blocks of \[128, 128\]"),
        ("deepseek_v3", {**_FP8, "weight_block_size": [64, 64]}, r"fp8 in blocks of \[64, 64\]"),
        ("deepseek_v3", {**_FP8, "weight_block_size": None}, "fp8 with a scale for each tensor"),
        ("deepseek_v3", {**_FP8, "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, "scales of one byte"),
        ("qwen3", _groups(num_bits=4), "compressed-tensors pack-quantized"),
        ("deepseek_v3", _groups(num_bits=8), "pack-quantized of 8 bits"),
        ("deepseek_v3", _groups(num_bits=4, symmetric=False), "asymmetric"),
        ("deepseek_v3", {**_PACKED, "format": "float-quantized"}, "compressed-tensors float-quantized"),
        ("qwen3", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ("qwen3", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("qwen3", {"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
        ("qwen3", {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ("qwen3", {"bits": 4, "group_size": 64}, "unknown without a quant_method, which"),
    ],
)
def test_kinds_of_weights_that_mlx_lm_does_not_load_are_refused_by_name(
    folder: Path, family: str, given: dict[str, Any], name: str
) -> None:
    change(folder / "config.json", model_type=family, quantization_config=given)
    weights = dict(cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors"))))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, "packed": mx.zeros(2, mx.uint8)})
    refused = f"of the kind .*{name}.*choose one in MLX"
    with pytest.raises(ModelUnsupported, match=refused):
        read_model_folder(folder)
    kind = quantization_kind(given)
    assert kind is not None
    if not kind.may_be_plain:
        with pytest.raises(ModelUnsupported, match=refused):
            describe_model(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("deepseek_v3", _FP8),
        ("kimi_k2", _groups(num_bits=4)),
        ("qwen3", {"quant_method": "awq", "bits": 4}),
        ("qwen3", {"quant_method": "mxfp4"}),
        ("muse_spark", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("minimax_m3_vl", {**_FP8, "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}),
    ],
)
def test_kinds_of_weights_that_mlx_lm_loads_are_accepted(
    folder: Path, family: str, given: dict[str, Any]
) -> None:
    change(folder / "config.json", model_type=family, quantization_config=given)
    assert read_model_folder(folder).quantization == given


@pytest.mark.parametrize("given", [_FP8, {"quant_method": "quark"}])
def test_plain_weights_are_accepted_although_the_configuration_says_that_they_are_quantized(
    folder: Path, given: dict[str, Any]
) -> None:
    change(folder / "config.json", quantization_config=given)
    assert read_model_folder(folder).quantization == given
    assert describe_model(str(folder)).folder.quantization == given
    assert describe_model(str(folder / "config.json")).folder.quantization == given


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        (
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "modelopt FP8 without a quant_method, which",
        ),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "modelopt FP8"),
    ],
)
def test_a_kind_that_modelopts_own_file_states_is_refused(
    folder: Path, stated: dict[str, Any], name: str
) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps(stated))
    for path in (folder, folder / "config.json"):
        with pytest.raises(ModelUnsupported, match=f"of the kind {name}.*choose one in MLX"):
            describe_model(str(path))
    change(folder / "config.json", quantization={"bits": 4, "group_size": 64})
    assert read_model_folder(folder).quantization == {"bits": 4, "group_size": 64}


def test_weights_that_were_converted_to_mlx_are_accepted_whatever_they_were_before(folder: Path) -> None:
    change(folder / "config.json", quantization={"bits": 4, "group_size": 64}, quantization_config=_FP8)
    assert read_model_folder(folder).model_type == "qwen3"


def test_the_families_that_decode_a_kind_are_those_of_mlx_lm() -> None:
    """Compare the table with the sources. Families that take over another's code are named here."""
    modules = Path(str(mlx_lm_utils.__file__)).with_name("models")

    def decoding(words: str) -> set[str]:
        return {file.stem for file in modules.glob("*.py") if words in file.read_text("utf-8")}

    def loads(given: dict[str, Any]) -> set[str]:
        kind = quantization_kind(given)
        assert kind is not None
        return set(kind.modules or ())

    assert decoding("from_fp8(weight, ") | {"glm_moe_dsa", "kimi_k25"} == loads(_FP8)
    assert decoding("weight_scale_inv") - loads(_FP8) == {"minimax_m3_vl", "ministral3"}
    packed = loads(_PACKED) | loads({**_PACKED, "format": "mxfp4-pack-quantized"})
    assert decoding("weight_packed") | {"kimi_k25"} == packed
    assert decoding("weight_scale_2") == loads({"quant_method": "modelopt", "quant_algo": "NVFP4"})
