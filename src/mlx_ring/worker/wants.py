"""What a row wants of the last stage: at which positions, and of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.protos import step_pb2

Want = step_pb2.Want


@dataclass(frozen=True, slots=True)
class RowWants:
    """A row's wants, read once."""

    offsets: tuple[int, ...] = ()
    """Into the row, ascending: where the model's head runs."""
    draws: tuple[int, ...] = ()
    """Those of them at which a token is drawn, in the order of the answer."""
    hidden: bool = False
    looks: tuple[step_pb2.Want, ...] = ()
    """Wants other than tokens: they are looked up in what was computed."""


NOTHING = RowWants()
_NEXT_TOKEN = RowWants((0,), (0,))
_HIDDEN = (Want.HIDDEN, Want.HIDDEN_SUM)


def samples_token(row: step_pb2.Row) -> bool:
    """Whether a row's result includes a sampled token."""
    return any(want.what == Want.TOKEN for want in row.wants)


def read_wants(row: step_pb2.Row, count: int) -> RowWants:
    """The wants of a row of `count` tokens.

    Raises:
        ProtocolError: they contradict each other or the row.
    """
    wants = row.wants
    if not wants:
        return NOTHING
    if count == 1 and len(wants) == 1 and wants[0].what == Want.TOKEN and wants[0].where != Want.LISTED:
        return _NEXT_TOKEN
    hidden = {want.what in _HIDDEN for want in wants}
    if len(hidden) > 1:
        raise ProtocolError(f"The row of sequence {row.sequence} wants hidden states and logits at once.")
    looks = tuple(want for want in wants if want.what != Want.TOKEN)
    for want in looks:
        _check_targets(want, count)
    return RowWants(
        tuple(sorted({offset for want in wants for offset in offsets_of(want, count)})),
        _draws(row, count),
        hidden == {True},
        looks,
    )


def _draws(row: step_pb2.Row, count: int) -> tuple[int, ...]:
    wants = [want for want in row.wants if want.what == Want.TOKEN]
    if len(wants) > 1:
        raise ProtocolError(f"The row of sequence {row.sequence} wants tokens more than once.")
    if not wants:
        return ()
    if row.draft and wants[0].where != Want.ALL:
        raise ProtocolError(f"The row of sequence {row.sequence} has drafts and does not want every token.")
    return tuple(offsets_of(wants[0], count))


def _check_targets(want: step_pb2.Want, count: int) -> None:
    positions = len(offsets_of(want, count))
    if want.what == Want.LOGPROBS and len(want.targets) != positions:
        raise ProtocolError(f"{positions} positions want log-probabilities of {len(want.targets)} tokens.")


def offsets_of(want: step_pb2.Want, count: int) -> Sequence[int]:
    """The offsets that one want names, in its order."""
    if want.where == Want.LAST:
        return (count - 1,)
    if want.where == Want.ALL:
        return range(count)
    for offset in want.listed:
        if offset >= count:
            raise ProtocolError(f"A result is wanted at offset {offset} of a row of {count} tokens.")
    return want.listed
