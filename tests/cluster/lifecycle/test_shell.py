"""Commands on machines: local ones, and over SSH."""

from __future__ import annotations

import sys

import pytest

from mlx_ring.cluster.lifecycle.arguments import Machine
from mlx_ring.cluster.lifecycle.shell import check_exit, command_on, on_all, own_output, run_on, send_to
from mlx_ring.core.errors import HostFailed, HostUnreached
from mlx_ring.settings.devices_file import Device

HERE = Machine(Device("here", "localhost"), "localhost", is_here=True)
MINI = Machine(Device("mini", "me@mini"), "mini", is_here=False)


def test_ssh_gets_one_line_with_every_argument_quoted() -> None:
    words = command_on(MINI, ["sh", "-c", 'echo "$HOME"', "it's"])
    assert words[:2] == ["ssh", "-T"]
    assert "BatchMode=yes" in words
    assert words[-3:] == ["--", "me@mini", """sh -c 'echo "$HOME"' 'it'"'"'s'"""]


def test_a_local_command_runs_unchanged_and_reads_its_input() -> None:
    assert run_on(HERE, [sys.executable, "-c", "print(input()[::-1])"], stdin="abc\n") == "cba\n"


def test_an_error_holds_the_last_output_of_the_command() -> None:
    script = "import sys; sys.exit('noise\\nmlx-ring: The port is held.')"
    with pytest.raises(HostFailed, match=r"^here: The port is held\.$"):
        run_on(HERE, [sys.executable, "-c", script])
    with pytest.raises(HostFailed, match=r"^here: it ended with code 3\.$"):
        run_on(HERE, [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(HostFailed, match=r"^here: Did you mean 'demo'\?$"):
        check_exit(HERE, 2, "mlx-ring: Did you mean 'demo'?\n")
    with pytest.raises(HostFailed, match="here: cannot run /no/such/program"):
        run_on(HERE, ["/no/such/program"])


def test_a_machine_that_ssh_does_not_reach_is_named_with_the_reason() -> None:
    with pytest.raises(
        HostUnreached,
        match=r"^mini cannot be reached by `ssh me@mini`: Permission denied \(publickey\)\. Make that",
    ):
        check_exit(MINI, 255, "me@mini: hello\nPermission denied (publickey).\n")
    with pytest.raises(HostUnreached, match=r"port 22: Connection refused\. Turn on .* > Remote Login;"):
        check_exit(MINI, 255, "ssh: connect to host mini port 22: Connection refused\n")


def test_output_of_shell_start_up_files_is_removed() -> None:
    assert own_output("Welcome!\n7 updates\nmlx-ring-begins-here\n4711\n") == "4711\n"
    assert own_output("4711\n") == "4711\n"


def test_invalid_utf_8_raises_no_error() -> None:
    script = "import sys; sys.stdout.buffer.write(bytes([255]) + b'up')"
    assert run_on(HERE, [sys.executable, "-c", script]).endswith("up")


def test_every_failed_machine_is_reported_after_the_others_are_done() -> None:
    done: list[str] = []

    def work(machine: Machine) -> str:
        if machine.name != "b":
            raise HostFailed(f"{machine.name} failed.")
        done.append(machine.name)
        return machine.name

    machines = [Machine(Device(name, name), name, is_here=True) for name in "abc"]
    with pytest.raises(HostFailed, match=r"^a failed\.\nc failed\.$"):
        on_all(machines, work)
    assert done == ["b"]
    assert on_all([], work) == []


def test_input_arrives_and_an_early_end_of_the_reader_is_reported() -> None:
    script = "import sys; sys.exit(len(sys.stdin.buffer.read()) != 1 << 20)"
    send_to(HERE, [sys.executable, "-c", script], lambda stream: stream.writelines([bytes(1 << 20)]))
    with pytest.raises(HostFailed, match="here: no room"):
        send_to(
            HERE,
            [sys.executable, "-c", "raise SystemExit('no room')"],
            lambda stream: stream.writelines([bytes(1 << 24)]),
        )
