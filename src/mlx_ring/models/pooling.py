"""Pooling of a text's hidden states to one vector, as sentence-transformers describes it in the model's folder.

`modules.json` lists the modules after the transformer, and `1_Pooling/config.json` says which tokens count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from mlx_ring.core.types import PoolingKind

_KINDS: dict[str, PoolingKind] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
}
_MODE = "pooling_mode"
_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}
_MEND = "--pooling last, mean or cls gives embeddings without it"


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of a model."""

    kind: PoolingKind = "last"
    normalize: bool = True
    """True if vectors have length 1."""
    ends_with_eos: bool = False
    """True if a text's tokens must end with EOS, even if the tokenizer adds none."""
    why: str = ""
    """Reason for this kind."""
    refusal: str = ""
    """Reason why the model's own embeddings cannot be computed; empty if they can."""


def read_pooling(folder: Path, asked: PoolingKind | Literal["auto"] = "auto") -> Pooling:
    """Return the pooling of a model. The requested one overrides its folder's.

    A model without a description is a generative one: only the last of its tokens has seen all of the text.
    """
    try:
        return _read(folder, asked)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"The embedding settings of {folder.name} cannot be read: {error}; {_MEND}."
        return Pooling(refusal=reason)


def _read(folder: Path, asked: PoolingKind | Literal["auto"]) -> Pooling:
    modules = _modules(folder)
    names = [name for name, _ in modules]
    normalize = not modules or "Normalize" in names
    eos = _json(folder / "tokenizer_config.json").get("add_eos_token") is True
    if asked != "auto":
        return Pooling(asked, normalize, eos, why="--pooling asks for it")
    foreign = sorted(set(names) - _KNOWN_MODULES)
    if foreign:
        return Pooling(
            refusal=f"{folder.name} has a module {foreign[0]} after its hidden states (modules.json), which is not "
            f"supported: {_MEND}."
        )
    path = next((path for name, path in modules if name == "Pooling"), "1_Pooling")
    config = _json(folder / path / "config.json")
    if not config:
        return Pooling(
            "last",
            normalize,
            eos,
            why="the folder names no pooling, and the last token attends to all others",
        )
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in _KINDS:
        named = " and ".join(modes) or "no tokens"
        return Pooling(
            refusal=f"{folder.name} pools {named} ({path}/config.json), which is not supported: {_MEND}."
        )
    return Pooling(_KINDS[modes[0]], normalize, eos, why=f"{path}/config.json says so")


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return each module's class and subfolder, in order."""
    file = folder / "modules.json"
    listed: list[dict[str, str]] = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return [(module["type"].rpartition(".")[2], module["path"]) for module in listed]


def _modes(config: dict[str, Any]) -> list[str]:
    """Return the modes. Newer files name one; older ones have a switch for each, of which several may be on."""
    named = config.get(_MODE)
    if named is not None:
        return [str(mode) for mode in (cast("list[object]", named) if isinstance(named, list) else [named])]
    prefix = f"{_MODE}_"
    return [
        name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True
    ]


def _json(file: Path) -> dict[str, Any]:
    """Return a file's object; empty if there is no such file."""
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}


def pooling_files(kind: PoolingKind) -> dict[str, object]:
    """Return the contents of the files that describe a pooling to vectors of length 1, by their names in a folder."""
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    mode = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}[kind]
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (name, path) in enumerate(modules)
        ],
        "1_Pooling/config.json": {f"{_MODE}_{mode}": True},
    }
