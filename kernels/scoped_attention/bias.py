"""Score biases: terms in a score that depend on its head and on the distance between query and key.

A kind of bias is a formula here, each head's coefficients in `model/position/bias.py`, and a setting in `configs/schema.py`.
The backends "reference", "banded" and "flex", and decoding with "banded", compute every formula; others have kernels for
ALiBi and refuse any other kind by name (`Visibility.alibi_slopes`).

Shape suffixes: N query heads, P coefficients of a formula.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _alibi(distance: Tensor, slope: Tensor) -> Tensor:
    """ALiBi, Press et al. 2022 (arXiv:2108.12409)."""
    return -slope * distance


FORMULAS: dict[str, Callable[..., Tensor]] = {"alibi": _alibi}
"""By kind: the term in a score, from the distance in tokens and the head's coefficients, which broadcast.

Distances to keys after the query are negative; whatever a formula gives for them is masked out.
"""


@dataclass(frozen=True, eq=False)
class ScoreBias:
    """A kind of bias with the coefficients of some heads, all constants."""

    kind: str
    """One of FORMULAS."""
    coefficients_PN: Tensor
    """Float tensor [P, N]; ALiBi's only coefficient is the slope, in score units per token."""

    def __call__(self, distance: Tensor, *heads: int) -> Tensor:
        """The term in the scores of keys at a distance in tokens, in the coefficients' dtype.

        Args:
            heads: the shape in which the N heads broadcast with `distance`, such as N, 1, 1 for distances [Lq, Lk].
        """
        return FORMULAS[self.kind](distance, *self.coefficients_PN.view(-1, *heads))

    def of_head(self, distance: Tensor, head: Tensor) -> Tensor:
        """The same for one head, given as a scalar tensor."""
        rows = range(self.coefficients_PN.shape[0])
        return FORMULAS[self.kind](distance, *(self.coefficients_PN[row, head] for row in rows))

    def for_heads(self, heads: slice | Tensor) -> "ScoreBias":
        """That of only these heads."""
        return ScoreBias(self.kind, self.coefficients_PN[:, heads])

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "ScoreBias":
        """The same on a device, in a dtype or its own."""
        return ScoreBias(self.kind, self.coefficients_PN.to(device=device, dtype=dtype))
