"""Requests that are all at another moment when a fault happens, and the record of their answers."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import httpx
import psutil
from tests.eventually import eventually
from tests.faults.comparison import Judge
from tests.faults.dialects import DIALECTS, EMBEDDINGS, Answer, Question, ask
from tests.faults.injection import CHUNK, FAULTS, AtStep, Rank, Served, Stopped
from tests.faults.models import CHARACTERS

Moment = Literal[
    "decode", "grammar", "choices", "drafts", "penalties", "stop", "prefill", "queued", "embedding", "scored"
]
TOGETHER: Sequence[Moment] = (
    "decode", "grammar", "choices", "drafts", "penalties", "stop", "prefill", "queued",
)  # fmt: skip
"""Moments of requests that are disturbed at the same time, in the order in which they are sent."""
DRAFTS: Sequence[Moment] = ("drafts",)
"""A request alone, because rows get draft tokens only in small batches."""
SCORED: Sequence[Moment] = ("embedding", "scored")
"""Requests whose results come from their prompts' own positions. One is in a chunk of it, while the other one waits."""
MOMENTS: Sequence[Moment] = (*TOGETHER, *SCORED)
Form = tuple[str, str]
"""Dialect of a request, and its way: `streamed` or `whole`."""
WAYS = ("streamed", "whole")
PLACES = 8
"""Sequences that run at the same time: one for each moment and two for `choices`, so that the last one is queued."""
STOP_FROM, STOP_TOKENS = 8, 56
"""First token and number of tokens that match the stop string."""
_LENGTHS = dict(zip(MOMENTS, (24, 27, 30, 33, 42, 36, 150, 39, 153, 156), strict=True))
"""Lengths of prompts, by which a worker's sequences are recognized. Templates add a length that is no multiple of three."""
_SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 40, "maxLength": 60}},
    "required": ["text"],
    "additionalProperties": False,
}
_FORMS_OF_A_MOMENT = 3
"""Number of a server's forms of a moment above which others are used only to cover pairs. Each needs an undisturbed answer."""
_STOP_AT, _DRAFTS_BEFORE = 12, 200
"""Position in the answer of `stop` at which the long prompt and the queued request are sent.

An answer that is to have draft tokens is disturbed between these positions.
"""


def question_of(moment: Moment, stop: str = "") -> Question:
    """Return the request that is at a moment when a fault happens."""
    numbers, length = random.Random(moment), _LENGTHS[moment]
    letters = CHARACTERS if moment != "drafts" else "abc"
    prompt = "".join(numbers.choice(letters) for _ in range(length))
    seed = None if moment in ("drafts", "queued", "grammar") else numbers.randrange(2**40)
    most = {"decode": 160, "drafts": 240, "prefill": 32, "queued": 32, "scored": 32}
    return Question(
        prompt,
        max_tokens=most.get(moment, 80),
        seed=seed,
        stop=stop,
        schema=_SCHEMA if moment == "grammar" else None,
        choices=2 if moment == "choices" else 1,
        has_penalties=moment == "penalties",
        echoes=moment == "scored",
    )


_NEEDED = {"grammar": "schema", "choices": "choices", "stop": "stop", "scored": "echoes"}


def forms_of(moment: Moment) -> list[Form]:
    """Return the forms of dialects that have the field which a moment needs."""
    if moment == "embedding":
        return [(name, "whole") for name in EMBEDDINGS]
    dialects = [name for name, dialect in DIALECTS.items() if _NEEDED.get(moment) not in dialect.missing]
    return [(dialect, way) for dialect in dialects for way in WAYS]


class Cover:
    """Greedy choice of forms, so that each fault and each moment meets each dialect and each way."""

    def __init__(self, seed: int = 0) -> None:
        self._used = Counter[tuple[str, ...]]()
        self._random = random.Random(seed)

    def next(
        self, fault: str, moments: Sequence[Moment], known: Collection[tuple[Moment, Form]] = ()
    ) -> dict[Moment, Form]:
        """Return the form of each moment's request. Those in `known` have an undisturbed answer."""
        return {moment: self._choose(fault, moment, known) for moment in moments}

    def _choose(self, fault: str, moment: Moment, known: Collection[tuple[Moment, Form]]) -> Form:
        known_forms = {form for of, form in known if of == moment}
        has_enough = len(known_forms) >= _FORMS_OF_A_MOMENT

        def uses(form: Form) -> tuple[int, ...]:
            """Return the rank of a form, the lowest for the best."""
            counts = (self._used[part] for part in _parts_of(fault, moment, form))
            return self._used[fault, *form] > 0, has_enough and form not in known_forms, *counts

        forms = forms_of(moment)
        self._random.shuffle(forms)
        form = min(forms, key=uses)
        self._used.update(_parts_of(fault, moment, form))
        return form


