"""Command-line flags that several commands take.

Most are made from the fields of `Settings`: a command names the settings that it takes, and gets their flags. The others
are those of a chat.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast, get_type_hints

import typer

from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings
from mlx_ring.settings.fields import Flag, default_text, flag_name, flag_of
from mlx_ring.settings.settings_sources import (
    allowed_values,
    has_choices,
    load_settings,
    log_old_name,
    takes_several,
)

ALL_SETTINGS = tuple(name for name in Settings.model_fields if name != "model")
_MANY = 20
"""Settings from which on plain `--help` lists the basic ones only."""
SYSTEM = typer.Option("--system", metavar="TEXT", help="System prompt.")
TEMPERATURE = typer.Option(
    "--temperature", metavar="T", min=0.0, help="Temperature; the model's or the API's if not set."
)
TOP_P = typer.Option(
    "--top-p", metavar="P", min=0.0, max=1.0, help="Probability of the tokens to choose from."
)
MAX_TOKENS = typer.Option("--max-tokens", metavar="N", min=1, help="Limit of each answer, in tokens.")
SEED = typer.Option("--seed", metavar="N", help="Seed, with which answers repeat.")


def with_settings(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these settings.

    Its parameter `flags` gets a dictionary of their values by field name; None stands for a flag that was not given.
    The settings model checks values, so that every source gives the same message.
    """
    chosen = tuple(names)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = _own_parameters(command)
        options = _options(chosen)

        def run(**given: Any) -> None:
            own = {name: given[name] for name in parameters}
            command(**own, flags=_values(chosen, given))

        signature = inspect.Signature([*parameters.values(), *options])
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
        vars(run)["__signature__"] = signature
        return run

    return decorate


def _own_parameters(command: Callable[..., None]) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    return {
        name: each.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in inspect.signature(command).parameters.items()
        if name != "flags"
    }


def _options(names: tuple[str, ...]) -> list[inspect.Parameter]:
    hides = len(names) > _MANY
    made: list[inspect.Parameter] = []
    for name in names:
        flag = flag_of(Settings.model_fields[name])
        hidden = hides and not flag.basic
        kind = list[str] if takes_several(Settings.model_fields[name]) else str
        made.append(_text(name, setting_option(name, hidden=hidden), kind))
        made += [_text(_old(old), typer.Option(flag_name(old), hidden=True), kind) for old in flag.old]
        made += [
            _text(_other(name, alias), typer.Option(alias, hidden=True), kind) for alias in flag.long_aliases
        ]
        made += _switches(name, flag, hidden=hidden)
    if hides:
        made.append(_help_all())
    return made


def setting_option(
    name: str, *, default: str = "", help_text: str = "", metavar: str = "", hidden: bool = False
) -> Any:
    """Return the option of a setting, for the annotation of a command's parameter.

    Args:
        name: field of `Settings`.
        default: what the command does without the flag; the setting's default otherwise.
        help_text: the whole help, for a command that takes other values than the setting.
        metavar: placeholder of the value; the setting's otherwise.
        hidden: True leaves it out of `--help`.
    """
    field = Settings.model_fields[name]
    flag = flag_of(field)
    choices = f" ({allowed_values(field)})" if has_choices(field) else ""
    known = default or default_text(field)
    also = f" Also {' and '.join(flag.long_aliases)}." if flag.long_aliases else ""
    described = f"{field.description}{choices}{also}{f' [default: {known}]' if known else ''}"
    return typer.Option(
        flag_name(name),
        *(alias for alias in flag.aliases if alias not in flag.long_aliases),
        help=(help_text or described).replace("[", "\\["),
        metavar=metavar or flag.metavar,
        rich_help_panel=flag.group,
        hidden=hidden,
        show_default=False,
    )


KvMemory = Annotated[
    str | None,
    setting_option("kv_cache_memory", default="as much as the plan needs, or that of the running head"),
]
"""Option of commands that only plan."""


def given_kv_memory(text: str | None) -> int | None:
    """Return the bytes of `--kv-cache-memory`; None if it is not given.

    Raises:
        ConfigError: it is no size.
    """
    return None if text is None else load_settings({"kv_cache_memory": text}).kv_cache_memory


