"""Links between machines: measured before the plan is made, shown with it, and told with what is sent over them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from tests.end_to_end.test_cluster import completion, end_head_member, head
from tests.eventually import eventually
from tests.machines import free_pair_of_ports
from tests.processes import give_profile, joining


def test_links_are_measured_shown_with_the_plan_and_told_while_serving(
    tiny_model: Path, tmp_path: Path
) -> None:
    port, lines, joined = free_pair_of_ports(), list[str](), list[object]()
    with ExitStack() as stack:

        def on_line(line: str) -> None:
            lines.append(line)
            found = re.search(r"join \S+ --token (\S+)", line)
            if found and not joined:
                give_profile(tmp_path / "node" / "state")
                node = joining(f"127.0.0.1:{port}", "--token", found[1], folder=tmp_path / "node")
                joined.append(stack.enter_context(node))

        stack.callback(end_head_member, tmp_path)
        server = stack.enter_context(
            head(tiny_model, 2, tmp_path, port, "--strategy", "uniform", on_line=on_line)
        )
        assert completion(server)
        (told,) = [line for line in lines if line.startswith("Measured links: ")]
        # Workers tell each second what they have sent.
        status = eventually(server.status, lambda status: any(link.get("frames") for link in status["links"]))
        there, back = sorted(status["links"], key=lambda link: not link["carries_activations"])
        nodes = [device["node"] for device in status["devices"]]
        assert [there["from"], there["to"]] == [back["to"], back["from"]] == nodes
        assert all(node in told for node in nodes)
        for link in (there, back):
            assert link["problem"] is None
            assert link["round_trip_us"] > 0
            assert link["bytes_per_s"] > 0
        assert (there["compresses"], back["compresses"]) == (False, False)
        assert there["frames"] > 0
        assert there["tensor_bytes"] == there["sent_bytes"] > 0
        assert back["why"] == "no stage of a model uses it"
        assert server.stop() == 0
    kept = [tmp_path / folder / "node" / "links.json" for folder in ("state", "node/state")]
    assert all(path.is_file() for path in kept)


def test_compression_that_is_switched_off_says_so(tiny_model: Path, tmp_path: Path) -> None:
    port, joined = free_pair_of_ports(), list[object]()
    with ExitStack() as stack:

        def on_line(line: str) -> None:
            found = re.search(r"join \S+ --token (\S+)", line)
            if found and not joined:
                give_profile(tmp_path / "node" / "state")
                node = joining(f"127.0.0.1:{port}", "--token", found[1], folder=tmp_path / "node")
                joined.append(stack.enter_context(node))

        stack.callback(end_head_member, tmp_path)
        flags = ("--strategy", "uniform", "--link-compression", "off")
        server = stack.enter_context(head(tiny_model, 2, tmp_path, port, *flags, on_line=on_line))
        assert completion(server)
        (why,) = [link["why"] for link in server.status()["links"] if link["carries_activations"]]
        assert why == "--link-compression is off"
        assert server.stop() == 0
