"""Links between machines: measured before planning, shown with the plan, reported with the traffic over them."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.loopback_cluster import completion, running_cluster
from tests.eventually import eventually
from tests.machines import free_pair_of_ports


def test_links_are_measured_shown_with_the_plan_and_reported_while_serving(
    tiny_model: Path, tmp_path: Path
) -> None:
    port, lines = free_pair_of_ports(), list[str]()
    with running_cluster(
        tiny_model, 2, tmp_path, port, "--strategy", "uniform", on_line=lines.append
    ) as server:
        assert completion(server)
        (measured,) = [line for line in lines if line.startswith("Measured links: ")]
        # Workers report each second what they have sent.
        status = eventually(server.status, lambda status: any(link.get("frames") for link in status["links"]))
        there, back = sorted(status["links"], key=lambda link: not link["carries_activations"])
        nodes = [device["node"] for device in status["devices"]]
        assert [there["from"], there["to"]] == [back["to"], back["from"]] == nodes
        assert all(node in measured for node in nodes)
        for link in (there, back):
            assert link["problem"] is None
            assert link["round_trip_us"] > 0
            assert link["bytes_per_s"] > 0
        assert (there["compresses"], back["compresses"]) == (False, False)
        assert there["frames"] > 0
        assert there["tensor_bytes"] == there["sent_bytes"] > 0
        assert back["why"] == "no stage of a model uses it"
        assert server.stop() == 0
    kept = [tmp_path / folder / "node" / "links.json" for folder in ("state", "node-1/state")]
    assert all(path.is_file() for path in kept)
