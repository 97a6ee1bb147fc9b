"""The attention mask and score bias as one value, passed from the model to the kernel.

Caches and contexts of parallel ranks cut it to the heads and keys of their calls; backends apply it; custom operators, which
take tensors and numbers only, take it apart and put it together again.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, P coefficients of a bias.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.bias import FORMULAS, ScoreBias
from farsight.kernels.scoped_attention.documents import remember_part
from farsight.kernels.scoped_attention.host import VALUES, host_values, known, remember

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys that each query head sees; `semantics` has the rule."""

    scopes_N: Tensor
    """Integer tensor [N]; the number of tokens that a head sees, the query's own included. Lk or more is dense."""
    document_starts_BL: Tensor | None = None
    """Integer tensor [B, Lk]; the index of the first token of each token's document. None is one document a row."""
    bias: ScoreBias | None = None
    """Added to the scores after scaling."""
    q_offset: int = 0
    """Number of keys before the first query, as in chunked prefill: query row r is token r + q_offset."""

    def for_heads(self, heads: slice | Tensor) -> "Visibility":
        """That of only these query heads."""
        bias = None if self.bias is None else self.bias.for_heads(heads)
        scopes_N = self.scopes_N[heads]
        if (scopes := known(self.scopes_N, VALUES)) is not None:
            kept = scopes[heads] if isinstance(heads, slice) else tuple(scopes[head] for head in host_values(heads))
            remember(scopes_N, VALUES, kept)
        return replace(self, scopes_N=scopes_N, bias=bias)

    def for_keys(self, keys: slice, q_offset: int) -> "Visibility":
        """That of a call with only these keys, whose indexes then begin at 0.

        Args:
            keys: its start and stop are tokens of the sequence.
            q_offset: number of these keys before the first query.
        """
        starts = whole = self.document_starts_BL
        if whole is not None:
            starts = (whole[:, keys] - keys.start).clamp(min=0)
            remember_part(whole, starts)
        return replace(self, document_starts_BL=starts, q_offset=q_offset)

    def to(self, device: torch.device) -> "Visibility":
        """The same on a device."""
        starts, bias = self.document_starts_BL, self.bias
        starts, bias = None if starts is None else starts.to(device), None if bias is None else bias.to(device)
        return replace(self, scopes_N=self.scopes_N.to(device), document_starts_BL=starts, bias=bias)

    def mask(self, queries: int) -> Tensor:
        """bool [N, queries, queries + q_offset], True where seen; [B, N, …] with documents. O(L²) in memory."""
        keys = torch.arange(queries + self.q_offset, device=self.scopes_N.device)
        starts = self.document_starts_BL
        if starts is not None:
            starts = starts[:, None, self.q_offset :, None].long().to(keys.device)
        return semantics.visible(keys[self.q_offset :, None], keys, self.scopes_N.long()[:, None, None], starts)

    def score_bias(self, queries: int, dtype: torch.dtype) -> Tensor | None:
        """The bias of all pairs, [N, queries, queries + q_offset]; without meaning where a key is not seen."""
        if self.bias is None:
            return None
        keys = torch.arange(queries + self.q_offset, device=self.scopes_N.device)
        distance = keys[self.q_offset :, None] - keys
        return self.bias.to(keys.device, dtype)(distance, self.scopes_N.shape[0], 1, 1)

    def alibi_slopes(self, backend: str) -> Tensor | None:
        """ALiBi's slopes [N], or None without a bias, for a backend whose kernels have no other bias.

        Raises:
            ValueError: another bias; names it and the backend.
        """
        if self.bias is None:
            return None
        if self.bias.kind != "alibi":
            raise ValueError(f'backend "{backend}" has no bias of kind "{self.bias.kind}", only "alibi": use "banded"')
        return self.bias.coefficients_PN[0]

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None, str | None, int]:
        """The arguments of a custom operator: scopes, document starts, coefficients and kind of the bias, q_offset."""
        if self.bias is None:
            return self.scopes_N, self.document_starts_BL, None, None, self.q_offset
        bias = self.bias
        return self.scopes_N, self.document_starts_BL, bias.coefficients_PN, bias.kind, self.q_offset

    @classmethod
    def of_parts(
        cls,
        scopes_N: Tensor,
        document_starts_BL: Tensor | None,
        bias_PN: Tensor | None,
        bias_kind: str | None,
        q_offset: int = 0,
    ) -> "Visibility":
        """The value whose `parts` these are."""
        bias = None if bias_PN is None or bias_kind is None else ScoreBias(bias_kind, bias_PN)
        return cls(scopes_N, document_starts_BL, bias, q_offset)

    def check(self, batch: int, queries: int, keys: int, heads: int) -> None:
        """Checks everything that does not need a tensor's values; backends check values where reading them is free.

        Raises:
            ValueError: it does not fit a call with these sizes; the message says what to set instead.
        """
        self.check_heads(heads)
        q_offset, starts = self.q_offset, self.document_starts_BL
        require(q_offset >= 0, f"q_offset is {q_offset}: set the number of tokens before the first query, 0 or more")
        require(
            keys == queries + q_offset,
            f"{keys} keys for {queries} queries at q_offset {q_offset}: keys are the tokens 0 to q_offset + queries - 1, "
            f"so pass {queries + q_offset} keys or set q_offset to {keys - queries}",
        )
        if starts is not None:
            shape = list(starts.shape)
            require(
                shape == [batch, keys],
                f"document_starts_BL has shape {shape}: pass one index a key, [{batch}, {keys}]",
            )
            integer = starts.dtype in INTEGERS
            require(integer, f"document_starts_BL is {starts.dtype}: pass an integer tensor, such as int64")

    def check_heads(self, heads: int) -> None:
        """The part of `check` that concerns the heads."""
        scopes, bias = self.scopes_N, self.bias
        shape = list(scopes.shape)
        require(shape == [heads], f"scopes_N has shape {shape}: pass one scope a query head, [{heads}]")
        require(scopes.dtype in INTEGERS, f"scopes_N is {scopes.dtype}: pass an integer tensor, such as int64")
        if bias is not None:
            require(bias.kind in FORMULAS, f'the bias is of kind "{bias.kind}": set it to one of {", ".join(FORMULAS)}')
            x, shape = bias.coefficients_PN, list(bias.coefficients_PN.shape)
            require(
                len(shape) == 2 and shape[1] == heads,
                f"coefficients_PN has shape {shape}: pass one value a query head for each coefficient, [P, {heads}]",
            )
            require(x.dtype.is_floating_point, f"coefficients_PN is {x.dtype}: pass a float tensor")
            require(not x.requires_grad, "coefficients_PN requires grad, but it is constant here: detach it")


def require(holds: bool, message: str) -> None:
    """Raises ValueError with this message unless the condition holds."""
    if not holds:
        raise ValueError(message)
