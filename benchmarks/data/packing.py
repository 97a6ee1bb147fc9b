"""How rows are packed, and how evenly ranks are loaded.

Padding and cut documents in rows of 32,768 and 131,072 tokens, by how rows are packed, by the size of the pool, and of long
documents alone; and the imbalance of visible pairs over eight context-parallel or data-parallel ranks, as read and as balanced.
Imbalance is the sum over micro-batches of the most pairs that a rank has, over the sum of the means. Medians of the rounds, each with
other documents.

The lengths of documents imitate SlimPajama's: a mixture of one log-normal distribution for each of its seven sources. The sources'
shares of the tokens are those of its dataset card; the medians and widths are chosen so that a document has 1,020 tokens in the mean
(977 to 1,270 were counted in parts of chunk 2, in the statistics of CroissantLLM's data) and that 32 % of the tokens are in documents
of more than 4,096 (about 30 %: Fu et al. 2024, "Data Engineering for Scaling Language Models to 128K Context", Figure 2).
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from farsight.data import packing as module
from farsight.data.packing import Drawn, Packer, Rows
from farsight.model.position.scope import geometric_scopes
from farsight.parallel.balance import PairBalance
from farsight.parallel.context import SequenceLayout
from farsight.progress import progress

SLIMPAJAMA = {
    "CommonCrawl": (0.522, 900, 1.05),
    "C4": (0.267, 340, 0.95),
    "GitHub": (0.052, 800, 1.3),
    "ArXiv": (0.046, 13_000, 0.7),
    "Books": (0.042, 90_000, 0.6),
    "Wikipedia": (0.038, 350, 1.2),
    "StackExchange": (0.033, 400, 0.8),
}
"""Share of the tokens, median length in tokens, and standard deviation of its logarithm."""
RANKS, MICRO_BATCHES = 8, 8
LANES, ROWS = RANKS * MICRO_BATCHES, 8
HEADS = 32
ROW_TOKENS = (32_768, 131_072)
LONG = 16_384
"""`min_tokens` of a source of long documents, as in SCOPE's later stages."""
POOLS = (16, 32, 64, 128, 256)
SCOPES: dict[str, Callable[[int], list[int]]] = {
    "SCOPE": lambda tokens: [*geometric_scopes(tokens, HEADS)],
    "dense": lambda tokens: [tokens] * HEADS,
}
LAYOUTS: tuple[SequenceLayout, ...] = ("zigzag", "contiguous")
_TOKENS = np.zeros(1 << 24, np.int64)
"""Documents are views of it: only their lengths matter."""


def lengths(seed: int, least: int = 2) -> Iterator[int]:
    """Lengths of documents of at least so many tokens, without end."""
    draw = np.random.default_rng(seed)
    shares, medians, widths = map(np.array, zip(*SLIMPAJAMA.values(), strict=True))
    documents = shares / (medians * np.exp(widths**2 / 2))
    while True:
        source = draw.choice(len(documents), 10_000, p=documents / documents.sum())
        drawn = medians[source] * np.exp(widths[source] * draw.standard_normal(10_000))
        found = np.clip(drawn, 2, len(_TOKENS)).astype(int)
        yield from found[found >= least].tolist()


class Lane:
    """One lane's rows; counts what packing did."""

    def __init__(self, seed: int, best_fit: bool, least: int = 2):
        self._lengths, self._drawn, self._best_fit = lengths(seed, least), list[int](), best_fit
        self._packer = Packer(self._draw, mask_documents=True, padding_id=0, best_fit_share=float(best_fit))
        self.padding, self.cut, self.packed = 0, 0, 0

    def _draw(self) -> Drawn:
        self._drawn.append(next(self._lengths))
        return Drawn(_TOKENS[: self._drawn[-1]], [len(self._drawn) - 1], self._best_fit)

    def fill(self, tokens: int) -> Rows:
        rows = Rows.empty(1, tokens)
        self.padding += self._packer.fill(rows, 0).padding
        self.cut += sum(begin > 0 and self._drawn[number] <= tokens for (number,), begin in self._packer.waiting)
        self.packed += len(np.unique(rows.document_starts))
        return rows


