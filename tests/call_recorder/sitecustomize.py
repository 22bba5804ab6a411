"""Record which functions of this process are called, on request.

Python imports a module of this name when it starts. It works with this folder in `PYTHONPATH` and a folder in
`RECORD_CALLS_IN`. Then a process and each of its children listen there on a Unix socket named after the process id.

The command `start` begins a recording, and `stop` ends it. `stop` returns JSON: the process's command line, and the file
and name of each function that was called or resumed meanwhile. Functions that write a log record are left out.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

_FOLDER = os.environ.get("RECORD_CALLS_IN")  # noqa: TID251 - read before anything of the product is imported


class _Recorder:
    def __init__(self) -> None:
        self._codes: set[CodeType] | None = None

    def on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        codes = self._codes
        if codes is not None and event == "call" and frame.f_code not in codes and not _is_logging(frame):
            codes.add(frame.f_code)

    def _answer(self, command: bytes) -> str:
        codes, self._codes = self._codes or set[CodeType](), set[CodeType]() if command == b"start" else None
        calls = sorted({(code.co_filename, code.co_qualname) for code in codes})
        return json.dumps({"command": sys.orig_argv, "calls": calls})

    def listen(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(self._answer(connection.recv(16)).encode())


def _is_logging(frame: FrameType) -> bool:
    """Return True for a call that writes a log record."""
    caller = frame.f_back
    while caller is not None and caller.f_code is not logging.Logger.handle.__code__:
        caller = caller.f_back
    return caller is not None


def _begin(folder: Path) -> None:
    recorder = _Recorder()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{os.getpid()}.sock"))
    listener.listen()
    threading.Thread(target=recorder.listen, args=(listener,), daemon=True, name="call recorder").start()
    # The thread above is started first, so that it is not recorded itself.
    threading.setprofile(recorder.on_event)
    sys.setprofile(recorder.on_event)


if _FOLDER:
    _begin(Path(_FOLDER))
