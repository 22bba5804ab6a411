"""Links in `/cluster/status`: their measurements, traffic and compression; and who may invite machines."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, get_type_hints

import pytest
from tests.api.clients import Api, refusal
from tests.api.twins import JOIN_TOKEN
from tests.default_settings import make_api_settings

from mlx_ring.api.ops.cluster import DeviceStatus, link_statuses
from mlx_ring.api.ops.status import (
    ClusterParts,
    NoProposalStatus,
    PlannedSplit,
    PlannedStage,
    ProposalStatus,
)
from mlx_ring.api.service import LinkInfo
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.core.worker_status import InstanceInfo, LinkUse, WorkerInfo, WorkerMemory
from mlx_ring.head.head import api_settings
from mlx_ring.settings.config import Settings

NOW = 1.8e9
NO_MEMORY: WorkerMemory = {
    "weight_bytes": 0,
    "device_memory_bytes": 0,
    "peak_memory_bytes": 0,
    "rss_bytes": 0,
    "kv_bytes": 0,
}
SHOWN_AS = {
    "memory": set(NO_MEMORY),
    "memory_bytes": {"device_limit_bytes"},
    "memory_left_bytes": {"device_left_bytes"},
}
"""Fields of `WorkerInfo` that have other names in a device's status."""
SHOWN_ELSEWHERE = {"sends", "group"}
"""Those that `links` and the stages of `instances` show."""
USE = LinkUse(compresses=True, why="8192 bytes become 6000", frames=3, tensor_bytes=24_576, sent_bytes=18_000)


def worker(stage: int, node: str, sends: LinkUse | None = None) -> WorkerInfo:
    layers = LayerRange(stage, stage + 1)
    return WorkerInfo(stage, 0, layers, node, 1, "cpu", "float32", True, "ready", NO_MEMORY, sends=sends)  # noqa: FBT003 - in the order of the fields


def link(source: str, target: str, problem: str = "") -> LinkInfo:
    return LinkInfo(source, target, 0.00031, 1.2e9, NOW - 60, problem)


def instance(*workers: WorkerInfo) -> InstanceInfo:
    return InstanceInfo("demo", 1, 2, workers)


def test_a_device_s_status_has_every_field_of_its_worker() -> None:
    names = {each.name for each in fields(WorkerInfo)} - SHOWN_ELSEWHERE
    shown = get_type_hints(DeviceStatus).keys()
    assert {name for name in names if not SHOWN_AS.get(name, {name}) <= shown} == set()


def test_link_has_its_measurements_and_their_age() -> None:
    (status,) = link_statuses([link("a", "b")], [], NOW)
    assert status == {
        "from": "a",
        "to": "b",
        "problem": None,
        "round_trip_us": 310.0,
        "bytes_per_s": 1_200_000_000,
        "measured_s_ago": 60.0,
        "measured_at": NOW - 60,
        "carries_activations": False,
        "compresses": False,
        "why": "no stage of a model uses it",
    }


def test_link_with_activations_reports_compression_and_its_reason() -> None:
    there, back = link_statuses(
        [link("a", "b"), link("b", "a")], [instance(worker(0, "a", USE), worker(1, "b"))], NOW
    )
    assert (there["carries_activations"], there["compresses"], there["why"]) == (True, True, USE.why)
    assert (there.get("frames"), there.get("tensor_bytes"), there.get("sent_bytes")) == (3, 24_576, 18_000)
    assert (back["carries_activations"], back["compresses"]) == (False, False)


def test_layers_move_away_from_a_machine_that_is_drained() -> None:
    answer = Api().post("/cluster/drain", {"node": "studio"})
    assert answer.status_code == 200
    (moved,) = answer.json()["moved"]
    assert (moved["way"], moved["requests"], moved["seconds"], moved["why"]) == ("beside", 2, 1.25, None)
    assert Api().post("/cluster/readmit", {"node": "studio"}).json() == {"node": "studio"}
    _, message = refusal(Api().post("/cluster/drain", {"node": "mini"}), 400)
    assert "No machine is called mini: connected are studio." in message


def test_machine_whose_layers_fit_nowhere_else_keeps_them() -> None:
    api = Api()
    api.catalog.refusal = PlanError("There is no room for 4 layers.")
    _, message = refusal(api.post("/cluster/drain", {"node": "studio"}), 503)
    assert "no room for 4 layers" in message
    assert api.post("/cluster/drain", {"node": "studio", "force": True}).status_code == 200


