"""Identity of a machine, which is the same after every start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.core.errors import ConfigError
from mlx_ring.rpc.tls.certificates import key_to_pem
from mlx_ring.rpc.tls.peers import Identity, check_node_id, open_identity


def test_id_and_key_are_the_same_after_a_restart(tmp_path: Path) -> None:
    first, second = open_identity(tmp_path, "Mini.local"), open_identity(tmp_path, "renamed")
    assert first.node == second.node
    assert key_to_pem(first.key) == key_to_pem(second.key)
    assert first.node.startswith("mini-")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_machines_of_one_name_get_different_ids(tmp_path: Path) -> None:
    # Each id has sixteen random bits: five equal ones occur once in 2^64.
    ids = {open_identity(tmp_path / str(number), "mini").node for number in range(5)}
    assert len(ids) > 1


def test_simultaneous_starts_make_one_identity(tmp_path: Path) -> None:
    made: list[Identity] = []
    threads = [threading.Thread(target=lambda: made.append(open_identity(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(identity.node, key_to_pem(identity.key)) for identity in made}) == 1
    assert len(made) == 4


@given(machine=st.text(max_size=300))
def test_every_machine_name_gives_a_valid_id(machine: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    identity = open_identity(tmp_path_factory.mktemp("any"), machine)
    assert check_node_id(identity.node) == identity.node


@pytest.mark.parametrize(
    ("file", "content"), [("node-id", b"No Id\n"), ("node-id", b"\xff"), ("key.pem", b"x")]
)
def test_an_unreadable_identity_file_is_refused_and_not_replaced(
    file: str, content: bytes, tmp_path: Path
) -> None:
    open_identity(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=str(tmp_path / file)):
        open_identity(tmp_path)
    assert (tmp_path / file).read_bytes() == content
