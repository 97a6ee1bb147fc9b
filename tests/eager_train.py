"""`train.py` without torch.compile: torchao compiles its optimizers' steps, which takes longer than a test's run."""

import runpy
from pathlib import Path

import torch

torch.compiler.set_stance("force_eager")
runpy.run_path(str(Path(__file__).parent.parent / "train.py"), run_name="__main__")
