"""Command line of what-if questions: to the planner, or to a running head. Answers as a table, a plot or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from mlx_ring.cli import report_console
from mlx_ring.cli.planning import ask_running_head, find_described
from mlx_ring.cli.status_tables import left_out_together
from mlx_ring.core.errors import ConfigError
from mlx_ring.planner.cluster_file import remarks_on_described
from mlx_ring.planner.known_models import popular_models
from mlx_ring.planner.layer_parts import WeightFormat
from mlx_ring.planner.memory_fit import MOST_USERS
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.plan import Plan, ranges_of
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.what_if import Answer, Curves, Outcome, Point, Question, what_if

_KILO = 1024
_BAR = 50
_FEW_ROWS, _LARGE = 4, 1000
_SHORTLY = re.compile(r"[\d.]+ GB are missing|supports \d+ at most|give a \w+ --kv-cache-memory")


@dataclass(frozen=True, slots=True)
class Asked:
    """A what-if question as a person asks it."""

    model: str | None
    """Name of the model; None for the head's own, or with `what_fits`."""
    question: Question
    weights: WeightFormat | None
    """Format of the weights instead of the stored one."""
    what_fits: bool
    """True to list popular models."""

    def __post_init__(self) -> None:
        if self.model is not None and self.what_fits:
            raise ConfigError(f"--what-fits lists popular models; leave {self.model} out.")


def check_alone(given: Mapping[str, object], model: str | None) -> None:
    """Check that neither a flag of a plan nor a model is given without machines.

    Raises:
        ConfigError: one is given.
    """
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{flag} is {value}, but no machines are given; name some with --machine, describe them in a file for --cluster, "
                "or ask a running head with --url."
            )
    if model is not None:
        raise ConfigError(
            f"No machines are given for {model}; name some, such as `mlx-ring plan {model} --machine m4-mac-mini-16` "
            "(`mlx-ring plan` lists all), describe them in a file for --cluster, or ask a running head with --url."
        )


def plan_as_json(plan: Plan, on_described: Sequence[str]) -> Mapping[str, object]:
    """Return the fields of a plan over machines that were not measured, with the ranges to expect.

    Args:
        plan: the plan.
        on_described: sentences on its machines that are described by numbers. With one, no ranges are known.
    """
    fields = plan.as_json()
    if on_described:
        return {**fields, "remarks": [*plan.remarks, *on_described], "ranges": None}
    return {**fields, "ranges": asdict(ranges_of(plan.prediction, is_measured=False))}


def ask_planner(machines: ClusterProfile, asked: Asked) -> Answer:
    """Return the answer for these machines.

    Raises:
        ConfigError: the question is not valid.
        ModelNotFound: there is no such model.
    """
    if asked.what_fits:
        popular = ((known.name, sizes_of(known.folder, known.name, machines)) for known in popular_models())
        return what_if(popular, machines, asked.question, remarks=remarks_on_described(machines.nodes))
    if asked.model is None:
        raise ConfigError(
            "No model is given; name one, such as llama-70b, or list popular ones with --what-fits."
        )
    described = find_described(asked.model, asked.weights)
    sizes = sizes_of(described.folder, described.name, machines, asked.weights)
    named = [(described.name, sizes)]
    remarks = (*described.remarks, *remarks_on_described(machines.nodes))
    return what_if(named, machines, asked.question, remarks=remarks)


def ask_running(
    url: str, asked: Asked, given: Mapping[str, object], cacert: Path | None, api_key: str | None = None
) -> Answer:
    """Return the answer of a running head for its machines.

    Args:
        url: address of the head.
        asked: the question.
        given: fields of the request that override how the head plans; None for its own.
        cacert: file of a certificate to trust.
        api_key: API key to send; the environment's by default.

    Raises:
        ConfigError: it does not answer, or not as this version does, or it refuses the question.
    """
    question = asked.question
    body = {
        "model": asked.model,
        "add": question.added,
        "link": question.link,
        "context_tokens": question.context_tokens,
        "curves": question.with_curves,
        "what_fits": asked.what_fits,
        **given,
    }
    sent = {name: value for name, value in body.items() if value is not None}
    return ask_running_head(url, "/cluster/what-if", sent, Answer, cacert, api_key)


def fields_for_head(
    flags: Mapping[str, object], request: PlanRequest, kv_bits: Sequence[int] | None
) -> Mapping[str, object]:
    """Return the fields of a question to a head that override how it plans; None for those that are not given."""
    return {
        "kv_bits": kv_bits,
        "prompt_tokens": None if flags["expected_prompt"] is None else request.prompt_tokens,
        "answer_tokens": None if flags["expected_answer"] is None else request.answer_tokens,
        "users": None if flags["expected_users"] is None else request.users,
        "optimize_for": flags["optimize_for"],
    }


def show_answer(answer: Answer, *, as_json: bool, plot: bool, plot_file: Path | None) -> None:
    """Print an answer as a table or as JSON, and plot it if that is asked for.

    Raises:
        ConfigError: the picture cannot be written.
    """
    if as_json:
        print(json.dumps(asdict(answer), indent=1))
    else:
        for remark in answer.remarks:
            print(remark)
        _show(answer)
        if plot and answer.curves is not None:
            for line in _plot(answer.curves):
                print(line)
    if plot_file is not None:
        _write_plot(plot_file, answer.curves)


# ---- the table