def packed(tokens: int, best_fit: bool, seed: int, least: int = 2) -> tuple[dict[str, float], list[Rows]]:
    """Padding and cut documents of some lanes' rows, and the last row of each lane."""
    lanes = [Lane(1000 * seed + lane, best_fit, least) for lane in range(LANES)]
    for _ in range(ROWS):
        last = [lane.fill(tokens) for lane in lanes]
    padding, cut, documents = (sum(getattr(lane, name) for lane in lanes) for name in ("padding", "cut", "packed"))
    return {"padding": padding / (LANES * ROWS * tokens), "cut_documents": cut / documents}, last


def over_context(balance: PairBalance, rows: list[Rows]) -> dict[str, float]:
    """Imbalance over context-parallel ranks with one row a micro-batch, and seconds to arrange a row."""
    begin = time.perf_counter()
    arranged = [balance([row])[0] for row in rows]
    seconds = (time.perf_counter() - begin) / len(rows)
    found = {}
    for name, some in (("as_read", rows), ("balanced", arranged)):
        pairs = np.array([balance.of_ranks(row.document_starts) for row in some])
        found[name] = float(pairs.max(1).sum() / pairs.mean(1).sum())
    return found | {"seconds_a_row": seconds}


def over_data(balance: PairBalance, rows: list[Rows]) -> dict[str, float]:
    """Imbalance over data-parallel ranks with one row a micro-batch: as read, sorted on each rank, and if ranks exchanged rows."""
    steps = [rows[rank * MICRO_BATCHES : (rank + 1) * MICRO_BATCHES] for rank in range(RANKS)]

    def pairs(steps: list[list[Rows]]) -> np.ndarray:
        return np.array([[balance.of_ranks(row.document_starts)[0] for row in step] for step in steps])

    as_read = pairs(steps)
    exchanged = np.sort(as_read, axis=None).reshape(MICRO_BATCHES, RANKS).T
    by_name = {"as_read": as_read, "balanced": pairs([balance(step) for step in steps]), "exchanged": exchanged}
    return {name: float(found.max(0).sum() / found.mean(0).sum()) for name, found in by_name.items()}


def packing(folder: Path, megabytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows for `rounds` draws of documents; there is no corpus."""
    found: dict[tuple[tuple[str, Any], ...], list[dict[str, float]]] = {}

    def add(figures: dict[str, float], **of: Any) -> None:
        found.setdefault(tuple(of.items()), []).append(figures)

    cases = [(tokens, seed) for tokens in ROW_TOKENS for seed in range(rounds)]
    for tokens, seed in progress(cases, desc="packing", unit="seed"):
        for pool in POOLS:
            with patch.object(module, "POOL", pool):
                add(packed(tokens, True, seed)[0], what="packing", tokens=tokens, packing="best_fit", pool=pool)
        add(packed(tokens, True, seed, LONG)[0], what="packing", tokens=tokens, packing="best_fit", min_tokens=LONG)
        for kind in ("cut", "best_fit"):
            figures, rows = packed(tokens, kind == "best_fit", seed)
            if kind == "cut":
                add(figures, what="packing", tokens=tokens, packing=kind, pool=None)
            for name, scopes in SCOPES.items():
                of = {"what": "imbalance", "tokens": tokens, "packing": kind, "heads": name}
                add(over_data(PairBalance(scopes(tokens), tokens, 1, "contiguous"), rows), **of, over=f"DP {RANKS}")
                for layout in LAYOUTS:
                    balance = PairBalance(scopes(tokens), tokens, RANKS, layout)
                    add(over_context(balance, rows), **of, over=f"CP {RANKS}, {layout}")
    for of, every in found.items():
        yield dict(of) | {key: statistics.median(figures[key] for figures in every) for key in every[0]}
