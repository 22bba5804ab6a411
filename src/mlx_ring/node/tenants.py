"""Who shares memory for KV: what they ask for, what they keep, and the sentence that refuses one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_ring.core.errors import ContextKept, PlanError
from mlx_ring.engine.kv_limits import KEPT_TOKENS


@dataclass(frozen=True, slots=True)
class Tenant:
    """An instance that wants a share."""

    instance: str
    model: str
    """As people call it."""
    context_tokens: int
    """That it would have, memory permitting."""
    insisted: bool
    """Whether it must have all of it."""

    def kept_of(self, context_tokens: int) -> int:
        """Tokens of a context that no newcomer takes away."""
        return context_tokens if self.insisted else min(context_tokens, KEPT_TOKENS)


@dataclass(frozen=True, slots=True)
class Claim:
    """What an instance that is being loaded will have on a node."""

    weight_bytes: int
    workers: int


@dataclass(frozen=True, slots=True)
class Keeper:
    """An instance that keeps memory of a node."""

    tenant: Tenant
    kept_tokens: int
    kept_bytes: int


def no_room(
    tenant: Tenant, node: str, takes: str, needed: int, left: int, keepers: Sequence[Keeper]
) -> PlanError:
    """Why a newcomer is refused.

    Args:
        tenant: the newcomer.
        node: where there is too little.
        takes: what it needs so many bytes for, in words.
        needed: bytes.
        left: bytes that it could have.
        keepers: who has the others; one at least.
    """
    insisted = any(keeper.tenant.insisted for keeper in keepers)
    kept = ", and ".join(
        f"{keeper.tenant.model} keeps {_size(keeper.kept_bytes)} for one request of {keeper.kept_tokens} tokens"
        for keeper in keepers
    )
    others = " and ".join(dict.fromkeys(keeper.tenant.model for keeper in keepers))
    if others == tenant.model:
        refused, remedy = f"Another replica of {others} does not fit", "Ask for fewer --replicas"
    else:
        refused, remedy = f"{tenant.model} does not fit beside {others}", f"Unload {others}"
    turns = ", or with --model-memory, by which models take turns" if insisted else ""
    kind = ContextKept if insisted else PlanError
    return kind(
        f"{refused} on {node}: {takes} {_size(needed)}, and {_size(left)} are left there, for {kept}. {remedy}, or start "
        f"the server with a --max-model-len below {max(keeper.kept_tokens for keeper in keepers)}{turns}."
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB"
