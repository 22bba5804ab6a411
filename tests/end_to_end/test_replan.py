"""Models that move to a better split of their layers while they serve, and answers that do not change."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.cgroups import limited, skip_without_groups
from tests.end_to_end.loopback_cluster import end_head_members, joining_head, running_cluster, running_head
from tests.end_to_end.test_drain import (
    FLAGS,
    STREAMS,
    TOKENS,
    Streams,
    ask,
    body_of,
    expected,
    moved_tokens,
    nodes,
    nodes_in_use,
)
from tests.eventually import eventually
from tests.faults.injection import stopping_at_steps
from tests.machines import free_pair_of_ports
from tests.processes import Server, client_of, give_profile, joining

from mlx_ring.agent.profiling import PROFILE_FILE

pytestmark = pytest.mark.machines

AUTO = ("--strategy", "auto", *FLAGS[2:], "--learn-speeds", "off")


SLOW_PROMPT_FLOPS = 1e8
"""Speed of products at which prompts take most of a request's time on every machine, so that each further stage pays."""
SLOW_TO_COMPUTE = 0.002
"""Factor of speed at which computing takes long compared to the sums of a group, also when a busy machine sums slowly."""


def join_faster(
    stack: ExitStack,
    port: int,
    token: str,
    folder: Path,
    factor: float,
    *flags: str,
    flops: float | None = None,
) -> None:
    """Let a machine join whose profile says that it is faster than this one by a factor."""
    give_faster_profile(folder / "state", factor, flops=flops)
    stack.enter_context(joining(f"127.0.0.1:{port}", "--token", token, *flags, folder=folder))


def give_faster_profile(
    state: Path, factor: float, *, cores: int | None = None, flops: float | None = None
) -> None:
    """Write a profile which says that the machine of a state folder is faster by a factor.

    It also says how many cores the machine has, and its speed of products. Where these are None, they are this machine's.
    """
    give_profile(state, speed=factor)
    kept = json.loads((state / PROFILE_FILE).read_text())
    profile = kept["profile"]
    for rate in profile["rates"]:
        rate["flops"] = flops or rate["flops"]
    profile["cores"] = cores or profile["cores"]
    (state / PROFILE_FILE).write_text(json.dumps(kept))


