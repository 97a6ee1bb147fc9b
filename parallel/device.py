"""The device that a process trains on, and what it offers."""

import ctypes
import logging
import os
import re
import resource
import sys
import types
import warnings
from functools import cache

import torch

from farsight.errors import ConfigError
from farsight.units import GIB

logger = logging.getLogger("farsight")

PEAK_FLOPS = (
    ("H100 NVL", 835e12), ("H100 PCIe", 756e12), ("H100", 989e12), ("H200", 989e12), ("H20", 148e12), ("GB200", 2500e12),
    ("B200", 2250e12), ("A100", 312e12), ("A10G", 70e12), ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12),
    ("RTX 3090", 71e12), ("RTX 4090", 165.2e12), ("MI355X", 2500e12), ("MI325X", 1300e12), ("MI300X", 1300e12), ("MI250X", 191.5e12),
)  # fmt: skip
"""Dense bf16 FLOP/s of the vendors' data sheets, by words of the device's name; the first that fits counts."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables with the GPUs that a process may use."""
NO_GPU = re.compile(r"-.*|NoDevFiles|")
"""Their values for none; the word is Slurm's, in a job that asked for no GPU."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""


def prepare_device(keep_memory: bool = True) -> torch.device:
    """Selects this process's device, and sets the environment variables of a run without a launcher.

    Call it before the trainer is built; further calls change nothing.

    Args:
        keep_memory: on the CPU, have the C library keep freed memory for the next step.

    Returns:
        The device this process trains on.

    Raises:
        ConfigError: there is a GPU that torch can't use; on the CPU the run would take a hundred times as long.
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if os.environ["WORLD_SIZE"] == "1":
        # Port 0: the system picks a free one, so that concurrent runs do not clash.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    if torch.accelerator.is_available():
        device = torch.device(default_device().type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
        return device
    if (why := unusable_gpu()) is not None:
        raise ConfigError(why)
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


def device_name(device: torch.device) -> str:
    """The accelerator's name as its driver gives it, or "CPU"."""
    return "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of the accelerator; None if unknown, as on a CPU."""
    name = device_name(device)
    # Laptops have slower chips under the same names.
    return next((flops for part, flops in PEAK_FLOPS if re.search(rf"\b{part}\b(?!.*Laptop)", name)), None)


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU; warns once if there is a GPU that torch can't use."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    _warn_of_unusable_gpu()
    return torch.device("cpu")


def unusable_gpu() -> str | None:
    """Says why torch, which has no accelerator, can't use this machine's GPU; None if there is none or it is hidden."""
    visible = {name: os.environ[name] for name in VISIBLE if name in os.environ}
    if any(NO_GPU.fullmatch(value.strip()) for value in visible.values()):
        return None
    # AMD's file is there for the graphics of most laptops too, which torch for CPUs is right to ignore.
    files = ["/dev/nvidiactl", *["/dev/kfd"] * (torch.version.hip is not None)]
    seen = [f"{path} exists" for path in files if os.path.exists(path)]
    seen += [f"{name}={value} is set" for name, value in visible.items()]
    if not seen:
        return None
    rocm, cuda = torch.version.hip, torch.version.cuda
    if rocm is None and cuda is None:
        what, remedy = "is built for CPUs alone", "Install torch for your GPU (https://pytorch.org/get-started/locally)"
    else:
        platform = f"CUDA {cuda}" if rocm is None else f"ROCm {rocm}"
        remedy = "Update the GPU's driver, or install a torch that is built for the driver's version"
        try:
            torch.cuda.init()
            what = f"is built for {platform} and finds no device"
        except Exception as error:  # the driver's own words
            what = f"is built for {platform} and says: {str(error).strip().partition('. ')[0]}"
    return (
        f"There seems to be a GPU ({', '.join(seen)}), but torch sees none: torch {torch.__version__} {what.rstrip('.')}. "
        f'{remedy}. To use the CPU on purpose, set CUDA_VISIBLE_DEVICES="".'
    )


@cache
def _warn_of_unusable_gpu() -> None:
    if (why := unusable_gpu()) is not None:
        logger.warning(why)


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


def _keep_freed_memory() -> None:
    """Makes glibc reuse the memory that a step frees instead of returning it to the kernel.

    With glibc's default thresholds a step's large tensors are mapped and unmapped every time, and zeroing their pages
    takes longer than the SiLU that fills them. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Older versions refuse such a large mmap threshold; the trim threshold alone would only turn off its dynamic adjustment.
    if mallopt is not None and mallopt(ctypes.c_int(M_MMAP_THRESHOLD), ctypes.c_int(GIB)):
        mallopt(ctypes.c_int(M_TRIM_THRESHOLD), ctypes.c_int(GIB))


def total_memory() -> int:
    """Physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
