"""A D-Bus with a stand-in for logind: it grants delay locks, and warns when the test says so."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    new_error,  # pyright: ignore[reportUnknownVariableType] - it has no types
    new_method_return,  # pyright: ignore[reportUnknownVariableType] - it has no types
    new_signal,  # pyright: ignore[reportUnknownVariableType] - it has no types
)
from jeepney.low_level import Parser

MANAGER = DBusAddress("/org/freedesktop/login1", "org.freedesktop.login1", "org.freedesktop.login1.Manager")


class Logind:
    """The bus and the service, for one client."""

    def __init__(self, path: Path, delay_us: int) -> None:
        self.address = f"unix:path={path}"
        self.asked: list[tuple[str, ...]] = []
        """Arguments of `Inhibit` for each lock."""
        self.matches: list[str] = []
        self.units: list[tuple[Any, ...]] = []
        """Arguments of `StartTransientUnit` of the user's systemd, for which it stands in, too."""
        self.refusals = 0
        """Number of locks that are refused from now on."""
        self.is_locked = threading.Semaphore(0)
        """Released for each lock that is granted."""
        self._ends: list[int] = []
        """Reading end of each lock's pipe."""
        self._delay_us = delay_us
        self._numbers = count(1)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def warn(self, signal: str, *, begins: bool) -> None:
        """Send `PrepareForSleep` or `PrepareForShutdown`."""
        self._send(new_signal(MANAGER, signal, "b", (begins,)))

    def wait_for_release(self, number: int) -> None:
        """Wait until a lock, counted from 0, is given up."""
        assert os.read(self._ends[number], 1) == b""

    def is_held(self, number: int) -> bool:
        """Report whether a lock is still held."""
        os.set_blocking(self._ends[number], False)
        try:
            return os.read(self._ends[number], 1) != b""
        except BlockingIOError:
            return True
        finally:
            os.set_blocking(self._ends[number], True)

    def close(self) -> None:
        for each in (self._client, self._listener):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        self._thread.join(10)
        for end in self._ends:
            os.close(end)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            self._client, _ = self._listener.accept()
            self._authenticate(self._client)
            parser = Parser()
            while data := self._client.recv(4096):
                parser.add_data(data)
                while (message := parser.get_next_message()) is not None:
                    self._answer(message)

    @staticmethod
    def _authenticate(client: socket.socket) -> None:
        """Accept any client (D-Bus specification, “Authentication Protocol”)."""
        lines = client.makefile("rb", buffering=0)
        while (line := lines.readline()) != b"BEGIN\r\n":
            client.sendall(b"AGREE_UNIX_FD\r\n" if b"NEGOTIATE" in line else b"OK 0123456789abcdef\r\n")

    def _answer(self, message: Message) -> None:
        answers: dict[str, Callable[[Message], Message]] = {
            "Hello": lambda asked: new_method_return(asked, "s", (":1.7",)),
            "AddMatch": self._match,
            "StartTransientUnit": self._start_unit,
            "Get": lambda asked: new_method_return(asked, "v", (("t", self._delay_us),)),
        }
        name = str(cast("dict[HeaderFields, object]", message.header.fields)[HeaderFields.member])
        if name == "Inhibit" and self.refusals:
            self.refusals -= 1
            self._send(new_error(message, "org.freedesktop.login1.OperationInProgress"))
        elif name == "Inhibit":
            self._lock(message)
        else:
            self._send(answers[name](message))

    def _match(self, asked: Message) -> Message:
        self.matches.append(cast("tuple[str]", asked.body)[0])
        return new_method_return(asked)

    def _start_unit(self, asked: Message) -> Message:
        self.units.append(cast("tuple[Any, ...]", asked.body))
        return new_method_return(asked, "o", ("/org/freedesktop/systemd1/job/1",))

    def _lock(self, asked: Message) -> None:
        """Answer with the writing end of a pipe, whose last copy the client then has."""
        reading, writing = os.pipe()
        self._ends.append(reading)
        self.asked.append(cast("tuple[str, ...]", asked.body))
        fds = array.array("i")
        reply = new_method_return(asked, "h", (writing,)).serialise(next(self._numbers), fds=fds)
        assert self._client is not None
        self._client.sendmsg([reply], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        os.close(writing)
        self.is_locked.release()

    def _send(self, message: Message) -> None:
        assert self._client is not None
        self._client.sendall(message.serialise(next(self._numbers)))


@contextmanager
def logind(folder: Path, delay_us: int = 5_000_000) -> Generator[Logind]:
    """Run the stand-in, whose system waits that long for locks."""
    service = Logind(folder / "bus", delay_us)
    try:
        yield service
    finally:
        service.close()