def replan(server: Server, **body: object) -> dict[str, Any]:
    answer = server.http.post("/cluster/replan", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for_proposal(server: Server, machines: int) -> None:
    """Wait until so many machines are there, and a split over them is proposed: a new one first reports its memory."""
    eventually(lambda: len(nodes(server)), lambda count: count == machines)
    eventually(lambda: replan(server, dry_run=True)["proposal"], lambda proposal: proposal is not None)


def test_model_moves_to_a_faster_machine_that_joins_and_no_answer_changes(tmp_path: Path) -> None:
    tokens: list[str] = []
    with ExitStack() as stack:
        port = free_pair_of_ports()

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            if found and not tokens:
                tokens.append(token.split()[0])
                join_faster(stack, port, tokens[0], tmp_path / "node-1", 1.0)

        stack.callback(end_head_members, tmp_path)
        server = stack.enter_context(running_head("demo", 2, tmp_path, port, *AUTO, on_line=read))
        texts, used = expected(server), nodes_in_use(server)
        before = {node["id"] for node in nodes(server)}
        join_faster(stack, port, tokens[0], tmp_path / "node-2", 20.0)
        wait_for_proposal(server, 3)
        (faster,) = {node["id"] for node in nodes(server)} - before

        only_shown = replan(server, dry_run=True)
        assert only_shown["moved"] is None
        assert nodes_in_use(server) == used
        proposal = only_shown["proposal"]
        assert (proposal["way"], proposal["why"]) == ("beside", None)
        assert proposal["gain"] > 0.15
        assert proposal["planned"]["request_s"] < proposal["loaded"]["request_s"]

        streams = Streams(server)
        moved = replan(server)["moved"]
        assert streams.finish() == texts
        assert (moved["model"], moved["way"], moved["why"]) == ("demo", "beside", None)
        assert moved["requests"] <= STREAMS
        assert faster in nodes_in_use(server)
        assert expected(server) == texts
        again = replan(server, dry_run=True)
        assert (again["proposal"], again["moved"]) == (None, None)
        assert server.http.post("/cluster/replan", json={"model": "other"}).status_code == 404


TRUSTED = ("--trusted-interface", "lo" if sys.platform == "linux" else "lo0")


@pytest.mark.parametrize(("way", "flags"), [("beside", ()), ("after", ("--model-memory", "30MiB"))])
def test_model_moves_to_a_group_that_shares_its_layers_and_no_answer_changes(
    tmp_path: Path, way: str, flags: Sequence[str]
) -> None:
    tokens: list[str] = []
    with ExitStack() as stack:
        port = free_pair_of_ports()

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            if found and not tokens:
                tokens.append(token.split()[0])
                join_faster(stack, port, tokens[0], tmp_path / "node-1", SLOW_TO_COMPUTE / 20)

        stack.callback(end_head_members, tmp_path)
        head = running_head("demo", 2, tmp_path, port, *AUTO, *TRUSTED, *flags, on_line=read)
        give_faster_profile(tmp_path / "state", SLOW_TO_COMPUTE)
        server = stack.enter_context(head)
        texts, before = expected(server), {node["id"] for node in nodes(server)}
        assert [len(stage["ranks"]) for stage in stages_of(server)] == [1]
        join_faster(stack, port, tokens[0], tmp_path / "node-2", SLOW_TO_COMPUTE, *TRUSTED)
        wait_for_proposal(server, 3)
        (new,) = {node["id"] for node in nodes(server)} - before
        proposal = replan(server, dry_run=True)["proposal"]
        (stage,) = proposal["planned"]["stages"]
        assert new in stage["nodes"]
        assert len(stage["nodes"]) == 2
        assert (proposal["way"], proposal["needs_pause"]) == (way, way == "after")
        streams = Streams(server)
        moved = replan(server, pause=way == "after")["moved"]
        assert streams.finish() == texts
        assert moved["way"] == way
        assert [len(stage["ranks"]) for stage in stages_of(server)] == [2]
        assert expected(server) == texts
        assert replan(server, dry_run=True)["proposal"] is None


def test_ranks_of_one_machine_spread_over_another_that_joins(tmp_path: Path) -> None:
    tokens: list[str] = []
    with ExitStack() as stack:
        port, leaving = free_pair_of_ports(), stack.enter_context(ExitStack())

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            if found and not tokens:
                tokens.append(token.split()[0])
                join_faster(leaving, port, tokens[0], tmp_path / "node-1", SLOW_TO_COMPUTE, *TRUSTED)

        stack.callback(end_head_members, tmp_path)
        head = running_head("demo", 2, tmp_path, port, *AUTO, "--tp", "2", *TRUSTED, on_line=read)
        give_faster_profile(tmp_path / "state", SLOW_TO_COMPUTE, cores=1)
        server = stack.enter_context(head)

        def homes() -> set[str]:
            instances = server.status()["instances"]
            return {rank["node"] for each in instances for stage in each["stages"] for rank in stage["ranks"]}

        texts = expected(server)
        assert len(homes()) == 2
        leaving.close()
        eventually(homes, lambda found: len(found) == 1, pause_s=0.5)
        assert expected(server) == texts
        join_faster(stack, port, tokens[0], tmp_path / "node-2", SLOW_TO_COMPUTE, *TRUSTED)
        eventually(lambda: [each["state"] for each in nodes(server)].count("attending") == 2, pause_s=0.5)
        proposal = replan(server, dry_run=True)["proposal"]
        assert (proposal["way"], len(set(proposal["planned"]["stages"][0]["nodes"]))) == ("beside", 2)
        streams = Streams(server)
        assert replan(server)["moved"]["way"] == "beside"
        assert streams.finish() == texts
        assert len(homes()) == 2
        assert expected(server) == texts


NO_SECOND = (
    *("--strategy", "uniform", *FLAGS[2:], "--learn-speeds", "off", "--model-memory", "30MiB"),
    *("--optimize-for", "throughput", "--expected-users", "4", "--replicas", "1"),
)
"""Flags with which the models have memory for one instance, but not for two, and each machine has as many layers."""


def stages_of(server: Server) -> list[dict[str, Any]]:
    (instance,) = server.status()["instances"]
    return instance["stages"]


@contextmanager
def growing_cluster(folder: Path) -> Generator[tuple[Server, Callable[[], None]]]:
    """Run a model on two machines that have no room for a second instance; yield what lets a faster third one join."""
    tokens: list[str] = []
    with ExitStack() as stack:
        port = free_pair_of_ports()

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            if found and not tokens:
                tokens.append(token.split()[0])
                join_faster(stack, port, tokens[0], folder / "node-1", 1.0, flops=SLOW_PROMPT_FLOPS)

        stack.callback(end_head_members, folder)
        head = running_head("demo", 2, folder, port, *NO_SECOND, on_line=read)
        give_faster_profile(folder / "state", 1.0, flops=SLOW_PROMPT_FLOPS)
        server = stack.enter_context(head)

        def join() -> None:
            join_faster(stack, port, tokens[0], folder / "node-2", 20.0, flops=20 * SLOW_PROMPT_FLOPS)
            wait_for_proposal(server, 3)

        yield server, join


def test_workers_load_only_the_layers_that_they_gain_and_no_answer_changes(tmp_path: Path) -> None:
    with growing_cluster(tmp_path) as (server, join):
        texts, before = expected(server), stages_of(server)
        name = server.status()["instances"][0]["name"]
        join()
        proposal = replan(server, dry_run=True)["proposal"]
        assert proposal["way"] == "ranges"
        assert "--model-memory" in proposal["why"]
        assert not proposal["needs_pause"]

        with asking(server, texts):
            moved = replan(server)["moved"]
        assert moved["way"] == "ranges"
        assert 0 < moved["requests"] <= STREAMS
        assert moved["pause_s"] < moved["seconds"]
        after = stages_of(server)
        assert len(after) == 3
        assert server.status()["instances"][0]["name"] == name
        pids = {stage["node"]: stage["pid"] for stage in after}
        assert {stage["node"]: stage["pid"] for stage in before}.items() <= pids.items()
        # Only the layers that a machine did not have were read.
        assert moved["loaded_bytes"] == pytest.approx(proposal["gained_bytes"], rel=0.02)
        memory = [(stage["memory"]["used"], stage["memory"]["promised"]) for stage in after]
        for used, promised in memory:
            assert used["weight_bytes"] == pytest.approx(promised["weight_bytes"], rel=0.05)
        assert 0 < moved["loaded_bytes"] < 0.8 * sum(used["weight_bytes"] for used, _ in memory)
        assert moved_tokens(server) > 0
        assert expected(server) == texts
        assert replan(server, dry_run=True)["proposal"] is None


def test_conversation_at_rest_continues_on_other_stages_without_being_computed(tmp_path: Path) -> None:
    """Let nothing else move: what that took might make it slower to move this than to compute it."""
    with growing_cluster(tmp_path) as (server, join):
        resting = "They talk for hours. " * 200
        text, computed = ask(server, resting)
        assert computed > 1024
        join()
        assert replan(server)["moved"]["way"] == "ranges"
        assert len(stages_of(server)) == 3
        assert eventually(lambda: moved_tokens(server), lambda tokens: tokens > 0) >= computed
        assert ask(server, resting) == (text, 1)
        # Nothing is left of the stages before.
        (instance,) = server.status()["instances"]
        cached = server.http.get("/cache/stats").json()["prefix_cache"]
        assert cached["entries"] == 1
        assert all(stage["memory"]["used"]["kv_bytes"] > 0 for stage in instance["stages"])


def test_a_machine_that_was_lost_gets_its_layers_again_and_no_answer_changes(tmp_path: Path) -> None:
    joined: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        port = free_pair_of_ports()

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            if found and not joined:
                for number in (1, 2):
                    machine = joining_head(port, token.split()[0], tmp_path / f"node-{number}")
                    joined.append(stack.enter_context(machine))

        stack.callback(end_head_members, tmp_path)
        server = stack.enter_context(running_head("demo", 3, tmp_path, port, *NO_SECOND, on_line=read))
        texts, before = expected(server), stages_of(server)
        assert len(nodes_in_use(server)) == 3
        lost = psutil.Process(joined[-1].pid)
        for process in (lost, *lost.children(recursive=True)):
            process.kill()
        eventually(lambda: nodes_in_use(server), lambda used: len(used) == 2)
        server.wait_for_health(200)
        makeshift = stages_of(server)
        assert [stage["layers"] for stage in makeshift] == [stage["layers"] for stage in before]

        stack.enter_context(joining(f"127.0.0.1:{port}", folder=tmp_path / "node-2"))
        (home,) = {stage["node"] for stage in before} - {stage["node"] for stage in makeshift}
        proposal = eventually(
            lambda: replan(server, dry_run=True)["proposal"],
            lambda proposal: proposal is not None and proposal["unused"],
        )
        assert proposal["way"] == "ranges"
        with asking(server, texts):
            moved = replan(server)["moved"]
        assert moved["way"] == "ranges"
        after = stages_of(server)
        assert [(stage["node"], stage["layers"]) for stage in after] == [
            (stage["node"], stage["layers"]) for stage in before
        ]
        # Every worker stays but the one whose place was a makeshift.
        stayed = {stage["pid"] for stage in makeshift} & {stage["pid"] for stage in after}
        assert stayed == {stage["pid"] for stage in after if stage["node"] != home}
        assert expected(server) == texts
        assert replan(server, dry_run=True)["proposal"] is None


@pytest.mark.faults
def test_a_worker_that_dies_in_the_pause_is_replaced_and_no_answer_changes(tmp_path: Path) -> None:
    with stopping_at_steps() as hooks, growing_cluster(tmp_path) as (server, join):
        texts, before = expected(server), stages_of(server)
        join()
        (hooks / f"change-{before[-1]['pid']}").touch()
        with asking(server, texts):
            moved = replan(server)["moved"]
        assert moved["way"] == "ranges"
        after = stages_of(server)
        assert [stage["layers"] for stage in after] != [stage["layers"] for stage in before]
        pids = {stage["pid"] for stage in after}
        assert before[0]["pid"] in pids
        assert before[-1]["pid"] not in pids
        assert expected(server) == texts


@pytest.mark.faults
def test_the_present_split_serves_on_if_a_worker_cannot_load_in_the_pause(tmp_path: Path) -> None:
    with stopping_at_steps() as hooks, growing_cluster(tmp_path) as (server, join):
        texts, before = expected(server), stages_of(server)
        name = server.status()["instances"][0]["name"]
        join()
        (hooks / f"drop-{before[-1]['pid']}").touch()
        with asking(server, texts):
            answer = server.http.post("/cluster/replan", json={"pause": True}, timeout=120)
        assert answer.status_code >= 400
        assert "No memory is left" in answer.text
        after = stages_of(server)
        assert [(each["node"], each["layers"]) for each in after] == [
            (each["node"], each["layers"]) for each in before
        ]
        # Only the worker that had dropped its layers is another one.
        assert after[0]["pid"] == before[0]["pid"]
        assert after[-1]["pid"] != before[-1]["pid"]
        assert server.status()["instances"][0]["name"] == name
        assert expected(server) == texts


@pytest.mark.faults
def test_no_worker_is_left_where_a_stage_is_placed_on_the_way_back_from_a_change(tmp_path: Path) -> None:
    joined: dict[int, subprocess.Popen[str]] = {}
    with stopping_at_steps() as hooks, ExitStack() as stack:
        port, tokens = free_pair_of_ports(), list[str]()

        def join(number: int) -> None:
            flags = ("--spare-worker", "off")
            machine = joining_head(port, tokens[0], tmp_path / f"node-{number}", *flags)
            joined[number] = stack.enter_context(machine)

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            if found and not tokens:
                tokens.append(token.split()[0])
                join(1)
                join(2)

        stack.callback(end_head_members, tmp_path)
        server = stack.enter_context(running_head("demo", 3, tmp_path, port, *NO_SECOND, on_line=read))
        texts = expected(server)
        lost = psutil.Process(joined[2].pid)
        for process in (lost, *lost.children(recursive=True)):
            process.kill()
        eventually(lambda: nodes_in_use(server), lambda used: len(used) == 2)
        server.wait_for_health(200)
        makeshift = stages_of(server)
        homes = [stage["node"] for stage in makeshift]
        for stage in makeshift:
            if homes.count(stage["node"]) == 2:
                (hooks / f"drop-{stage['pid']}").touch()
        join(3)
        join(4)
        eventually(
            lambda: replan(server, dry_run=True)["proposal"],
            lambda proposal: proposal is not None and len(proposal["planned"]["stages"]) == 4,
            pause_s=1.0,
        )
        with asking(server, texts):
            answer = server.http.post("/cluster/replan", json={"pause": True}, timeout=120)
        assert answer.status_code >= 400
        assert "No memory is left" in answer.text
        after = stages_of(server)
        assert [each["layers"] for each in after] == [each["layers"] for each in makeshift]
        # Lost stages are placed again where workers of the next plan were.
        assert len(nodes_in_use(server)) == 3
        agents = [psutil.Process(joined[number].pid) for number in (1, 3, 4)]
        workers = {worker.pid for agent in agents for worker in agent.children(recursive=True)}
        assert workers <= {each["pid"] for each in after}


def streamed(client: httpx.Client, number: int) -> str:
    """Return the text of a stream, with what ends it too early."""
    body, parts = body_of(number, TOKENS, stream=True), list[str]()
    with client.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                parts.append(event["choices"][0]["text"] if "choices" in event else line)
    return "".join(parts)


class Askers:
    """Clients that stream the same answers again and again, and compare each with the first one."""

    def __init__(self, server: Server, texts: Sequence[str]) -> None:
        self.answers = 0
        self.differing: list[str] = []
        self._has_ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(server, number, text))
            for number, text in enumerate(texts)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, server: Server, number: int, text: str) -> None:
        with client_of(str(server.http.base_url)) as client:
            while not self._has_ended.is_set():
                if (answer := streamed(client, number)) != text:
                    self.differing.append(answer)
                self.answers += 1

    def end(self) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def asking(server: Server, texts: Sequence[str]) -> Generator[None]:
    """Stream answers meanwhile. Afterwards, none has differed."""
    askers = Askers(server, texts)
    try:
        yield
    finally:
        askers.end()
    assert askers.answers
    assert not askers.differing


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_model_moves_once_away_from_a_machine_that_gets_a_quarter_of_a_core(tmp_path: Path) -> None:
    skip_without_groups()
    flags = ("--optimize-for", "throughput", "--expected-users", "4", "--replicas", "1", "--replan", "auto")
    with ExitStack() as stack:
        cluster = running_cluster(
            "demo", 2, tmp_path, free_pair_of_ports(), "--strategy", "auto", *FLAGS[2:], *flags
        )
        server = stack.enter_context(cluster)
        (slow,) = [node["id"] for node in nodes(server) if not node["is_head"]]
        layers = {stage["node"]: stage for stage in server.status()["instances"][0]["stages"]}
        assert slow in layers
        askers = Askers(server, expected(server))
        stack.callback(askers.end)
        group = stack.enter_context(limited(8 << 30, 0.25))
        group.add(layers[slow]["pid"])

        def instances() -> list[str]:
            return [instance["name"] for instance in server.status()["instances"]]

        (first,) = instances()
        (second,) = eventually(instances, lambda names: len(names) == 1 and names != [first], pause_s=0.5)
        stages = server.status()["instances"][0]["stages"]
        now = {stage["node"]: stage["layers"][1] - stage["layers"][0] for stage in stages}
        before = layers[slow]["layers"][1] - layers[slow]["layers"][0]
        assert now.get(slow, 0) < before
        # The machine is still slow: nothing moves back.
        count = askers.answers
        eventually(lambda: askers.answers >= count + 8 * STREAMS, pause_s=0.5)
        assert instances() == [second]
        askers.end()
        assert not askers.differing
