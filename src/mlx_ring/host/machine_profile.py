"""Profile of a machine, as a worker in profile mode writes it and planning reads it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_ring.core.errors import ProtocolError

PROFILE_VERSION = 8
"""Version of the measurements: machines with profiles of another version are measured again."""

_STEADY_SPREAD = 0.25

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WeightRate(_Frozen):
    """Speed of products with weights of one kind."""

    weights: str
    """Kind: "float32", "bfloat16", "float16", or "8-bit" and "4-bit" for quantized weights in groups of 64."""
    bandwidth: Positive
    """Bytes of weights a second while decoding: products of a single row, with long rows of weights."""
    row_s: Cost
    """Additional seconds for each row of weights, long or short."""
    spread: Cost
    """Distance from the first to the third quarter of the repetitions' times, over their median."""
    flops: Positive
    """Operations a second in products of many rows, as in a prompt."""


class StepCosts(_Frozen):
    """Seconds that a step takes whatever the size of its layers."""

    step_s: Cost
    """Seconds for each step."""
    layer_s: Cost
    """Seconds for each layer of a usual decoder with float weights: starting its operations, not computing them."""
    quantized_layer_s: Cost
    """The same with quantized weights, which native kernels compute in fewer operations."""
    draw_s: Cost
    """Seconds for drawing tokens, once a step ..."""
    logit_s: Cost
    """... and for each row and token of the vocabulary."""
    attention_s: Cost
    """Seconds for each token attended to, and each number of the queries."""
    experts_s: Cost = 0.0
    """Further seconds for each layer with experts: choosing them, and gathering their results."""
    states_s: Cost = 0.0
    """Further seconds for each layer with a recurrent state."""
    row_s: Cost = 0.0
    """Further seconds for each row of a layer after the first, beside attention and products."""
    starts_ahead: bool = False
    """True if a layer's operations are started while those before are computed, as a GPU allows: the longer counts."""


class MachineProfile(_Frozen):
    """Performance of one machine, for a worker with `blas_threads` BLAS threads."""

    version: int
    device: str
    """Device: "cpu" or "gpu"."""
    device_name: str
    computes_in: str
    """Type that replaces half precision at loading: "float32" on a CPU; empty if it stays."""
    memory_bytes: Bytes
    """Usable memory of the device in all."""
    memory_available_bytes: Bytes
    """Memory of it that was free."""
    memory_limited_by: str
    cores: int
    cpu_share: Positive | None
    """Cores' worth of time that control groups grant; None: all of it. Rates and costs below are in granted time."""
    cpu_period_s: Positive | None
    """Period of this grant."""
    worker_bytes: Bytes
    """Bytes that a worker holds beside weights, KV and activations."""
    agent_bytes: Bytes
    """Bytes that an agent holds."""
    blas: str
    kernels: str
    """Instruction set of the native kernels that multiplied quantized weights; empty without them."""
    blas_threads: int
    mlx: str
    rates: Annotated[tuple[WeightRate, ...], Field(min_length=1, strict=False)]
    costs: StepCosts
    seconds: Positive
    """Duration of the measurement."""

    @property
    def uses_cuda(self) -> bool:
        """True if it computes on an NVIDIA GPU."""
        return self.device != "cpu" and "NVIDIA" in self.device_name

    @property
    def is_steady(self) -> bool:
        """True if repetitions took equally long, so that no other program used the machine."""
        return self.spread <= _STEADY_SPREAD

    @property
    def spread(self) -> float:
        """Largest relative spread of its rates."""
        return max(rate.spread for rate in self.rates)

    def limited_to(self, nbytes: int) -> MachineProfile:
        """Return the same machine with no more memory than this, as its owner grants."""
        if nbytes >= self.memory_bytes:
            return self
        return self.model_copy(update={"memory_bytes": nbytes, "memory_limited_by": "--memory-limit"})

    @classmethod
    def from_json(cls, text: str) -> MachineProfile:
        """Read the output of `model_dump_json`.

        Raises:
            ProtocolError: it is no profile, or of another version.
        """
        try:
            profile = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "its beginning"
            raise ProtocolError(f"This is not a machine's profile: {first['msg']} at {where}.") from error
        if profile.version != PROFILE_VERSION:
            raise ProtocolError(
                f"The profile is of version {profile.version}; this version reads {PROFILE_VERSION}."
            )
        return profile
