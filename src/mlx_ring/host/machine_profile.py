"""What was measured of a machine, as a worker in profile mode writes it down and planning reads it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_ring.core.errors import ProtocolError

PROFILE_VERSION = 3
"""Of how things are measured: profiles of another are measured again."""

_STEADY_SPREAD = 0.25

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WeightRate(_Frozen):
    """How fast products go with weights of one kind."""

    weights: str
    """"float32", "bfloat16", "float16", or "8-bit" and "4-bit" of quantized ones in groups of 64."""
    bandwidth: Positive
    """Bytes of weights a second, as decoding reads them: products of a single row, with weights of long rows."""
    row_s: Cost
    """Seconds that each row of weights takes besides, long or short."""
    spread: Cost
    """Of the repetitions' times, from the first quarter to the third, over their median."""
    flops: Positive
    """A second, in products of many rows, as a prompt has them."""


class StepCosts(_Frozen):
    """Seconds that a step takes whatever the size of its layers."""

    step_s: Cost
    """For each step."""
    layer_s: Cost
    """For each layer of a decoder's usual build: operations that are begun, not what they compute."""
    draw_s: Cost
    """For drawing tokens, once a step ..."""
    logit_s: Cost
    """... and for each row and token of the vocabulary."""
    attention_s: Cost
    """For each token looked back at, and each number of the queries."""


class MachineProfile(_Frozen):
    """One machine, by what a worker with so many BLAS threads gets out of it."""

    version: int
    device: str
    """"cpu" or "gpu"."""
    device_name: str
    computes_in: str
    """What half precision becomes when it is loaded: "float32" on a CPU; empty where it stays as it is."""
    memory_bytes: Bytes
    """Of the device, that may be used in all."""
    memory_available_bytes: Bytes
    """That was left of it."""
    memory_limited_by: str
    cores: int
    cpu_share: Positive | None
    """Cores' worth of time that control groups grant; None: all of it. Rates and costs below are of time that is granted."""
    cpu_period_s: Positive | None
    """In which that is granted, and after which it is granted again."""
    worker_bytes: Bytes
    """That a worker holds beside weights, KV and activations."""
    agent_bytes: Bytes
    """That an agent holds."""
    blas: str
    blas_threads: int
    mlx: str
    rates: Annotated[tuple[WeightRate, ...], Field(min_length=1, strict=False)]
    costs: StepCosts
    seconds: Positive
    """That measuring took."""

    @property
    def is_steady(self) -> bool:
        """Whether repetitions took about as long as each other: nobody else used the machine meanwhile."""
        return max(rate.spread for rate in self.rates) <= _STEADY_SPREAD

    def limited_to(self, nbytes: int) -> MachineProfile:
        """The same machine, of whose memory its owner grants no more than this."""
        if nbytes >= self.memory_bytes:
            return self
        return self.model_copy(update={"memory_bytes": nbytes, "memory_limited_by": "--memory-limit"})

    @classmethod
    def from_json(cls, text: str) -> MachineProfile:
        """Read what `model_dump_json` wrote.

        Raises:
            ProtocolError: it is none, or of another version.
        """
        try:
            profile = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "its beginning"
            raise ProtocolError(f"This is no machine's profile: {first['msg']} at {where}.") from error
        if profile.version != PROFILE_VERSION:
            raise ProtocolError(
                f"The profile is of version {profile.version}; this version reads {PROFILE_VERSION}."
            )
        return profile
