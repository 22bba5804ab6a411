"""Sources of settings, by priority: flags, `MLX_RING_*` variables, `.env`, a YAML or JSON file.

Apart from this module, only `core/environment.py` reads the environment.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import DotEnvSettingsSource, EnvSettingsSource

from mlx_ring.core.errors import ConfigError, reason_of
from mlx_ring.core.folders import kv_folder, logs_folder, state_folder
from mlx_ring.host.addresses import is_same_server, local_url
from mlx_ring.host.interfaces import lan_addresses, lan_urls
from mlx_ring.host.running import running_here
from mlx_ring.settings.config import (
    ENVIRONMENT_PREFIX,
    OLD_NAMES,
    OTHER_NAMES,
    Settings,
)
from mlx_ring.settings.devices_file import load_content
from mlx_ring.settings.fields import flag_name, flag_of
from mlx_ring.settings.old_names import is_old, of_today
from mlx_ring.settings.strategies import STRATEGIES


def field_of_key(key: str) -> str:
    """Return the field that a file's key names, with dashes or underscores; an unknown key as it is."""
    name = key.replace("-", "_")
    return OTHER_NAMES.get(name, name)


def allowed_values(field: FieldInfo) -> str:
    """Return what a field accepts, as text: "a whole number from 0 to 65535"."""
    if takes := flag_of(field).takes:
        return takes
    kind, constraints = _unwrap(field.annotation, list(field.metadata))
    if get_origin(kind) is Literal:
        *most, last = (str(choice) for choice in get_args(kind))
        return f"{', '.join(most)} or {last}"
    if kind is int:
        return _number_range("a whole number", constraints)
    if kind is float:
        return _number_range("a number", constraints)
    if kind is Path:
        return "a path"
    return "names separated by commas" if get_origin(kind) is tuple else "a non-empty text"


def has_choices(field: FieldInfo) -> bool:
    """Return True if a field accepts one of a few words."""
    kind, _ = _unwrap(field.annotation, list(field.metadata))
    return get_origin(kind) is Literal


def takes_several(field: FieldInfo) -> bool:
    """Return True if a field accepts several values, separated by commas."""
    kind, _ = _unwrap(field.annotation, list(field.metadata))
    return get_origin(kind) is tuple


def _unwrap(annotation: object, constraints: list[object]) -> tuple[object, list[object]]:
    """Return the type inside `Annotated[... | None, ...]`, and all constraints around it."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        found: list[object] = []
        for item in more:
            found += item.metadata if isinstance(item, FieldInfo) else [item]
        return _unwrap(inner, constraints + found)
    if get_origin(annotation) in (Union, UnionType):
        return _unwrap(next(part for part in get_args(annotation) if part is not type(None)), constraints)
    return annotation, constraints


def _number_range(noun: str, constraints: list[object]) -> str:
    low = next((str(item.ge) for item in constraints if isinstance(item, Ge)), "")
    above = next((str(item.gt) for item in constraints if isinstance(item, Gt)), "")
    high = next((str(item.le) for item in constraints if isinstance(item, Le)), "")
    return f"{noun} above {above}, at most {high}" if above else f"{noun} from {low} to {high}"


log = logging.getLogger(__name__)

_FOREIGN_VARIABLES = {"mlx_ring_verbose", "mlx_ring_join_token"}
"""Variables that are no settings: MLX's ring backend reads the first one, and `mlx-ring join` the second one."""
_CONFIG_VARIABLE = "config"


@dataclass(frozen=True, slots=True)
class _SourcedValue:
    """A value and a description of where it was given."""

    value: object
    place: str


