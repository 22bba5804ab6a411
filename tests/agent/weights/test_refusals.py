"""Nodes that send wrong data, and requests for data outside the model: refused with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.agent.weights.nodes import (
    Node,
    Tamper,
    fetch_all,
    flipping,
    is_like,
    node,
    warnings_of,
    write_pieces,
)

from mlx_ring.agent.weights.stages import fetch_manifest
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.core.errors import WeightsMissing
from mlx_ring.models.weights_manifest import WeightsManifest
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import FETCH
from mlx_ring.rpc.protos import weights_pb2

MB = 1 << 20


def fetch_from_bad_and_good(manifest: WeightsManifest, folder: Path) -> None:
    """Fetch the model from a node that flips bytes and from an honest one, and check that all is right at the end."""

    async def act() -> None:
        async with (
            node("bad", manifest, folder / "model", tamper=flipping) as bad,
            node("good", manifest, folder / "model") as good,
        ):
            model = WeightStore(folder / "store").create(manifest)
            await fetch_all(model, bad, good)
        assert is_like(model, folder / "model")

    asyncio.run(act())


@pytest.mark.slow
def test_wrong_bytes_are_refused_and_fetched_from_another_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_pieces(tmp_path / "model", [MB] * 80)
    fetch_from_bad_and_good(manifest, tmp_path)
    assert "bad sends this node no more weights: it sent tensor tensor." in warnings_of(caplog)
    assert "another SHA-256" in warnings_of(caplog)
    assert "good sends this node no more" not in warnings_of(caplog)


@pytest.mark.slow
def test_the_wrong_node_is_found_among_several_that_sent_a_tensor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_pieces(tmp_path / "model", [200 * MB])
    fetch_from_bad_and_good(manifest, tmp_path)
    assert "bad sends this node no more weights" in warnings_of(caplog)
    assert "good sends this node no more weights" not in warnings_of(caplog)


def test_wrong_bytes_without_another_node_are_an_error_and_not_stored(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB])

    async def act() -> None:
        async with node("bad", manifest, tmp_path / "model", tamper=flipping) as bad:
            store = WeightStore(tmp_path / "store")
            model = store.create(manifest)
            with pytest.raises(WeightsMissing, match=r"bad: it sent tensor tensor\.0 with another SHA-256"):
                await fetch_all(model, bad)
            assert model.have == frozenset()
            async with node("mini", store=store) as mini:
                answer = await request(mini, manifest, "model.safetensors", (0, MB))
        assert answer.failure.kind == "WeightsMissing"

    asyncio.run(act())


async def too_much(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
    yield weights_pb2.FetchPart(offset=part.offset, data=part.data + b"x")


async def elsewhere(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
    yield weights_pb2.FetchPart(offset=part.offset + 5, data=part.data[:5])


async def nothing(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
    yield weights_pb2.FetchPart(offset=part.offset)


async def twice(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
    yield part
    yield part


async def silence(_part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
    for never in ():
        yield never


async def too_large(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
    yield weights_pb2.FetchPart(offset=part.offset, data=bytes(64 * MB))


@pytest.mark.parametrize("tamper", [too_much, elsewhere, nothing, twice, silence, too_large, flipping])
def test_a_hostile_node_is_refused_and_another_serves_the_rest(
    tmp_path: Path, tamper: Tamper, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_pieces(tmp_path / "model", [MB, 10 * MB, 100, 0, 7])

    async def act() -> None:
        async with (
            node("bad", manifest, tmp_path / "model", tamper=tamper) as bad,
            node("good", manifest, tmp_path / "model") as good,
        ):
            model = WeightStore(tmp_path / "store").create(manifest)
            with pytest.raises(WeightsMissing, match="bad: "):
                await fetch_all(model, bad)
            await fetch_all(model, good)
        assert is_like(model, tmp_path / "model")
        assert {path.name for path in model.folder.iterdir()} == {"model.safetensors"}

    asyncio.run(act())
    assert "bad sends this node no more weights" in warnings_of(caplog)


async def request(
    server: Node, manifest: WeightsManifest, file: str, *ranges: tuple[int, int]
) -> weights_pb2.FetchPart:
    """Return the first part of the answer to a request."""
    call = FETCH.aio_unary_stream(server.peer.channel)(
        weights_pb2.FetchRequest(
            hello=make_hello(),
            model=manifest.digest,
            file=file,
            ranges=[weights_pb2.ByteRange(offset=start, length=length) for start, length in ranges],
        )
    )
    part = await call.read()
    assert isinstance(part, weights_pb2.FetchPart)
    call.cancel()
    return part


@pytest.mark.parametrize(
    ("file", "ranges", "sentence"),
    [
        ("../secret", [(0, 1)], "The model has no file '../secret'."),
        ("/etc/passwd", [(0, 1)], "The model has no file '/etc/passwd'."),
        ("model.safetensors", [(0, 2 * MB + 1)], "it has 2097152"),
        ("model.safetensors", [((1 << 64) - 1, 1)], "it has 2097152"),
        ("model.safetensors", [(0, 0)], "were requested"),
        ("model.safetensors", [], "0 ranges were requested at once"),
        ("model.safetensors", [(0, 1)] * 5000, "5000 ranges were requested at once"),
    ],
)
def test_requests_outside_the_model_are_refused_with_one_sentence(
    tmp_path: Path, file: str, ranges: list[tuple[int, int]], sentence: str
) -> None:
    manifest = write_pieces(tmp_path / "model", [MB, MB])
    (tmp_path / "secret").write_text("secret")

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            answer = await request(big, manifest, file, *ranges)
            assert sentence in answer.failure.message
            assert answer.data == b""
            big.service.withdraw(manifest.digest)
            answer = await request(big, manifest, "model.safetensors", (0, 1))
            assert "big has no model" in answer.failure.message

    asyncio.run(act())


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB, MB])

    async def act() -> None:
        async with node("big", manifest, tmp_path / "model") as big:
            with (tmp_path / "model" / "model.safetensors").open("r+b") as stream:
                stream.truncate(MB)
            with pytest.raises(WeightsMissing, match="it was changed"):
                await fetch_all(WeightStore(tmp_path / "store").create(manifest), big)

    asyncio.run(act())


def test_a_manifest_of_another_model_is_refused(tmp_path: Path) -> None:
    manifest = write_pieces(tmp_path / "model", [MB])
    other = write_pieces(tmp_path / "other", [MB], seed=1)

    async def act() -> None:
        async with node("bad") as bad, node("empty") as empty:
            bad.service.offer(tmp_path / "other", other)
            bad.service.served_model = other.digest
            with pytest.raises(WeightsMissing, match=r"instead of .* empty has no model"):
                await fetch_manifest(manifest.digest, [bad.peer, empty.peer], "mini")

    asyncio.run(act())
