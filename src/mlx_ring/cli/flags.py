"""Command-line flags made from the fields of `Settings`: a command names the settings that it takes, and gets their flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings
from mlx_ring.settings.fields import Flag, flag_name, flag_of
from mlx_ring.settings.settings_sources import allowed_values, has_choices, log_old_name

ALL_SETTINGS = tuple(name for name in Settings.model_fields if name != "model")
_MANY = 20
"""Settings from which on plain `--help` lists the basic ones only."""


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
        made.append(_text(name, setting_option(name, hidden=hidden)))
        made += [_text(_old(old), typer.Option(flag_name(old), hidden=True)) for old in flag.old]
        if flag.switch_on or flag.switch_off:
            made.append(_switch(name, flag, hidden=hidden))
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
    known = default or ("" if field.default in (None, ()) else str(field.default))
    described = f"{field.description}{choices}{f' [default: {known}]' if known else ''}"
    return typer.Option(
        flag_name(name),
        *flag.aliases,
        help=(help_text or described).replace("[", "\\["),
        metavar=metavar or flag.metavar,
        rich_help_panel=flag.group,
        hidden=hidden,
        show_default=False,
    )


def _text(parameter: str, option: Any) -> inspect.Parameter:
    return _parameter(parameter, Annotated[str | None, option], None)


def _switch(name: str, flag: Flag, *, hidden: bool) -> inspect.Parameter:
    """Return a flag without a value: `--on/--off` where there are both, else those that mean `on`, or `off`."""
    both = bool(flag.switch_on and flag.switch_off)
    pair = [f"{flag.switch_on[0]}/{flag.switch_off[0]}"] if both else []
    declarations = (
        [*pair, *(f" /{each}" for each in flag.switch_off[1:])] if both else flag.switch_on or flag.switch_off
    )
    means = "on or off" if both else "on" if flag.switch_on else "off"
    option = typer.Option(
        *declarations,
        help=f"Same as {flag_name(name)} {means}.",
        show_default=False,
        rich_help_panel=flag.group,
        hidden=hidden,
    )
    return _parameter(f"{name}_switch", Annotated[bool | None, option], None)


def _help_all() -> inspect.Parameter:
    option = typer.Option("--help-all", is_eager=True, callback=_print_all, help="List all flags, and exit.")
    return _parameter("help_all", Annotated[bool, option], default=False)


def _print_all(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    shown = {*Settings.model_fields, *(f"{name}_switch" for name in Settings.model_fields)}
    for each in context.command.params:
        if each.name in shown:
            vars(each)["hidden"] = False
    typer.echo(context.get_help(), nl=False)
    raise typer.Exit


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _old(name: str) -> str:
    return f"{name}_old"


def _values(names: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, object]:
    """Return the values by field name, with old names and switches resolved."""
    values: dict[str, object] = {}
    for name in names:
        flag = flag_of(Settings.model_fields[name])
        values[name] = given[name]
        for old in flag.old:
            if (value := given[_old(old)]) is not None:
                _take_old(values, name, old, value)
        if (switch := given.get(f"{name}_switch")) is not None:
            values[name] = _one_switch(name, given[name], "on" if switch and flag.switch_on else "off")
    return values


def _take_old(values: dict[str, object], name: str, old: str, value: str) -> None:
    if values[name] not in (None, value):
        raise ConfigError(
            f"{flag_name(name)} is {values[name]}, and its old name {flag_name(old)} is {value}: give one of them."
        )
    log_old_name(flag_name(old), flag_name(name))
    values[name] = value


def _one_switch(name: str, given: str | None, switch: str) -> str:
    if given not in (None, switch):
        raise ConfigError(
            f"{flag_name(name)} is {given}, but another flag switches it {switch}: give one of them."
        )
    return switch
