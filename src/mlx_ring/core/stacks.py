"""Where every thread of a process is, on request: what hangs cannot say it by itself.

Who gets `SIGNAL` writes the stacks of its threads to stderr; of a worker's or an agent's they come into the log of
whoever started it. Native code is shown by the call that led into it.
"""

from __future__ import annotations

import faulthandler
import signal

SIGNAL = signal.SIGUSR1


def tell_stacks_on_signal() -> None:
    """From now on, even while a thread holds the interpreter."""
    faulthandler.register(SIGNAL, all_threads=True, chain=False)
