"""Architectures that can be cut into stages, and the defaults of mlx-lm's modules for their configurations.

The conformance run (`make conformance`) compares every family of mlx-lm, whole and cut, and writes
`architectures.json`. Published configurations leave out entries that equal the defaults.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from mlx_ring.core.errors import ModelUnsupported

TABLE = "architectures.json"


class ConfiguredModel(Protocol):
    """Model with its configuration, such as a model's folder."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def model_type(self) -> str: ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in `architectures`."""
        ...

    def entry(self, *names: str) -> object:
        """Return an entry of the configuration, or of its language model's part; None without one."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """Result for one family."""

    exact: bool = False
    """True if its logits are those of the whole model, bit for bit, however it is cut."""
    whole: bool = False
    """True if they are on one stage."""
    batches: bool = False
    """True if rows of different lengths may share a forward pass."""
    restores: bool = False
    """True if the logits are the same, bit for bit, after KV was saved on a disk and restored by other stages."""
    caches: tuple[str, ...] = ()
    """Kinds of mlx-lm's caches that its layers keep."""
    experts: bool = False
    tied: bool = False
    """True if the embedding may serve as the head."""
    only_if: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Entries of the model's configuration that `exact` requires."""
    reason: str = ""
    """Reason why it cannot be cut, or not without these entries."""

    @property
    def sliding(self) -> bool:
        """True if some layers have a sliding window."""
        return not {"RotatingKVCache", "ChunkedKVCache"}.isdisjoint(self.caches)

    @property
    def recurrent(self) -> bool:
        """True if some layers have a recurrent state."""
        return "ArraysCache" in self.caches


@cache
def known_architectures() -> dict[str, Architecture]:
    """Return every examined family, by model type."""
    read = cast("dict[str, dict[str, Any]]", _read()["architectures"])
    return {name: _architecture(fields) for name, fields in read.items()}


def _architecture(fields: dict[str, Any]) -> Architecture:
    return replace(Architecture(**fields), caches=tuple(cast("list[str]", fields["caches"])))


@cache
def _aliases() -> dict[str, str]:
    """Return model types that mlx-lm runs as another; `type:class` if the class in `architectures` decides."""
    return cast("dict[str, str]", _read()["aliases"])


def _read() -> dict[str, Any]:
    return cast(
        "dict[str, Any]", json.loads(files("mlx_ring.models").joinpath(TABLE).read_text(encoding="utf-8"))
    )


def find_architecture(model_type: str, classes: Sequence[str] = ()) -> Architecture | None:
    """Return the result for a model type; None for one that was not examined.

    Args:
        model_type: the model type in the configuration.
        classes: the configuration's `architectures`.
    """
    return known_architectures().get(module_of(model_type, classes))


def module_of(model_type: str, classes: Sequence[str] = ()) -> str:
    """Return the name of mlx-lm's module that runs a model type; see `find_architecture`."""
    named = [f"{model_type}:{name}" for name in classes if f"{model_type}:{name}" in _aliases()]
    return _aliases()[named[0]] if named else _aliases().get(model_type, model_type)


def require_cuttable(folder: ConfiguredModel, stages: int) -> Architecture:
    """Return the result for the folder's architecture.

    Raises:
        ModelUnsupported: an architecture that was not tested, or cannot run on that many stages.
    """
    found = find_architecture(folder.model_type, folder.classes)
    if found is None:
        raise ModelUnsupported(
            f"{folder.path} is a {folder.model_type!r} model, an architecture that mlx-ring does not know. "
            "docs/architectures.md lists those that it serves; a newer version may serve it."
        )
    if found.exact and all(folder.entry(name) == value for name, value in found.only_if.items()):
        return found
    if stages == 1 and found.whole:
        return replace(found, exact=False)
    if stages == 1:
        raise ModelUnsupported(
            f"{folder.path} is a {folder.model_type!r} model, which is not supported ({found.reason})."
        )
    one = " Serve it on one stage: leave out --stages." if found.whole else ""
    raise ModelUnsupported(
        f"{folder.path} is a {folder.model_type!r} model, which cannot be split over {stages} stages "
        f"({found.reason}).{one}"
    )


_UNQUANTIZED_KV = frozenset(
    {
        # with attention sinks
        "gpt_oss",
        # with an attention of their own
        "gemma2",
        "minimax_m3_vl",
        "olmo",
        "phi",
        "phixtral",
        "plamo",
        "plamo2",
        "stablelm",
        # with latent KV
        "bailing_hybrid",
        "bailing_moe_v3",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k25",
        "kimi_k3",
        "kimi_linear",
        "kimi_vl",
        "longcat_flash",
        "longcat_flash_ngram",
        "mistral4",
    }
)
"""Families whose attention mlx-lm cannot compute over quantized keys and values."""
_SHARED_LAYERS = "num_kv_shared_layers"
_UNQUANTIZED_IF_SHARED = frozenset({"gemma4", "gemma4_text"})
"""Families whose layers cannot take over the quantized keys and values of earlier ones."""


