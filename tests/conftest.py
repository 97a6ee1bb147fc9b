"""Triton's kernels are interpreted in the test processes: it has to be said before anything imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
