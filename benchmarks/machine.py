"""The machine that a benchmark runs on."""

from pathlib import Path

import torch


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return models[0] if models else "cpu"
