"""A cache of tensor values read on the host, and of results computed from them, valid until the tensor changes.

Reading a GPU tensor waits for all queued work on the GPU, and layers call attention with the same few tensors.
"""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

_memory = WeakTensorKeyDictionary()
"""For each tensor, its version and the results computed from it, by name. An entry dies with its tensor."""


def host_values(x: Tensor) -> tuple[int, ...]:
    """The values of a one-dimensional integer tensor, such as scopes_N; read only if the tensor is new or has changed.

    Tensors made under inference_mode do not track changes and are read every time. A change through `x.data` is not
    tracked either, and goes unnoticed.
    """
    return cached(x, "values", lambda x: tuple(x.tolist()))


def cached(x: Tensor, name: Hashable, compute: Callable[[Tensor], T]) -> T:
    """compute(x), cached under a name until x changes in place or is deleted."""
    # Cached tensors may be saved for a later backward pass, which refuses tensors made in inference mode.
    with torch.inference_mode(False):
        if x.is_inference():
            return compute(x)
        version, known = _memory.get(x, (None, {}))
        if version != x._version:
            version, known = _memory[x] = x._version, {}
        if name not in known:
            known[name] = compute(x)
        return known[name]
