"""Counts the operators that run."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    """Counts the operators that run, in compiled code too."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    @classmethod
    def ignore_compile_internals(cls):
        return True  # under other modes nothing is compiled

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func] += 1
        return func(*args, **(kwargs or {}))
