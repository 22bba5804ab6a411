"""The nodes of the cluster, as a fold over membership events. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from mlx_ring.host.energy import PartEnergy
from mlx_ring.host.interfaces import TrustedInterface
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.yielding import Yielding

SILENCE_S = 3.5
"""Silence after which a node is disconnected, and counts as lost; nodes send a message every half second.

The last message may be half a second old when a cable is cut, and the next one arrives within a second after the repair.
"""
_REMEMBERED = 32
"""Number of former members that are remembered."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node that attends, that is, is connected to the head."""

    node: str
    """Its ID, from its certificate."""
    machine: str
    """Its readable name."""
    host: str
    """Its address as the head sees it."""
    port: int
    """Port of its agent."""
    head_host: str
    """Address at which it reaches the head's machine."""
    profile: MachineProfile
    memory_utilization: float
    session: int
    """Number of the session; a node that reconnects gets a new one."""
    memory_free_bytes: int = 0
    agent_bytes: int = 0
    """Memory that its agent uses."""
    links_port: int = 0
    """Port on which its agent answers link probes; 0 for none."""
    since_s: float = 0.0
    """Time at which it connected, in seconds since the Unix epoch."""
    versions: tuple[tuple[str, str], ...] = ()
    """Package versions by name."""
    trusted: tuple[TrustedInterface, ...] = ()
    """Interfaces on which its owner allows collectives with other machines."""
    trusted_problem: str = ""
    """Reason why an interface that the owner named is not among them."""
    energy: tuple[PartEnergy, ...] = ()
    """Energy of its parts that count it, since its agent started."""
    yielding: Yielding | None = None
    """State if it yields to its user."""
    process: str = ""
    """Random id of its agent's process."""

    def host_of(self, other: Member) -> str:
        """Return the address at which this node reaches another one.

        The scope of a link-local one is an interface of the head's machine. This node needs its own, by which it reaches the
        head.
        """
        address, has_scope, _ = other.host.partition("%")
        _, is_scoped, interface = self.head_host.partition("%")
        return f"{address}%{interface}" if has_scope and is_scoped else other.host

    def after(self, report: Reported) -> Member:
        """Return the member with the state of a report."""
        return replace(
            self,
            memory_free_bytes=report.memory_free_bytes,
            agent_bytes=report.agent_bytes,
            trusted=report.trusted,
            trusted_problem=report.trusted_problem,
            energy=report.energy,
            yielding=report.yielding,
        )


@dataclass(frozen=True, slots=True)
class FormerMember:
    """A node that was connected and has left."""

    member: Member
    """Its last state."""
    reason: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """A node has connected. It replaces an earlier session of the same node."""

    member: Member


@dataclass(frozen=True, slots=True)
class Reported:
    """A node has reported its state."""

    node: str
    session: int
    memory_free_bytes: int
    agent_bytes: int = 0
    trusted: tuple[TrustedInterface, ...] = ()
    trusted_problem: str = ""
    energy: tuple[PartEnergy, ...] = ()
    yielding: Yielding | None = None


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session has ended."""

    node: str
    session: int
    reason: str
    at_s: float = 0.0
    """Time in seconds since the Unix epoch."""
    is_final: bool = False
    """True if the node has left or was removed; otherwise it may be back in a moment."""


@dataclass(frozen=True, slots=True)
class Drained:
    """A node may get no layers until it leaves or is asked for again, because its owner wants it back."""

    node: str
    is_drained: bool = True
    """False if it may get layers again."""


Event = Joined | Reported | SessionEnded | Drained


@dataclass(frozen=True, slots=True)
class Membership:
    """Connected nodes, and former ones with the reason why they left."""

    members: Mapping[str, Member] = field(default_factory=dict[str, Member])
    former: Mapping[str, FormerMember] = field(default_factory=dict[str, FormerMember])
    """The last former members by node, in the order in which they left."""
    drained: frozenset[str] = frozenset()
    """Nodes that may get no layers. One whose connection breaks stays among them; one that leaves does not."""

    def apply(self, event: Event) -> Membership:
        """Return the membership after the event; ignore events of a replaced session."""
        match event:
            case Joined(member):
                former = {node: was for node, was in self.former.items() if node != member.node}
                return replace(self, members={**self.members, member.node: member}, former=former)
            case Reported(node, session):
                if not self.has_session(node, session):
                    return self
                return replace(self, members={**self.members, node: self.members[node].after(event)})
            case Drained(node, is_drained):
                others = self.drained - {node}
                return replace(self, drained=others | {node} if is_drained else others)
            case SessionEnded(node, session, reason, at_s, is_final):
                if not self.has_session(node, session):
                    return self
                left = {other: member for other, member in self.members.items() if other != node}
                former = [*self.former.items(), (node, FormerMember(self.members[node], reason, at_s))]
                drained = self.drained - {node} if is_final else self.drained
                return Membership(left, dict(former[-_REMEMBERED:]), drained)

    @property
    def usable(self) -> Membership:
        """The membership without drained nodes, for plans."""
        return self.without(self.drained)

    def without(self, nodes: Container[str]) -> Membership:
        """Return the membership without these nodes."""
        kept = {node: member for node, member in self.members.items() if node not in nodes}
        return replace(self, members=kept)

    def has_session(self, node: str, session: int) -> bool:
        """Report whether a node is connected in this session."""
        return node in self.members and self.members[node].session == session
