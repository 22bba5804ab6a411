"""Architectures that can be cut into stages, as proved by the conformance run.

That run (`make conformance`) compares every family of mlx-lm, whole and cut, and writes `architectures.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, cast

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.models.model_folder import ModelFolder

TABLE = "architectures.json"


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


def require_cuttable(folder: ModelFolder, stages: int) -> Architecture:
    """Return the result for the folder's architecture.

    Raises:
        ModelUnsupported: an architecture that was not tested, or cannot run on that many stages.
    """
    found = find_architecture(folder.model_type, folder.classes)
    if found is None:
        raise ModelUnsupported(
            f"{folder.path} is a {folder.model_type!r} model, an architecture that was not examined: add it to "
            "tests/conformance/families.py and run `make conformance`."
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


def quantizes_kv(folder: ModelFolder) -> bool:
    """Return False if the folder's family, or that of its text model, cannot have a quantized KV cache."""
    families = {module_of(folder.model_type, folder.classes)}
    text = cast("object", folder.config.get("text_config"))
    if isinstance(text, Mapping):
        families.add(module_of(str(cast("Mapping[str, object]", text).get("model_type", ""))))
    return families.isdisjoint(_UNQUANTIZED_KV)


def require_quantizable(folder: ModelFolder) -> None:
    """Check that the folder's model can have a quantized KV cache.

    Raises:
        ModelUnsupported: it cannot.
    """
    if not quantizes_kv(folder):
        raise ModelUnsupported(
            f"{folder.path} is a {folder.model_type!r} model, whose attention cannot use a quantized KV cache: "
            "leave out --kv-bits."
        )
