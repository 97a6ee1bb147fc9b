"""GPUs as their data sheets give them, and what part of that a run is assumed to reach: every assumed number is here."""

from dataclasses import dataclass

from farsight.configs.check import ConfigError
from farsight.errors import nearest
from farsight.units import GIB


@dataclass(frozen=True)
class Gpu:
    """One GPU in the vendor's own eight-GPU machine. Bandwidths are bytes a second in one direction."""

    memory_gib: float
    bf16_flops: float
    """Dense, without sparsity."""
    fp32_flops: float
    """Outside the tensor cores, as PyTorch multiplies fp32 unless told otherwise."""
    hbm: float
    nvlink: float
    """To the GPUs of the same node: half of the sheet's figure, which adds both directions."""
    network: float
    """To other nodes, for each GPU: one 200 or 400 Gb/s adapter."""
    host: float
    """PCIe to the host's memory."""
    per_node: int = 8


GPUS = {
    # NVIDIA A100 data sheet (SXM), DGX A100: eight ConnectX-6 at 200 Gb/s.
    "a100-40g": Gpu(40, 312e12, 19.5e12, 1.555e12, 300e9, 25e9, 32e9),
    "a100-80g": Gpu(80, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 32e9),
    # NVIDIA H100 and H200 data sheets (SXM), DGX H100 and H200: eight ConnectX-7 at 400 Gb/s.
    "h100-80g": Gpu(80, 989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9),
    "h200-141g": Gpu(141, 989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
    # NVIDIA DGX B200 data sheet: 1,440 GB, 64 TB/s and 14.4 TB/s of NVLink for eight; ConnectX-7 at 400 Gb/s.
    "b200-180g": Gpu(180, 2250e12, 75e12, 8e12, 900e9, 50e9, 64e9),
    # One GPU for fine-tuning, without NVLink: NVIDIA's data sheets (fp32 accumulation), PCIe 4.0. Several of a machine meet over PCIe.
    "rtx3090-24g": Gpu(24, 71e12, 35.6e12, 936e9, 32e9, 12.5e9, 32e9, per_node=4),
    "rtx4090-24g": Gpu(24, 165.2e12, 82.6e12, 1.008e12, 32e9, 12.5e9, 32e9, per_node=4),
    "a10g-24g": Gpu(24, 70e12, 35e12, 600e9, 32e9, 12.5e9, 32e9, per_node=4),
    "l4-24g": Gpu(24, 121e12, 30.3e12, 300e9, 32e9, 12.5e9, 32e9, per_node=4),
    "l40s-48g": Gpu(48, 362e12, 91.6e12, 864e9, 32e9, 12.5e9, 32e9),
}


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's figures; docs/training/plan.md says where each comes from."""

    matmul: float = 0.60
    """Of the peak FLOP/s, in matrix products."""
    attention: float = 0.55
    """Of the peak FLOP/s, in attention of heads that see the whole sequence."""
    windows: float = 0.40
    """Of that again, in heads that see less of it."""
    hbm: float = 0.80
    """Of the memory's bandwidth, in what only reads and writes: norms, rotation, SwiGLU, optimizer."""
    links: float = 0.80
    """Of NVLink's and the network's bandwidth."""
    overlap: float = 0.90
    """Of the time in which a rank computes, in which data-parallel traffic is hidden."""
    memory: float = 0.92
    """Of the memory; the rest is CUDA's and NCCL's own, and fragments."""


def usable_bytes(gpu: Gpu, efficiency: Efficiency) -> float:
    """Of its memory, what a run can have."""
    return gpu.memory_gib * GIB * efficiency.memory


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        ConfigError: an unknown one, with the nearest.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is not in launch/plan/hardware.py.{nearest(name, list(GPUS))}")
    return GPUS[name]
