"""What is read of tensors on the host, or computed from that: once, until the tensor changes.

Reading a tensor of a GPU waits for all that the GPU was given to do; layers call attention with the same few tensors.
"""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

_memory = WeakTensorKeyDictionary()
"""Tensor: its version, and by name what was computed from that. Goes with the tensor."""


def host_values(x: Tensor) -> tuple[int, ...]:
    """The values of a one-dimensional integer tensor, such as scopes_N. Read when the tensor is new or has changed.

    A tensor made under inference_mode does not say when it changes: it is read each time. A change through `x.data`
    says nothing either, and goes unseen.
    """
    return kept(x, "values", lambda x: tuple(x.tolist()))


def kept(x: Tensor, name: Hashable, compute: Callable[[Tensor], T]) -> T:
    """compute(x), remembered under a name until x changes in place or is gone."""
    # Tensors that are kept serve a later backward pass too, which refuses those made in inference mode.
    with torch.inference_mode(False):
        if x.is_inference():
            return compute(x)
        version, known = _memory.get(x, (None, {}))
        if version != x._version:
            version, known = _memory[x] = x._version, {}
        if name not in known:
            known[name] = compute(x)
        return known[name]
