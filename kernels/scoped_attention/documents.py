"""Documents as the sequences of variable-length attention, computed without reading the accelerator.

The host has to know how many documents there are, and the length of the longest, to launch such a kernel. Who copies a
batch to an accelerator knows both and tells `remember_documents`.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys).
"""

from functools import lru_cache
from itertools import accumulate
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


Span = tuple[int, int]


class Sequences(NamedTuple):
    """Documents of all rows and pieces one after the other, as variable-length attention takes them.

    A piece is a span of tokens [begin, end) whose queries a call has; its keys are the tokens from a first one to its end. A
    plain call has one piece. In each batch row queries and keys of a piece follow those of the piece before it.
    """

    cu_seqlens_q: Tensor
    """int32 [documents + 1]: where each begins among all queries. Documents that end before a piece have none."""
    cu_seqlens_k: Tensor
    """int32 [documents + 1]: where each begins among all keys."""
    max_seqlen_q: int
    max_seqlen_k: int


def sequences_of(
    document_starts_BL: Tensor, pieces: tuple[Span, ...], first_keys: tuple[int, ...], device: torch.device
) -> Sequences:
    """Computed on the device; if there are fewer documents than the host knows of, empty ones follow.

    Args:
        document_starts_BL: of the whole sequence.
        first_keys: token, by piece.
    """
    documents, longest, _ = documents_of(document_starts_BL)
    number = documents * len(pieces)

    def build(starts_BL: Tensor) -> Sequences:
        tokens_K, begins_K, queries_K = _keys(pieces, first_keys, device)
        B, L = len(starts_BL), _queries(pieces)
        begins = ((starts_BL.to(device)[:, tokens_K] == tokens_K) | begins_K).flatten()
        place = torch.where(begins, begins.cumsum(0) - 1, number)
        rows_B1 = torch.arange(B, device=device)[:, None]

        def cumulative(tokens: int, first_K: Tensor) -> Tensor:
            ends = torch.full((number + 1,), B * tokens, dtype=torch.int32, device=device)
            firsts = (rows_B1 * tokens + first_K).flatten().int()
            return ends.scatter_(0, place, torch.where(begins, firsts, B * tokens))

        keys_K = torch.arange(len(tokens_K), device=device)
        most_queries, most_keys = _longest(pieces, first_keys)
        return Sequences(
            cumulative(L, queries_K),
            cumulative(len(tokens_K), keys_K),
            min(longest, most_queries),
            min(longest, most_keys),
        )

    return cached(document_starts_BL, ("sequences", pieces, first_keys, number, device), build)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def whole_rows(batch: int, pieces: tuple[Span, ...], first_keys: tuple[int, ...], device: torch.device) -> Sequences:
    """Each piece of each row as one document."""
    queries = [end - begin for begin, end in pieces] * batch
    keys = [end - first for (_, end), first in zip(pieces, first_keys, strict=True)] * batch
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=device) for x in (queries, keys))
    return Sequences(cu_q, cu_k, *_longest(pieces, first_keys))


def _queries(pieces: tuple[Span, ...]) -> int:
    return sum(end - begin for begin, end in pieces)


def _longest(pieces: tuple[Span, ...], first_keys: tuple[int, ...]) -> tuple[int, int]:
    """Most queries and most keys of a piece."""
    keys = (end - first for (_, end), first in zip(pieces, first_keys, strict=True))
    return max(end - begin for begin, end in pieces), max(keys)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _keys(pieces: tuple[Span, ...], first_keys: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each key of a batch row: its token, whether it is its piece's first, and the first query that is not before it."""
    tokens, begins, queries, first_query = [], [], [], 0
    for (begin, end), first in zip(pieces, first_keys, strict=True):
        tokens.append(torch.arange(first, end))
        begins.append(tokens[-1] == first)
        queries.append((tokens[-1] - begin).clamp_min(0) + first_query)
        first_query += end - begin
    tokens_K, begins_K, queries_K = (torch.cat(x).to(device) for x in (tokens, begins, queries))
    return tokens_K, begins_K, queries_K
