"""Heads of equal scope as groups, for kernels that take one sliding window a call.

Shape suffix: N query heads.
"""

import math
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

Heads = slice | Tensor
"""Indexes of heads: a slice, for views without copies, if they are evenly spaced."""


class Group(NamedTuple):
    """Heads for one call."""

    window: int
    """Number of tokens before its own that a query sees; -1 is no limit."""
    heads: Heads
    kv_heads: Heads
    """Each of these serves equally many of the heads, in order."""


def by_window(
    scopes: tuple[int, ...], longest: int, kv_places: tuple[int, ...], device: torch.device
) -> tuple[Group, ...]:
    """Query heads by window.

    Args:
        scopes: of all heads, in tokens; 0 leaves a head out.
        longest: tokens of the longest document: a scope of this or more has no limit.
        kv_places: index of each key-value head in the tensors of keys and values; that of a head left out does not matter.
    """
    windows = (-1 if scope >= longest else scope - 1 if scope else None for scope in scopes)
    return _groups(tuple(windows), kv_places, device)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _groups(windows_N: tuple[int | None, ...], kv_places: tuple[int, ...], device: torch.device) -> tuple[Group, ...]:
    """Cached, because copying a list of heads to the GPU waits for it."""
    ratio = len(windows_N) // len(kv_places)
    groups = []
    for window in sorted({window for window in windows_N if window is not None}):
        heads = [n for n, other in enumerate(windows_N) if other == window]
        served = [(kv_head, len(list(same))) for kv_head, same in groupby(n // ratio for n in heads)]
        # A key-value head that serves more heads than others is repeated until all serve equally many.
        share = math.gcd(*(count for _, count in served))
        repeated = [kv_places[kv_head] for kv_head, count in served for _ in range(count // share)]
        groups.append(Group(window, _indexes(heads, device), _indexes(repeated, device)))
    return tuple(groups)


def _indexes(heads: list[int], device: torch.device) -> Heads:
    step = max(1, heads[1] - heads[0]) if len(heads) > 1 else 1
    evenly = slice(heads[0], heads[-1] + 1, step)
    return evenly if list(range(*evenly.indices(evenly.stop))) == heads else torch.tensor(heads, device=device)


def add_heads(total: Tensor, heads: Heads, part: Tensor) -> None:
    """total[..., heads, :] += part, where heads may repeat; the sum is in place."""
    if isinstance(heads, slice):
        total[..., heads, :] += part
    else:
        total.index_add_(-2, heads, part)
