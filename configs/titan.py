"""Config sections that torchtitan's trainer reads. Only [quantize.linear.float8] can be set: `configs/check.py` refuses other
values of the rest, or they have no effect on these models."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class DataLoader:
    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None


@dataclass
class Float8Linear:
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers weights in float8; for "tensorwise"."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights at once after a step; for "tensorwise"."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """How tensors are scaled; None is "tensorwise"."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules to leave in their own type; those whose sizes are not multiples of 16 always stay so."""
    emulate: bool = False
    """Emulate float8 on hardware without it; for tests."""


@dataclass
class MXLinear:
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    recipe_name: str = "mxfp8_cublas"
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])


@dataclass
class QuantizedLinear:
    float8: Float8Linear = field(default_factory=Float8Linear)
    # torchtitan reads these; `configs/check.py` refuses other values.
    mx: MXLinear = field(default_factory=MXLinear)


@dataclass
class Float8GroupedMM:
    fqns: list[str] | str = field(default_factory=list)


@dataclass
class MXGroupedMM:
    recipe_name: Literal["mxfp8"] = "mxfp8"
    fqns: list[str] | str = field(default_factory=list)


@dataclass
class QuantizedGroupedMM:
    float8: Float8GroupedMM = field(default_factory=Float8GroupedMM)
    mx: MXGroupedMM = field(default_factory=MXGroupedMM)


@dataclass
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    # torchtitan reads these; `configs/check.py` refuses other values.
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)


@dataclass
class MemoryEstimation:
    enable: bool = False
    disable_fake_mode: bool = False


@dataclass
class FaultTolerance:
    enable: bool = False
    process_group: str = "gloo"
    process_group_timeout_ms: int = 10000
    replica_id: int = 0
    group_size: int = 0
    min_replica_size: int = 1
    semi_sync_method: str | None = None


@dataclass
class Experimental:
    custom_import: str = ""
    custom_args_module: str = ""
