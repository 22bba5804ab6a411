"""Stand-in for macOS's IOKit: it sends messages when the test says so, and records the answers."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_ring.host.power import MacWarnings, OnWarning

CAN_SLEEP, WILL_SLEEP, WILL_NOT_SLEEP, HAS_POWERED_ON, WILL_POWER_ON = (
    0xE0000000 | code for code in (0x270, 0x280, 0x290, 0x300, 0x320)
)
"""Messages, as IOMessage.h numbers them."""
REGISTERED = ("register 0", "add 0")
UNREGISTERED = ("remove 0", "deregister 0", "close 0", "destroy 0")


class Mac:
    """A Mac that announces sleep."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "iokit.so"
        source = Path(__file__).with_name("iokit.c")
        command = ("cc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(self.path), str(source))
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(self.path))
        self._library.stand_in_send.argtypes = [ctypes.c_uint32, ctypes.c_ssize_t]
        self._calls = os.fdopen(self._library.stand_in_open())

    def warnings(self, on_warning: OnWarning) -> MacWarnings:
        return MacWarnings(on_warning, self.path, self.path)

    def send(self, message: int, number: int) -> None:
        self._library.stand_in_send(message, number)

    def end(self) -> None:
        """Let the run loop end."""
        self._library.stand_in_end()

    def calls(self, count: int) -> tuple[str, ...]:
        """Wait for the next calls of its functions, and return them."""
        return tuple(self._calls.readline().strip() for _ in range(count))

    def close(self) -> None:
        self._calls.close()


@contextmanager
def mac(folder: Path) -> Generator[Mac]:
    """Compile and load the stand-in, anew for each test."""
    system = Mac(folder)
    try:
        yield system
    finally:
        system.close()
