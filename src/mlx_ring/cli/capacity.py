"""`mlx-ring capacity`: the users that a cluster serves at a service level, and which machine to add next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from mlx_ring.cli.flags import KvMemory, given_kv_memory, with_settings
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
    given_basis,
    given_machines,
    given_upkeep,
    given_weights,
    one_of,
    read_lengths,
    read_seconds,
    read_share,
    read_time_or_off,
    running_basis,
)
from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import ConfigError, PlanError, reason_of
from mlx_ring.engine.capacity import Capacity, CapacityMeter, Question
from mlx_ring.engine.capacity_search import ServiceLevel
from mlx_ring.head.served_model import policy_of
from mlx_ring.planner.cluster_file import with_machines
from mlx_ring.planner.place import PlanningBasis
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import (
    ARRIVALS,
    Arrivals,
    Demand,
    Lengths,
    Load,
    PlanRequest,
    Recorded,
    chunk_within,
    read_recorded,
)
from mlx_ring.settings.config import Settings
from mlx_ring.settings.settings_sources import load_settings

_SHORT_LIST = ("m4-pro-64", "m4-max-128", "m3-ultra-256", "nvidia-dgx-spark")
"""Machines that `--what-to-add` compares."""
_BURST, _LARGEST_BURST = 8, 10_000
_SCHEDULING = ("max_num_seqs", "max_itl_ratio", "prefill_chunk")
_LOAD, _LEVEL, _COST = "Load", "Service level", "Power and price"
_LARGE, _TABLE_WIDTH = 1000, 240


@with_settings(_SCHEDULING)
def capacity(
    flags: Mapping[str, object],
    model: ModelName = None,
    cluster: ClusterFile = None,
    machine: MachineNames = None,
    link: LinkName = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare with this machine added. Repeat it to compare several, one at a time.",
            rich_help_panel=COMPARISONS,
        ),
    ] = None,
    what_to_add: Annotated[
        bool,
        typer.Option(
            "--what-to-add",
            help=f"Compare with each of {', '.join(_SHORT_LIST)} added.",
            rich_help_panel=COMPARISONS,
        ),
    ] = False,
    url: HeadUrl = None,
    api_key: HeadKey = None,
    cacert: HeadCertificate = None,
    quantization: WeightBits = None,
    kv_bits: Annotated[
        int | None,
        typer.Option(
            metavar="4|8|16", help="Bits of the KV cache. By default 16, or those of the running head."
        ),
    ] = None,
    kv_cache_memory: KvMemory = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="Length of prompts: 1k (default), or 200-2k.", rich_help_panel=_LOAD
        ),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="Length of answers: 256 (default), or 50-500.", rich_help_panel=_LOAD
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded requests: CSV with the columns prompt, answer and, if known, at (seconds); or JSON lines.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(metavar="|".join(ARRIVALS), help="How requests arrive.", rich_help_panel=_LOAD)
    ] = "poisson",
    burst: Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests of a burst; 8 by default.", rich_help_panel=_LOAD),
    ] = None,
    prefix_hits: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Share of prompt tokens in the prefix cache: 60%.", rich_help_panel=_LOAD
        ),
    ] = "0%",
    thinking_time: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="From an answer to its user's next request.", rich_help_panel=_LOAD
        ),
    ] = "60s",
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Requests per second to measure at, in place of the highest.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the load.", rich_help_panel=_LOAD)] = 0,
    first_token_within: Annotated[
        str, typer.Option(metavar="TIME|off", help="Time to the first token.", rich_help_panel=_LEVEL)
    ] = "5s",  # noqa: S107 - it is no password
    between_tokens_within: Annotated[
        str, typer.Option(metavar="TIME|off", help="Time from token to token.", rich_help_panel=_LEVEL)
    ] = "200ms",
    percentile: Annotated[
        float,
        typer.Option(metavar="P", help="Percentage of tokens that must keep it.", rich_help_panel=_LEVEL),
    ] = 95.0,
    watts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=BUSY[/IDLE]",
            help="Power of a machine, such as m4-max-128=140/12.",
            rich_help_panel=_COST,
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PRICE", help="Price of a machine, in any currency.", rich_help_panel=_COST
        ),
    ] = None,
    price_per_kwh: Annotated[
        float, typer.Option(metavar="PRICE", help="Price of energy.", rich_help_panel=_COST)
    ] = 0.0,
    years: Annotated[
        float, typer.Option(metavar="N", help="Years over which prices are spread.", rich_help_panel=_COST)
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show how many users a cluster serves at a service level, what limits it, and which machine to add next.

    The engine's scheduler is simulated over predicted times of the machines. Nothing is loaded.
    """
    is_given = cluster is not None or bool(machine)
    adds = bool(add or what_to_add or machine)
    check_uses(link, url, cacert, adds=adds, is_given=is_given, api_key=api_key)
    _check_numbers(rate, percentile, years, price_per_kwh)
    weights = given_weights(quantization)
    if kv_bits is not None:
        one_of("--kv-bits", kv_bits, KV_BITS)
    settings = load_settings(flags)
    if is_given:
        if model is None:
            raise ConfigError(
                "No model is given; name one, such as `mlx-ring capacity llama-8b --machine m4-max-128`."
            )
        basis = given_basis(model, given_machines(cluster, machine, link)[0], weights)
    else:
        basis = running_basis(model, url, cacert, weights, api_key)
    machines, sizes = basis.machines, basis.model
    level = ServiceLevel(
        read_time_or_off("--first-token-within", first_token_within),
        read_time_or_off("--between-tokens-within", between_tokens_within),
        percentile,
    )
    _check_load({"--prompt": prompt, "--answer": answer}, requests, burst, arrivals)
    load = Load(
        Lengths(*read_lengths("--prompt", prompt or "1024")),
        Lengths(*read_lengths("--answer", answer or "256")),
        cast("Arrivals", one_of("--arrivals", arrivals, ARRIVALS)),
        at_least_one("--burst", _BURST if burst is None else burst, _LARGEST_BURST),
        read_share("--prefix-hits", prefix_hits),
        () if requests is None else _recorded(requests),
        seed,
    )
    longest = load.longest
    if longest > sizes.context_tokens:
        raise ConfigError(
            f"The longest request has {longest:,} tokens of prompt and answer; {sizes.name} supports {sizes.context_tokens:,} at most."
        )
    bits = basis.request.demand.kv_bits if kv_bits is None else kv_bits
    kv_memory = given_kv_memory(kv_cache_memory) or basis.request.demand.kv_memory_bytes
    policy = _policy(flags, settings, basis.policy)
    is_own = basis.policy is None or flags["prefill_chunk"] is not None
    # Without a number, chunks of a prompt alone may be long.
    is_limited = (settings.prefill_chunk if is_own else basis.request.demand.chunk_tokens) is not None
    chunk = chunk_within(policy.prefill_chunk, longest) if is_limited else None
    question = Question(
        load,
        level,
        PlanRequest(Demand(longest, 1, bits, kv_memory_bytes=kv_memory, chunk_tokens=chunk)),
        policy,
        _most_running(flags, settings, basis.policy),
        rate,
        read_seconds("--thinking-time", thinking_time, allows_zero=True),
        given_upkeep(cluster, watts, price),
        years,
        price_per_kwh,
    )
    known = [node.name for node in machines.nodes] + [*(add or ()), *(_SHORT_LIST if what_to_add else ())]
    _check_names("--watts", watts, known)
    _check_names("--price", price, known)
    names = dict.fromkeys([*(add or ()), *(_SHORT_LIST if what_to_add else ())])
    clusters = {f"with {name}": with_machines(machines, (name,), link) for name in names}
    rows = list(_rows(basis, clusters, question))
    if as_json:
        print(json.dumps({"model": sizes.name, "capacities": list(map(_as_json, rows))}, indent=1))
        return
    for remark in basis.remarks:
        print(remark)
    _show(sizes.name, rows, question)