def proposal(way: Literal["beside", "ranges", "after"]) -> ProposalStatus:
    """Return a better split that two machines share."""
    stages = [PlannedStage(nodes=["mini"], layers=(0, 5)), PlannedStage(nodes=["studio"], layers=(5, 8))]
    return ProposalStatus(
        model="",
        instance="twin-1",
        way=way,
        why=None if way == "beside" else "There is no room for both.",
        gain=0.25,
        load_s=3.0,
        pause_s={"beside": 0.0, "ranges": 1.0, "after": 3.0}[way],
        needs_pause=way == "after",
        gained_bytes=12_000_000 if way == "ranges" else None,
        loaded=PlannedSplit(stages=stages[:1], tokens_per_s=8.0, first_token_s=0.5, request_s=12.5),
        planned=PlannedSplit(stages=stages, tokens_per_s=10.0, first_token_s=0.4, request_s=10.0),
        is_due=True,
    )


def test_a_model_moves_to_a_better_split() -> None:
    api = Api()
    assert api.post("/cluster/replan", {}).json() == {"model": "org/twin", "proposal": None, "moved": None}
    api.catalog.proposal = proposal("beside")
    shown = api.post("/cluster/replan", {"dry_run": True}).json()
    assert (shown["moved"], shown["proposal"]["gain"], shown["proposal"]["model"]) == (None, 0.25, "org/twin")
    assert shown["proposal"]["planned"]["stages"][1] == {"nodes": ["studio"], "layers": [5, 8]}
    assert api.post("/cluster/replan", {"model": "org/twin"}).json()["moved"]["requests"] == 2
    api.catalog.proposal = proposal("after")
    _, message = refusal(api.post("/cluster/replan", {}), 409)
    assert message == "Answers would pause."
    assert api.post("/cluster/replan", {"pause": True}).json()["moved"]["why"] == "There is no room for both."
    refusal(api.post("/cluster/replan", {"model": "other"}), 404)


def test_status_says_why_no_split_is_looked_for() -> None:
    api = Api()
    assert api.get("/cluster/status").json()["no_proposals"] == []
    reason = "No other split of org/twin can be looked for: --tp gives each machine's part."
    refused = NoProposalStatus(model="org/twin", why=reason)
    api.catalog.parts = ClusterParts(no_proposals=[refused])
    assert api.get("/cluster/status").json()["no_proposals"] == [{"model": "org/twin", "why": reason}]


@pytest.mark.parametrize("path", ["/cluster/drain", "/cluster/readmit"])
def test_another_machine_needs_a_key_to_move_layers(path: str) -> None:
    stranger = Api(client="192.168.1.9")
    refusal(stranger.post("/cluster/replan", {}), 403)
    stranger = Api(client="192.168.1.9")
    _, message = refusal(stranger.post(path, {"node": "studio"}), 403)
    assert "192.168.1.9" in message
    keyed = Api(None, make_api_settings(api_keys=("k",)), client="192.168.1.9")
    assert keyed.post(path, {"node": "studio"}, authorization="Bearer k").status_code == 200


def test_only_this_machine_may_invite_another() -> None:
    answer = Api().post("/cluster/invite", {})
    assert answer.json()["commands"][0] == f"mlx-ring join 10.0.0.7:50051 --token {JOIN_TOKEN}"
    keyed = make_api_settings(api_keys=("k",))
    assert Api(settings=keyed).post("/cluster/invite", {}).status_code == 401
    stranger = Api(None, keyed, client="192.168.1.9")
    reply = stranger.post("/cluster/invite", {}, authorization="Bearer k")
    _, message = refusal(reply, 403)
    assert "192.168.1.9" in message
    assert JOIN_TOKEN not in reply.text


def test_status_lists_the_addresses_for_other_machines_and_phones() -> None:
    urls = ("http://mini.local:8100", "http://192.168.1.7:8100")
    assert Api(settings=make_api_settings(urls=lambda: urls)).get("/cluster/status").json()["urls"] == [*urls]
    assert Api().get("/cluster/status").json()["urls"] == []


@pytest.mark.parametrize(
    ("called", "shown"),
    [
        (".venv/bin/mlx-ring", ".venv/bin/mlx-ring"),
        ("/home/joe/bin/mlx-ring", "mlx-ring"),
        ("run.py", "mlx-ring"),
    ],
)
def test_status_has_the_program_as_it_was_called_but_no_folders_above(
    called: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [called])
    monkeypatch.setenv("PATH", "/nowhere")
    assert Api().get("/cluster/status").json()["program"] == shown
    monkeypatch.setattr("shutil.which", str)
    assert Api().get("/cluster/status").json()["program"] == "mlx-ring"


