"""Which nodes are there, folded from what happens. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.trusted_interfaces import TrustedInterface

_REMEMBERED = 32
"""So many that went are remembered."""


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
    session: int
    """Which of all attendances it is: a node that comes again is a new one."""
    memory_free_bytes: int = 0
    agent_bytes: int = 0
    """Of memory, that its agent holds."""
    links_port: int = 0
    """Where its agent answers probes of links; 0: nowhere."""
    since_s: float = 0.0
    """When it came, seconds since the Unix epoch."""
    versions: tuple[tuple[str, str], ...] = ()
    """Of packages, by name."""
    trusted: tuple[TrustedInterface, ...] = ()
    """Where its owner lets collectives go to other machines."""
    trusted_problem: str = ""
    """Why one that the owner named is not among them."""


@dataclass(frozen=True, slots=True)
class FormerMember:
    """A node that attended and does no more."""

    member: Member
    """As it was."""
    reason: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """A node attends. One that did so before is replaced: there are no ghosts after a rejoin."""

    member: Member


@dataclass(frozen=True, slots=True)
class Reported:
    """A node has said how it is."""

    node: str
    session: int
    memory_free_bytes: int
    agent_bytes: int = 0
    trusted: tuple[TrustedInterface, ...] = ()
    trusted_problem: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """An attendance has ended."""

    node: str
    session: int
    reason: str
    at_s: float = 0.0
    """Seconds since the Unix epoch."""


Event = Joined | Reported | Left


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is there, and why others are not."""

    members: Mapping[str, Member] = field(default_factory=dict[str, Member])
    former: Mapping[str, FormerMember] = field(default_factory=dict[str, FormerMember])
    """By node that was there: the last ones, in the order in which they went."""

    def apply(self, event: Event) -> Membership:
        """How it stands after the event. What is said of an attendance that has been replaced changes nothing."""
        match event:
            case Joined(member):
                former = {node: was for node, was in self.former.items() if node != member.node}
                return Membership({**self.members, member.node: member}, former)
            case Reported(node, session):
                if not self._is_current(node, session):
                    return self
                told = replace(
                    self.members[node],
                    memory_free_bytes=event.memory_free_bytes,
                    agent_bytes=event.agent_bytes,
                    trusted=event.trusted,
                    trusted_problem=event.trusted_problem,
                )
                return replace(self, members={**self.members, node: told})
            case Left(node, session, reason, at_s):
                if not self._is_current(node, session):
                    return self
                left = {other: member for other, member in self.members.items() if other != node}
                former = [*self.former.items(), (node, FormerMember(self.members[node], reason, at_s))]
                return Membership(left, dict(former[-_REMEMBERED:]))

    def without(self, nodes: Container[str]) -> Membership:
        """The same with fewer members."""
        kept = {node: member for node, member in self.members.items() if node not in nodes}
        return replace(self, members=kept)

    def _is_current(self, node: str, session: int) -> bool:
        return node in self.members and self.members[node].session == session
