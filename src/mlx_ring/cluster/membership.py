"""Which nodes are there, folded from what happens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlx_ring.core.machine_profile import MachineProfile


@dataclass(frozen=True, slots=True)
class Member:
    """A node that attends."""

    node: str
    """Its id, from its certificate."""
    machine: str
    """Its name, for people."""
    host: str
    """Where the head sees it."""
    port: int
    """Of its agent."""
    head_host: str
    """By which address it reaches the head's machine."""
    profile: MachineProfile
    memory_utilization: float
    came: int
    """Which of all attendances it is: a node that comes again is a new one."""
    memory_free_bytes: int = 0
    links_port: int = 0
    """Where its agent answers probes of links; 0: nowhere."""


@dataclass(frozen=True, slots=True)
class Came:
    """A node attends. One that did so before is replaced: there are no ghosts after a rejoin."""

    member: Member


@dataclass(frozen=True, slots=True)
class Told:
    """A node has said how it is."""

    node: str
    came: int
    memory_free_bytes: int


@dataclass(frozen=True, slots=True)
class Went:
    """An attendance has ended."""

    node: str
    came: int
    reason: str


Event = Came | Told | Went


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is there, and why others are not."""

    members: Mapping[str, Member] = field(default_factory=dict[str, Member])
    gone: Mapping[str, str] = field(default_factory=dict[str, str])
    """By node that was there: why it is no more."""

    def apply(self, event: Event) -> Membership:
        """How it stands after the event. What is said of an attendance that has been replaced changes nothing."""
        match event:
            case Came(member):
                gone = {node: reason for node, reason in self.gone.items() if node != member.node}
                return Membership({**self.members, member.node: member}, gone)
            case Told(node, came, memory_free_bytes):
                if not self._is_current(node, came):
                    return self
                told = replace(self.members[node], memory_free_bytes=memory_free_bytes)
                return replace(self, members={**self.members, node: told})
            case Went(node, came, reason):
                if not self._is_current(node, came):
                    return self
                left = {other: member for other, member in self.members.items() if other != node}
                return Membership(left, {**self.gone, node: reason})

    def _is_current(self, node: str, came: int) -> bool:
        return node in self.members and self.members[node].came == came
