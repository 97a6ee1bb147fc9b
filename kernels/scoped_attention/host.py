"""A cache of tensor values read on the host, and of results computed from them, valid until the tensor changes.

Reading a GPU tensor waits for all queued work on the GPU, and layers call attention with the same few tensors.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

VALUES = "values"
"""The name under which `host_values` are cached."""

_memory = WeakTensorKeyDictionary()
"""For each tensor, its version and the results computed from it, by name. An entry dies with its tensor."""


def host_values(x: Tensor) -> tuple[int, ...]:
    """The values of a one-dimensional integer tensor, such as scopes_N; read only if the tensor is new or has changed.

    Tensors made under inference_mode do not track changes and are read every time. A change through `x.data` is not
    tracked either, and goes unnoticed.
    """
    return cached(x, VALUES, lambda x: tuple(x.tolist()))


def remember_scopes(scopes_N: Tensor, scopes: Sequence[int]) -> None:
    """Saves `host_values` from reading scopes on an accelerator that the host knows."""
    remember(scopes_N, VALUES, tuple(scopes))


def cached(x: Tensor, name: Hashable, compute: Callable[[Tensor], T]) -> T:
    """compute(x), cached under a name until x changes in place or is deleted."""
    # Cached tensors may be saved for a later backward pass, which refuses tensors made in inference mode.
    with torch.inference_mode(False):
        if x.is_inference():
            return compute(x)
        results = _results(x)
        if name not in results:
            results[name] = compute(x)
        return results[name]


def known(x: Tensor, name: Hashable) -> Any:
    """The result that `cached` has stored for x under a name; None if it has none."""
    return None if x.is_inference() else _results(x).get(name)


def remember(x: Tensor, name: Hashable, result: object) -> None:
    """Tells `cached` a result that need not be computed from x, because it is known otherwise."""
    if not x.is_inference():
        _results(x)[name] = result


def _results(x: Tensor) -> dict[Hashable, Any]:
    """The results stored for the current version of x."""
    version, results = _memory.get(x, (None, {}))
    if version != x._version:
        version, results = _memory[x] = x._version, {}
    return results