def batches_rows(folder: ConfiguredModel) -> bool:
    """Report whether rows of different lengths may share a forward pass, as in most families."""
    found = find_architecture(folder.model_type, folder.classes)
    return found is None or found.batches


def quantizes_kv(folder: ConfiguredModel) -> bool:
    """Return False if the folder's family, or that of its text model, cannot have a quantized KV cache."""
    families = {module_of(folder.model_type, folder.classes)}
    text = cast("object", folder.config.get("text_config"))
    if isinstance(text, Mapping):
        families.add(module_of(str(cast("Mapping[str, object]", text).get("model_type", ""))))
    if not families.isdisjoint(_UNQUANTIZED_IF_SHARED) and folder.entry(_SHARED_LAYERS) != 0:
        return False
    return families.isdisjoint(_UNQUANTIZED_KV)


def require_quantizable(folder: ConfiguredModel) -> None:
    """Check that the folder's model can have a quantized KV cache.

    Raises:
        ModelUnsupported: it cannot.
    """
    if not quantizes_kv(folder):
        raise ModelUnsupported(
            f"{folder.path} is a {folder.model_type!r} model, whose attention cannot use a quantized KV cache: "
            "leave out --kv-bits."
        )


# ---- defaults that mlx-lm's modules have for entries of a configuration

_TEXT_ARGUMENTS = ("TextConfig", "TextArgs", "TextModelArgs")
"""Classes of the language model's part of a configuration, in modules that define it themselves."""


def language_module(config: Mapping[str, Any]) -> str:
    """Return the name of mlx-lm's module that defines the language model of a configuration.

    For a multimodal model it is the module that reads the language model's part, if that is another one.
    """
    nested = config.get("text_config")
    kind = cast("Mapping[str, object]", nested).get("model_type") if isinstance(nested, Mapping) else None
    return _language_module(str(config.get("model_type")), _classes(config), str(kind))


@cache
def _language_module(model_type: str, classes: tuple[str, ...], nested_type: str) -> str:
    outer = module_of(model_type, classes)
    source = _module_source(outer)
    if source is None or any(name in source.classes for name in _TEXT_ARGUMENTS) or not source.inner:
        return outer
    named = module_of(nested_type)
    return named if named in source.inner else source.inner[-1]