def load_settings(
    flags: Mapping[str, object], *, config: Path | None = None, folder: Path | None = None
) -> Settings:
    """Merge all sources.

    Args:
        flags: values by field name; None stands for a flag that was not given.
        config: file of `--config`; by default the one that `MLX_RING_CONFIG` names.
        folder: folder whose `.env` is read; by default the working directory.

    Raises:
        ConfigError: a value is invalid; the message names the setting, the value, its source and what is allowed.
    """
    dotenv = (folder or Path.cwd()) / ".env"
    source = _dotenv_source(dotenv)
    environment, local, old = _variables(EnvSettingsSource(Settings)), _variables(source), _old_names(source)
    named = environment.pop(_CONFIG_VARIABLE, None) or local.pop(_CONFIG_VARIABLE, None)
    local.pop(_CONFIG_VARIABLE, None)
    path = config if config is not None else Path(named).expanduser() if named else None
    given: dict[str, _SourcedValue] = {}
    if path is not None:
        given |= _from_file(path)
    given |= _from_old_names(old, dotenv, {*local, *environment})
    given |= _from_variables(local, f" in {dotenv}")
    given |= _from_variables(environment, "")
    given |= {
        name: _SourcedValue(value, flag_name(name)) for name, value in flags.items() if value is not None
    }
    return _check(given)


def log_old_name(old: str, new: str) -> None:
    """Log that a setting was given under its old name."""
    log.warning("%s is now called %s; the old name still works.", old, new)


def check_values(values: Mapping[str, str], where: str) -> None:
    """Check flags for a server on another machine, as `load_settings` does.

    Args:
        values: values by field name.
        where: where they were given, as text that follows a setting's name.

    Raises:
        ConfigError: a value is invalid; the message names the setting, the value and what is allowed.
    """
    _check({name: _SourcedValue(value, f"{flag_name(name)[2:]}{where}") for name, value in values.items()})


def names_in_environment() -> tuple[str, ...]:
    """Return the variables of this environment that give settings."""
    return tuple(f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in _variables(EnvSettingsSource(Settings)))


def names_in_dotenv(folder: Path) -> tuple[str, ...]:
    """Return the variables in a folder's `.env` that give settings.

    Raises:
        ConfigError: the file cannot be read.
    """
    source = _dotenv_source(folder / ".env")
    ours = (f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in _variables(source))
    return (*ours, *_old_names(source))


def _dotenv_source(path: Path) -> DotEnvSettingsSource:
    try:
        return DotEnvSettingsSource(Settings, env_file=path, env_file_encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}.") from error


def _variables(source: EnvSettingsSource) -> dict[str, str]:
    """Return the text of all variables with our prefix, by field name; an empty one counts as not set."""
    prefix = ENVIRONMENT_PREFIX.lower()
    return {
        name.removeprefix(prefix): value
        for name, value in source.env_vars.items()
        if name.startswith(prefix) and name not in _FOREIGN_VARIABLES and value
    }


def _from_variables(variables: Mapping[str, str], where: str) -> dict[str, _SourcedValue]:
    given: dict[str, _SourcedValue] = {}
    for name, value in variables.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        field = OLD_NAMES.get(name, name)
        if field not in Settings.model_fields:
            raise ConfigError(f"{variable}{where} is no setting{_suggest(name, ENVIRONMENT_PREFIX)}")
        if field != name:
            log_old_name(f"{variable}{where}", ENVIRONMENT_PREFIX + field.upper())
            if field in variables:
                continue
        given[field] = _SourcedValue(value, f"{variable}{where}")
    return given


def _old_names(source: EnvSettingsSource) -> dict[str, str]:
    """Return the names of prototypes in a `.env`; in the environment such names may belong to other programs."""
    return {name.upper(): value for name, value in source.env_vars.items() if is_old(name.upper()) and value}


