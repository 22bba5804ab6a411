"""Commands on machines, here and over ssh."""

from __future__ import annotations

import sys

import pytest

from mlx_ring.cluster.lifecycle.arguments import Place
from mlx_ring.cluster.lifecycle.shell import check_exit, on_all, own_words, run_on, send_to, words_on
from mlx_ring.core.errors import HostFailed, HostUnreached
from mlx_ring.settings.devices_file import Device

HERE = Place(Device("here", "localhost"), "localhost", is_here=True)
MINI = Place(Device("mini", "me@mini"), "mini", is_here=False)


def test_ssh_gets_one_line_in_which_every_word_is_quoted() -> None:
    words = words_on(MINI, ["sh", "-c", 'echo "$HOME"', "it's"])
    assert words[:2] == ["ssh", "-T"]
    assert "BatchMode=yes" in words
    assert words[-3:] == ["--", "me@mini", """sh -c 'echo "$HOME"' 'it'"'"'s'"""]


def test_a_command_here_is_run_as_it_is_and_reads_what_it_is_told() -> None:
    assert run_on(HERE, [sys.executable, "-c", "print(input()[::-1])"], told="abc\n") == "cba\n"


def test_the_last_words_of_what_failed_are_the_sentence() -> None:
    script = "import sys; sys.exit('noise\\nmlx-ring: The port is held.')"
    with pytest.raises(HostFailed, match=r"^here: The port is held\.$"):
        run_on(HERE, [sys.executable, "-c", script])
    with pytest.raises(HostFailed, match=r"^here: it ended with code 3\.$"):
        run_on(HERE, [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(HostFailed, match="here: /no/such/program cannot be run"):
        run_on(HERE, ["/no/such/program"])


def test_a_machine_that_ssh_does_not_reach_is_named_with_the_reason() -> None:
    with pytest.raises(
        HostUnreached,
        match=r"^mini cannot be reached by `ssh me@mini`: Permission denied \(publickey\)\. Mend",
    ):
        check_exit(MINI, 255, "me@mini: hello\nPermission denied (publickey).\n")


def test_what_a_machine_prints_by_itself_is_no_part_of_an_answer() -> None:
    assert own_words("Welcome!\n7 updates\nmlx-ring-begins-here\n4711\n") == "4711\n"
    assert own_words("4711\n") == "4711\n"


def test_bytes_that_are_no_text_end_in_no_error() -> None:
    script = "import sys; sys.stdout.buffer.write(bytes([255]) + b'up')"
    assert run_on(HERE, [sys.executable, "-c", script]).endswith("up")


def test_every_machine_that_failed_has_a_sentence_and_the_others_are_done() -> None:
    done: list[str] = []

    def work(place: Place) -> str:
        if place.name != "b":
            raise HostFailed(f"{place.name} failed.")
        done.append(place.name)
        return place.name

    places = [Place(Device(name, name), name, is_here=True) for name in "abc"]
    with pytest.raises(HostFailed, match=r"^a failed\.\nc failed\.$"):
        on_all(places, work)
    assert done == ["b"]
    assert on_all([], work) == []


def test_what_is_sent_arrives_and_a_reader_that_ends_is_told() -> None:
    script = "import sys; sys.exit(len(sys.stdin.buffer.read()) != 1 << 20)"
    send_to(HERE, [sys.executable, "-c", script], lambda stream: stream.writelines([bytes(1 << 20)]))
    with pytest.raises(HostFailed, match="here: no room"):
        send_to(
            HERE,
            [sys.executable, "-c", "raise SystemExit('no room')"],
            lambda stream: stream.writelines([bytes(1 << 24)]),
        )