def _check_load(
    lengths: Mapping[str, str | None], requests: Path | None, burst: int | None, arrivals: str
) -> None:
    for flag, text in lengths.items():
        if text is not None and requests is not None:
            raise ConfigError(f"{flag} is {text}, but --requests gives the lengths; leave one of them out.")
    if burst is not None and arrivals != "burst":
        raise ConfigError(f"--burst is {burst}, but --arrivals is {arrivals}; give --arrivals burst.")


def _check_names(flag: str, given: Sequence[str] | None, known: Sequence[str]) -> None:
    for text in given or ():
        name = text.partition("=")[0]
        if name not in {*known, *(each.partition("#")[0] for each in known)}:
            listed = ", ".join(dict.fromkeys(known))
            raise ConfigError(f"{flag} is {text}, but there is no machine {name}; there are {listed}.")


def _check_numbers(rate: float | None, percentile: float, years: float, price_per_kwh: float) -> None:
    if rate is not None and not 0 < rate < inf:
        raise ConfigError(f"--rate is {rate:g}; it must be more than 0 requests per second.")
    if not 0 < percentile <= 100:  # noqa: PLR2004 - per cent
        raise ConfigError(f"--percentile is {percentile:g}; it must be more than 0, and 100 at most.")
    if not 0 < years < inf:
        raise ConfigError(f"--years is {years:g}; it must be a number above 0.")
    if not 0 <= price_per_kwh < inf:
        raise ConfigError(f"--price-per-kwh is {price_per_kwh:g}; it must be 0 or more.")


