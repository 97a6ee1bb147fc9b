"""Contexts, which supply a layer's keys and values: its own, a cache's or other ranks'; some only record them.

Shapes: B batch, L tokens of the call, N query heads, K key/value heads, H head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from farsight.kernels.scoped_attention import Visibility, scoped_attention


class PendingKV(Protocol):
    """Keys and values that are still being gathered: a layer asks for them, computes its queries, then attends."""

    def attend(self, q_BLNH: Tensor, visibility: Visibility, backend: str) -> Tensor:
        """Attention of this call's queries [B, L, N, H] over all the keys they see, in q's dtype.

        Args:
            visibility: that of the whole sequence. The offset is the context's to set.
            backend: as in `scoped_attention`.
        """
        ...


class SequenceContext(Protocol):
    """Keys beyond this call's tokens: on other ranks (`parallel.halo`), or cached from earlier calls (`inference.kv_cache`)."""

    @property
    def rotates(self) -> bool:
        """Whether it rotates queries and keys itself, and so is given them unrotated."""
        ...

    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Sequence[int]) -> PendingKV:
        """Takes this call's keys and values [B, L, K, H] and starts gathering the others that its queries see.

        Args:
            scopes: scopes of the rank's query heads, as Python integers.
        """
        ...


@dataclass(frozen=True)
class OwnKV:
    """Keys and values of a layer without a context: those of its call are all there are."""

    k_BLKH: Tensor
    v_BLKH: Tensor

    def attend(self, q_BLNH: Tensor, visibility: Visibility, backend: str) -> Tensor:
        return scoped_attention(q_BLNH, self.k_BLKH, self.v_BLKH, visibility, backend=backend)


class PassThrough:
    """A context around a layer's own, which may record or change queries and keys and leaves the attention to it.

    Args:
        inner: the layer's own context; None if it has none.
    """

    def __init__(self, inner: SequenceContext | None) -> None:
        self.inner = inner

    @property
    def rotates(self) -> bool:
        """That of the inner context."""
        return self.inner is not None and self.inner.rotates

    @property
    def nbytes(self) -> int:
        """Bytes held by the inner context, if it is a cache."""
        return getattr(self.inner, "nbytes", 0)

    def pass_keys(self, k_BLKH: Tensor) -> Tensor:
        """The keys to hand on."""
        return k_BLKH

    def pass_queries(self, q_BLNH: Tensor) -> Tensor:
        """The queries to hand on, after `pass_keys` for the same tokens."""
        return q_BLNH

    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Sequence[int]) -> "PassThrough":
        k_BLKH = self.pass_keys(k_BLKH)
        self._pending: PendingKV = (
            OwnKV(k_BLKH, v_BLKH) if self.inner is None else self.inner.exchange(k_BLKH, v_BLKH, scopes)
        )
        return self

    def attend(self, q_BLNH: Tensor, visibility: Visibility, backend: str) -> Tensor:
        pending = self._pending
        del self._pending
        return pending.attend(self.pass_queries(q_BLNH), visibility, backend)