def _from_old_names(old: Mapping[str, str], path: Path, given_today: set[str]) -> dict[str, _SourcedValue]:
    """Read settings under the names of prototypes, with a log line for each. Today's names take precedence."""
    found = of_today(old, str(path))
    given: dict[str, _SourcedValue] = {}
    for name, value in old.items():
        renamed = found.get(name)
        if renamed is None:
            log.warning("%s=%s in %s has no effect.", name, value, path)
        elif renamed.setting not in given_today:
            variable = f"{ENVIRONMENT_PREFIX}{renamed.setting.upper()}"
            log.warning("%s in %s is read as %s=%s.", name, path, variable, renamed.value)
            given[renamed.setting] = _SourcedValue(renamed.value, f"{name} in {path}")
    return given


def _from_file(path: Path) -> dict[str, _SourcedValue]:
    given: dict[str, _SourcedValue] = {}
    for key, value in _read_file(path).items():
        name = field_of_key(str(key))
        if name not in Settings.model_fields:
            raise ConfigError(f"{path} has the key {key!r}, which is no setting{_suggest(name, '')}")
        if name in given:
            raise ConfigError(f"{path} gives {flag_name(name)[2:]!r} twice, under two spellings of its name.")
        if str(key).replace("-", "_") in OLD_NAMES:
            log_old_name(f"{key} in {path}", flag_name(name)[2:])
        if value is not None:
            given[name] = _SourcedValue(value, f"{str(key)!r} in {path}")
    return given


def _read_file(path: Path) -> dict[object, object]:
    try:
        text = path.read_text(encoding="utf-8")
        content = load_content(text, f"The settings file {path}")
    except FileNotFoundError as error:
        raise ConfigError(f"The settings file {path} does not exist.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The settings file {path} cannot be read: {reason_of(error)}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"The settings file {path} must hold names and values, not {type(content).__name__}."
        )
    return cast("dict[object, object]", content)


def _suggest(name: str, prefix: str) -> str:
    """Return the end of the message about an unknown name."""
    close = difflib.get_close_matches(name, Settings.model_fields, n=1)
    if not close:
        return "; `mlx-ring serve --help` lists them."
    return f"; did you mean {prefix + close[0].upper() if prefix else close[0].replace('_', '-')}?"


def _check(given: Mapping[str, _SourcedValue]) -> Settings:
    values: dict[str, Any] = {name: item.value for name, item in given.items()}
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise ConfigError(" ".join(_sentences(error, given))) from error
    _check_proportions(settings)
    _check_bodies(settings)
    _check_node_ids(settings)
    return settings.model_copy(
        update={
            "log_dir": _log_dir(settings),
            "kv_disk_dir": (settings.kv_disk_dir or kv_folder(state_folder(settings.state_dir)))
            .expanduser()
            .absolute(),
            "run_dir": settings.run_dir and settings.run_dir.expanduser().absolute(),
            "state_dir": settings.state_dir and settings.state_dir.expanduser().absolute(),
            **{
                name: _whole(getattr(settings, name))
                for name in ("api_key_file", "journal_dir", "ssl_certfile", "ssl_keyfile")
            },
        }
    )


def _log_dir(settings: Settings) -> Path:
    if "log_dir" in settings.model_fields_set:
        return settings.log_dir.expanduser().absolute()
    return Path(logs_folder(str(state_folder(settings.state_dir).expanduser().absolute())))


def _whole(path: Path | None) -> Path | None:
    return path and path.expanduser().absolute()


def _check_proportions(settings: Settings) -> None:
    if STRATEGIES[settings.strategy].is_tensor_parallel and settings.nodes == 1:
        raise ConfigError(
            f"--strategy {settings.strategy} shares layers among machines, but --nodes is 1. Use --tp 2 to share them "
            "among workers of this machine."
        )
    if bool(settings.proportions) != (settings.strategy == "custom"):
        raise ConfigError(
            "The strategy custom needs --proportions, as 0.7,0.3."
            if settings.strategy == "custom"
            else f"--proportions requires --strategy custom, but the strategy is {settings.strategy}."
        )


