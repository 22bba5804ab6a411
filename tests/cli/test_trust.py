"""`mlx-ring token` and `mlx-ring node`, as a person types them, beside a head that runs and without one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import pytest
from tests.machines import running_head
from tests.processes import run_cli, run_in_process

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import TokenRefused
from mlx_ring.core.folders import authority_folder
from mlx_ring.core.join_token import parse_token
from mlx_ring.rpc.tls.peers import open_identity


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, with a state folder of its own."""
    return run_in_process(*arguments, folder=folder, environment=state_in(folder))


def run_beside(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, beside a head in this one."""
    return run_cli(*arguments, folder=folder, environment=state_in(folder))


def state_in(folder: Path) -> dict[str, str]:
    return {"MLX_RING_STATE_DIR": str(folder / "state")}


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Return the table's rows without their heading."""
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:]]


def test_a_token_is_printed_once_and_listed_without_its_secret(tmp_path: Path) -> None:
    made = run("token", "create", "--name", "laptops", "--uses", "2", "--expires", "7d", folder=tmp_path)
    token = parse_token(made.stdout)
    assert made.stdout == f"{token}\n"
    assert "mlx-ring join" in made.stderr
    listed = run("token", "list", folder=tmp_path)
    ((token_id, name, state, *_, used, left),) = rows(listed)
    assert (token_id, name, state, used, left) == (token.id.hex(), "laptops", "valid", "0", "2")
    assert str(token)[-40:] not in listed.stdout


def test_a_list_without_an_entry_says_what_to_do(tmp_path: Path) -> None:
    Authority.open(authority_folder(tmp_path / "state"))
    tokens, nodes = (run(kind, "list", folder=tmp_path).stdout for kind in ("token", "node"))
    assert tokens == "There is no join token. Make one with: mlx-ring token create\n"
    assert nodes == "No machine has joined. To let one join, run here: mlx-ring token create\n"


def test_a_taken_port_of_the_cluster_is_refused_with_the_flag_for_it(tmp_path: Path) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--nodes", "2", "--port", "0", "--cluster-port", port)
        done = run_cli("serve", "demo", *flags, folder=tmp_path, environment=state_in(tmp_path))
    assert done.returncode == 2
    assert f"[::]:{port} cannot be used: another process listens there" in done.stderr
    assert "choose others with --cluster-port." in done.stderr


def test_a_running_head_applies_changes_of_tokens_and_nodes_at_once(
    tmp_path: Path,
) -> None:
    async def act() -> None:
        async with running_head(authority_folder(tmp_path / "state")) as head:
            made = await asyncio.to_thread(run_beside, "token", "create", folder=tmp_path)
            token = made.stdout.strip()
            await head.join(tmp_path / "node", token)
            node = open_identity(tmp_path / "node").node
            (row,) = rows(await asyncio.to_thread(run_beside, "node", "list", folder=tmp_path))
            assert row[0] == node
            await asyncio.to_thread(
                run_beside, "token", "revoke", parse_token(token).id.hex(), folder=tmp_path
            )
            with pytest.raises(TokenRefused, match="is revoked"):
                await head.join(tmp_path / "late", token)
            removed = await asyncio.to_thread(run_beside, "node", "remove", node, folder=tmp_path)
            assert (
                removed.stdout
                == f"{node} is removed from this cluster. It needs a new token to join again.\n"
            )
            assert head.members.list() == {}

    asyncio.run(act())


def test_a_removal_is_reported_without_readable_tokens_and_its_advice_names_the_state_folder(
    tmp_path: Path,
) -> None:
    state = tmp_path / "my state"

    async def act() -> None:
        async with running_head(authority_folder(state)) as head:
            token = head.token()
            await head.join(tmp_path / "node", token)
            node = open_identity(tmp_path / "node").node
            command = "node", "remove", node, "--state-dir", str(state)
            done = await asyncio.to_thread(run_cli, *command, folder=tmp_path)
            first = parse_token(token).id.hex()
            assert f"run `mlx-ring token revoke {first} --state-dir '{state}'`." in done.stdout
            await head.join(tmp_path / "node", token)
            (authority_folder(state) / "tokens.json").write_text("{")
            done = await asyncio.to_thread(run_cli, *command, folder=tmp_path)
            assert (done.returncode, done.stdout) == (2, f"{node} is removed from this cluster.\n")
            assert "tokens.json" in done.stderr
            assert head.members.list() == {}

    asyncio.run(act())


def test_the_removal_of_a_node_names_the_tokens_with_which_it_could_join_again(tmp_path: Path) -> None:
    async def act() -> None:
        async with running_head(authority_folder(tmp_path / "state")) as head:

            async def remove(token: str) -> str:
                await head.join(tmp_path / "node", token)
                node = open_identity(tmp_path / "node").node
                done = await asyncio.to_thread(run_beside, "node", "remove", node, folder=tmp_path)
                assert done.returncode == 0, done.stderr
                return done.stdout.removeprefix(f"{node} is removed from this cluster. ")

            token = head.token()
            first = parse_token(token).id.hex()
            assert await remove(token) == (
                "It could join again with a token that is still valid: to prevent that, run "
                f"`mlx-ring token revoke {first}`.\n"
            )
            head.token(uses=3)
            assert await remove(token) == (
                "It could join again with any of 2 tokens that are still valid: to prevent that, run "
                "`mlx-ring token revoke ID` for each that `mlx-ring token list` shows as valid.\n"
            )

    asyncio.run(act())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("token", "create", "--expires", "soon"), "--expires is soon; it must be a time from 1s to 365d"),
        (("token", "create", "--expires", "0h"), "--expires is 0h;"),
        (("token", "create", "--uses", "many"), "--uses is many; it must be a whole number from 1 to 1024."),
        (("token", "create", "--uses", "0"), "--uses is 0;"),
        (
            ("token", "revoke", "12345678"),
            "There is no token '12345678': `mlx-ring token list` shows the IDs.",
        ),
        (("node", "remove", "mini"), "There is no node 'mini': no machine has joined this cluster."),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = run(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"mlx-ring: {said}")


def test_the_state_folder_can_be_set_by_a_flag(tmp_path: Path) -> None:
    run_in_process("token", "create", "--state-dir", "here", folder=tmp_path)
    assert (tmp_path / "here" / "cluster" / "tokens.json").is_file()
