"""Reading of GGUF headers: values, tensors, and files that are damaged or meant to do harm."""

# pyright: reportPrivateUsage=false
# One test changes a file between two steps of its reader.
from __future__ import annotations

import os
import struct
import subprocess
import tracemalloc
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.models.gguf.writing import F32, Q4_1, Stored, Typed, Value, gguf_bytes, text
from tests.processes import run_cli, run_in_process

from mlx_ring.core.errors import ModelCorrupt, ModelError, ModelUnsupported
from mlx_ring.models import gguf
from mlx_ring.models.gguf import read_gguf

METADATA: dict[str, Value] = {
    "general.architecture": "llama",
    "a.texts": ["one", "", "drei ☃"],
    "a.numbers": [1.5, -2.0],
    "a.integers": [3, -4],
    "a.nothing": [],
    "a.truth": True,
    "a.long": Typed(10, 1 << 40),
    "a.double": Typed(12, 0.1),
}
TENSORS = {
    "first": Stored(F32, (2, 3), bytes(range(24))),
    "second": Stored(Q4_1, (2, 64), b"\x01" * 80),
}


def write(path: Path, version: int = 3) -> Path:
    path.write_bytes(gguf_bytes(METADATA, TENSORS, version=version))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_has_its_values_and_tensors(tmp_path: Path, version: int) -> None:
    file = read_gguf(write(tmp_path / "a.gguf", version))
    assert file.value("general.architecture", str) == "llama"
    assert file.values("a.texts") == ["one", "", "drei ☃"]
    assert file.values("a.numbers") == [1.5, -2.0]
    assert file.values("a.integers") == [3, -4]
    assert file.values("a.nothing") == []
    assert (file.value("a.truth", bool), file.value("a.long", int)) == (True, 1 << 40)
    assert file.value("a.double", float) == 0.1
    assert file.value("a.missing", int) is None
    assert file.values("a.missing") is None
    first, second = file.tensors.values()
    assert (first.name, first.shape, first.kind.name, first.nbytes) == ("first", (2, 3), "F32", 24)
    assert (second.shape, second.kind.name, second.nbytes) == ((2, 64), "Q4_1", 80)
    assert first.offset == file.header_bytes
    assert second.offset == file.header_bytes + 32
    assert file.path.read_bytes()[first.offset : first.offset + 24] == bytes(range(24))


def test_tensors_follow_the_alignment_that_the_file_gives(tmp_path: Path) -> None:
    data = gguf_bytes({"general.alignment": 256}, TENSORS, alignment=256)
    (tmp_path / "a.gguf").write_bytes(data)
    file = read_gguf(tmp_path / "a.gguf")
    assert [tensor.offset % 256 for tensor in file.tensors.values()] == [0, 0]


@pytest.mark.parametrize(
    ("key", "kind"), [("a.texts", str), ("a.truth", int), ("a.long", str), ("a.numbers", float)]
)
def test_a_value_of_another_type_is_an_error(tmp_path: Path, key: str, kind: type[int | str | float]) -> None:
    file = read_gguf(write(tmp_path / "a.gguf"))
    with pytest.raises(ModelCorrupt, match=f"{key} as .* must be a {kind.__name__}"):
        file.value(key, cast("type[str]", kind))
    with pytest.raises(ModelCorrupt, match="must be an array"):
        file.values("a.truth")


def test_an_array_of_arrays_is_passed_over(tmp_path: Path) -> None:
    """Give two arrays of bytes and an empty one; a value behind them is read, they themselves are not."""
    nested = struct.pack("<IIQ", 9, 9, 3) + struct.pack("<IQ2BIQBIQ", 0, 2, 1, 2, 0, 1, 3, 4, 0)
    data = head(0, 2) + text("k") + nested + text("n") + struct.pack("<IB", 0, 7) + bytes(64)
    (tmp_path / "a.gguf").write_bytes(data)
    file = read_gguf(tmp_path / "a.gguf")
    assert file.value("n", int) == 7
    with pytest.raises(ModelUnsupported, match="k as an array of arrays"):
        file.values("k")


