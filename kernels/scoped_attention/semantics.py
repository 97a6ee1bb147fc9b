"""The rule of visibility: the one place that defines which keys a query of a head attends to.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim.

Token t of a head with scope S, in a document that starts at token d, sees the tokens i with

    max(d, t - S + 1) <= i <= t          (SCOPE, Eq. 2: t - S < i <= t)

and no others. A scope counts the token itself: with S = 1 a token sees only itself, with S >= t + 1 all tokens before it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def visible(query: Tensor | int, key: Tensor, scope: Tensor, document_start: Tensor | None = None) -> Tensor:
    """bool, True where `query` sees `key`; all arguments are token indexes or scopes, and broadcast.

    `document_start` is the first token of the query's document. The scope is compared with a difference, so that the
    largest int32 scope does not overflow.
    """
    seen = (key <= query) & (query - key < scope)
    return seen if document_start is None else seen & in_document(key, document_start)


def in_document(key: Tensor, document_start: Tensor) -> Tensor:
    """bool, True where `key`, no later than the query, is in the query's document, which starts at `document_start`."""
    return key >= document_start


def visible_pairs(scopes: Sequence[int] | Tensor, length: int, q_offset: int = 0) -> int:
    """Exact number of query-key pairs that all heads see: the sum over heads and queries of min(S, t + 1).

    `length` is the number of keys; queries are the tokens `q_offset` to `length - 1`.
    """
    scopes = scopes.tolist() if isinstance(scopes, Tensor) else scopes

    def pairs_before(scope: int, end: int) -> int:
        full = min(scope, end)
        return full * (full + 1) // 2 + (end - full) * full

    return sum(pairs_before(int(s), length) - pairs_before(int(s), q_offset) for s in scopes)


def visible_pairs_in_documents(scopes: Sequence[int] | Tensor, document_starts_BL: Tensor, q_offset: int = 0) -> int:
    """`visible_pairs` for a batch of packed rows: the sum over rows, heads and queries of min(S, t - start + 1).

    `document_starts_BL` is an integer tensor [B, Lk].
    """
    scopes = scopes.tolist() if isinstance(scopes, Tensor) else scopes
    tokens = torch.arange(document_starts_BL.shape[1], device=document_starts_BL.device)
    return visible_pairs_at_positions(scopes, (tokens - document_starts_BL.long())[:, q_offset:])


def visible_pairs_at_positions(scopes: Iterable[int] | Mapping[int, int], positions_BL: Tensor) -> int:
    """Query-key pairs of all heads, from the queries' positions in their documents: the sum of min(S, position + 1).

    `positions_BL` is an integer tensor [B, L]. It is read once, whatever the number of scopes; the rest depends on the number
    of documents, since positions go up by one within each. A mapping gives the number of heads of each scope, or other weights.
    """
    if not positions_BL.numel():
        return 0
    heads = Counter(scopes)
    scopes_S1 = torch.tensor([*heads], device=positions_BL.device)[:, None]
    row_edges = torch.ones_like(positions_BL[:, :1], dtype=torch.bool)
    jumps = positions_BL[:, 1:] - positions_BL[:, :-1] != 1
    first = positions_BL[torch.cat([row_edges, jumps], dim=1)].long()
    last = positions_BL[torch.cat([jumps, row_edges], dim=1)].long()

    def pairs_before(end: Tensor) -> Tensor:
        full = torch.minimum(scopes_S1, end)
        return full * (full + 1) // 2 + (end - full) * full

    # Each run of queries sees what all queries up to its last position would see, without those before its first.
    pairs_S = (pairs_before(last + 1) - pairs_before(first)).sum(1).tolist()
    return sum(n * pairs for n, pairs in zip(heads.values(), pairs_S, strict=True))


def check_values(scopes: Sequence[int], document_starts_BL: Tensor | None) -> None:
    """Raises ValueError unless every scope is at least 1 and document starts are those of packed rows.

    That is: 0 <= start of t <= t, never falling from one token to the next. It reads the tensor, so backends call it only
    where that costs no synchronisation with an accelerator.
    """
    for head, scope in enumerate(scopes):
        if scope < 1:
            raise ValueError(f"scopes_N[{head}] is {scope}: a scope counts the token itself, set it to 1 or more")
    if document_starts_BL is None:
        return
    starts = document_starts_BL.long()
    late = starts > torch.arange(starts.shape[1], device=starts.device)
    for wrong, why in ((starts < 0, "is negative"), (late, "lies after its token")):
        if wrong.any():
            b, t = (int(x) for x in wrong.nonzero()[0])
            raise ValueError(
                f"document_starts_BL[{b}, {t}] is {int(starts[b, t])}, which {why}: "
                f"it has to be the index of the first token of that token's document, 0 to {t}"
            )
    falls = starts.diff(dim=1) < 0
    if falls.any():
        b, t = (int(x) for x in falls.nonzero()[0])
        raise ValueError(
            f"document_starts_BL[{b}] falls from {int(starts[b, t])} to {int(starts[b, t + 1])} at token {t + 1}: "
            "packed documents follow one another, so starts never fall"
        )
