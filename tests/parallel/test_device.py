"""A GPU that torch can't use: training refuses to start on the CPU, and other commands warn."""

import os

import pytest
import torch

from farsight.errors import ConfigError
from farsight.parallel import device

FILES = {"/dev/nvidiactl", "/dev/kfd"}
OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update it."
BUILDS = {"cpu": (None, None), "cuda": ("13.0", None), "rocm": (None, "7.1")}


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one without accelerators for torch, with other device files, variables and another build of torch."""

    def make(file=None, build="cpu", says=None, **variables):
        def init():
            if says:
                raise RuntimeError(says)

        exists = os.path.exists
        cuda, hip = BUILDS[build]
        for target, name, value in (
            (torch.accelerator, "is_available", lambda: False), (torch.version, "cuda", cuda), (torch.version, "hip", hip),
            (torch.cuda, "init", init), (os.path, "exists", lambda path: path == file if path in FILES else exists(path)),
        ):  # fmt: skip
            monkeypatch.setattr(target, name, value)
        for name in device.VISIBLE:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        device._warn_of_unusable_gpu.cache_clear()

    return make


REFUSED = {
    "no build for GPUs": ({"file": "/dev/nvidiactl"}, r"/dev/nvidiactl exists\), .* is built for CPUs alone\. Install torch"),
    "an old driver": (
        {"file": "/dev/nvidiactl", "build": "cuda", "says": OLD},
        r"is built for CUDA 13\.0 and says: The NVIDIA driver .*found version 12020\)\. Update the GPU's driver",
    ),
    "no such GPU": ({"build": "cuda", "CUDA_VISIBLE_DEVICES": "7"}, r"DEVICES=7 is set\).* finds no device\. Update"),
    "no build, but a list": ({"CUDA_VISIBLE_DEVICES": "0,1"}, r"CUDA_VISIBLE_DEVICES=0,1 is set\).* built for CPUs alone"),
    "an AMD GPU": ({"file": "/dev/kfd", "build": "rocm", "says": "No GPU"}, r"/dev/kfd exists\).* ROCm 7\.1 and says: No GPU\. "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_training_does_not_start_on_the_cpu(machine, caplog, case):
    there, says = REFUSED[case]
    machine(**there)
    with pytest.raises(
        ConfigError, match=says + r'.* To use the CPU on purpose, set CUDA_VISIBLE_DEVICES=""\.$'
    ) as error:
        device.prepare_device(keep_memory=False)
    for _ in range(2):
        assert device.default_device().type == "cpu"
    assert caplog.messages == [str(error.value)]


@pytest.mark.parametrize(
    "there",
    [
        {}, {"build": "cuda"}, {"file": "/dev/kfd"}, {"file": "/dev/kfd", "build": "cuda"},
        *({"file": "/dev/nvidiactl", "build": "cuda", "CUDA_VISIBLE_DEVICES": none} for none in ("", "-1", "NoDevFiles")),
        {"file": "/dev/kfd", "build": "rocm", "HIP_VISIBLE_DEVICES": "-1"},
    ],
)  # fmt: skip
def test_the_cpu_where_there_is_no_gpu_or_on_purpose(machine, caplog, there):
    machine(**there)
    assert device.prepare_device(keep_memory=False).type == device.default_device().type == "cpu"
    assert not caplog.messages
