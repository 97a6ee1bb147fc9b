"""Data-sheet figures of GPUs, and the shares of them that a run is assumed to reach. All assumptions of plans are here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from farsight.errors import ConfigError, nearest
from farsight.units import GIB

if TYPE_CHECKING:
    from farsight.kernels.scoped_attention.cost import Pass


@dataclass(frozen=True)
class Gpu:
    """One GPU in the vendor's eight-GPU machine. Bandwidths are bytes per second in one direction."""

    memory_gib: float
    bf16_flops: float
    """Dense, without sparsity."""
    fp32_flops: float
    """Outside the tensor cores, as PyTorch multiplies fp32 unless told otherwise."""
    hbm: float
    nvlink: float
    """To GPUs of the same node: half of the data sheet's figure, which adds both directions."""
    network: float
    """To other nodes, per GPU: one 200 or 400 Gb/s adapter."""
    host: float
    """To host memory, over PCIe."""
    per_node: int = 8
    """GPUs in a node."""
    major: int = 8
    """Of the compute capability: attention reaches the shares of its architecture."""


GPUS = {
    # NVIDIA A100 data sheet (SXM), DGX A100: eight ConnectX-6 at 200 Gb/s.
    "a100-40g": Gpu(40, 312e12, 19.5e12, 1.555e12, 300e9, 25e9, 32e9),
    "a100-80g": Gpu(80, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 32e9),
    # NVIDIA H100 and H200 data sheets (SXM), DGX H100 and H200: eight ConnectX-7 at 400 Gb/s.
    "h100-80g": Gpu(80, 989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9, major=9),
    "h200-141g": Gpu(141, 989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9, major=9),
    # NVIDIA DGX B200 data sheet: 1,440 GB, 64 TB/s and 14.4 TB/s of NVLink for eight; ConnectX-7 at 400 Gb/s.
    "b200-180g": Gpu(180, 2250e12, 75e12, 8e12, 900e9, 50e9, 64e9, major=10),
    # Single GPUs for fine-tuning, without NVLink: NVIDIA's data sheets (fp32 accumulation). GPUs of a machine use PCIe 4.0.
    "rtx3090-24g": Gpu(24, 71e12, 35.6e12, 936e9, 32e9, 12.5e9, 32e9, per_node=4),
    "rtx4090-24g": Gpu(24, 165.2e12, 82.6e12, 1.008e12, 32e9, 12.5e9, 32e9, per_node=4),
    "a10g-24g": Gpu(24, 70e12, 35e12, 600e9, 32e9, 12.5e9, 32e9, per_node=4),
    "l4-24g": Gpu(24, 121e12, 30.3e12, 300e9, 32e9, 12.5e9, 32e9, per_node=4),
    "l40s-48g": Gpu(48, 362e12, 91.6e12, 864e9, 32e9, 12.5e9, 32e9),
}


ANY = "any"
"""The value of `farsight recipe --gpu` for GPUs of any memory."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's figures that runs reach; docs/training/plan.md gives the source of each."""

    matmul: float = 0.60
    """Share of the peak FLOP/s in matrix products."""
    attention: float | None = None
    """Share of the peak FLOP/s in attention, in heads that see the whole sequence; None is each pass's of the kernels."""
    windows: float = 0.43
    """Share of the attention speed that heads with shorter scopes reach."""
    hbm: float = 0.80
    """Share of the memory bandwidth in memory-bound operations: norms, rotation, SwiGLU, optimizer."""
    links: float = 0.80
    """Share of the bandwidth of NVLink, network and PCIe."""
    overlap: float = 0.90
    """Share of a rank's computation time that can hide data-parallel traffic."""
    memory: float = 0.92
    """Share of the memory that a run can use; CUDA, NCCL and fragmentation take the rest."""


def find_gpu(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        ConfigError: an unknown name; the message suggests the closest one.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is not a known GPU.{nearest(name, list(GPUS))}")
    return GPUS[name]


@dataclass(frozen=True)
class Device:
    """A device and the memory that a run can use on it."""

    name: str
    usable: float
    """Bytes: those free on a GPU in this machine, or a run's share of a listed one."""
    cpu: bool = False


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, and the shares of their figures that a run reaches."""

    kind: str
    gpu: Gpu
    efficiency: Efficiency = Efficiency()

    @property
    def device(self) -> Device:
        """One of the GPUs."""
        return Device(self.kind, self.gpu.memory_gib * GIB * self.efficiency.memory)

    @property
    def hbm(self) -> float:
        """Bytes per second that a run reads and writes on a GPU."""
        return self.gpu.hbm * self.efficiency.hbm

    def attention(self, pass_: "Pass") -> float:
        """Share of the peak FLOP/s in attention, in heads that see the whole sequence: the fastest kernel's without packages."""
        from farsight.kernels.scoped_attention.cost import gpu_of  # imports torch

        constants = gpu_of(self.gpu.major)
        fastest = max(passes[pass_].dense for kernel, passes in constants.kernels.items() if kernel != "FA3")
        return self.efficiency.attention or fastest / constants.peak

    def flops(self, itemsize: int) -> float:
        """The peak FLOP/s of products of numbers of this many bytes."""
        return self.gpu.fp32_flops if itemsize == 4 else self.gpu.bf16_flops


def find_device() -> Device:
    """This machine's GPU, or its main memory."""
    import torch

    from farsight.parallel.device import total_memory

    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return Device(torch.cuda.get_device_name(), free)
    return Device("this machine's memory", total_memory(), cpu=True)
