"""`mlx-ring plan`: plan the layers of each machine and predict the speed, without loading anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table

from mlx_ring.cli.flags import with_settings
from mlx_ring.cli.heads import CACERT, DEFAULT_URL
from mlx_ring.cli.what_if import (
    Asked,
    ask_planner,
    ask_running,
    check_alone,
    fields_for_head,
    find_described,
    plan_as_json,
    read_tokens,
    show_answer,
)
from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.planner.catalogue import accuracy, chips, known_machines, known_profile
from mlx_ring.planner.cluster_file import (
    cluster_of,
    link_named,
    load_content,
    read_cluster,
)
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.replicas import place_replicas, total_tokens_per_s
from mlx_ring.planner.request import OBJECTIVES, USUAL_CONTEXT, Demand, Objective, PlanRequest, request_within
from mlx_ring.planner.weight_format import WeightFormat
from mlx_ring.planner.what_if import Question
from mlx_ring.settings.config import Settings
from mlx_ring.settings.devices_file import DevicesFile, lists_devices, read_devices
from mlx_ring.settings.fields import flag_of
from mlx_ring.settings.strategies import STRATEGIES, Strategy, current_strategy, strategy_help

_BITS = (2, 3, 4, 5, 6, 8, 16, 32)
_KV_BITS = (4, 8, 16)
_WHAT_IF = "Comparisons"
_GB = 10**9
Value = TypeVar("Value", int, str)


@with_settings(("optimize_for", "expected_prompt", "expected_answer", "expected_users"))
def plan(
    flags: Mapping[str, object],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Built-in name, folder, GGUF file, config.json, Hugging Face id, or a short name such as llama-70b or 70B-4bit."
        ),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML or JSON file of machines and links.")
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Known machine, such as m4-mac-mini-16. Repeat it for several."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(STRATEGIES),
            help=f"How to split layers over machines; by default the file's strategy, or auto. {strategy_help()}.",
        ),
    ] = None,
    proportions: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Shares of the layers by machine, with --strategy custom."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N,M", help="Number of layers by machine, with --strategy custom.")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help=f"Context of each sequence; by default {USUAL_CONTEXT}, or the model's limit if that is less.",
        ),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences that fit at once; by default as many as users.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Instances; by default one, or the best number with --optimize-for throughput."
        ),
    ] = None,
    kv_bits: Annotated[
        str | None,
        typer.Option(
            metavar="4|8|16",
            help="Bits of the KV cache; 16,8,4 compares them. By default 16, or those of the running head.",
        ),
    ] = None,
    quantization: Annotated[
        int | None, typer.Option(metavar="BITS", help="Bits of the weights; as stored by default.")
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare with one more machine, such as m3-ultra-512. Repeat it for several.",
            rich_help_panel=_WHAT_IF,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Link of added machines to all others, such as tb5-rdma; with --machine, between all.",
            rich_help_panel=_WHAT_IF,
        ),
    ] = None,
    users_at: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="How many users with this context, such as 32k, fit at the same time, and their speed.",
            rich_help_panel=_WHAT_IF,
        ),
    ] = None,
    what_fits: Annotated[
        bool, typer.Option("--what-fits", help="List popular models.", rich_help_panel=_WHAT_IF)
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Plot tokens/s over context and users.", rich_help_panel=_WHAT_IF)
    ] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Write the plot as a picture.", rich_help_panel=_WHAT_IF),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help=f"Head of the running cluster to ask, if no machines are given; {DEFAULT_URL} by default.",
            rich_help_panel=_WHAT_IF,
        ),
    ] = None,
    cacert: Annotated[Path | None, CACERT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show the layers that each machine would get, why, and the predicted speed.

    Without --cluster and --machine, list the known machines. The options of a what-if question ask the running cluster then.
    """
    kinds = [
        _one_of("--kv-bits", bits, _KV_BITS)
        for bits in dict.fromkeys(_whole_numbers("--kv-bits", "16" if kv_bits is None else kv_bits))
    ]
    is_given = cluster is not None or bool(machine)
    weights = None if quantization is None else WeightFormat(_one_of("--quantization", quantization, _BITS))
    asks = bool(add or what_fits or plot or plot_file or url or len(kinds) > 1) or users_at is not None
    _check_uses(link, cacert, adds=bool(add or machine), is_given=is_given)
    if not is_given and not asks:
        check_alone(
            {
                **{
                    f"--{name.removeprefix('expected_').replace('_', '-')}": value
                    for name, value in flags.items()
                },
                "--strategy": strategy,
                "--proportions": proportions,
                "--layers": layers,
                "--context": context,
                "--sequences": sequences,
                "--replicas": replicas,
                "--kv-bits": kv_bits,
                "--quantization": quantization,
            }
        )
        _list_machines()
        return
    machines, listed = _machines(cluster, machine, link) if is_given else (None, DevicesFile(()))
    users = _whole_number(flags, "expected_users")
    prompt, answer, typical = _lengths(flags, fills_context=what_fits)
    request = PlanRequest(
        Demand(USUAL_CONTEXT, users, kinds[0], typical),
        strategy=_strategy(strategy or listed.strategy or "auto"),
        objective=cast(
            "Objective", _one_of("--optimize-for", str(flags["optimize_for"] or OBJECTIVES[0]), OBJECTIVES)
        ),
        proportions=_numbers("--proportions", proportions) or listed.proportions,
        counts=_whole_numbers("--layers", layers),
        prompt_tokens=prompt,
        answer_tokens=answer,
        users=users,
    )
    _check_custom(request, proportions, layers)
    if asks:
        _refuse("planner", {"--sequences": sequences, "--replicas": replicas})
        if machines is None:
            _refuse(
                "head",
                {
                    "--strategy": strategy,
                    "--quantization": quantization,
                    "--proportions": proportions,
                    "--layers": layers,
                },
            )
        elif url is not None:
            raise ConfigError(f"--url is {url}, but machines are given too; leave one of them out.")
        if what_fits:
            _refuse("planner about popular models", {"--quantization": quantization})
        question = Question(
            tuple(add or ()),
            link if add else None,
            _asked_context(users_at, context),
            tuple(kinds),
            with_curves=plot or plot_file is not None,
            request=request,
        )
        asked = Asked(model, question, weights, what_fits=what_fits)
        if machines is None:
            given = fields_for_head(flags, request, kinds if kv_bits else None)
            found = ask_running(url or DEFAULT_URL, asked, given, cacert)
        else:
            found = ask_planner(machines, asked)
        show_answer(found, as_json=as_json, plot=plot, plot_file=plot_file)
        return
    if model is None or machines is None:
        raise ConfigError(
            "No model is given; name one, such as `mlx-ring plan llama-70b --machine m3-ultra-512`."
        )
    described = find_described(model, weights)
    profile = profile_folder(described.folder, described.name, weights)
    one = request_within(request, profile.context_tokens, _asked_context(None, context))
    demand = replace(one.demand, sequences=_sequences(sequences, users))
    request = replace(one, demand=demand, users=users)
    count = None if replicas is None else _at_least_one("--replicas", replicas)
    made = place_replicas(profile, machines, request, count)
    if as_json:
        plans = [plan_as_json(each) for each in made]
        print(json.dumps(plans[0] if len(plans) == 1 else {"replicas": plans}, indent=1))
        return
    show_plans(made, request.demand.sequences)
    print(_expectation(made))
    for remark in described.remarks:
        print(remark)


