"""The machine that a benchmark runs on, and the code that runs."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def origin(device: str) -> dict[str, Any]:
    """Device, versions, date and commit, for a file of figures; figures of a CPU are marked as small."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    if find_spec("triton"):
        import triton

        versions["triton"] = triton.__version__
    return {
        "device": device_name(device), "small": device == "cpu", **versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit(),
    }  # fmt: skip


def _commit() -> str | None:
    """The checkout's commit, with "-dirty" if files differ from it; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
