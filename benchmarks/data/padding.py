"""Padding of fine-tuning rows that are not packed, by the rows that share a length.

An epoch of 20,000 conversations of at most 1,024 tokens, in global batches of 16 and micro-batches of 4, as in the GARFA paper, and of other
sizes. Lengths are log-normal around 200 tokens. Medians of the rounds, each with other lengths.

- "global": every micro-batch has the length of the global batch's longest row
- "micro": that of its own longest row, with rows in the order in which they are drawn
- "sorted": likewise, with the rows of the global batch sorted by length, as the loader does
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from farsight.data.instructions.loader import Layout

CONVERSATIONS, MOST, MULTIPLE = 20_000, 1_024, 8
SIZES = ((16, 4), (16, 1), (64, 4), (4, 4))
"""Rows of a global batch and of a micro-batch."""


def padded(lengths_SG: np.ndarray, size: int) -> dict[str, int]:
    """Tokens with padding of some steps' rows, by the rows that share a length."""
    micro = lengths_SG.reshape(len(lengths_SG), -1, size)
    in_order = {
        "global": np.broadcast_to(micro.max((1, 2), keepdims=True), micro.shape),
        "micro": np.broadcast_to(micro.max(2, keepdims=True), micro.shape),
    }
    found = {name: int((-(-rows // MULTIPLE) * MULTIPLE).clip(max=MOST).sum()) for name, rows in in_order.items()}
    layout = Layout(packed=False, seq_len=MOST, multiple=MULTIPLE, size=size)
    return found | {"sorted": sum(int(layout.padded(step).sum()) for step in lengths_SG)}


def padding(folder: Path, megabytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows for `rounds` draws of lengths; there is no corpus."""
    for global_batch, size in SIZES:
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in range(rounds):
            drawn = np.random.default_rng(seed).lognormal(np.log(200), 0.7, CONVERSATIONS).clip(20, MOST).astype(int)
            steps = drawn[: len(drawn) // global_batch * global_batch].reshape(-1, global_batch)
            by_name = padded(steps, size)
            for name, tokens in by_name.items():
                found.setdefault(name, []).append((1 - int(steps.sum()) / tokens, tokens / by_name["global"]))
        for name, figures in found.items():
            share, tokens = (statistics.median(column) for column in zip(*figures, strict=True))
            yield {
                "what": "padding",
                "global_batch": global_batch,
                "micro_batch": size,
                "rows": name,
                "padding": share,
                "tokens_of_global": tokens,
            }
