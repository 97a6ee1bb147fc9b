"""Distributed pre-training and long-context extension for Llama-style language models."""

import sys
from importlib.util import find_spec
from types import ModuleType

__version__ = "0.1.0"

if find_spec("triton") is None:
    # Importing torchtitan 0.2.2 imports its kernels for mixtures of experts, which need Triton. We never call them, and
    # PyTorch for CPUs comes without Triton.
    _moe_kernels = ModuleType("torchtitan.models.moe.kernels")
    _moe_kernels.generate_permute_indices = None  # type: ignore[attr-defined]  # the only name that is imported
    sys.modules[_moe_kernels.__name__] = _moe_kernels
