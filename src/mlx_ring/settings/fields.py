"""Building blocks of `Settings`: types that parse text, and `setting`, the single description of one setting.

Text comes from flags, environment variables and files alike, so each type parses strings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from mlx_ring.host.machine import SOCKET_PATH_LIMIT
from mlx_ring.settings.process_settings import BlasMode, SpareMode
from mlx_ring.settings.strategies import current_strategy


@dataclass(frozen=True, slots=True)
class Flag:
    """Presentation of a setting on the command line and in documents."""

    group: str
    """Heading under which `--help` lists it."""
    metavar: str
    """Placeholder for its value in `--help`."""
    basic: bool
    """True if plain `--help` lists it; `--help-all` lists all."""
    aliases: tuple[str, ...]
    """Other flags for it: vLLM's."""
    old: tuple[str, ...]
    """Field names of earlier versions, still read from flags, environment and files."""
    switch_on: tuple[str, ...]
    """Flags without a value that mean `on`; the first may also be a key of a file."""
    switch_off: tuple[str, ...]
    """Flags without a value that mean `off`."""
    takes: str
    """Accepted values, if the type alone does not describe them."""

    @property
    def long_aliases(self) -> tuple[str, ...]:
        """Aliases with two dashes, which help names beside the description."""
        return tuple(alias for alias in self.aliases if alias.startswith("--"))


def setting(
    default: object,
    help_text: str,
    group: str,
    *,
    metavar: str = "N",
    basic: bool = False,
    aliases: tuple[str, ...] = (),
    old: tuple[str, ...] = (),
    switch_on: tuple[str, ...] = (),
    switch_off: tuple[str, ...] = (),
    takes: str = "",
    secret: bool = False,
) -> Any:
    """Describe one setting: its default, its help line and its flag.

    Args:
        default: value if no source gives one.
        help_text: one line, for `--help` and docs/configuration.md.
        secret: True keeps the value out of the printed settings.
    """
    flag = Flag(group, metavar, basic, aliases, old, switch_on, switch_off, takes)
    return Field(
        default, description=help_text, repr=not secret, json_schema_extra=cast("Any", {"flag": flag})
    )


def flag_name(field: str) -> str:
    """Return the flag of a field of `Settings`."""
    return "--" + field.replace("_", "-")


def flag_of(field: FieldInfo) -> Flag:
    """Return the presentation that `setting` gave a field."""
    return cast("dict[str, Flag]", field.json_schema_extra)["flag"]


def _split(value: object) -> object:
    """Split `a,b` or a JSON list such as `["a", "b"]` (vLLM's form); pass a file's list through."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _keys(value: object) -> object:
    """Split keys, of which a text has at least one: an empty variable of a script must not mean no authentication.

    Raises:
        ValueError: a text without a key.
    """
    keys = _split(value)
    if isinstance(value, str) and not keys:
        raise ValueError("no key")
    return keys


def _yaml_switch(value: object) -> object:
    """Undo YAML's reading of an unquoted `on` or `off` as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _bits(value: object) -> object:
    """Read a bare number from a file as its digits."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _yaml_switch(value)


_UNITS = (
    {"": 1, "b": 1}
    | {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
    | {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
)


def _bytes(value: object) -> object:
    """Read `2GiB`, `500 MB` or a bare number as bytes."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError
    return int(float(found[1]) * _UNITS[found[2]])


_SHARE = re.compile(r"(?:[a-z0-9][a-z0-9-]*=)?(?:\d+(?:\.\d*)?|\.\d+)")


def _shares(value: object) -> object:
    """Read `0.7,0.3` or `mini-7f3a=0.7,studio-1b2c=0.3`; a file may hold a list of numbers."""
    if isinstance(value, str):
        value = value.strip("[] ").split(",")
    if not isinstance(value, (list, tuple)):
        raise ValueError  # noqa: TRY004 - pydantic reports a ValueError as a bad value
    parts = tuple(str(part).strip() for part in cast("list[object]", value))
    if not all(map(_SHARE.fullmatch, parts)):
        raise ValueError
    return parts


_NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


def _node_ids(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_NODE_ID.fullmatch, names)):
        raise ValueError
    return names


_PORTS = re.compile(r"(\d{4,5})-(\d{4,5})")
_FEWEST_PORTS, _FIRST_PORT, _LAST_PORT = 3, 1024, 65535


def _ports(value: object) -> object:
    """Read `9000-9015` as the first and the last port."""
    if isinstance(value, tuple):
        return cast("object", value)
    found = _PORTS.fullmatch(value.strip()) if isinstance(value, str) else None
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not _FIRST_PORT <= first <= last + 1 - _FEWEST_PORTS <= _LAST_PORT + 1 - _FEWEST_PORTS:
        raise ValueError
    return first, last


def _http_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError
    return value


def _short_enough(path: Path | None) -> Path | None:
    if path is not None and len(os.fsencode(path.absolute())) > SOCKET_PATH_LIMIT - 40:
        raise ValueError
    return path


def read_strategy(value: object) -> object:
    """Replace a strategy's name of earlier versions by today's."""
    return current_strategy(value) if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Keys = Annotated[tuple[str, ...], BeforeValidator(_keys)]
NodeIds = Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_node_ids)]
Ports = Annotated[tuple[int, ...], BeforeValidator(_ports)]
PORTS_TAKE = (
    f"a range of {_FEWEST_PORTS} ports or more, from {_FIRST_PORT} to {_LAST_PORT}, such as 9000-9015"
)
Numbers = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], BeforeValidator(_split)]
Shares = Annotated[tuple[str, ...], BeforeValidator(_shares)]
Size = Annotated[Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None, BeforeValidator(_bytes)]
Switch = Annotated[Literal["on", "off"], BeforeValidator(_yaml_switch)]
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(_yaml_switch)]
Blas = Annotated[BlasMode, BeforeValidator(_yaml_switch)]
Spare = Annotated[SpareMode, BeforeValidator(_yaml_switch)]
KvBits = Annotated[Literal["off", "8", "4"], BeforeValidator(_bits)]
HttpAddress = Annotated[str, AfterValidator(_http_address)]
SocketFolder = Annotated[Path | None, AfterValidator(_short_enough)]
Tokens = Annotated[int, Field(ge=1, le=1 << 20)]
SIZE_TAKES = "a size of 1MiB or more, such as 2GiB, 500MB or a number of bytes"


def default_text(field: FieldInfo) -> str:
    """Return a setting's default for help and documents; empty if its description has it."""
    return "" if field.default in (None, (), Path()) else str(field.default)


def other_names(fields: dict[str, FieldInfo]) -> Iterator[tuple[str, str]]:
    """Yield (name, field) for every alias and old name, written as a field: with underscores."""
    for field, info in fields.items():
        flag = flag_of(info)
        for alias in (*flag.long_aliases, *flag.switch_on):
            if alias.startswith("--"):
                yield alias.removeprefix("--").replace("-", "_"), field
        yield from ((old, field) for old in flag.old)


class CheckedSettings(BaseSettings):
    """Settings that are given their values, and refuse a boolean where a number or a text belongs."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read no source here: `settings_sources.py` does, so that errors can say where a value came from."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object, info: ValidationInfo) -> object:
        # Python accepts True as 1, but `port: yes` in a file is a mistake.
        if value is True and get_args(cls.model_fields[info.field_name or ""].annotation) != ("on", "off"):
            raise ValueError
        return value
