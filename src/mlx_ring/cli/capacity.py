"""`mlx-ring capacity`: the users that a cluster serves at a service level, and which machine to add next."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from mlx_ring.cli.flags import with_settings
from mlx_ring.cli.what_if import find_described, given_machines
from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.engine.capacity import Capacity, Question, measure_capacity
from mlx_ring.engine.simulated_load import (
    ARRIVALS,
    Arrivals,
    Lengths,
    Load,
    Recorded,
    ServiceLevel,
    read_recorded,
)
from mlx_ring.head.served_model import policy_of
from mlx_ring.planner.cluster_file import Upkeep, read_upkeep, with_machines
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.weight_format import WeightFormat
from mlx_ring.settings.settings_sources import load_settings

_SHORT_LIST = ("m4-pro-64", "m4-max-128", "m3-ultra-256", "nvidia-dgx-spark")
"""Machines that `--what-to-add` compares."""
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?")
_UNITS = {"ms": 1e-3, None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BITS, _KV_BITS = (2, 3, 4, 5, 6, 8, 16, 32), (4, 8, 16)
_LOAD, _LEVEL, _COST = "Load", "Service level", "Power and price"
_LARGE, _TABLE_WIDTH = 1000, 240


@with_settings(("max_num_seqs", "max_itl_ratio", "prefill_chunk"))
def capacity(
    flags: Mapping[str, object],
    model: Annotated[
        str, typer.Argument(help="Model, as for `mlx-ring plan`: a folder, or a short name as llama-70b.")
    ],
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML or JSON file of machines and links.")
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Known machine, such as m4-max-128. Repeat it for several."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Link of added machines, such as tb5; with --machine, between all."
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Compare with this machine added. Repeat it to compare several."),
    ] = None,
    what_to_add: Annotated[
        bool, typer.Option("--what-to-add", help=f"Compare with each of {', '.join(_SHORT_LIST)} added.")
    ] = False,
    quantization: Annotated[
        int | None, typer.Option(metavar="BITS", help="Bits of the weights; as stored by default.")
    ] = None,
    kv_bits: Annotated[int, typer.Option(metavar="4|8|16", help="Bits of the KV cache.")] = 16,
    prompt: Annotated[
        str,
        typer.Option(metavar="TOKENS", help="Length of prompts: 1024, or 200-2000.", rich_help_panel=_LOAD),
    ] = "1024",
    answer: Annotated[
        str, typer.Option(metavar="TOKENS", help="Length of answers: 256, or 50-500.", rich_help_panel=_LOAD)
    ] = "256",
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
    burst: Annotated[int, typer.Option(metavar="N", help="Requests of a burst.", rich_help_panel=_LOAD)] = 8,
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
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and lengths.", rich_help_panel=_LOAD)] = 0,
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
    if cluster is None and not machine:
        raise ConfigError("No machines are given; name some with --machine, or a file with --cluster.")
    machines, _ = given_machines(cluster, machine, link)
    if link and not (add or what_to_add or machine):
        raise ConfigError(
            f"--link is {link}, but no machine is added; give --add, --what-to-add or --machine."
        )
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--rate is {rate:g}; it must be more than 0 requests per second.")
    if not 0 < percentile <= 100:  # noqa: PLR2004 - per cent
        raise ConfigError(f"--percentile is {percentile:g}; it must be more than 0, and 100 at most.")
    if years <= 0 or price_per_kwh < 0:
        raise ConfigError(
            f"--years is {years:g} and --price-per-kwh is {price_per_kwh:g}; neither may be negative, nor the years 0."
        )
    policy, max_num_seqs = _policy(flags)
    described = find_described(model)
    weights = None if quantization is None else WeightFormat(_one_of("--quantization", quantization, _BITS))
    sizes = sizes_of(described.folder, described.name, machines, weights)
    level = ServiceLevel(
        _time_or_off("--first-token-within", first_token_within),
        _time_or_off("--between-tokens-within", between_tokens_within),
        percentile,
    )
    load = Load(
        _lengths("--prompt", prompt),
        _lengths("--answer", answer),
        cast("Arrivals", _one_of("--arrivals", arrivals, ARRIVALS)),
        _at_least_one("--burst", burst) if arrivals == "burst" else 1,
        _share("--prefix-hits", prefix_hits),
        () if requests is None else _recorded(requests),
        seed,
    )
    longest = sum(load.longest)
    if longest > sizes.context_tokens:
        raise ConfigError(
            f"The longest prompt and answer have {longest:,} tokens together; {described.name} supports {sizes.context_tokens:,} at most."
        )
    question = Question(
        load,
        level,
        PlanRequest(Demand(longest, 1, _one_of("--kv-bits", kv_bits, _KV_BITS))),
        policy,
        max_num_seqs,
        rate,
        _seconds("--thinking-time", thinking_time, allows_zero=True),
        _upkeep(cluster, watts, price),
        years,
        price_per_kwh,
    )
    rows = list(_rows(sizes, machines, question, [*(add or ()), *(_SHORT_LIST if what_to_add else ())], link))
    if as_json:
        print(json.dumps({"model": described.name, "capacities": [asdict(row) for row in rows]}, indent=1))
        return
    for remark in described.remarks:
        print(remark)
    _show(described.name, rows, question)


def _rows(
    model: ModelProfile, machines: ClusterProfile, question: Question, added: Sequence[str], link: str | None
) -> Iterator[Capacity]:
    """Yield the capacity of the cluster, and of the cluster with each of the added machines.

    Raises:
        ConfigError: the level is impossible, or a machine is unknown.
        PlanError: the model fits none of the clusters.
    """
    clusters = [("now", machines)]
    clusters += [(f"with {name}", with_machines(machines, (name,), link)) for name in dict.fromkeys(added)]
    for label, cluster in clusters:
        try:
            found = measure_capacity(label, model, cluster, question)
        except PlanError as error:
            if len(clusters) == 1:
                raise
            yield Capacity(label, holds=False, why=f"The model does not fit: {error}")
            continue
        if question.rate is None and not found.holds and len(clusters) == 1:
            raise ConfigError(_impossible(found, question.level))
        yield found


def _impossible(found: Capacity, level: ServiceLevel) -> str:
    if level.first_token_s is not None and found.first_token_s > level.first_token_s:
        flag, limit, best = "--first-token-within", level.first_token_s, found.first_token_s
    else:
        flag, limit, best = "--between-tokens-within", level.between_tokens_s or 0.0, found.between_tokens_s
    return (
        f"{flag} is {_time(limit)}, but even one request at a time takes {_time(best)} (percentile {level.percent:g}): "
        f"allow more, or use faster machines, a smaller model or shorter prompts."
    )


# ---- values of flags


def _policy(flags: Mapping[str, object]) -> tuple[Policy, int | None]:
    """Return the scheduler's settings, and the number of running requests if it is given."""
    settings = load_settings(flags)
    policy = replace(policy_of(settings), num_speculative_tokens=0)
    return policy, None if flags["max_num_seqs"] is None else settings.max_num_seqs