def given_prefill_chunk(flags: Mapping[str, object]) -> int | None:
    """Return the number of `--prefill-chunk`, of flags by the names of their settings; None if it is not given.

    Raises:
        ConfigError: it is out of range.
    """
    text = flags["prefill_chunk"]
    return None if text is None else load_settings({"prefill_chunk": text}).prefill_chunk


def _text(parameter: str, option: Any, kind: type[str | list[str]]) -> inspect.Parameter:
    return _parameter(parameter, Annotated[kind | None, option], None)


def _switches(name: str, flag: Flag, *, hidden: bool) -> Iterator[inspect.Parameter]:
    """Yield the flags without a value: one for all that mean `on`, and one for those that mean `off`."""
    for means, names in (("on", flag.switch_on), ("off", flag.switch_off)):
        if not names:
            continue
        # Where there are both, help names the second beside the first: a terminal has no room for two in a line.
        is_second = means == "off" and bool(flag.switch_on)
        also = f"; {flag.switch_off[0]} is off" if means == "on" and flag.switch_off else ""
        option = typer.Option(
            *names,
            help=f"Same as {flag_name(name)} {means}{also}.",
            show_default=False,
            rich_help_panel=flag.group,
            hidden=hidden or is_second,
        )
        yield _parameter(f"{name}_{means}", Annotated[bool, option], default=False)


def _help_all() -> inspect.Parameter:
    option = typer.Option("--help-all", is_eager=True, callback=_print_all, help="List all flags, and exit.")
    return _parameter("help_all", Annotated[bool, option], default=False)


def _print_all(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    shown = {*Settings.model_fields, *map(_main_switch, Settings.model_fields)}
    for each in context.command.params:
        if each.name in shown:
            vars(each)["hidden"] = False
    typer.echo(context.get_help(), nl=False)
    raise typer.Exit


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _main_switch(name: str) -> str:
    """Return the parameter of a setting's flag without a value that help lists, if it has one."""
    return f"{name}_{'on' if flag_of(Settings.model_fields[name]).switch_on else 'off'}"


def _old(name: str) -> str:
    return f"{name}_old"


def _other(name: str, alias: str) -> str:
    return f"{name}_{alias.strip('-').replace('-', '_')}"


def given_settings(given: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of a command's flags by field name, from all its parameters."""
    return _values(tuple(name for name in ALL_SETTINGS if name in given), given)


def _values(names: tuple[str, ...], typed: Mapping[str, Any]) -> dict[str, object]:
    """Return the values by field name, with old names and switches resolved.

    A setting that takes several values gets those of all its flags; of others, the last flag counts.
    """
    given = {name: _joined(value) for name, value in typed.items()}
    values: dict[str, object] = {}
    for name in names:
        flag = flag_of(Settings.model_fields[name])
        values[name] = given[name]
        for old in flag.old:
            if (value := given[_old(old)]) is not None:
                _take_other(values, name, flag_name(old), value)
                log_old_name(flag_name(old), flag_name(name))
        for alias in flag.long_aliases:
            if (value := given[_other(name, alias)]) is not None:
                _take_other(values, name, alias, value)
        for means in ("on", "off"):
            if given.get(f"{name}_{means}"):
                values[name] = _one_switch(name, values[name], means)
    return values


def _joined(value: Any) -> Any:
    """Return the text of all values of a flag that may be repeated, None if it was not given; any other value as it is.

    Typer gives a command a list, and the context a tuple.
    """
    if not isinstance(value, list | tuple):
        return value
    return ",".join(cast("Sequence[str]", value)) if value else None


def _take_other(values: dict[str, object], name: str, other: str, value: str) -> None:
    """Take a value that was given under another name of the flag."""
    if values[name] not in (None, value):
        raise ConfigError(
            f"{flag_name(name)} is {values[name]}, and its other name {other} is {value}: give one of them."
        )
    values[name] = value


def _one_switch(name: str, given: object, switch: str) -> str:
    if given not in (None, switch):
        raise ConfigError(
            f"{flag_name(name)} is {given}, but another flag switches it {switch}: give one of them."
        )
    return switch
