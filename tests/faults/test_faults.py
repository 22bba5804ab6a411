"""Answers over faults of real workers, machines and links, which happen at chosen steps (`make faults`)."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.end_to_end.lan_cluster import LanCluster, make_cluster
from tests.faults.comparison import Judge
from tests.faults.disturbances import DRAFTS, PLACES, SCORED, Cover, Disturber, Ledger
from tests.faults.injection import CHUNK, FAULTS, ServedCluster, stopping_at_steps
from tests.faults.models import MODELS, write_model
from tests.namespaces import skip_without_namespaces
from tests.processes import give_profile

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
SERVED: dict[str, tuple[int, Sequence[str]]] = {
    "quantized": (2, ("--strategy", "uniform")),
    "recurrent": (2, ("--strategy", "uniform")),
    "experts": (2, ("--tp", "2")),
    "dense": (3, ("--strategy", "uniform")),
    "sliding": (3, ("--strategy", "uniform")),
}
"""Machines and flags by model. Machines join as they are needed."""
_APART = {"dense": (DRAFTS, SCORED)}
"""Moments that are also disturbed without the others, by model."""
TOPOLOGIES = ("2 stages", "3 stages", "tp 2")
_FLAGS = (
    *("--max-num-seqs", str(PLACES), "--prefill-chunk", str(CHUNK), "--prefix-cache", "off"),
    # The mean needs the hidden states of all positions, so a loss must neither repeat nor omit some.
    *("--trusted-interface", "fast0", "--max-model-len", "1024", "--pooling", "mean"),
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Generator[LanCluster]:
    """Make three machines."""
    skip_without_namespaces()
    folder = tmp_path_factory.mktemp("faults")
    with ExitStack() as stack:
        cluster = make_cluster(write_model(folder / "dense", "dense"), folder, stack, [None] * 3, fast=True)
        for machine in cluster.machines:
            give_profile(machine.state)
        cluster.join_flags = ("--trusted-interface", "fast0")
        yield cluster


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture(scope="module")
def cover() -> Cover:
    return Cover()


@pytest.fixture(scope="module")
def hook() -> Generator[Path]:
    """Let workers stop at steps; return the folder of their sockets."""
    with stopping_at_steps() as folder:
        yield folder


@contextmanager
def serving(hosts: LanCluster, hook: Path, model: str, folder: Path) -> Generator[ServedCluster]:
    """Serve a model on the machines of the table."""
    count, flags = SERVED[model]
    hosts.model = write_model(folder / model, model)
    new = [machine for machine in hosts.machines[1:count] if not machine.has_joined]
    server = hosts.serve(count, *_FLAGS, *flags, joining=new)
    try:
        with hosts.head.host.threads(16) as threads:
            yield ServedCluster(server, hook, hosts.http, threads, hosts)
        assert server.stop() == 0
    finally:
        # A test that was stopped in the middle must not disturb the next one.
        for machine in hosts.machines[:count]:
            machine.host.mend()
        for process in hosts.head.processes:
            process.kill()


@pytest.mark.parametrize("model", SERVED)
def test_answers_continue_as_if_no_fault_had_happened(
    model: str,
    hosts: LanCluster,
    hook: Path,
    ledger: Ledger,
    cover: Cover,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = len(ledger.runs)
    with serving(hosts, hook, model, tmp_path) as served:
        disturber = Disturber(served, model, Judge(hosts.model), cover, ledger)
        nodes = {rank.node for rank in served.wait_until_ready()}
        assert len(nodes) == SERVED[model][0]
        for fault in FAULTS:
            disturber.disturb(fault)
            if {rank.node for rank in served.wait_until_ready()} != nodes:
                disturber.load_again(nodes)
            for moments in _APART.get(model, ()):
                disturber.disturb(fault, moments)
                disturber.load_again(nodes)
        disturber.check_again()
    with capsys.disabled():
        print("", model, *ledger.table(), sep="\n")  # noqa: T201 - the table is the result
    wrong = [run for run in ledger.runs[before:] if run in ledger.wrong()]
    assert not wrong, "\n".join(json.dumps(asdict(run)) for run in wrong)


def test_every_fault_met_every_moment_dialect_model_and_topology(ledger: Ledger) -> None:
    if {run.model for run in ledger.runs} != set(MODELS):
        pytest.skip("it counts the runs of the tests before it, which did not all run")
    for part in ledger.uncovered(list(MODELS), TOPOLOGIES):
        print(part)  # noqa: T201 - a list is easier to read line by line
    assert ledger.uncovered(list(MODELS), TOPOLOGIES) == []