def default_entries(config: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the whole numbers and truth values that mlx-lm takes for entries that a configuration leaves out."""
    outer = _module_source(module_of(str(config.get("model_type")), _classes(config)))
    inner = _module_source(language_module(config))
    if outer is None or inner is None:
        return {}
    text = next((inner.classes[name] for name in _TEXT_ARGUMENTS if name in inner.classes), None)
    own = inner.classes.get("ModelArgs", {}) if text is None else text
    return {**own, **outer.classes.get("ModelArgs", {}), **outer.given_to_text}


def _classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("architectures")
    return tuple(map(str, cast("list[object]", named))) if isinstance(named, list) else ()


@dataclass(frozen=True, slots=True)
class _ModuleSource:
    """Arguments of one of mlx-lm's modules, as its source has them."""

    classes: Mapping[str, Mapping[str, int]]
    """Defaults of the fields of each class, without those that are no constants."""
    given_to_text: Mapping[str, int]
    """Defaults that the outer part of a multimodal configuration gives to the language model's part."""
    inner: tuple[str, ...]
    """Modules whose arguments it reads from that part."""


@cache
def _module_source(module: str) -> _ModuleSource | None:
    """Read a module's source, because its import would need MLX; return None if mlx-lm has no such module."""
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations or not module.replace("-", "_").isidentifier():
        return None
    file = Path(spec.submodule_search_locations[0], "models", f"{module}.py")
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes: dict[str, dict[str, int]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = {**_inherited(node, classes), **dict(_fields(node))}
    arguments = next((node for node in tree.body if getattr(node, "name", "") == "ModelArgs"), None)
    given = {} if arguments is None else dict(_given_to_text(arguments, classes["ModelArgs"]))
    return _ModuleSource(classes, given, tuple(dict.fromkeys(_inner_modules(tree))))


def _inherited(node: ast.ClassDef, classes: Mapping[str, Mapping[str, int]]) -> Mapping[str, int]:
    """Return the defaults of a base class of the same module or, as `llama.ModelArgs`, of another one."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            return classes[base.id]
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.attr == "ModelArgs":
            source = _module_source(base.value.id)
            return {} if source is None else source.classes.get("ModelArgs", {})
    return {}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    for field_ in node.body:
        if isinstance(field_, ast.AnnAssign) and isinstance(field_.target, ast.Name):
            yield from _constant(field_.target.id, field_.value)


def _given_to_text(node: ast.AST, own: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield what a class puts into its `text_config`: a constant, one of its fields, or what `get` falls back to."""
    for each in ast.walk(node):
        if not isinstance(each, ast.Assign) or not isinstance(target := each.targets[0], ast.Subscript):
            continue
        if ast.unparse(target.value) != "self.text_config" or not isinstance(target.slice, ast.Constant):
            continue
        name, value = str(target.slice.value), each.value
        if isinstance(value, ast.Call) and len(value.args) == 2:  # noqa: PLR2004 - a name and its default
            yield from _constant(name, value.args[1])
        elif isinstance(value, ast.Attribute) and value.attr in own:
            yield name, own[value.attr]
        else:
            yield from _constant(name, value)


def _constant(name: str, value: ast.expr | None) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(ValueError):
        found: object = None if value is None else ast.literal_eval(value)
        if isinstance(found, int):
            yield name, found


def _inner_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the names of modules of calls such as `gemma3_text.ModelArgs.from_dict(args.text_config)`."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Call) and any(
            isinstance(argument, ast.Attribute) and argument.attr == "text_config" for argument in each.args
        ):
            module, _, rest = ast.unparse(each.func).partition(".")
            if rest == "ModelArgs.from_dict":
                yield module


# ---- entries, and layers without KV

_GATED_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35", "olmo_hybrid")
WITHOUT_KV = ("mamba", "mamba2", "rwkv7")
"""Modules whose layers all have a recurrent state."""
_GROUPED = ("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3")
"""Modules with full attention in the last layer of each group, and in layers that fill no group."""
_ATTENTION_KINDS = ("attention", "full_attention", "sliding_attention", "*")
CONVOLUTIONS = ("gear", "lfm2", "lfm2_moe")
"""Modules whose other layers are short convolutions."""


def number(folder: ConfiguredModel, *names: str) -> int | None:
    """Return the first whole number among entries of the configuration, else among mlx-lm's defaults for them."""
    found = folder.entry(*names)
    if type(found) is int or len(names) == 1:
        return found if type(found) is int else None
    return next((each for each in map(folder.entry, names) if type(each) is int), None)


def listed_entry(folder: ConfiguredModel, name: str, index: int) -> object:
    """Return a layer's value in a list of the configuration; None without that."""
    values = folder.entry(name)
    if not isinstance(values, (list, str)) or index >= len(listed := cast("Sequence[object]", values)):
        return None
    return listed[index]


def kind_of_attention(folder: ConfiguredModel, index: int) -> object:
    """Return the kind of a layer's attention in `layer_types`; None without that."""
    return listed_entry(folder, "layer_types", index)


def is_gated_delta(folder: ConfiguredModel, index: int) -> bool:
    """Report whether a layer has a gated delta rule instead of attention."""
    module = language_module(folder.config)
    if module == "olmo_hybrid" and (kind := kind_of_attention(folder, index)) is not None:
        return kind == "linear_attention"
    if module not in _GATED_DELTA or number(folder, "linear_num_value_heads") is None:
        return False
    return (index + 1) % (number(folder, "full_attention_interval") or 4) != 0


def lacks_kv(folder: ConfiguredModel, index: int) -> bool:
    """Report whether a layer has no KV, by the entries that each of mlx-lm's modules reads."""
    module = language_module(folder.config)
    if module in _GROUPED and (size := number(folder, "layer_group_size")):
        return (index + 1) % size != 0 and index < (number(folder, "num_hidden_layers") or 0) // size * size
    if module in ("kimi_linear", "kimi_k3"):
        given = folder.entry("linear_attn_config")
        linear = cast("Mapping[str, object]", given).get("kda_layers") if isinstance(given, Mapping) else None
        return isinstance(linear, list) and index + 1 in linear
    if module == "plamo2":
        step = number(folder, "mamba_step") or 2
        return folder.entry("mamba_enabled") is not False and index % step != step // 2
    if module in CONVOLUTIONS and isinstance(full := folder.entry("full_attn_idxs"), list):
        return index not in full
    kind = mixer_of(folder, module, index)
    if kind is None and module == "jamba":
        return index % (number(folder, "attn_layer_period") or 1) != (
            number(folder, "attn_layer_offset") or 0
        )
    return module in WITHOUT_KV or (kind is not None and kind not in _ATTENTION_KINDS)


def mixer_of(folder: ConfiguredModel, module: str, index: int) -> object:
    """Return the kind of a layer in the list of kinds that a module with layers without KV reads; None without that."""
    if module == "recurrent_gemma":
        kinds = folder.entry("block_types", "_block_types")
        return (
            cast("list[object]", kinds)[index % len(cast("list[object]", kinds))]
            if isinstance(kinds, list)
            else None
        )
    if module == "nemotron_h":
        names = ("hybrid_override_pattern", "layers_block_type", "layer_types")
    else:
        names = {"jamba": ("layers_block_type",), "granitemoehybrid": ("layer_types",)}.get(
            module, ("layer_types",) if module in CONVOLUTIONS else ()
        )
    return next((kind for name in names if (kind := listed_entry(folder, name, index)) is not None), None)