def _rows(
    basis: PlanningBasis, clusters: Mapping[str, ClusterProfile], question: Question
) -> Iterator[Capacity]:
    """Yield the capacity of the cluster, and of the others.

    Raises:
        ConfigError: the level is impossible for the only cluster.
        PlanError: the model does not fit the only cluster.
    """
    meter = CapacityMeter(basis.model, question)
    now: Capacity | None = None
    for label, cluster in {"now": basis.machines, **clusters}.items():
        try:
            found = meter.measure(label, cluster, () if now else basis.replicas)
        except PlanError as error:
            if not clusters:
                raise
            found = Capacity(label, holds=False, why=f"The model does not fit: {error}")
        if question.rate is None and not found.holds and not clusters:
            raise ConfigError(_impossible(found, question.level))
        if now is not None and now.holds and _is_worse(found, now, question):
            gain = "answers sooner" if question.rate is not None else "serves more requests"
            found = replace(now, label=label, why=f"It is best left out: no plan with it {gain}.")
        now = now or found
        yield found


def _is_worse(found: Capacity, now: Capacity, question: Question) -> bool:
    """Return True if machines with a further one serve less, or at a given rate send the first token later."""
    if question.rate is None:
        return found.requests_per_s < now.requests_per_s
    return not found.holds or found.first_token_s > now.first_token_s


def _impossible(found: Capacity, level: ServiceLevel) -> str:
    if level.first_token_s is not None and found.first_token_s > level.first_token_s:
        flag, limit, best = "--first-token-within", level.first_token_s, found.first_token_s
    elif level.between_tokens_s is not None and found.between_tokens_s > level.between_tokens_s:
        flag, limit, best = "--between-tokens-within", level.between_tokens_s, found.between_tokens_s
    else:
        return f"{found.why} Allow more time, or use faster machines, a smaller model or shorter prompts."
    return (
        f"{flag} is {_time(limit)}, but even one request at a time takes {_time(best)} (percentile {level.percent:g}): "
        f"allow more, or use faster machines, a smaller model or shorter prompts."
    )


# ---- values of flags


def _policy(flags: Mapping[str, object], settings: Settings, running: Policy | None) -> Policy:
    """Return the scheduler's settings: the running head's where no flag gives others."""
    given = policy_of(settings)
    if running is not None:
        kept = {name: getattr(running, name) for name in _SCHEDULING if flags[name] is None}
        given = replace(running, **{name: getattr(given, name) for name in _SCHEDULING} | kept)
    return replace(given, num_speculative_tokens=0)


def _most_running(flags: Mapping[str, object], settings: Settings, running: Policy | None) -> int | None:
    """Return the number of requests that may run at once in a replica; None for as many as the level allows."""
    if flags["max_num_seqs"] is not None:
        return settings.max_num_seqs
    return None if running is None else running.max_num_seqs