def options_for(client: str) -> list[str]:
    return Api(client=client).get("/cluster/status").json()["options"]


def test_status_has_the_options_of_the_start_without_keys_and_passwords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = (
        *("serve", "demo", "--stages", "2", "--port=8200", "-tp", "1", "--config", "ring.yaml"),
        *("--yield-to-user", "--no-join-lines", "--api-key", "s3cret", "--api-key=s3cret,other"),
        *("--ssl-keyfile-password", "s3cret", "--nodes", "1", "--stages=3", "--nodes", "2"),
        *("--more-models", "demo-moe", "--unknown", "s3cret"),
    )
    monkeypatch.setattr("sys.argv", ["mlx-ring", *given])
    assert options_for("127.0.0.1") == [
        *("--stages", "3", "--port", "8200", "--tp", "1", "--config", "ring.yaml", "--yield-to-user"),
        *("--api-key", "KEY", "--ssl-keyfile-password", "PASSWORD", "--nodes", "2"),
    ]
    monkeypatch.setattr("sys.argv", ["mlx-ring"])
    assert options_for("127.0.0.1") == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://traces:4318", "http://traces:4318"),
        ("https://me:s3cret@[fe80::1]:4318/v1", "https://[fe80::1]:4318"),
        ("http://me:p@s3cret@traces/v1", "http://traces"),
        ("https://traces/v1?api-key=s3cret", "https://traces"),
        ("https://traces/s3cret#s3cret", "https://traces"),
        ("http://me:s3cret/w@traces/v1", "URL"),
        ("http://me:12/s3cret@traces/v1", "URL"),
        ("http://me:12?s3cret@traces/v1", "URL"),
        ("http://me:12#s3cret@traces/v1", "URL"),
        ("me:s3cret@traces", "URL"),
        ("http://[s3cret", "URL"),
        ("", "URL"),
    ],
)
def test_status_has_the_scheme_host_and_port_of_a_url_alone(
    url: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = f"*,{url}"
    given = ("--otlp-traces-endpoint", url, "--allowed-origins", origins)
    monkeypatch.setattr("sys.argv", ["mlx-ring", "serve", "demo", *given])
    assert options_for("127.0.0.1") == [
        *("--otlp-traces-endpoint", shown, "--allowed-origins", f"*,{shown}"),
    ]


def test_only_clients_of_this_machine_see_absolute_paths_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = ("--state-dir", "/home/joe/x", "--config=~joe/ring.yaml", "--api-key-file", "/home/joe/keys")
    monkeypatch.setattr("sys.argv", ["mlx-ring", "serve", "demo", *folders, "--log-dir", "logs"])
    assert options_for("127.0.0.1") == [
        *("--state-dir", "/home/joe/x", "--config", "~joe/ring.yaml", "--api-key-file", "/home/joe/keys"),
        *("--log-dir", "logs"),
    ]
    elsewhere = ["--state-dir", "DIR", "--config", "FILE", "--api-key-file", "FILE", "--log-dir", "logs"]
    assert options_for("192.168.1.9") == elsewhere


def test_status_says_why_no_machine_can_join() -> None:
    alone = Api().get("/cluster/status").json()["join_refusal"]
    assert "one machine alone" in alone
    assert "--nodes 2" in alone
    joined = Api(settings=api_settings(Settings(nodes=2))).get("/cluster/status").json()
    assert joined["join_refusal"] is None


def test_link_without_a_report_of_its_worker_says_so() -> None:
    (status,) = link_statuses([link("a", "b")], [instance(worker(0, "a"), worker(1, "b"))], NOW)
    assert status["why"] == "nothing is known yet about the data sent"


def test_broken_link_has_its_problem_and_no_figures() -> None:
    (status,) = link_statuses([link("a", "b", "b did not answer")], [], NOW)
    assert status["problem"] == "b did not answer"
    assert "round_trip_us" not in status


def test_stages_on_one_node_use_no_link() -> None:
    (status,) = link_statuses([link("a", "b")], [instance(worker(0, "a"), worker(1, "a"))], NOW)
    assert status["carries_activations"] is False


def test_traffic_of_several_instances_is_added_up() -> None:
    little = LinkUse(compresses=False, why="little", frames=1, tensor_bytes=10, sent_bytes=10)
    instances = [instance(worker(0, "a", use), worker(1, "b")) for use in (USE, little)]
    (status,) = link_statuses([link("a", "b")], instances, NOW)
    assert (status.get("frames"), status.get("sent_bytes"), status["compresses"], status["why"]) == (
        4,
        18_010,
        True,
        USE.why,
    )
