"""Flags and values that `mlx-ring plan` and `mlx-ring capacity` have in common: models, machines, links and numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

import typer

from mlx_ring.cli.head_client import API_KEY, CACERT, DEFAULT_URL, ask_head, server_here
from mlx_ring.core.errors import ConfigError, RequestError, reason_of
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.model_source import builtin_names, describe_model
from mlx_ring.planner.catalogue import as_listed, known_profile
from mlx_ring.planner.cluster_file import (
    Upkeep,
    cluster_of,
    link_named,
    read_cluster,
    read_upkeep,
    remarks_on_described,
)
from mlx_ring.planner.known_models import find_known_model
from mlx_ring.planner.layer_parts import WeightFormat
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.place import PlanningBasis, RunningCluster
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import USUAL_CONTEXT, Demand, PlanRequest
from mlx_ring.settings.devices_file import DevicesFile, lists_devices, load_content, read_devices

BITS = (2, 3, 4, 5, 6, 8, 16, 32)
"""Bits of weights that sizes are known for."""
KV_BITS = (4, 8, 16)
COMPARISONS = "Comparisons"
"""Group of the flags that compare cases."""
Value = TypeVar("Value", int, str)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2}

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?")
_TIME_UNITS = {"ms": 1e-3, None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

# ---- flags

ModelName = Annotated[
    str | None,
    typer.Argument(
        help="Built-in name, folder, GGUF file, config.json, Hugging Face id, or a short name such as llama-70b or 70B-4bit."
    ),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", metavar="FILE", help="YAML or JSON file of machines and links.")
]
MachineNames = Annotated[
    list[str] | None,
    typer.Option(
        "--machine", metavar="NAME", help="Known machine, such as m4-mac-mini-16. Repeat it for several."
    ),
]
WeightBits = Annotated[
    int | None,
    typer.Option("--quantization", metavar="BITS", help="Bits of the weights; as stored by default."),
]
LinkName = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="NAME",
        help="Link of added machines to all others, such as tb5-rdma; with --machine, between all.",
        rich_help_panel=COMPARISONS,
    ),
]
HeadUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=f"Head of the running cluster to ask, if no machines are given; {DEFAULT_URL} or another of this machine by default.",
        rich_help_panel=COMPARISONS,
    ),
]
HeadCertificate = Annotated[Path | None, CACERT]
HeadKey = Annotated[str | None, API_KEY]


def check_uses(
    link: str | None,
    url: str | None,
    cacert: Path | None,
    *,
    adds: bool,
    is_given: bool,
    api_key: str | None = None,
    adding: str = "--add or --machine",
) -> None:
    """Check that a link has an added machine, and that a head is asked if its flags are given.

    Args:
        link: name of a link.
        url: address of a head.
        cacert: certificate of a head.
        adds: True if machines are added or named.
        is_given: True if machines are given, so that no head is asked.
        api_key: API key for a head.
        adding: flags of the command that add or name machines.

    Raises:
        ConfigError: a flag has no use.
    """
    if link is not None and not adds:
        raise ConfigError(f"--link is {link}, but no machine is added; give {adding}.")
    if is_given and cacert is not None:
        raise ConfigError(f"--cacert is {cacert}, but no head is asked; leave it out.")
    if is_given and api_key is not None:
        raise ConfigError("--api-key is given, but no head is asked; leave it out.")
    if is_given and url is not None:
        raise ConfigError(f"--url is {url}, but machines are given too; leave one of them out.")


def one_of(flag: str, value: Value, allowed: tuple[Value, ...]) -> Value:
    """Return a value that is one of those allowed.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in allowed:
        raise ConfigError(f"{flag} is {value}; it must be one of {', '.join(map(str, allowed))}.")
    return value


_MEASURED_WITHIN_S, _NOTICE_AFTER_S = 300.0, 3.0
"""Longest time for a head that first compiles kernels and measures its machine, and time after which a line says so."""


def ask_running_head(
    url: str,
    path: str,
    body: Mapping[str, object] | None,
    answer_type: Any,
    cacert: Path | None,
    api_key: str | None = None,
) -> Any:
    """Return a running head's answer to GET, or with a body to POST.

    Args:
        url: address of the head.
        path: path of the route.
        body: fields to send as JSON.
        answer_type: type of the answer.
        cacert: file of a certificate to trust.
        api_key: key of a flag; without one, `key_to_send` finds it.

    Raises:
        ConfigError: it does not answer, or not as this version does, or it refuses the question.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import, and files do without it

    hint = "give --url, or machines with --cluster or --machine"
    text = f"Waiting for the head at {url}. The first time, it measures its machine, for up to two minutes."
    notice = Timer(_NOTICE_AFTER_S, print, [text], {"file": sys.stderr})
    notice.daemon = True
    notice.start()
    try:
        answer = ask_head(
            url, path, body, api_key=api_key, cacert=cacert, hint=hint, timeout_s=_MEASURED_WITHIN_S
        )
        return TypeAdapter(answer_type).validate_python(answer)
    except RequestError as error:
        # The flags of this command are wrong.
        raise ConfigError(str(error)) from error
    except ValidationError as error:
        raise ConfigError(f"The head at {url} has another version: its answer cannot be read.") from error
    finally:
        notice.cancel()


# ---- models and machines


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model whose sizes can be computed."""

    name: str
    folder: ModelFolder
    remarks: tuple[str, ...]
    """Sentences on how its name or its sizes are to be read."""