def _recorded(path: Path) -> tuple[Recorded, ...]:
    try:
        # Spreadsheets begin their files with a byte order mark.
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requests is {path}, which cannot be read: {reason_of(error)}.") from error
    return read_recorded(text, str(path))


def _as_json(row: Capacity) -> dict[str, object]:
    """Return a row's fields; null for a time without end."""
    return {name: None if value == inf else value for name, value in asdict(row).items()}


# ---- the table


def _show(model: str, rows: Sequence[Capacity], question: Question) -> None:
    console = Console(width=_TABLE_WIDTH, soft_wrap=True, highlight=False, markup=False)
    now, percent = rows[0], f"p{question.level.percent:g}"
    has_watts = any(row.watts is not None for row in rows)
    has_prices = any(row.price is not None for row in rows)
    table = Table("", box=None, pad_edge=False)
    titles = ["requests/s", "users", "tokens/s", f"first token, {percent}", f"between tokens, {percent}"]
    titles += ["watts", "tokens/J"] * has_watts + ["price", "tokens/price"] * has_prices
    titles += ["more users"] * (len(rows) > 1) + ["per 1,000 of price"] * (len(rows) > 1 and has_prices)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.label, *_cells(row, now, question, (has_watts, has_prices, len(rows) > 1)))
    console.print(f"{model}\n")
    console.print(table)
    console.print()
    for row in rows:
        begin = f"{row.label}: " if len(rows) > 1 else ""
        if row.replicas:
            running = f"{row.replicas} replica{'s' * (row.replicas > 1)}, --max-num-seqs {row.max_num_seqs}"
            console.print(f"{begin}{running}: {', '.join(row.stages)}. {row.why}")
        else:
            console.print(f"{begin}{row.why}")
    console.print(f"\n{_explanation(question, rows)}")


def _cells(row: Capacity, now: Capacity, question: Question, shown: tuple[bool, bool, bool]) -> Iterator[str]:
    """Yield the cells of a row; `shown` says whether there are columns of power, of prices and of gains."""
    has_watts, has_prices, has_gains = shown
    if not row.replicas:
        yield "does not fit"
        return
    yield _figure(row.requests_per_s) if row.holds or question.rate is not None else "too slow"
    yield f"{int(row.users):,}"
    yield _figure(row.tokens_per_s)
    yield _time(row.first_token_s)
    yield _time(row.between_tokens_s)
    if has_watts:
        yield from (_figure(row.watts), _figure(row.tokens_per_joule))
    if has_prices:
        yield from (_figure(row.price), _figure(row.tokens_per_price))
    if has_gains and row is not now:
        gain = int(row.users) - int(now.users)
        yield f"{gain:+,}"
        if has_prices:
            known = None not in (row.price, now.price)
            added = (row.price or 0.0) - (now.price or 0.0)
            yield _figure(1000 * gain / added) if known and added else "unknown"


def _explanation(question: Question, rows: Sequence[Capacity]) -> str:
    load, level = question.load, question.level
    parts = [f"{load.mean_prompt:,.0f} tokens of prompt and {load.mean_answer:,.0f} of answer on average"]
    if load.prefix_hits:
        parts.append(f"{load.prefix_hits:.0%} of each prompt in the prefix cache")
    limits = [
        f"{name} within {_time(limit)}"
        for name, limit in (("first tokens", level.first_token_s), ("further tokens", level.between_tokens_s))
        if limit is not None
    ]
    asked = f"A request has {', and '.join(parts)}."
    kept = f" The level: {level.percent:g} % of {' and of '.join(limits)}." if limits else ""
    if question.rate is not None:
        kept += (
            " It holds at this rate." if all(row.holds for row in rows) else " It does not hold at this rate."
        )
    return f"{asked}{kept} A user asks again {_time(question.thinking_s)} after an answer."


def _figure(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if value >= _LARGE else f"{value:.3g}"


def _time(seconds: float) -> str:
    if seconds == inf:
        return "endless"
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1e3 * seconds:.3g} ms"
