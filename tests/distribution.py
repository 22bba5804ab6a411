"""Which process runs which tests, in what order.

The tests of a file stay together, so that what one sets up serves all of them. Files that take long come first, and tests that
are alone at the very end, all in one process: each time that the machine is handed over, somebody waits for the end of what another is at.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.alone import is_alone

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadGroupScheduling

_LONG = Path(__file__).with_name("end_to_end")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (is_alone(item), not item.path.is_relative_to(_LONG)))
    for item in items:
        if is_alone(item):
            item.add_marker(pytest.mark.xdist_group("alone"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling | None:
    """With `--dist loadgroup`: groups, and the files of tests that are in none."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # noqa: PLC0415 - tests run without it too

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid else group

    return ByFile(config, log)
