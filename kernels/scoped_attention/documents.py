"""Documents as the sequences of variable-length attention, computed without reading the accelerator.

The host has to know how many documents there are, and the length of the longest, to launch such a kernel. Who copies a
batch to an accelerator knows both and tells `remember_documents`.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.host import cached, known, remember

MAX_DOCUMENTS = 65535
"""Documents are the second dimension of FlashAttention's CUDA grids, and this is its limit."""


class Documents(NamedTuple):
    """The documents of a batch, as far as the host needs to know them to launch a kernel."""

    number: int
    """Of all rows together, or more."""
    longest: int
    """Tokens of the longest, or more."""
    mean: float
    """Mean length of a token's document, in tokens."""

    @classmethod
    def of(cls, document_starts_BL: Tensor) -> "Documents":
        """Those of document starts [B, Lk], which this copies to the host.

        Raises:
            ValueError: starts that are not those of packed documents.
        """
        starts_BL = document_starts_BL.cpu().long()
        semantics.check_values((), starts_BL)
        astray = starts_BL.gather(1, starts_BL) != starts_BL
        if astray.any():
            b, t = (int(x) for x in astray.nonzero()[0])
            first = int(starts_BL[b, t])
            raise ValueError(
                f"document_starts_BL[{b}, {t}] is {first}, but token {first} is in the document that starts at "
                f"{int(starts_BL[b, first])}: variable-length kernels take whole documents only, use "
                '"triton" or "banded"'
            )
        _, lengths = (starts_BL + torch.arange(len(starts_BL))[:, None] * starts_BL.shape[1]).unique_consecutive(
            return_counts=True
        )
        return cls(len(lengths), int(lengths.max()), float((lengths.double() ** 2).sum() / starts_BL.numel()))


def documents_of(document_starts_BL: Tensor) -> Documents:
    """Those of a batch, or of the batch that these starts are some rows of.

    Starts on an accelerator are read, which waits for it, unless the host was told.
    """
    base = document_starts_BL._base
    told = None if base is None else known(base, Documents)
    return told or cached(document_starts_BL, Documents, Documents.of)


def remember_documents(document_starts_BL: Tensor, on_host_BL: Tensor) -> None:
    """Saves `documents_of` from reading document starts on an accelerator that were copied from the host."""
    remember(document_starts_BL, Documents, Documents.of(on_host_BL))


def remember_part(whole_BL: Tensor, part_BL: Tensor) -> None:
    """Tells `documents_of` of starts for some keys of a batch what the host knows of the batch."""
    base = whole_BL if whole_BL._base is None else whole_BL._base
    if (documents := known(whole_BL, Documents) or known(base, Documents)) is not None:
        keys = part_BL.shape[1]
        cut = Documents(documents.number, min(documents.longest, keys), min(documents.mean, keys))
        remember(part_BL, Documents, cut)


class Sequences(NamedTuple):
    """The documents of all rows one after the other, as variable-length attention takes them."""

    cu_seqlens_q: Tensor
    """int32 [documents + 1]: where each begins among the B * Lq queries. Documents before q_offset have no queries."""
    cu_seqlens_k: Tensor
    """int32 [documents + 1]: where each begins among the B * Lk keys."""
    max_seqlen_q: int
    max_seqlen_k: int


def sequences_of(document_starts_BL: Tensor, q_offset: int, device: torch.device) -> Sequences:
    """Computed on the device; if there are fewer documents than the host knows of, empty ones follow."""
    number, longest, _ = documents_of(document_starts_BL)

    def build(starts_BL: Tensor) -> Sequences:
        B, Lk = starts_BL.shape
        Lq = Lk - q_offset
        tokens_L = torch.arange(Lk, device=device)
        begins = (starts_BL.to(device) == tokens_L).flatten()
        place = torch.where(begins, begins.cumsum(0) - 1, number)
        rows_B1 = torch.arange(B, device=device)[:, None]

        def cumulative(tokens: int, first_L: Tensor) -> Tensor:
            ends = torch.full((number + 1,), B * tokens, dtype=torch.int32, device=device)
            firsts = (rows_B1 * tokens + first_L).flatten().int()
            return ends.scatter_(0, place, torch.where(begins, firsts, B * tokens))

        queries, keys = cumulative(Lq, (tokens_L - q_offset).clamp_min(0)), cumulative(Lk, tokens_L)
        return Sequences(queries, keys, min(longest, Lq), longest)

    return cached(document_starts_BL, ("sequences", q_offset, number, device), build)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def whole_rows(batch: int, queries: int, keys: int, device: torch.device) -> Sequences:
    """Every row as one document."""
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Sequences(rows * queries, rows * keys, queries, keys)
