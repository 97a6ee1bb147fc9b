"""Without a GPU Triton's kernels are interpreted: it has to be said before anything imports Triton."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def unreadable(monkeypatch):
    """Has a file raise when it is opened, as a network file system may for a while."""
    broken, opened = {}, Path.open

    def fail(path, *arguments, **options):
        if path in broken:
            raise broken[path]
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    return broken.__setitem__
