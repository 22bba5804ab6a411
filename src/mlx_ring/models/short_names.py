"""Short names of published models, such as `qwen3:8b` or `llama3.3:70b-4bit`: what they mean on the hub. Pure.

`known_models.yaml` is the one list: names, configurations, and conversions by the format of their weights.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mlx_ring.core.errors import ModelNotFound

_SECTIONS = ("popular", "further")
_NOT_FORMS = ("context", "can", "size")
_FORM = re.compile(r"-(\d+-?bits?(?:-gs\d+)?|mxfp\d+(?:-q8)?|bf16|fp16|f16|q\d+)$")
_KNOWN_FORM = re.compile(r"[234568]-bit(-gs(32|64|128))?|MXFP[48]|MXFP4-Q8|bf16|fp16|f16")
_FAMILY_AND_VERSION = re.compile(r"([a-z]{3,})-?(?=\d)")
_SIZE = re.compile(r"-(?=(?:a?\d+(?:\.\d+)?b|8x7b)(?:-|$))")
_ACTIVE = re.compile(r"a\d+(?:\.\d+)?b")
_USUAL_TAG = ":latest"
_NEAREST = 3
_HUB_PAGE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:[/?#].*)?")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Model with conversions on the hub."""

    name: str
    """Name in the list, as `Qwen3-8B`."""
    conversions: Mapping[str, str]
    """Id on the hub by format of the weights, the usual one first."""
    abilities: tuple[str, ...]
    """Abilities of its chat template: "tools", "reasoning"."""
    size: str = ""
    """Size that a name may have beside the parts of this one: `14b`."""

    @property
    def short_name(self) -> str:
        """Short name without a format: `qwen3:8b`."""
        said = self.name.lower()
        size = _SIZE.search(said)
        family, rest = (said[: size.start()], f":{said[size.end() :]}") if size else (said, "")
        return _FAMILY_AND_VERSION.sub(r"\1", family, count=1) + rest

    def short_names(self) -> Iterator[tuple[str, str]]:
        """Yield each short name with the hub's id. The first one has no format."""
        joint = "-" if ":" in self.short_name else ":"
        for number, (form, hub_id) in enumerate(self.conversions.items()):
            if number == 0:
                yield self.short_name, hub_id
            if " " not in form:
                yield f"{self.short_name}{joint}{form.lower().replace('-bit', 'bit')}", hub_id


@cache
def known_models() -> Mapping[str, Any]:
    """Return the content of `known_models.yaml`, with the entry of untied heads, which its configurations leave out."""
    import yaml  # takes a while, and most names are ids or folders

    loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(files("mlx_ring.models").joinpath("known_models.yaml").read_text("utf-8"), loader)  # noqa: S506 - it is a safe loader
    untied = {"tie_word_embeddings": False}
    return {**content, "configs": {name: untied | config for name, config in content["configs"].items()}}


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """Return all models that have short names, popular ones first."""
    return tuple(
        PublishedModel(name, conversions_of(entry), tuple(entry["can"]), entry.get("size", ""))
        for section in _SECTIONS
        for name, entry in known_models()[section].items()
    )