def find_described(text: str, weights: WeightFormat | None = None) -> SizedModel:
    """Return the model of a built-in name, folder, file, hub id, short name or number of parameters.

    Args:
        text: what names the model.
        weights: format to assume for its weights; None for the stored one.

    Raises:
        ModelNotFound: there is none.
    """
    if text in builtin_names() or "/" in text or _exists(text):
        found = describe_model(text)
        assumed = f"The weights of {found.name} are taken in {weights.name}." if weights else ""
        rounding = f"{found.folder.rounding}." if found.folder.rounding and not weights else ""
        return SizedModel(found.name, found.folder, tuple(filter(None, (assumed, rounding))))
    known = find_known_model(text, form="" if weights is None else weights.name)
    return SizedModel(known.name, known.folder, (known.remark,))


def given_weights(quantization: int | None) -> WeightFormat | None:
    """Return the format of weights with so many bits; None for none, as they are stored.

    Raises:
        ConfigError: the sizes of such weights are not known.
    """
    if quantization is None:
        return None
    bits = one_of("--quantization", quantization, BITS)
    return WeightFormat(bits, plain="float32") if bits == max(BITS) else WeightFormat(bits)


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # the name is too long for a file
        return False


# ---- numbers


def read_tokens(flag: str, text: str) -> int:
    """Return a number of tokens, such as `32k` or `8192`; 1k is 1,024.

    Raises:
        ConfigError: it is no such number, or 0.
    """
    tokens = _tokens(text)
    if tokens < 1:
        raise ConfigError(
            f"{flag} is {text.strip() or 'empty'}; it must be a number of tokens, such as 8192 or 32k."
        )
    return tokens


def _tokens(text: str) -> int:
    """Return a number of tokens; 0 if it is none."""
    found = _TOKENS.fullmatch(text.strip())
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0


def at_least_one(flag: str, value: int, most: int | None = None) -> int:
    """Return a number that is 1 or more, and not more than `most`.

    Raises:
        ConfigError: it is less or more.
    """
    if value < 1:
        raise ConfigError(f"{flag} is {value}; it must be 1 or more.")
    if most is not None and value > most:
        raise ConfigError(f"{flag} is {value}; it must be {most} at most.")
    return value


def read_whole_numbers(flag: str, text: str | None) -> tuple[int, ...]:
    """Return whole numbers, as `16,8`; none if nothing is given.

    Raises:
        ConfigError: one is no whole number.
    """
    numbers = read_numbers(flag, text)
    if not all(one.is_integer() for one in numbers):
        raise ConfigError(f"{flag} is {text}; it must be whole numbers separated by commas.")
    return tuple(map(int, numbers))


def read_numbers(flag: str, text: str | None) -> tuple[float, ...]:
    """Return numbers, as `0.7,0.3`; none if nothing is given.

    Raises:
        ConfigError: one is no number.
    """
    if text is None:
        return ()
    if not text.strip():
        raise ConfigError(f"{flag} is empty; it must be numbers separated by commas.")
    try:
        return tuple(float(part) for part in text.strip("[] ").split(","))
    except ValueError:
        raise ConfigError(f"{flag} is {text}; it must be numbers separated by commas.") from None


def read_lengths(flag: str, text: str) -> tuple[int, int]:
    """Return the least and the largest number of tokens of `1024` or `200-2k`; 1k is 1,024.

    Raises:
        ConfigError: it is neither.
    """
    fewest, dash, most = text.partition("-")
    low = _tokens(fewest)
    high = _tokens(most) if dash else low
    if not 1 <= low <= high:
        raise ConfigError(
            f"{flag} is {text}; it must be a number of tokens, as 1024 or 1k, or from fewer to more, as 200-2k."
        )
    return low, high


def read_time_or_off(flag: str, text: str) -> float | None:
    """Return the seconds of a time such as `2s`; None for `off`.

    Raises:
        ConfigError: it is none.
    """
    return None if text.strip().lower() == "off" else read_seconds(flag, text)


