"""The device, on machines with and without an accelerator.

Without one, torchtitan 0.2.2 assumes "cuda" and reads memory statistics that `torch.cpu` lacks, and DeepSpeed compiles
kernels it does not need. This module is the only place that patches another library to fix that.
"""

import ctypes
import os
import resource
import sys
import types
import warnings
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torchtitan.tools import utils as titan_utils

from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.units import GIB

A100_FLOPS = 312e12
"""The peak FLOP/s that torchtitan returns for a device that it does not know."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""


def prepare_device(keep_memory: bool = True) -> torch.device:
    """Points torchtitan at the CPU if there is no accelerator, and sets the environment variables of a single process.

    Call it before the trainer is built; further calls change nothing.

    Args:
        keep_memory: on the CPU, have the C library keep freed memory for the next step.

    Returns:
        The device this process trains on.
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if os.environ["WORLD_SIZE"] == "1":
        # Port 0: the system picks a free one, so that concurrent runs do not clash.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    if torch.accelerator.is_available():
        return torch.device(titan_utils.device_type, int(os.environ["LOCAL_RANK"]))
    # Every torchtitan module has imported the names, so each has to be patched.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            module.device_type = "cpu"  # type: ignore[attr-defined]  # torchtitan's module attribute
            if hasattr(module, "device_module"):
                module.device_module = _cpu_module()  # type: ignore[attr-defined]  # the same
    if keep_memory:
        _keep_freed_memory()
    return torch.device("cpu")


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated by torch on an accelerator, resident in this process on the CPU."""
    if device.type == "cpu":
        # Linux reports kilobytes here, macOS bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
    return torch.accelerator.max_memory_allocated(device) / GIB


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of the accelerator; None if unknown, as on a CPU."""
    if device.type == "cpu":
        return None
    name = titan_utils.device_module.get_device_name(device)
    flops = titan_utils.get_peak_flops(name)
    return None if flops == A100_FLOPS and "A100" not in name else flops


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def import_deepspeed() -> types.ModuleType:
    """Imports DeepSpeed, set up for the CPU if there is no accelerator; only runs that use it call this.

    Raises:
        ConfigError: it is not installed.
    """
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f'engine = "deepspeed" needs a package that is not installed: pip install "deepspeed>=0.19,<0.20" ({error}).'
        ) from error
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    # On a CPU it would compile its own all-reduce, which needs a compiler and minutes; gloo has one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def check_float8(config: JobConfig) -> None:
    """Refuses float8 layers where they are not available.

    Raises:
        ConfigError: the package or the GPU is missing.
    """
    if not config.model.converters:
        return
    if find_spec("torchao") is None:
        raise ConfigError(
            f"model.converters = {config.model.converters} needs a package that is not installed: pip install torchao."
        )
    emulated = config.quantize.linear.float8.emulate and not config.compile.enable
    if not titan_utils.has_cuda_capability(8, 9) and not emulated:
        raise ConfigError(
            f"model.converters = {config.model.converters} needs a GPU with float8 products (compute capability 8.9: L40, H100 "
            "and later). On other machines quantize.linear.float8.emulate = true with compile.enable = false shows its effect on losses, slowly."
        )


def wait_for_rank_zero() -> None:
    """A barrier for long work that only rank 0 does: it waits up to 12 hours, beyond the usual groups' timeouts."""
    if dist.get_world_size() > 1:
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=12))
        dist.barrier(group)
        dist.destroy_process_group(group)


def _keep_freed_memory() -> None:
    """Makes glibc reuse the memory that a step frees instead of returning it to the kernel.

    With glibc's default thresholds a step's large tensors are mapped and unmapped every time, and zeroing their pages
    takes longer than the SiLU that fills them. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Older versions refuse such a large mmap threshold; the trim threshold alone would only turn off its dynamic adjustment.
    if mallopt is not None and mallopt(ctypes.c_int(M_MMAP_THRESHOLD), ctypes.c_int(GIB)):
        mallopt(ctypes.c_int(M_TRIM_THRESHOLD), ctypes.c_int(GIB))


def _cpu_module() -> types.SimpleNamespace:
    """`torch.cpu` plus the functions that torchtitan expects of a device module."""
    functions = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")}
    missing = {
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=total_memory()),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
    }
    return types.SimpleNamespace(**{**functions, **missing})


def total_memory() -> int:
    """Physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