def conversions_of(entry: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the hub's ids of an entry of the list, by format."""
    return {form: hub_id for form, hub_id in entry.items() if form not in _NOT_FORMS}


def split_format(text: str) -> tuple[str, str]:
    """Split a name into its stem and the format of weights as the list names it, which is empty if none is said.

    Raises:
        ModelNotFound: the format is unknown.
    """
    said = re.sub(r"[\s_:]+", "-", text.strip().lower().removesuffix(_USUAL_TAG))
    found = _FORM.search(said)
    return (said[: found.start()], _form(found[1])) if found else (said, "")


def _form(said: str) -> str:
    if said.startswith("q"):
        form = f"{said[1:]}-bit"
    else:
        form = said.upper() if said.startswith("mxfp") else re.sub(r"^(\d+)-?bits?", r"\1-bit", said)
    if not _KNOWN_FORM.fullmatch(form):
        raise ModelNotFound(
            f"The format {said} is unknown; give 2, 3, 4, 5, 6 or 8 bits as in 70B-4bit, or bf16, fp16, mxfp4 or mxfp8."
        )
    return form


def parts_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name, in which a family and its version are two: of `qwen3-8b` as of `Qwen-3-8B`."""
    split = _FAMILY_AND_VERSION.sub(r"\1-", name.lower())
    return tuple(part for part in split.split("-") if part)


def find_name(text: str) -> str | None:
    """Return the name in the list that a short name means; None if it is no model's with conversions or whole name.

    The name may leave out the format, the number of active parameters, and parts that only one model with conversions has.

    Raises:
        ModelNotFound: several models have this name, or its format is unknown.
    """
    parts = frozenset(parts_of(split_format(text)[0]))
    published = {model.name: model for model in published_models()}
    said = {
        name: parts - {published[name].size} if name in published else parts
        for name in {**known_models()["configs"], **published}
    }
    whole = [name for name in said if said[name] in _whole_names(name)]
    if len(whole) == 1:
        return whole[0]
    for name, usual in known_models()["usual"].items():
        if parts == frozenset(parts_of(name)):
            return usual
    alike = [
        name
        for name in published
        if said[name] <= frozenset(parts_of(name)) and parts_of(name)[0] in said[name]
    ]
    if len(alike) > 1:
        raise ModelNotFound(
            f"{text} may be any of {', '.join(published[name].short_name for name in alike)}: name one of them."
        )
    return alike[0] if alike else None


def _whole_names(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parts of a name, also without the number of active parameters."""
    parts = parts_of(name)
    return frozenset(parts), frozenset(part for part in parts if not _ACTIVE.fullmatch(part))


def find_hub_id(text: str) -> str | None:
    """Return the hub's id that a short name means; None if the list has no such model.

    Raises:
        ModelNotFound: several models have this name, or the model is not published in this format, or not at all.
    """
    try:
        _, form = split_format(text)
    except ModelNotFound:
        return None
    name = find_name(text)
    if name is None:
        return None
    model = next((model for model in published_models() if model.name == name), None)
    if model is None:
        parts = frozenset(parts_of(name))
        more = [each.short_name for each in published_models() if parts < frozenset(parts_of(each.name))]
        raise ModelNotFound(
            f"{text} is {name}, of which the list has no conversion: give the hub's id of one"
            f"{', or one of ' * bool(more)}{', '.join(more)}."
        )
    return _conversion(text, model, form)


def _conversion(text: str, model: PublishedModel, form: str) -> str:
    usual = next(iter(model.conversions))
    exact = [each for each in model.conversions if each == form or (form and each.startswith(f"{form}-"))]
    if form and not exact:
        named = ", ".join(name for name, _ in model.short_names())
        raise ModelNotFound(f"{text} is not in the list in this format; it has {named}.")
    return model.conversions[exact[0] if exact else usual]


def short_names_of(hub_id: str) -> tuple[str, ...]:
    """Return the short names of an id of the hub; none if it is not in the list."""
    return tuple(
        name for model in published_models() for name, named in model.short_names() if named == hub_id
    )


def close_short_names(text: str) -> list[str]:
    """Return the short names that are most like an unknown name."""
    names = [name for model in published_models() for name, _ in model.short_names()]
    return difflib.get_close_matches(text.lower(), names, n=_NEAREST, cutoff=0.6)


def is_hub_id(name: str) -> bool:
    """Report whether a name has the form of an id of the hub."""
    return _HUB_ID.fullmatch(name) is not None and not name.startswith(".")


def unknown_model(name: str, builtin: Sequence[str]) -> ModelNotFound:
    """Return the error for a name that no model has, with those of similar models."""
    page = _HUB_PAGE.fullmatch(name)
    alike = [page[1]] if page else difflib.get_close_matches(name.lower(), builtin, n=1)
    close = alike or close_short_names(name)
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return ModelNotFound(
        f"There is no model {name!r}. Give a folder, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, a short name such as "
        f"qwen3:8b, or a built-in model ({', '.join(builtin)}).{meant}"
    )
