"""The config section on what a run reports, and the check of its plasticity settings."""

from dataclasses import dataclass, field
from typing import Literal

from farsight.ranges import Count, Positive, Size


@dataclass
class Metrics:
    """Metrics, how often they are logged, and where to."""

    log_freq: Size = 10
    """Log every this many steps."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Where figures go beside metrics.jsonl (docs/training/trackers.md); all but TensorBoard are extras to install."""
    tracker_project: str = ""
    """Project of W&B and Trackio, experiment of MLflow. Empty takes the tracker's own environment variable, or "farsight"."""
    save_tb_folder: str = "tb"
    """Folder for TensorBoard events, inside the run folder."""
    slow_ranks_freq: Count = 100
    """Steps between measurements of how fast each rank is by itself, at logged steps; ranks that take 1.2 times as long as
    the median in three in a row are named (docs/training/hangs.md). 0 disables them."""
    plasticity_freq: Count = 0
    """Steps between measurements of positional bias and attention plasticity (docs/analysis/live.md); one more
    comes before the first step and one after the last. 0 disables them."""
    plasticity_heads: Size = 4
    """Query heads measured in each layer, the same ones each time."""
    plasticity_sequences: Size = 8
    """Held-out sequences of training.seq_len tokens to measure on, the same ones each time."""
    plasticity_buckets: Size = 16
    """Buckets of equal width that positions are divided into, 8 or more."""
    plasticity_tokens: Positive = 4.0
    """Expected number of tokens sampled per bucket and sequence."""


LEAST_BUCKETS = 8
"""With fewer, only the first bucket, which is skipped, has its middle in the first 20 % of positions."""
LEAST_QUERIES = 8
"""Queries that a bucket needs for their spread to be worth measuring."""


def check_plasticity(metrics: Metrics, seq_len: int, heads: int) -> str | None:
    """Returns what is wrong with the plasticity settings, or None.

    Args:
        seq_len: tokens per training sequence.
        heads: query heads per layer.
    """
    m = metrics
    if not m.plasticity_freq:
        return None
    if m.plasticity_heads > heads:
        return f"metrics.plasticity_heads = {m.plasticity_heads}: a layer has {heads}; set 1 to {heads}."
    if m.plasticity_buckets < LEAST_BUCKETS:
        return (
            f"metrics.plasticity_buckets = {m.plasticity_buckets}: the first bucket has no earlier keys, and no other would "
            f"lie in the first 20 % of positions; set {LEAST_BUCKETS} or more."
        )
    if seq_len < m.plasticity_buckets or m.plasticity_tokens > seq_len / m.plasticity_buckets:
        return (
            f"metrics.plasticity_buckets = {m.plasticity_buckets} and plasticity_tokens = {m.plasticity_tokens:g}: sequences of "
            f"training.seq_len = {seq_len} tokens have {seq_len / m.plasticity_buckets:g} in each bucket; set fewer of either, "
            "or plasticity_freq = 0."
        )
    queries = m.plasticity_sequences * m.plasticity_tokens
    if queries < LEAST_QUERIES:
        return (
            f"metrics.plasticity_sequences = {m.plasticity_sequences} with plasticity_tokens = {m.plasticity_tokens:g} keeps "
            f"{queries:g} queries of each bucket; raise either until it is {LEAST_QUERIES} or more."
        )
    return None
