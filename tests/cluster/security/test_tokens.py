"""Join tokens at the head: their uses, their lifetime, and their secret, which is never stored."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import pytest

from mlx_ring.cluster.security.records import TokenStore
from mlx_ring.core.errors import ConfigError, TokenRefused
from mlx_ring.core.join_token import JoinToken

FINGERPRINT = bytes(range(32))


class Clock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> TokenStore:
    return TokenStore(tmp_path, clock)


def redeem(store: TokenStore, token: JoinToken, nonce: bytes | None = None) -> None:
    store.redeem(token.id, token.secret, nonce or secrets.token_bytes(16))


def test_a_token_admits_any_number_of_machines(store: TokenStore) -> None:
    token = store.create(FINGERPRINT)
    assert token.fingerprint == FINGERPRINT
    for _ in range(3):
        redeem(store, token)
    assert [(record.uses, record.uses_left) for record in store.list()] == [(3, None)]


def test_the_secret_is_not_on_the_disk(store: TokenStore, tmp_path: Path) -> None:
    token = store.create(FINGERPRINT, name="laptops")
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"laptops" in content
    assert token.secret not in content
    assert token.secret.hex().encode() not in content
    assert str(token).encode() not in content
    assert (tmp_path / "tokens.json").stat().st_mode & 0o777 == 0o600


def test_a_wrong_secret_and_an_unknown_token_look_the_same(store: TokenStore) -> None:
    token = store.create(FINGERPRINT)
    errors: set[str] = set()
    for wrong in (
        JoinToken(FINGERPRINT, token.id, bytes(20)),
        JoinToken(FINGERPRINT, bytes(4), token.secret),
    ):
        with pytest.raises(TokenRefused) as caught:
            redeem(store, wrong)
        errors.add(str(caught.value))
    assert len(errors) == 1
    assert "token is unknown" in errors.pop()
    assert store.list()[0].uses == 0


def test_without_the_secret_a_revoked_token_looks_unknown(store: TokenStore) -> None:
    token = store.create(FINGERPRINT)
    store.revoke(token.id.hex())
    with pytest.raises(TokenRefused, match="token is unknown"):
        redeem(store, JoinToken(FINGERPRINT, token.id, bytes(20)))


def test_a_token_expires_after_a_day(store: TokenStore, clock: Clock) -> None:
    token = store.create(FINGERPRINT)
    clock.now_s += 24 * 3600 - 1
    redeem(store, token)
    clock.now_s += 1
    with pytest.raises(TokenRefused, match=f"{token.id.hex()} is expired"):
        redeem(store, token)


def test_a_token_is_used_up_after_its_uses(store: TokenStore) -> None:
    token = store.create(FINGERPRINT, uses=2)
    redeem(store, token)
    redeem(store, token)
    with pytest.raises(TokenRefused, match="is used up"):
        redeem(store, token)


def test_a_revoked_token_is_refused_and_found_by_id_or_name(store: TokenStore) -> None:
    named, unnamed = store.create(FINGERPRINT, name="laptops"), store.create(FINGERPRINT)
    store.revoke("laptops")
    store.revoke(unnamed.id.hex())
    for token in (named, unnamed):
        with pytest.raises(TokenRefused, match="is revoked"):
            redeem(store, token)


def test_revoking_an_unknown_or_ambiguous_token_is_refused(store: TokenStore) -> None:
    store.create(FINGERPRINT, name="twice")
    store.create(FINGERPRINT, name="twice")
    for wanted, said in (
        ("none", "There is no token 'none'"),
        ("twice", "There are 2 tokens"),
        ("", "no token"),
    ):
        with pytest.raises(ConfigError, match=said):
            store.revoke(wanted)


def test_a_repeated_request_is_refused_even_after_a_restart(
    store: TokenStore, tmp_path: Path, clock: Clock
) -> None:
    token, nonce = store.create(FINGERPRINT), secrets.token_bytes(16)
    redeem(store, token, nonce)
    for again in (store, TokenStore(tmp_path, clock)):
        with pytest.raises(TokenRefused, match="already used"):
            redeem(again, token, nonce)
    assert store.list()[0].uses == 1


@pytest.mark.parametrize("length", [0, 15, 17, 4000])
def test_a_nonce_of_another_length_is_refused(length: int, store: TokenStore) -> None:
    token = store.create(FINGERPRINT)
    with pytest.raises(TokenRefused, match=f"nonce has {length} bytes"):
        store.redeem(token.id, token.secret, bytes(length))


def test_concurrent_requests_do_not_exceed_the_uses(tmp_path: Path) -> None:
    token = TokenStore(tmp_path).create(FINGERPRINT, uses=3)
    outcomes: list[str] = []

    def try_to_join() -> None:
        try:
            # Each thread has its own store, like another process.
            redeem(TokenStore(tmp_path), token)
            outcomes.append("admitted")
        except TokenRefused:
            outcomes.append("refused")

    threads = [threading.Thread(target=try_to_join) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count("admitted"), outcomes.count("refused")) == (3, 9)


def test_a_running_head_sees_tokens_of_other_processes(store: TokenStore, tmp_path: Path) -> None:
    assert store.list() == ()
    other = TokenStore(tmp_path, Clock())
    token = other.create(FINGERPRINT)
    redeem(store, token)
    other.revoke(token.id.hex())
    assert [record.state(0.0) for record in store.list()] == ["revoked"]


def test_a_token_is_dropped_a_week_after_it_expired(store: TokenStore, clock: Clock) -> None:
    old = store.create(FINGERPRINT, life_s=10)
    clock.now_s += 7 * 24 * 3600
    store.create(FINGERPRINT)
    assert len(store.list()) == 2
    clock.now_s += 11
    store.create(FINGERPRINT)
    assert old.id.hex() not in {record.id for record in store.list()}


def test_a_file_that_cannot_be_parsed_is_named_and_kept(store: TokenStore, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text('{"tokens": [{"id": 1}]}')
    for act in (store.list, lambda: store.create(FINGERPRINT)):
        with pytest.raises(ConfigError, match=str(file)):
            act()
    assert file.read_text() == '{"tokens": [{"id": 1}]}'


def test_a_member_joins_again_with_a_used_up_token_and_does_not_use_it(store: TokenStore) -> None:
    token = store.create(FINGERPRINT, uses=1)
    redeem(store, token)
    given = token.id, token.secret
    store.check(*given, secrets.token_bytes(16), is_member=True)
    store.redeem(*given, secrets.token_bytes(16), is_member=True)
    assert [(record.uses, record.uses_left) for record in store.list()] == [(1, 0)]
    with pytest.raises(TokenRefused, match="is used up"):
        redeem(store, token)


def test_a_member_cannot_join_again_with_a_revoked_token(store: TokenStore) -> None:
    token = store.create(FINGERPRINT, uses=1)
    redeem(store, token)
    store.revoke(token.id.hex())
    with pytest.raises(TokenRefused, match="is revoked"):
        store.redeem(token.id, token.secret, secrets.token_bytes(16), is_member=True)
