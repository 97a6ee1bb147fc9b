"""Sequences whose last tokens are permuted.

Shapes: L tokens of a sequence.
"""

import torch
from torch import Tensor

DRAWS = 50
"""Redraws before a span is taken to have no other permutation."""


def spans(length: int) -> list[int]:
    """2, 4, 8 … below the length, then the length itself."""
    return [*(2**power for power in range(1, length.bit_length()) if 2**power < length), length]


def reordered(tokens_L: Tensor, span: int, keep_last: bool, generator: torch.Generator) -> Tensor | None:
    """The sequence with its last `span` tokens in a different random order, int64 [L]; None if they have no other.

    Args:
        keep_last: keeps the last token in place and permutes the span − 1 tokens before it.
    """
    stop = len(tokens_L) - keep_last
    start = len(tokens_L) - span
    for _ in range(DRAWS):
        out_L = tokens_L.clone()
        out_L[start:stop] = tokens_L[start:stop][torch.randperm(stop - start, generator=generator)]
        if not torch.equal(out_L, tokens_L):
            return out_L
    return None


def oldest_exchanged(tokens_L: Tensor, span: int) -> Tensor | None:
    """The sequence with the first of its last `span` tokens and the next different token exchanged, int64 [L].

    The last token stays in place. None if no token in between differs from the first.
    """
    start = len(tokens_L) - span
    others = torch.nonzero(tokens_L[start:-1] != tokens_L[start])[:, 0]
    if not len(others):
        return None
    out_L, other = tokens_L.clone(), start + int(others[0])
    out_L[start], out_L[other] = tokens_L[other], tokens_L[start]
    return out_L
