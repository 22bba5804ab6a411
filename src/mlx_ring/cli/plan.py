"""`mlx-ring plan`: plan the layers of each machine and predict the speed, without loading anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from mlx_ring.cli.flags import (
    KvMemory,
    given_kv_memory,
    given_prefill_chunk,
    setting_option,
    with_settings,
)
from mlx_ring.cli.head_client import server_here
from mlx_ring.cli.planning import (
    COMPARISONS,
    KV_BITS,
    ClusterFile,
    HeadCertificate,
    HeadKey,
    HeadUrl,
    LinkName,
    MachineNames,
    ModelName,
    WeightBits,
    at_least_one,
    check_uses,
    find_described,
    given_machines,
    given_weights,
    one_of,
    read_numbers,
    read_tokens,
    read_whole_numbers,
)
from mlx_ring.cli.status_tables import expectation, list_machines, show_plans
from mlx_ring.cli.what_if import (
    Asked,
    ask_planner,
    ask_running,
    check_alone,
    fields_for_head,
    plan_as_json,
    show_answer,
)
from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.planner.cluster_file import remarks_on_described
from mlx_ring.planner.layer_parts import WeightFormat
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.replicas import place_replicas
from mlx_ring.planner.request import OBJECTIVES, USUAL_CONTEXT, Demand, Objective, PlanRequest, request_within
from mlx_ring.planner.what_if import Question
from mlx_ring.settings.config import Settings
from mlx_ring.settings.devices_file import DevicesFile
from mlx_ring.settings.fields import flag_of
from mlx_ring.settings.strategies import STRATEGIES, Strategy, current_strategy


@with_settings(("optimize_for", "expected_prompt", "expected_answer", "expected_users", "prefill_chunk"))
def plan(
    flags: Mapping[str, object],
    model: ModelName = None,
    cluster: ClusterFile = None,
    machine: MachineNames = None,
    strategy: Annotated[
        str | None, setting_option("strategy", default="the file's strategy, or auto")
    ] = None,
    proportions: Annotated[
        str | None,
        setting_option("proportions", help_text="With --strategy custom: shares of the layers by machine."),
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
    replicas: Annotated[str | None, setting_option("replicas")] = None,
    kv_bits: Annotated[
        str | None,
        setting_option(
            "kv_bits",
            metavar="4|8|16",
            help_text="Bits of the KV cache; 16,8,4 compares them. By default 16, or those of the running head.",
        ),
    ] = None,
    kv_cache_memory: KvMemory = None,
    quantization: WeightBits = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare with one more machine, such as m3-ultra-512. Repeat it for several.",
            rich_help_panel=COMPARISONS,
        ),
    ] = None,
    link: LinkName = None,
    users_at: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="How many users with this context, such as 32k, fit at the same time, and their speed.",
            rich_help_panel=COMPARISONS,
        ),
    ] = None,
    what_fits: Annotated[
        bool, typer.Option("--what-fits", help="List popular models.", rich_help_panel=COMPARISONS)
    ] = False,
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Plot tokens/s over context and users.", rich_help_panel=COMPARISONS),
    ] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Write the plot as a picture.", rich_help_panel=COMPARISONS),
    ] = None,
    url: HeadUrl = None,
    api_key: HeadKey = None,
    cacert: HeadCertificate = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show the layers that each machine would get, why, and the predicted speed.

    Without a model and machines, list the known machines. Without machines, the options of a what-if question ask the running cluster.
    """
    given = _Given(
        flags=flags,
        model=model,
        strategy=strategy,
        proportions=proportions,
        layers=layers,
        context=context,
        sequences=sequences,
        replicas=replicas,
        kv_bits=kv_bits,
        kv_cache_memory=kv_cache_memory,
        quantization=quantization,
    )
    what_if = _WhatIf(add, link, users_at, url, cacert, api_key, plot_file, what_fits=what_fits, plot=plot)
    is_given = cluster is not None or bool(machine)
    asks = what_if.is_asked or len(given.kinds) > 1
    check_uses(link, url, cacert, adds=bool(add or machine), is_given=is_given, api_key=api_key)
    if not is_given and not asks:
        check_alone(given.plan_flags, model)
        list_machines()
        return
    machines, listed = given_machines(cluster, machine, link) if is_given else (None, DevicesFile(()))
    request = given.request(listed, fills_context=what_fits)
    if machines is not None:
        _check_custom(request, {"--proportions": proportions, "--layers": layers})
    if asks:
        _ask(given, what_if, request, machines, as_json=as_json)
    else:
        _show(given, request, machines, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Flags that describe a plan, as they were typed."""

    flags: Mapping[str, object]
    model: str | None
    strategy: str | None
    proportions: str | None
    layers: str | None
    context: str | None
    sequences: int | None
    replicas: str | None
    kv_bits: str | None
    kv_cache_memory: str | None
    quantization: int | None

    @property
    def kinds(self) -> tuple[int, ...]:
        """Bits of the KV cache, in the order given."""
        numbers = dict.fromkeys(
            read_whole_numbers("--kv-bits", "16" if self.kv_bits is None else self.kv_bits)
        )
        return tuple(one_of("--kv-bits", bits, KV_BITS) for bits in numbers)

    @property
    def weights(self) -> WeightFormat | None:
        """Format of the weights; None: as they are stored."""
        return given_weights(self.quantization)

    @property
    def plan_flags(self) -> Mapping[str, object]:
        """Flags beside the model; None for those that are not given."""
        settings = {"--optimize-for": self.flags["optimize_for"], "--users": self.flags["expected_users"]}
        settings |= {"--prompt": self.flags["expected_prompt"], "--answer": self.flags["expected_answer"]}
        settings |= {"--prefill-chunk": self.flags["prefill_chunk"]}
        own = (
            "strategy",
            "proportions",
            "layers",
            "context",
            "sequences",
            "replicas",
            "kv_bits",
            "kv_cache_memory",
            "quantization",
        )
        return settings | {f"--{name.replace('_', '-')}": getattr(self, name) for name in own}

    @property
    def users(self) -> int:
        return _whole_number(self.flags, "expected_users")

    def request(self, listed: DevicesFile, *, fills_context: bool) -> PlanRequest:
        """Return the request to the planner, for the usual context.

        Args:
            listed: what a file of devices says about the split.
            fills_context: True if the default prompt fills the context.

        Raises:
            ConfigError: a value is invalid.
        """
        prompt, answer, typical = _lengths(self.flags, fills_context=fills_context)
        objective = str(self.flags["optimize_for"] or OBJECTIVES[0])
        strategy = current_strategy(self.strategy or listed.strategy or "auto")
        kv_memory, chunk = given_kv_memory(self.kv_cache_memory), given_prefill_chunk(self.flags)
        return PlanRequest(
            Demand(USUAL_CONTEXT, self.users, self.kinds[0], typical, kv_memory, chunk),
            strategy=cast("Strategy", one_of("--strategy", strategy, tuple(STRATEGIES))),
            objective=cast("Objective", one_of("--optimize-for", objective, OBJECTIVES)),
            proportions=read_numbers("--proportions", self.proportions) or listed.proportions,
            counts=read_whole_numbers("--layers", self.layers),
            prompt_tokens=prompt,
            answer_tokens=answer,
            users=self.users,
        )


@dataclass(frozen=True, slots=True)
class _WhatIf:
    """Flags of a what-if question, as they were typed."""

    add: list[str] | None
    link: str | None
    users_at: str | None
    url: str | None
    cacert: Path | None
    api_key: str | None
    plot_file: Path | None
    what_fits: bool
    plot: bool

    @property
    def is_asked(self) -> bool:
        is_given = (self.add, self.users_at, self.plot_file, self.url)
        return self.what_fits or self.plot or any(value is not None for value in is_given)


def _ask(
    given: _Given, what_if: _WhatIf, request: PlanRequest, machines: ClusterProfile | None, *, as_json: bool
) -> None:
    """Ask the planner, or without machines the running head, and print the answer.

    Raises:
        ConfigError: a flag was given that the question does not take.
    """
    _refuse("planner", {"--sequences": given.sequences, "--replicas": given.replicas})
    if machines is None:
        _refuse(
            "head",
            {
                "--strategy": given.strategy,
                "--kv-cache-memory": given.kv_cache_memory,
                "--prefill-chunk": given.flags["prefill_chunk"],
                "--quantization": given.quantization,
                "--proportions": given.proportions,
                "--layers": given.layers,
            },
        )
    if what_if.what_fits:
        _refuse("planner about popular models", {"--quantization": given.quantization})
    question = Question(
        tuple(what_if.add or ()),
        what_if.link if what_if.add else None,
        _asked_context(what_if.users_at, given.context),
        given.kinds,
        with_curves=what_if.plot or what_if.plot_file is not None,
        request=request,
    )
    asked = Asked(given.model, question, given.weights, what_fits=what_if.what_fits)
    if machines is None:
        for_head = fields_for_head(given.flags, request, given.kinds if given.kv_bits else None)
        head = server_here(what_if.url, given.model, api_key=what_if.api_key, cacert=what_if.cacert)
        found = ask_running(head, asked, for_head, what_if.cacert, what_if.api_key)
    else:
        found = ask_planner(machines, asked)
    show_answer(found, as_json=as_json, plot=what_if.plot, plot_file=what_if.plot_file)


def _show(given: _Given, request: PlanRequest, machines: ClusterProfile | None, *, as_json: bool) -> None:
    """Plan, and print the plans.

    Raises:
        ConfigError: no model is given, or a value is invalid.
        PlanError: there is no such plan.
    """
    if given.model is None or machines is None:
        raise ConfigError(
            "No model is given; name one, such as `mlx-ring plan llama-70b --machine m3-ultra-512`."
        )
    described = find_described(given.model, given.weights)
    profile = profile_folder(described.folder, described.name, given.weights)
    one = request_within(request, profile.context_tokens, _asked_context(None, given.context))
    demand = replace(one.demand, sequences=_sequences(given.sequences, given.users))
    count = None if given.replicas is None else _number("--replicas", given.replicas)
    made = place_replicas(profile, machines, replace(one, demand=demand, users=given.users), count)
    if as_json:
        plans = [plan_as_json(each, _on_described(machines, [each])) for each in made]
        print(json.dumps(plans[0] if len(plans) == 1 else {"replicas": plans}, indent=1))
        return
    show_plans(made, demand.sequences)
    for sentence in _on_described(machines, made) or (expectation(made),):
        print(sentence)
    for remark in described.remarks:
        print(remark)


def _on_described(machines: ClusterProfile, plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return sentences on those machines with layers that are described by numbers; their accuracy is not known."""
    used = {rank.node for plan in plans for stage in plan.stages for rank in stage.ranks}
    return remarks_on_described(node for node in machines.nodes if node.name in used)


def _asked_context(users_at: str | None, context: str | None) -> int | None:
    if users_at is not None and context is not None:
        raise ConfigError(f"--context is {context} and --users-at is {users_at}; give one of them.")
    if users_at is not None:
        return read_tokens("--users-at", users_at)
    return None if context is None else read_tokens("--context", context)


def _whole_number(flags: Mapping[str, object], name: str) -> int:
    """Return the number of tokens or users that a flag gives, or the setting's default."""
    field = Settings.model_fields[name]
    (flag,) = flag_of(field).aliases
    given = flags[name]
    return int(field.default) if given is None else _number(flag, str(given))


def _number(flag: str, given: str) -> int:
    try:
        return at_least_one(flag, int(given))
    except ValueError:
        raise ConfigError(f"{flag} is {given}; it must be a whole number.") from None


def _sequences(given: int | None, users: int) -> int:
    """Return the number of sequences whose memory is promised: at least one for each user."""
    if given is not None and at_least_one("--sequences", given) < users:
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


def _check_custom(request: PlanRequest, given: Mapping[str, object]) -> None:
    """Check that the strategy custom has shares or numbers of layers, not both, and no other one is given any."""
    if request.strategy != "custom":
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{flag} is {value}, which only the strategy custom uses; give --strategy custom, or leave it out."
                )
    elif None not in given.values():
        both = " and ".join(f"{flag} is {value}" for flag, value in given.items())
        raise ConfigError(f"{both}, and each divides the layers; give one of them.")
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