def test_a_value_of_any_size_is_not_read(tmp_path: Path) -> None:
    """Give a number of the configuration as half a million, and a text of 300 MB; neither is in memory."""
    path = tmp_path / "a.gguf"
    numbers = struct.pack("<IIQ", 9, 0, 500_000) + bytes(500_000)
    with path.open("wb") as stream:
        stream.write(head(0, 2) + text("n") + numbers + text("t") + struct.pack("<IQ", 8, 300 << 20))
        stream.truncate(stream.tell() + (300 << 20) + 64)
    file = read_gguf(path)
    tracemalloc.start()
    try:
        with pytest.raises(ModelCorrupt, match="n 500000 values; 1000 are the most"):
            file.values("n", 1000)
        with pytest.raises(ModelCorrupt, match="t 314572808 bytes; 268435456 are the most"):
            file.value("t", str)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "arrays",
    [[(4, 10**12)], [(7, 10**12)], [(4, 1 << 22), (0, 1 << 22), (6, 1)]],
    ids=["numbers", "booleans", "several"],
)
def test_arrays_longer_than_any_model_has_are_refused_though_the_file_holds_them(
    tmp_path: Path, arrays: list[tuple[int, int]]
) -> None:
    """Give arrays that a sparse file has room for, but nobody's memory."""
    with (tmp_path / "a.gguf").open("wb") as stream:
        stream.write(head(0, len(arrays)))
        for number, (kind, count) in enumerate(arrays):
            stream.write(text(f"k{number}") + struct.pack("<IIQ", 9, kind, count))
            stream.seek(count * (1 if kind in {0, 7} else 4), os.SEEK_CUR)
        stream.truncate(stream.tell() + 64)
    with pytest.raises(ModelCorrupt, match=r"gives 'k\d' \d+ values; 8388608 are the most of a file\. Fetch"):
        read_gguf(tmp_path / "a.gguf")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncate the file after its version was read: as a memory map it would end the process by a signal."""
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({f"k{number}": "text" * 100 for number in range(2000)}, TENSORS))
    check_version = gguf._Header._check_version

    def shrink(header: gguf._Header) -> None:
        check_version(header)
        os.truncate(path, 300_000)

    monkeypatch.setattr(gguf._Header, "_check_version", shrink)
    with pytest.raises(ModelCorrupt, match=r"no longer has the 8\d+ bytes"):
        read_gguf(path)


def head(tensors: int, values: int, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def described(name: str, sizes: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


HUGE = 10**18
HARMFUL = {
    "an empty file": (b"", "0 bytes: it is truncated, or no GGUF file. Fetch it again."),
    "a few bytes": (b"GGUF", "4 bytes"),
    "another kind of file": (b"PK\x03\x04" + bytes(40), "no GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (head(0, 0, version=1), "version 1;"),
    "version 4": (head(0, 0, version=4), "version 4;"),
    "no counts": (b"GGUF" + struct.pack("<I", 3) + bytes(4), "ends before the count of tensors"),
    "too many tensors": (head(HUGE, 0) + bytes(64), f"announces {HUGE} tensors"),
    "too many values": (head(0, HUGE) + bytes(64), f"announces {HUGE} values"),
    "a key that is too long": (head(0, 1) + struct.pack("<Q", HUGE) + bytes(64), f"{HUGE} bytes"),
    "a text that is too long": (
        head(0, 1) + text("k") + struct.pack("<IQ", 8, HUGE) + bytes(64),
        "texts of 'k'",
    ),
    "a value of no type": (head(0, 1) + text("k") + struct.pack("<I", 77) + bytes(64), "type 77"),
    "an array of too many": (
        head(0, 1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(64),
        f"{HUGE} values",
    ),
    "an array of too many texts": (
        head(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(64),
        f"{HUGE} values",
    ),
    "arrays too deep in each other": (
        head(0, 1) + text("k") + struct.pack("<I", 9) + 12 * struct.pack("<IQ", 9, 1) + bytes(64),
        "arrays of 'k' more than 8 deep",
    ),
    "arrays that end within": (
        head(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(9),
        "within|13|than its",
    ),
    "more values than any file has": (
        head(1 << 21, 0) + bytes(64 << 20),
        "announces 2097152 tensors; 1048576 are the most",
    ),
    "a name that no key has": (head(0, 1) + text("k" * 70_000) + bytes(64), "a key 70000 bytes; 65536 are"),
    "a key twice": (head(0, 2) + 2 * (text("k") + struct.pack("<IB", 0, 1)) + bytes(64), "'k' twice"),
    "five axes": (head(1, 0) + described("t", (1, 1, 1, 1, 1)) + bytes(64), "5 axes"),
    "no axes": (head(1, 0) + described("t", ()) + bytes(64), "0 axes"),
    "an endless tensor": (head(1, 0) + described("t", (HUGE, HUGE)) + bytes(64), "it is truncated"),
    "an empty tensor": (head(1, 0) + described("t", (0,)) + bytes(64), "whole blocks"),
    "a part of a block": (head(1, 0) + described("t", (33,), Q4_1) + bytes(64), "whole blocks of 32"),
    "an offset outside": (head(1, 0) + described("t", (1,), offset=1 << 62) + bytes(64), "it is truncated"),
    "an offset between": (head(1, 0) + described("t", (1,), offset=4) + bytes(64), "no multiple of 32"),
    "tensors that overlap": (
        head(2, 0) + described("t", (16,)) + described("u", (1,), offset=32) + bytes(128),
        "'t' and 'u' overlap",
    ),
    "a tensor twice": (
        head(2, 0) + described("t", (1,)) + described("t", (1,), offset=32) + bytes(128),
        "'t' twice",
    ),
    "an unsupported type": (head(1, 0) + described("t", (256,), 23) + bytes(64), "IQ4_XS.*Q4_K_M"),
    "an unknown type": (head(1, 0) + described("t", (256,), 4711) + bytes(64), "4711"),
    "alignment 0": (
        head(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0) + bytes(64),
        "general.alignment as 0",
    ),
    "an endless alignment": (
        head(0, 1) + text("general.alignment") + struct.pack("<IQ", 10, 1 << 63) + bytes(64),
        "general.alignment as 9223372036854775808",
    ),
    "alignment as text": (
        head(0, 1) + text("general.alignment") + struct.pack("<I", 8) + text("8") + bytes(64),
        "as no number",
    ),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_file_is_refused_with_its_value_and_without_memory(tmp_path: Path, name: str) -> None:
    data, message = HARMFUL[name]
    (tmp_path / "a.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            read_gguf(tmp_path / "a.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(tmp_path / "a.gguf") in str(caught.value)
    assert "\n" not in str(caught.value)


COMMANDS = {
    "plan": ("plan", "a.gguf", "--machine", "m4-mac-mini-16"),
    "preshard": ("models", "preshard", "a.gguf", "--stages", "1", "--out", "out"),
}


def assert_refused(done: subprocess.CompletedProcess[str]) -> None:
    """Assert that a command ended with one sentence about the file."""
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "a.gguf" in line]) == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["too many tensors", "an unsupported type", "big-endian"])
def test_commands_refuse_such_files_in_one_sentence(tmp_path: Path, command: str, name: str) -> None:
    (tmp_path / "a.gguf").write_bytes(HARMFUL[name][0])
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert_refused(run_in_process(*COMMANDS[command], folder=tmp_path, environment=cache))


def test_serve_refuses_such_a_file_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(HARMFUL["too many values"][0])
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert_refused(run_cli("serve", "a.gguf", "--port", "0", folder=tmp_path, environment=cache))


WHOLE = gguf_bytes(METADATA, TENSORS)


@pytest.mark.parametrize("kept", range(0, len(WHOLE), 7))
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    (tmp_path / "a.gguf").write_bytes(WHOLE[:kept])
    with pytest.raises(ModelError):
        read_gguf(tmp_path / "a.gguf")


@examples(4)
@given(
    st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 9), st.sampled_from([1, 4, 8]), st.integers(0, (1 << 64) - 1)),
        min_size=1,
        max_size=4,
    )
)
def test_no_change_of_bytes_leads_to_another_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, int]]
) -> None:
    data = bytearray(WHOLE)
    for place, count, value in changes:
        data[place : place + count] = value.to_bytes(8, "little")[:count]
    path = tmp_path_factory.mktemp("changed") / "a.gguf"
    path.write_bytes(data)
    try:
        file = read_gguf(path)
        for key in METADATA:
            if file.is_array(key):
                file.values(key)
            else:
                file.value(key, int)
        assert all(tensor.offset + tensor.nbytes <= len(data) for tensor in file.tensors.values())
    except (ModelCorrupt, ModelUnsupported):
        pass
