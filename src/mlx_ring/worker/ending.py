"""How a worker ends that has no place in its group of ranks any more."""

from __future__ import annotations

import logging
import os
import time
from typing import NoReturn

log = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""For the one whose fault it is to be found first, where ranks lose each other."""


def end_process(error: Exception) -> NoReturn:
    """End at once but for a pause: the other ranks may wait for this one in a collective, or have gone on without it."""
    log.error("this worker ends, for its group is of no use any more: %s", error)
    time.sleep(_LAST_WORDS_S)
    logging.shutdown()
    os._exit(1)
