"""Triton's interpreter, faster."""

from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def patched_once():
    """Has Triton's interpreter patch its language once a launch. It does so again whenever a kernel calls another function, which takes
    two fifths of the time; of those calls, the first of each module is enough.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    modules = set()

    def call(self, *arguments, **options):
        if self.fn.__module__ not in modules:
            modules.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
