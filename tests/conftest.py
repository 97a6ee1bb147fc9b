"""Without a GPU Triton's kernels are interpreted: it has to be said before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