def _show(answer: Answer) -> None:
    console = report_console()
    outcomes = answer.outcomes
    models = {one.model for one in outcomes}
    if len(models) == 1 and not models & {one.label for one in outcomes}:
        console.print(f"{models.pop()}\n")
    for line in _table([_TITLES, *(_row(one, is_one_of_many=len(outcomes) > _FEW_ROWS) for one in outcomes)]):
        console.print(line)
    if len(outcomes) <= _FEW_ROWS:
        for one in outcomes:
            if not one.fits:
                console.print(one.why)
        split = (left.partition(": ") for left in outcomes[-1].left_out)
        for names, _, why in left_out_together((name, why) for name, _, why in split):
            console.print(f"Without layers: {names}: {why}.")
    console.print(f"\n{_request(outcomes)} {_whose_ranges(outcomes)}".rstrip())


_TITLES = ("", "tokens/s", "first token, s", "request, s", "users", "tokens/s, all", "memory", "layers")


def _row(one: Outcome, *, is_one_of_many: bool) -> tuple[str, ...]:
    memory = f"{one.memory_bytes / 1e9:.1f} GB"
    if not one.fits:
        # Where rows are many, a few words say why.
        return (
            one.label,
            "does not fit",
            "",
            "",
            "",
            "",
            memory,
            _shortly(one.why) if is_one_of_many else "",
        )
    users = f"{one.users}+" if one.users >= MOST_USERS else str(one.users)
    times = map(_range, (one.tokens_per_s_range, one.first_token_s_range, one.request_s_range))
    together = f"{one.users_tokens_per_s:.3g}"
    if one.fastest_users != one.users:
        together += f" with {one.fastest_users}"
    return (one.label, *times, users, together, memory, ", ".join(one.stages))


def _shortly(why: str) -> str:
    """Return what is missing of a reason, or else its first sentence."""
    found = _SHORTLY.search(why)
    return found[0] if found else why.partition(". ")[0].rstrip(".")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table as wide as its content: the first and last columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.ljust(width) if place in (0, len(row) - 1) else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _request(outcomes: Sequence[Outcome]) -> str:
    """Return sentences on the request and the users of the rows."""
    contexts = _either(one.context_tokens for one in outcomes)
    prompts, answers = (
        _either(each)
        for each in zip(*((one.prompt_tokens, one.answer_tokens) for one in outcomes), strict=True)
    )
    at_once = max(one.at_once for one in outcomes)
    several = (
        f" {at_once} users send one at once: `tokens/s` is for each, and the times are the last one's."
        if at_once > 1
        else ""
    )
    return (
        f"A request has a prompt of {prompts} tokens and an answer of {answers}.{several} Each user has a context of {contexts} "
        "tokens; `users` is the number that fits into the memory at the same time."
    )


def _either(counts: Iterable[int]) -> str:
    return " or ".join(f"{count:,}" for count in sorted(set(counts)))


def _whose_ranges(outcomes: Iterable[Outcome]) -> str:
    """Return a sentence on the machines whose predictions are off by as much as the ranges."""
    match {one.is_measured for one in outcomes if one.fits}:
        case kinds if len(kinds) > 1:
            return "Ranges depend on whether the machines of a row were measured."
        case kinds if not kinds:
            return ""
        case kinds if True in kinds:
            return "Ranges are those of measured machines."
        case _:
            return "Ranges are those of machines that were not measured."


def _range(pair: tuple[float, float]) -> str:
    low, high = (f"{value:,.0f}" if value >= _LARGE else f"{value:.3g}" for value in pair)
    return f"{low} - {high}"


# ---- the plot


def _tokens(count: int) -> str:
    return f"{count // _KILO}k" if count % _KILO == 0 else f"{count:,}"


def _parts(curves: Curves) -> Iterator[tuple[str, Sequence[Point], Callable[[int], str]]]:
    yield f"tokens/s of one user over the context, {curves.label}", curves.by_context, _tokens
    yield f"tokens/s of all users over their number, {curves.label}", curves.by_users, str


def _plot(curves: Curves) -> Iterator[str]:
    """Yield the lines of bars in plain characters."""
    for title, points, name in _parts(curves):
        yield f"\n{title}"
        most = max((point.tokens_per_s for point in points), default=1.0)
        for point in points:
            bar = "#" * max(1, round(_BAR * point.tokens_per_s / most))
            yield f"{name(point.at):>6} {bar:<{_BAR}} {point.tokens_per_s:.3g}"


_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 220, 56, 32


def _write_plot(path: Path, curves: Curves | None) -> None:
    """Write both curves as an SVG picture.

    Raises:
        ConfigError: nothing fits, or the file cannot be written.
    """
    if curves is None:
        raise ConfigError(f"There is nothing to plot into {path}, because the model does not fit.")
    body = "".join(
        f'<g transform="translate(0 {number * _HEIGHT})">{"".join(_drawn(*part))}</g>'
        for number, part in enumerate(_parts(curves))
    )
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {2 * _HEIGHT}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot-file is {path}, which cannot be written: {error.strerror}.") from error


def _drawn(title: str, points: Sequence[Point], name: Callable[[int], str]) -> Iterator[str]:
    """Yield the elements of one diagram: equal steps across, tokens/s from 0 upwards."""
    bottom, right = _HEIGHT - 32, _WIDTH - 24
    most = max((point.tokens_per_s for point in points), default=1.0)
    step = (right - _LEFT) / max(1, len(points) - 1)
    at = [
        (_LEFT + place * step, bottom - (bottom - _TOP) * point.tokens_per_s / most)
        for place, point in enumerate(points)
    ]
    yield f'<text x="{_LEFT}" y="18">{escape(title)}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="gray"/>'
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" stroke="#2563eb" stroke-width="2"/>'
    for (x, y), point in zip(at, points, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#2563eb"><title>{point.tokens_per_s:.3g}</title></circle>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{name(point.at)}</text>'
    for share in (0.0, 0.5, 1.0):
        y = bottom - (bottom - _TOP) * share
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{most * share:.3g}</text>'