def _parts_of(fault: str, moment: str, form: Form) -> tuple[tuple[str, ...], ...]:
    """Return the combinations that a choice covers, the most important first."""
    dialect, _ = form
    return (fault, dialect), (fault, *form), (moment, dialect), (moment, *form)


@dataclass(frozen=True, slots=True)
class Run:
    """A request during which a fault happened."""

    fault: str
    moment: Moment
    dialect: str
    way: str
    model: str
    topology: str
    was_hit: bool
    """True if the request was at its moment when the fault happened."""
    was_resumed: bool
    kind: str
    """`equal`, `tie`, `unexplained` or `failed`."""
    detail: str = ""
    position: int = -1
    """Position of its last step at the fault."""

    @property
    def says_so(self) -> bool:
        """True unless the answer was interrupted, and does not say so."""
        return self.was_resumed or not (self.was_hit and FAULTS[self.fault].interrupts)


@dataclass(slots=True)
class Ledger:
    """Record of all runs."""

    runs: list[Run] = field(default_factory=list[Run])
    controls: Counter[str] = field(default_factory=Counter[str])
    """Results of the undisturbed runs against each other."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))
    """Seconds of each disturbance, by fault."""

    def wrong(self) -> list[Run]:
        """Return the runs that ended with an error, differ without a tie, or do not say that they were interrupted."""
        return [run for run in self.runs if run.kind in ("failed", "unexplained") or not run.says_so]

    def hits(self) -> list[Run]:
        """Return the runs whose fault happened at their moment."""
        return [run for run in self.runs if run.was_hit]

    def uncovered(self, models: Sequence[str], topologies: Sequence[str]) -> list[tuple[str, str]]:
        """Return the pairs of a fault with a moment, a dialect, a model or a topology that no run has."""
        found = {(run.fault, part) for run in self.hits() for part in _parts(run)}
        parts = [*MOMENTS, *DIALECTS, *WAYS, *models, *topologies]
        return [(fault, part) for fault in FAULTS for part in parts if (fault, part) not in found]

    def table(self) -> Iterator[str]:
        """Yield the lines of a table of all faults."""
        columns = ("runs", "at moment", "resumed", "different", "ties", "unexplained", "failed", "seconds")
        yield f"{'fault':24}" + "".join(f"{name:>13}" for name in columns)
        for fault in FAULTS:
            runs = [run for run in self.runs if run.fault == fault]
            kinds = Counter(run.kind for run in runs)
            numbers = (
                len(runs),
                sum(run.was_hit for run in runs),
                sum(run.was_resumed for run in runs),
                *(len(runs) - kinds["equal"] - kinds["failed"], kinds["tie"], kinds["unexplained"]),
                kinds["failed"],
            )
            seconds = self.seconds[fault]
            mean = sum(seconds) / len(seconds) if seconds else 0.0
            yield f"{fault:24}" + "".join(f"{number:13}" for number in numbers) + f"{mean:13.1f}"
        yield f"undisturbed against itself: {dict(self.controls)}"


def _parts(run: Run) -> tuple[str, ...]:
    return (run.moment, run.dialect, run.way, run.model, run.topology)


@dataclass(slots=True)
class Disturber:
    """Disturbances of one server."""

    served: Served
    model: str
    judge: Judge
    cover: Cover
    ledger: Ledger
    seed: int = 0
    _expected: dict[tuple[Moment, Form], tuple[Question, Answer]] = field(
        default_factory=dict[tuple[Moment, Form], tuple[Question, Answer]]
    )

    # ---- undisturbed

    def expect(self, forms: Mapping[Moment, Form]) -> None:
        """Get the undisturbed answers that are not known yet."""
        missing = [key for key in forms.items() if key not in self._expected]
        questions = dict(zip(missing, self.served.threads.map(self._question, missing), strict=True))
        answers = {key: self._submit(key[1], question) for key, question in questions.items()}
        self._expected |= {key: (questions[key], answer.result()) for key, answer in answers.items()}

    def _question(self, key: tuple[Moment, Form]) -> Question:
        moment, (dialect, _) = key
        question = question_of(moment)
        if moment != "stop":
            return question
        (choice,) = self._ask((dialect, "whole"), question).choices
        return question_of(moment, choice.text[STOP_FROM : STOP_FROM + STOP_TOKENS])

    def _submit(self, form: Form, question: Question) -> Future[Answer]:
        return self.served.threads.submit(self._ask, form, question)

    def _ask(self, form: Form, question: Question) -> Answer:
        dialect, way = form
        url = self.served.server.url
        found = DIALECTS.get(dialect) or EMBEDDINGS[dialect]
        return ask(self.served.http, url, found, question, streams=way == "streamed")

    def check_again(self) -> None:
        """Ask everything again without a fault, and compare."""
        answers = {key: self._submit(key[1], question) for key, (question, _) in self._expected.items()}
        for (moment, form), answer in answers.items():
            question, expected = self._expected[moment, form]
            compared = self.judge.compare(question, self._prompt(form, question), expected, answer.result())
            self.ledger.controls[compared.kind] += 1

    def _prompt(self, form: Form, question: Question) -> list[int]:
        """Return the tokens of a question's prompt in a dialect."""
        messages = [{"role": "user", "content": question.prompt}]
        is_plain = form[0] in ("completions", *EMBEDDINGS)
        body = {"prompt": question.prompt} if is_plain else {"messages": messages}
        return self.served.threads.submit(self._post, "/tokenize", body).result().json()["tokens"]

    def _post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        return self.served.http.post(self.served.server.url + path, json=body).raise_for_status()

    # ---- disturbed

    def disturb(self, fault: str, moments: Sequence[Moment] = TOGETHER) -> None:
        """Let a fault happen while there is a request at each moment, and record their answers."""
        ranks = self.served.wait_until_ready()
        forms = self.cover.next(fault, moments, self._expected)
        self.expect(forms)
        self.seed += 1
        victim = self._victim(ranks, fault)
        began = time.monotonic()
        reach = {TOGETHER: self._reach_moments, DRAFTS: self._reach_drafts, SCORED: self._reach_scored}[
            moments
        ]
        answers, at = reach(forms, victim, lambda: FAULTS[fault].inject(self.served, victim))
        topology = _topology(ranks)
        for moment, answer in answers.items():
            was_hit, position = self._at_moment(moment, forms[moment], at)
            question, expected = self._expected[moment, forms[moment]]
            try:
                found = answer.result()
                prompt = self._prompt(forms[moment], question)
                compared = self.judge.compare(question, prompt, expected, found)
                kind, detail, was_resumed = compared.kind, compared.detail, found.was_paused
            except (AssertionError, httpx.HTTPError) as error:
                kind, detail, was_resumed = "failed", repr(error)[:500], False
            where = (self.model, topology, was_hit, was_resumed)
            self.ledger.runs.append(Run(fault, moment, *forms[moment], *where, kind, detail, position))
        self.ledger.seconds[fault].append(time.monotonic() - began)
        self.served.restore(victim, FAULTS[fault])
        if any(run.kind == "failed" for run in self.ledger.runs[-len(answers) :]):
            self.load_again()

    def load_again(self, nodes: AbstractSet[str] = frozenset()) -> None:
        """Kill all workers, because those that are left would stay where they are, and wait for others on all these nodes.

        If the head sees the first loss before the others, it replaces them one by one. Two may then be on one node.
        """
        while not nodes <= {rank.node for rank in self._load_others()}:
            self.served.forget_losses()

    def _load_others(self) -> Sequence[Rank]:
        """Kill all workers, and return those that serve next."""
        ended = set(self.served.wait_until_ready())
        for rank in ended:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.process.kill()
        return eventually(self.served.ranks, lambda ranks: ranks and ended.isdisjoint(ranks))

    def _victim(self, ranks: Sequence[Rank], fault: str) -> Rank:
        """Choose a worker, in turn; not one on the head's machine, if the machine is lost."""
        may_be_lost = [rank for rank in ranks if self.served.can_lose(rank)]
        choices = may_be_lost if FAULTS[fault].loses_machine else ranks
        return choices[self.seed % len(choices)]

    def _reach_moments(
        self, forms: Mapping[Moment, Form], victim: Rank, inject: Callable[[], None]
    ) -> tuple[dict[Moment, Future[Answer]], AtStep]:
        """Send the requests, stop the victim before the step at which all are at their moments, and cause the fault."""
        answers: dict[Moment, Future[Answer]] = {}

        def send(moment: Moment) -> None:
            answers[moment] = self._send(moment, forms[moment])

        stopped = Stopped(self.served.hook, victim.pid)
        try:
            length = self._prompt_length("stop", forms["stop"])
            stopped.set(length, length + _STOP_AT)
            for moment in TOGETHER[:-2]:
                send(moment)
            stopped.wait()
            for moment in TOGETHER[-2:]:
                with self._until_queued():
                    send(moment)
            length = self._prompt_length("prefill", forms["prefill"])
            stopped.set(length, CHUNK * (1 + self.seed % 4))
            at = stopped.wait()
            inject()
        finally:
            stopped.close()
        return answers, at

    def _reach_drafts(
        self, forms: Mapping[Moment, Form], victim: Rank, inject: Callable[[], None]
    ) -> tuple[dict[Moment, Future[Answer]], AtStep]:
        """Send the request alone, stop the victim before it verifies draft tokens, and cause the fault."""
        stopped = Stopped(self.served.hook, victim.pid)
        try:
            length = self._prompt_length("drafts", forms["drafts"])
            stopped.set(length, length + _STOP_AT, or_without_drafts=length + _DRAFTS_BEFORE)
            answer = self._send("drafts", forms["drafts"])
            at = stopped.wait()
            inject()
        finally:
            stopped.close()
        return {"drafts": answer}, at

    def _reach_scored(
        self, forms: Mapping[Moment, Form], victim: Rank, inject: Callable[[], None]
    ) -> tuple[dict[Moment, Future[Answer]], AtStep]:
        """Send one request, stop the victim in a chunk of its prompt, send the other one, and cause the fault."""
        first, second = SCORED if self.seed % 2 else reversed(SCORED)
        stopped = Stopped(self.served.hook, victim.pid)
        try:
            stopped.set(self._prompt_length(first, forms[first]), CHUNK * (1 + self.seed // 2 % 4))
            answers: dict[Moment, Future[Answer]] = {first: self._send(first, forms[first])}
            at = stopped.wait()
            with self._until_queued():
                answers[second] = self._send(second, forms[second])
            inject()
        finally:
            stopped.close()
        return answers, at

    def _send(self, moment: Moment, form: Form) -> Future[Answer]:
        return self._submit(form, self._expected[moment, form][0])

    @contextlib.contextmanager
    def _until_queued(self) -> Generator[None]:
        """Wait at the end until the engine has one more request. None may end meanwhile: the worker is stopped."""

        def count() -> float:
            return sum(map(self.served.metric, ("num_requests_running", "num_requests_waiting")))

        before = count()
        yield
        eventually(count, lambda number: number > before)

    def _prompt_length(self, moment: Moment, form: Form) -> int:
        return self._expected[moment, form][1].prompt_tokens

    def _at_moment(self, moment: Moment, form: Form, at: AtStep) -> tuple[bool, int]:
        """Return True if the request was at its moment, and the position of its last step; -1 if it had none."""
        length = self._prompt_length(moment, form)
        starts = at.starts(length)
        if not starts:
            return moment in ("queued", *SCORED), -1
        position = min(starts)
        answered = position - length
        holds = {
            "decode": answered > 0,
            "grammar": answered > 0,
            "choices": answered > 0 and len(starts) == 2,
            "drafts": answered > 0 and at.has_draft(length),
            "penalties": answered > 0,
            "stop": STOP_FROM < answered < STOP_FROM + STOP_TOKENS,
            "prefill": 0 < position < length,
            "queued": False,
            "embedding": 0 < position < length,
            "scored": 0 < position < length,
        }
        return holds[moment], position


def _topology(ranks: Sequence[Rank]) -> str:
    stages = len({rank.stage for rank in ranks})
    return f"{stages} stages" if stages == len(ranks) else f"tp {len(ranks) // stages}"