def _strategy(name: str) -> Strategy:
    return cast("Strategy", _one_of("--strategy", current_strategy(name), tuple(STRATEGIES)))


def _check_uses(link: str | None, cacert: Path | None, *, adds: bool, is_given: bool) -> None:
    """Raise `ConfigError` for a link without an added machine, or a certificate without a head."""
    if link is not None and not adds:
        raise ConfigError(f"--link is {link}, but no machine is added; give --add or --machine.")
    if is_given and cacert is not None:
        raise ConfigError(f"--cacert is {cacert}, but no head is asked; leave it out.")


def _asked_context(users_at: str | None, context: str | None) -> int | None:
    if users_at is not None and context is not None:
        raise ConfigError(f"--context is {context} and --users-at is {users_at}; give one of them.")
    if users_at is not None:
        return read_tokens("--users-at", users_at)
    return None if context is None else read_tokens("--context", context)


def _whole_number(flags: Mapping[str, object], name: str) -> int:
    """Return the number of users that a flag gives, or the setting's default."""
    field = Settings.model_fields[name]
    (flag,) = flag_of(field).aliases
    given = flags[name]
    if given is None:
        return int(field.default)
    try:
        return _at_least_one(flag, int(str(given)))
    except ValueError:
        raise ConfigError(f"{flag} is {given}; it must be a whole number.") from None