def _check_node_ids(settings: Settings) -> None:
    ids = set(settings.node_ids)
    if ids and len(ids) < settings.nodes - 1:
        raise ConfigError(
            f"--node-ids is {','.join(settings.node_ids)}, with which --nodes {settings.nodes} is never reached: give "
            f"the ids of {settings.nodes - 1} other machines, or --nodes {len(ids) + 1}."
        )


_BODIES = 16


def bodies_mb(settings: Settings) -> int:
    """Return the limit for all request bodies together, in MiB."""
    return settings.max_bodies_mb or _BODIES * settings.max_request_mb


def _check_bodies(settings: Settings) -> None:
    if bodies_mb(settings) < 2 * settings.max_request_mb:
        raise ConfigError(
            f"--max-bodies-mb is {settings.max_bodies_mb}, of which one client gets half, but --max-request-mb is "
            f"{settings.max_request_mb}: set at least {2 * settings.max_request_mb}."
        )


def _sentences(error: ValidationError, given: Mapping[str, _SourcedValue]) -> Iterator[str]:
    """Yield one message for each invalid setting."""
    for name in dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()):
        field, item = Settings.model_fields[name], given[name]
        shown = item.value if isinstance(item.value, str) and item.value else repr(item.value)
        if isinstance(item.value, bool):
            shown = f"{str(item.value).lower()} (as YAML reads yes, no, on and off without quotes)"
        quotes = (
            f' Write it in quotes: "{item.value}".'
            if isinstance(item.value, int | float)
            and not isinstance(item.value, bool)
            and _takes_text(field.annotation)
            else ""
        )
        yield f"{item.place} is {shown}; it must be {allowed_values(field)}.{quotes}"


def _takes_text(annotation: object) -> bool:
    """Return True if a value of this type is a text, or holds texts."""
    return annotation is str or any(map(_takes_text, get_args(annotation)))


def api_keys(settings: Settings) -> tuple[str, ...]:
    """Return the keys of `--api-key` and those in `--api-key-file`.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    if settings.api_key_file is None:
        return settings.api_key
    try:
        lines = settings.api_key_file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file is {settings.api_key_file}, which cannot be read: {reason_of(error)}."
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"--api-key-file is {settings.api_key_file}, which holds no key.")
    return (*settings.api_key, *keys)


KEY_VARIABLE = f"{ENVIRONMENT_PREFIX}API_KEY"


def key_to_send(url: str, settings: Settings, given: str | None = None) -> str | None:
    """Return the key that a request to a server carries; None without any.

    Keys in files are those of the server that the files set up. They go to this server and to the heads of this
    machine. Other servers get only a key of a flag or of the environment.

    Args:
        url: address of the server.
        settings: all settings.
        given: key of a flag, which the settings have too.

    Raises:
        ConfigError: an HTTP header cannot carry the key.
    """
    if not settings.api_key:
        return None
    is_for_any = given is not None or KEY_VARIABLE in names_in_environment()
    return checked_key(settings.api_key[0]) if is_for_any or _is_own(url, settings) else None


def checked_key(key: str | None) -> str | None:
    """Return a key that an HTTP header can carry, or None as it is.

    Raises:
        ConfigError: an HTTP header cannot carry it.
    """
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"--api-key must be printable ASCII characters, as {KEY_VARIABLE} too: an HTTP header carries no others."
        )
    return key


def own_url(settings: Settings) -> str:
    """Return the URL by which this machine reaches the server of these settings."""
    return local_url(settings.host, settings.port, _scheme(settings))


def _scheme(settings: Settings) -> str:
    return "http" if settings.ssl_certfile is None else "https"


def _is_own(url: str, settings: Settings) -> bool:
    """Report whether a URL is that of the server of these settings, or of a head of this machine."""
    named = [
        own_url(settings),
        *lan_urls(settings.host, settings.port, _scheme(settings), lan_addresses(), ()),
    ]
    heads = (each.url for each in running_here(state_folder(settings.state_dir)) if each.kind == "head")
    return any(is_same_server(url, each) for each in (*named, *heads))
