"""Memory that a worker reports of its device."""

from __future__ import annotations

import pytest

from mlx_ring.host.process import UsableMemory
from mlx_ring.worker.platform import device


def test_on_a_cpu_a_containers_limit_is_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    group = UsableMemory(4 * 10**9, 3 * 10**9, "the control group (/sys/fs/cgroup/memory.max)")
    monkeypatch.setattr(device, "usable_memory", lambda: group)
    assert device.device_memory() == (group.total_bytes, group.available_bytes)
    assert device.free_memory() == group.available_bytes
    assert device.device_description()[1] == group.limited_by


def test_the_device_has_a_name() -> None:
    name, limited_by = device.device_description()
    assert name
    assert limited_by
