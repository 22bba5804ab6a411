"""The agent of a single machine, which is replaced if it hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mlx_ring.core.errors import WorkerStuck
from mlx_ring.head import single_node as subject
from mlx_ring.head.single_node import SingleNode
from mlx_ring.settings.config import Settings


class FakeAgent:
    """An agent that answers or hangs."""

    exit_reason = ""

    def __init__(self) -> None:
        self.hangs = False
        self.is_stopped = False

    async def answers(self) -> bool:
        return not self.hangs

    async def stop(self) -> None:
        self.is_stopped = True


@pytest.mark.parametrize(("fails", "hangs", "agents"), [(1, 1, 2), (1, 0, 1), (0, 1, 1)])
def test_only_an_agent_that_hangs_after_a_failure_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, hangs: int, agents: int
) -> None:
    started: list[FakeAgent] = []

    class Starts:
        @classmethod
        async def start(cls, *_: object, **_options: object) -> FakeAgent:
            started.append(FakeAgent())
            return started[-1]

    async def run() -> None:
        machines: Any = SingleNode(Settings(), tmp_path, 1)
        agent = await machines._alive()
        agent.hangs = bool(hangs)
        if fails:
            machines.record_failure(WorkerStuck("The agent has sent nothing."), 0.0)
        assert await machines._alive() is started[-1]

    monkeypatch.setattr(subject, "LocalAgent", Starts)
    asyncio.run(run())
    assert [agent.is_stopped for agent in started] == [True] * (agents - 1) + [False]
