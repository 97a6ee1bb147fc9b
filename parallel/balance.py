"""Balance of visible query-key pairs over the ranks of a step, by the order of its rows and of the documents in each.

Ranks hold equally many tokens, but a token late in a long document sees more keys than one in a short document, and the ranks of a step
wait for the one whose queries see most. The loss and the gradients of rows whose documents are masked do not depend on the
order of rows in a rank's step, nor on that of documents in a row. So, as a function of the rows alone:

- The rows of a rank's step are sorted by pairs, so that micro-batches of the same number are alike on all data-parallel ranks.
  Where micro-batches differ in length, the longest come first, and rows change places only among those of their length.
- Under context parallelism the documents of a row are reordered so that the worst rank has fewer pairs. The search swaps documents, two
  at a time, as long as that helps. What a rank holds of a row, and which keys are sent where, stays the same (`context.py`).

Pairs are those of all heads and layers. Shape suffixes: B rows, T tokens of a row, C context-parallel ranks, D documents of
a row, K candidates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields

import numpy as np

from farsight.data.order import permutation
from farsight.data.packing import Rows
from farsight.parallel.context import SequenceLayout, pieces

_ROUNDS, _TRIES = 40, 64
"""Rounds of the search, and swaps that each tries; it takes the best. 150 rounds would take a tenth off what imbalance is left."""


class PairBalance:
    """Arranges the rows of a rank's steps, and counts the pairs of each rank.

    Args:
        scopes: of all heads of all layers, in tokens.
        tokens: of a row, at most.
        ranks: context-parallel ranks, C.
    """

    def __init__(self, scopes: Iterable[int], tokens: int, ranks: int, layout: SequenceLayout) -> None:
        heads = np.bincount(np.minimum([*scopes], tokens), minlength=tokens + 1)
        seen = (
            heads[::-1].cumsum()[::-1][1:].cumsum()
        )  # by the query at each position: the heads with scope 1, 2, … or more
        self.pairs = np.concatenate([[0], seen.cumsum()])
        """int64 [tokens + 1]: pairs in a document of that many tokens."""
        self.ranks, layout = ranks, layout if ranks > 1 else "contiguous"
        parts = ranks * len(pieces(0, ranks, 2 * ranks, layout))
        self._parts_of_rank = np.array([[part for part, _ in pieces(r, ranks, parts, layout)] for r in range(ranks)])
        self._swaps = permutation(2 * _ROUNDS * _TRIES, seed=0).reshape(_ROUNDS, _TRIES, 2)

    def of_ranks(self, document_starts_BT: np.ndarray) -> np.ndarray:
        """Pairs that the queries of each context-parallel rank see in some rows, int64 [C]."""
        return np.sum([self._of_orders(_documents(starts)[None])[0] for starts in document_starts_BT], axis=0)

    def __call__(self, step: Sequence[Rows]) -> list[Rows]:
        """Arranges the micro-batches of a rank's step, which do not become longer from one to the next."""
        documents = [_documents(starts) for rows in step for starts in rows.document_starts]
        rows = [(micro_batch, row) for micro_batch in step for row in range(len(micro_batch.inputs))]
        tokens, pairs = [-lengths.sum() for lengths in documents], [-self.pairs[lengths].sum() for lengths in documents]
        by_pairs = np.lexsort((pairs, tokens))
        taken, arranged = iter(by_pairs if len(step) > 1 else range(len(rows))), []
        for micro_batch in step:
            new, of_ranks = Rows.empty(*micro_batch.inputs.shape), np.zeros(self.ranks, np.int64)
            for row in range(len(new.inputs)):
                number = next(taken)
                order, of_row = self._order(documents[number], of_ranks)
                _copy(rows[number], documents[number], order, new, row)
                of_ranks += of_row
            arranged.append(new)
        return arranged

    def _order(self, lengths_D: np.ndarray, before_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """An order of documents in a row, with few pairs on the worst rank, and the pairs of each rank.

        Args:
            before_C: pairs that the ranks have in other rows.
        """
        order = np.arange(len(lengths_D))
        of_ranks = self._of_orders(lengths_D[None])[0]
        if self.ranks == 1:
            return order, of_ranks
        candidate = np.arange(_TRIES)
        for swaps in self._swaps % len(order):
            orders = np.tile(order, (_TRIES, 1))
            orders[candidate, swaps[:, 0]], orders[candidate, swaps[:, 1]] = order[swaps[:, 1]], order[swaps[:, 0]]
            found = self._of_orders(lengths_D[orders])
            best = (found + before_C).max(1).argmin()
            if (found[best] + before_C).max() < (of_ranks + before_C).max():
                order, of_ranks = orders[best], found[best]
        return order, of_ranks

    def _of_orders(self, lengths_KD: np.ndarray) -> np.ndarray:
        """Pairs of each rank, int64 [K, C], if a row's documents follow each other in these orders."""
        count, documents = lengths_KD.shape
        ends = np.cumsum(lengths_KD, axis=1)
        tokens = ends[0, -1]
        edges = np.arange(0, tokens + 1, tokens // self._parts_of_rank.size)
        zeros = np.zeros((count, 1), np.int64)
        starts, before = (np.concatenate([zeros, x], 1) for x in (ends, np.cumsum(self.pairs[lengths_KD], axis=1)))
        candidate = np.arange(count)[:, None]
        apart = candidate * (tokens + 1)  # one sorted array for all
        ended = np.searchsorted((ends + apart).ravel(), edges + apart, side="right") - candidate * documents
        of_parts = np.diff(before[candidate, ended] + self.pairs[edges - starts[candidate, ended]], axis=1)
        return of_parts[:, self._parts_of_rank].sum(2)


def _documents(starts_T: np.ndarray) -> np.ndarray:
    """Lengths of a row's documents, in order."""
    return np.diff(np.flatnonzero(starts_T == np.arange(len(starts_T))), append=len(starts_T))


def _copy(source: tuple[Rows, int], lengths_D: np.ndarray, order: np.ndarray, target: Rows, row: int) -> None:
    """Copies a row with its documents in another order."""
    rows, number = source
    begins, lengths = np.cumsum(lengths_D) - lengths_D, lengths_D[order]
    new_begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    moved_from = np.repeat(begins[order], lengths) + np.arange(len(new_begins)) - new_begins
    for field in fields(Rows):
        getattr(target, field.name)[row] = getattr(rows, field.name)[number, moved_from]
    target.document_starts[row] = new_begins