def _sequences(given: int | None, users: int) -> int:
    """Return the number of sequences whose memory is promised: at least one for each user."""
    if given is not None and _at_least_one("--sequences", given) < users:
        raise ConfigError(f"--sequences is {given} and --users is {users}; give as many sequences as users.")
    return users if given is None else given


def _lengths(flags: Mapping[str, object], *, fills_context: bool) -> tuple[int, int, int | None]:
    """Return the request's prompt and answer, and the mean context of its answer; None if no lengths are given.

    A prompt that fills the usual context takes the place of the default one.
    """
    prompt, answer = (
        _whole_number(flags, name) if flags[name] is None else read_tokens(flag, str(flags[name]))
        for flag, name in (("--prompt", "expected_prompt"), ("--answer", "expected_answer"))
    )
    if fills_context and flags["expected_prompt"] is None:
        prompt = max(1, USUAL_CONTEXT - answer)
    if flags["expected_prompt"] is None and flags["expected_answer"] is None:
        return prompt, answer, None
    return prompt, answer, prompt + answer // 2


def _check_custom(request: PlanRequest, proportions: str | None, layers: str | None) -> None:
    if request.strategy != "custom":
        for flag, value in (("--proportions", proportions), ("--layers", layers)):
            if value is not None:
                raise ConfigError(
                    f"{flag} is {value}, which only the strategy custom uses; give --strategy custom, or leave it out."
                )
    elif not request.proportions and not request.counts:
        raise PlanError("The strategy custom needs --proportions, as 0.7,0.3, or --layers, as 20,8.")


def _refuse(whom: str, given: Mapping[str, object]) -> None:
    """Refuse flags that a what-if question does not take.

    Raises:
        ConfigError: one of them is given.
    """
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{flag} is {value}, which a what-if question to the {whom} does not take; leave it out."
            )


def _machines(
    file: Path | None, machines: list[str] | None, link: str | None
) -> tuple[ClusterProfile, DevicesFile]:
    """Return the machines, and what a file of devices says about the split."""
    if file is not None and machines:
        raise ConfigError("--cluster and --machine were both given; the file names the machines.")
    if file is None:
        names = machines or []
        twice = {name for name in names if names.count(name) > 1}
        profiles = [
            known_profile(name, f"{name}#{names[: place + 1].count(name)}" if name in twice else None)
            for place, name in enumerate(names)
        ]
        named = cluster_of(tuple(profiles))
        return replace(named, usual_link=link_named(link) or named.usual_link), DevicesFile(())
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cluster is {file}, which cannot be read: {error}.") from error
    content = load_content(text, str(file))
    listed = read_devices(content, str(file)) if lists_devices(content) else DevicesFile(())
    return read_cluster(text, str(file)), listed


def _one_of(flag: str, value: Value, allowed: tuple[Value, ...]) -> Value:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value}; it must be one of {', '.join(map(str, allowed))}.")
    return value


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{flag} is {value}; it must be 1 or more.")
    return value


def _whole_numbers(flag: str, text: str | None) -> tuple[int, ...]:
    numbers = _numbers(flag, text)
    if not all(one.is_integer() for one in numbers):
        raise ConfigError(f"{flag} is {text}; it must be whole numbers separated by commas.")
    return tuple(map(int, numbers))


