"""Sampling parameters across gRPC: the one place where `Sampling` becomes its message and comes back.

Both directions go by the fields' names, so that a new parameter is one field of `Sampling` and one of the message.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from mlx_ring.core.types import Sampling
from mlx_ring.rpc.protos import step_pb2

SamplingT = TypeVar("SamplingT", bound=Sampling)

_NAMES = tuple(field.name for field in fields(Sampling))
_MAPS = frozenset({"logit_bias"})
"""Fields that are a map in the message, and sorted pairs outside of it."""


def encode_sampling(sampling: Sampling) -> step_pb2.Sampling:
    """Return the message that carries the parameters."""
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _NAMES}
    for name in _MAPS:
        values[name] = dict(values[name])
    return step_pb2.Sampling(**values)


def decode_sampling(message: step_pb2.Sampling, kind: type[SamplingT]) -> SamplingT:
    """Return the parameters of a message as a `kind`.

    Fields that the message leaves out, or sets to 0, get the defaults of `Sampling`, which switch them off.
    """
    given: dict[str, Any] = {}
    for name in _NAMES:
        value = getattr(message, name)
        if value:
            given[name] = tuple(sorted(value.items())) if name in _MAPS else value
    return kind(**given)