def _one_of(flag: str, value: Any, allowed: Sequence[Any]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value}; it must be one of {', '.join(map(str, allowed))}.")
    return value


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{flag} is {value}; it must be 1 or more.")
    return value


def _lengths(flag: str, text: str) -> Lengths:
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    low = int(found[1]) if found else 0
    high = int(found[2]) if found and found[2] else low
    if not 1 <= low <= high:
        raise ConfigError(
            f"{flag} is {text}; it must be a number of tokens, as 1024, or from fewer to more, as 200-2000."
        )
    return Lengths(low, high)


def _time_or_off(flag: str, text: str) -> float | None:
    return None if text.strip().lower() == "off" else _seconds(flag, text)


def _seconds(flag: str, text: str, *, allows_zero: bool = False) -> float:
    found = _SECONDS.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _UNITS[found[2]] if found else -1.0
    if seconds < 0 or (not seconds and not allows_zero):
        raise ConfigError(f"{flag} is {text}; it must be a time above 0, as 2s or 50ms.")
    return seconds


def _share(flag: str, text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigError(f"{flag} is {text}; it must be a share from 0 to less than all, as 60% or 0.6.")
    return share


def _recorded(path: Path) -> tuple[Recorded, ...]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requests is {path}, which cannot be read: {error}.") from error
    return read_recorded(text, str(path))


def _upkeep(
    cluster: Path | None, watts: Sequence[str] | None, prices: Sequence[str] | None
) -> dict[str, Upkeep]:
    """Return power and price by machine: those of the file, unless flags give others."""
    found = {} if cluster is None else read_upkeep(cluster.read_text("utf-8"), str(cluster))
    values: dict[str, dict[str, float]] = {}
    for text in watts or ():
        name, numbers = _pair("--watts", text, most=2)
        values.setdefault(name, {}).update(zip(("watts", "idle_watts"), numbers, strict=False))
        if len(numbers) > 1 and numbers[1] > numbers[0]:
            raise ConfigError(f"--watts is {text}; the power without load must not be more than under load.")
    for text in prices or ():
        name, numbers = _pair("--price", text, most=1)
        values.setdefault(name, {})["price"] = numbers[0]
    for name, given in values.items():
        found[name] = Upkeep(**{**asdict(found.get(name, Upkeep())), **given})
    return found


def _pair(flag: str, text: str, most: int) -> tuple[str, list[float]]:
    name, _, rest = text.partition("=")
    try:
        numbers = [float(part) for part in rest.split("/")]
    except ValueError:
        numbers = []
    if not name or not 1 <= len(numbers) <= most or not all(0 < number < float("inf") for number in numbers):
        form = "NAME=BUSY or NAME=BUSY/IDLE, in watts" if most > 1 else "NAME=PRICE"
        raise ConfigError(f"{flag} is {text}; it must be {form}, with numbers above 0.")
    return name, numbers


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
        gain = row.users - now.users
        yield f"{gain:+,.0f}"
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
    if seconds == float("inf"):
        return "endless"
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1e3 * seconds:.3g} ms"