def _numbers(flag: str, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    if not text.strip():
        raise ConfigError(f"{flag} is empty; it must be numbers separated by commas.")
    try:
        return tuple(float(part) for part in text.strip("[] ").split(","))
    except ValueError:
        raise ConfigError(f"{flag} is {text}; it must be numbers separated by commas.") from None


def _list_machines() -> None:
    table = Table("machine", "memory, GB", box=None, pad_edge=False)
    table.add_column("GB/s", justify="right")
    table.add_column("teraflops", justify="right")
    for known in known_machines().values():
        for name, sizes in known.bins.items():
            chip = chips()[name]
            table.add_row(known.name, ", ".join(map(str, sizes)), f"{chip.gb_s:,.0f}", f"{chip.tflops:.1f}")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(
        "\nName some: `mlx-ring plan MODEL --machine m4-mac-mini-16 --machine m2-max-mac-studio-64`, "
        "or describe yours in a file for --cluster.",
        highlight=False,
    )


def show_plans(made: Sequence[Plan], sequences: int) -> None:
    """Print one table for each replica, and their total speed with so many sequences."""
    for number, each in enumerate(made, start=1):
        if len(made) > 1:
            print(f"{chr(10) * (number > 1)}Replica {number} of {len(made)}:")
        show_plan(each)
    if len(made) > 1:
        together = total_tokens_per_s(made, sequences)
        print(f"\n{together:.1f} tokens/s for {sequences} sequences over {len(made)} replicas together.")


def show_plan(made: Plan) -> None:
    """Print a plan as a table, with its prediction."""
    console = Console(soft_wrap=True)
    are_shared = any(stage.is_shared for stage in made.stages)
    table = Table("machine", "layers", box=None, pad_edge=False)
    for title in (*["share"] * are_shared, "weights", "memory", "of", "ms a token"):
        table.add_column(title, justify="right")
    table.add_column("why")
    for stage in made.stages:
        for place, rank in enumerate(stage.ranks):
            layers = f"{stage.layers.start}-{stage.layers.end - 1}"
            # The stage's own values stand beside its first rank.
            texts = (f"{1e3 * stage.token_s:.1f}", stage.why) if place == 0 else ("", "")
            sizes = map(_size, (rank.weight_bytes, rank.memory_bytes, rank.usable_bytes))
            table.add_row(rank.node, layers, *[f"{rank.share:.0%}"] * are_shared, *sizes, *texts)
    console.print(table)
    for left in made.left_out:
        console.print(f"{left.node} gets no layers: {left.why}.", highlight=False)
    prediction = made.prediction
    console.print(
        f"\n{made.model}, {made.sequences} x {made.context_tokens} tokens, strategy {made.strategy}: "
        f"{1 / prediction.token_s:.1f} tokens/s {_whose(prediction.users)}, {prediction.tokens_per_s:.1f} for {made.sequences}; "
        f"{prediction.first_token_s:.2f} s to the first token of a prompt of {prediction.prompt_tokens}, "
        f"{prediction.request_s:.2f} s with an answer of {prediction.answer_tokens}.",
        highlight=False,
    )
    for remark in made.remarks:
        console.print(remark, highlight=False)


def _whose(users: int) -> str:
    return "for one stream" if users == 1 else f"for each of {users} users"


def _expectation(made: Sequence[Plan]) -> str:
    """Return what to expect of machines that were not measured, as ranges."""
    decode, prefill = accuracy("decode"), accuracy("prefill")
    slowest = max(made, key=lambda each: each.prediction.token_s).prediction
    speed, first_s = 1 / slowest.token_s, slowest.first_token_s
    return (
        f"Not measured: expect {_figure(speed / decode, 3)} to {_figure(speed * decode, 3)} tokens/s {_whose(slowest.users)} and "
        f"{_figure(first_s / prefill, 2)} to {_figure(first_s * prefill, 2)} s to the first token. "
        f"Predictions are off by factors of {decode:.2f} and {prefill:.2f} on average, where others have published measurements."
    )


def _figure(value: float, digits: int) -> str:
    """Write a number with the given number of significant digits."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= _GB else f"{nbytes / 1e6:.0f} MB"