def read_seconds(flag: str, text: str, *, allows_zero: bool = False) -> float:
    """Return the seconds of a time such as `2s` or `50ms`.

    Raises:
        ConfigError: it is none.
    """
    found = _SECONDS.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _TIME_UNITS[found[2]] if found else -1.0
    if seconds < 0 or (not seconds and not allows_zero):
        raise ConfigError(f"{flag} is {text}; it must be a time above 0, as 2s or 50ms.")
    return seconds


def read_share(flag: str, text: str) -> float:
    """Return a share such as `60%` or `0.6`.

    Raises:
        ConfigError: it is none.
    """
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigError(f"{flag} is {text}; it must be a share from 0 to less than all, as 60% or 0.6.")
    return share


def read_pair(flag: str, text: str, most: int) -> tuple[str, list[float]]:
    """Return the name and the numbers of `NAME=NUMBER/NUMBER`, `most` of them at most.

    Raises:
        ConfigError: it is none.
    """
    name, _, rest = text.partition("=")
    try:
        numbers = [float(part) for part in rest.split("/")]
    except ValueError:
        numbers = []
    if not name or not 1 <= len(numbers) <= most or not all(0 < number < inf for number in numbers):
        form = "NAME=BUSY or NAME=BUSY/IDLE, in watts" if most > 1 else "NAME=PRICE"
        raise ConfigError(f"{flag} is {text}; it must be {form}, with numbers above 0.")
    return name, numbers


# ---- given machines


def given_upkeep(
    cluster: Path | None, watts: Sequence[str] | None, prices: Sequence[str] | None
) -> dict[str, Upkeep]:
    """Return power and price by machine: those of a file of machines, unless flags give others.

    Raises:
        ConfigError: a value is no power or price.
    """
    found = {} if cluster is None else read_upkeep(cluster.read_text("utf-8"), str(cluster))
    values: dict[str, dict[str, float]] = {}
    for text in watts or ():
        name, numbers = read_pair("--watts", text, most=2)
        given = values.setdefault(name, {})
        given.update(zip(("watts", "idle_watts"), numbers, strict=False))
        idle = given.get("idle_watts", found.get(name, Upkeep()).idle_watts)
        if idle is not None and idle > numbers[0]:
            raise ConfigError(
                f"--watts is {text}; the power without load, which is {idle:g}, must not be more than under load."
            )
    for text in prices or ():
        name, numbers = read_pair("--price", text, most=1)
        values.setdefault(name, {})["price"] = numbers[0]
    for name, given in values.items():
        found[name] = Upkeep(**{**asdict(found.get(name, Upkeep())), **given})
    return found


def given_machines(
    file: Path | None, machines: list[str] | None, link: str | None
) -> tuple[ClusterProfile, DevicesFile]:
    """Return the machines, and what a file of devices says about the split."""
    if file is not None and machines:
        raise ConfigError("--cluster and --machine were both given; the file names the machines.")
    if file is None:
        typed = machines or []
        names = [as_listed(name) for name in typed]
        profiles = [
            known_profile(text, f"{name}#{names[: place + 1].count(name)}" if names.count(name) > 1 else None)
            for place, (text, name) in enumerate(zip(typed, names, strict=True))
        ]
        named = cluster_of(tuple(profiles))
        return replace(named, usual_link=link_named(link) or named.usual_link), DevicesFile(())
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cluster is {file}, which cannot be read: {reason_of(error)}.") from error
    content = load_content(text, str(file))
    listed = read_devices(content, str(file)) if lists_devices(content) else DevicesFile(())
    return read_cluster(text, str(file)), listed


def given_basis(model: str, machines: ClusterProfile, weights: WeightFormat | None) -> PlanningBasis:
    """Return what plans of a named model on these machines are made of."""
    described = find_described(model, weights)
    sizes = sizes_of(described.folder, described.name, machines, weights)
    running = RunningCluster(machines, PlanRequest(Demand(USUAL_CONTEXT, 1)))
    return PlanningBasis.of(running, sizes, (*described.remarks, *remarks_on_described(machines.nodes)))


def running_basis(
    model: str | None,
    url: str | None,
    cacert: Path | None,
    weights: WeightFormat | None,
    api_key: str | None = None,
) -> PlanningBasis:
    """Return what plans of the running cluster are made of.

    Raises:
        ConfigError: the head does not answer, or refuses.
    """
    if weights is not None:
        raise ConfigError(
            f"--quantization is {weights.bits}, which a question to the head does not take; leave it out."
        )
    path = "/cluster/planning" + ("" if model is None else f"?{urlencode({'model': model})}")
    head = server_here(url, model, api_key=api_key, cacert=cacert)
    return ask_running_head(head, path, None, PlanningBasis, cacert, api_key)
