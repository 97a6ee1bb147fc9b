"""Which heads PyTorch's variable-length attention computes, and which Triton: a model of the time that each split takes.

A kernel's time is the larger of its FLOPs over the speed it reaches and its bytes over the memory bandwidth. The speeds are
constants in `speeds.json`: TFLOP/s of long causal attention and of windows of 1,024 tokens. What a window costs more
than its pairs, at the edges of blocks, is a number of tokens for each query, which those two give.

Variable-length attention takes a call for each window, one after the other, and a call lasts no less than its longest
block of queries, or its launch. Triton takes one call for all of its heads beside them. So a split takes as long as the
work of both together, or the longer of the two sequences.

FLOPs are those of the visible pairs: 4 for each pair and number of the head dim forward (two products), 10 backward (five),
however many a kernel computes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from farsight.kernels.scoped_attention.documents import Documents, Span
from farsight.kernels.scoped_attention.semantics import visible_pairs

Pass = Literal["forward", "backward"]
FLOPS_PER_PAIR: Mapping[Pass, int] = {"forward": 4, "backward": 10}
"""Times the head dim."""
MOVED: Mapping[Pass, int] = {"forward": 2, "backward": 4}
"""Tensors of the queries' size that a kernel reads and writes, and as many of the keys'."""
WINDOW = 1024
BLOCK_ROWS = 128
"""Queries that a program of any of the kernels takes at once."""
NEAR = 1.02
SPEEDS = Path(__file__).with_name("speeds.json")


@dataclass(frozen=True)
class Speed:
    """The speed of a kernel in one pass, in FLOP/s of the visible pairs."""

    dense: float
    """In causal attention over long sequences."""
    window: float
    """With windows of 1,024 tokens."""

    @property
    def edge(self) -> float:
        """Tokens a query that a window costs in addition to its own."""
        return WINDOW * (self.dense / self.window - 1)


@dataclass(frozen=True, eq=False)
class Gpu:
    """A GPU architecture's constants; seconds, bytes and FLOPs."""

    name: str
    measured: bool
    """False: the speeds are published ones or assumed, as `source` says."""
    source: str
    peak: float
    """Dense bf16 FLOP/s of the data sheet."""
    memory: float
    """Bytes per second."""
    processors: int
    launch: float
    """Seconds from one call of a sequence to the next."""
    empty_block: float
    """Seconds for a block of queries past the end of its document, over all processors."""
    kernels: Mapping[str, Mapping[Pass, Speed]]
    """By kernel ("triton", "FA2", "FA3") and pass."""

    def like(self, peak: float, memory: float) -> "Gpu":
        """A GPU with another peak and bandwidth, of which kernels reach the same shares."""
        ratio = peak / self.peak
        kernels: dict[str, Mapping[Pass, Speed]] = {
            name: {pass_: Speed(speed.dense * ratio, speed.window * ratio) for pass_, speed in passes.items()}
            for name, passes in self.kernels.items()
        }
        return replace(self, peak=peak, memory=memory, kernels=kernels)


@cache
def gpu_of(major: int) -> Gpu:
    """The constants of a GPU's major architecture, or the next older one that is known."""
    tables = {int(number): table for number, table in json.loads(SPEEDS.read_text()).items()}
    return read_gpu(tables[max((number for number in tables if number <= major), default=min(tables))])


def read_gpu(table: Mapping[str, Any]) -> Gpu:
    """The constants of one architecture's table in `speeds.json`."""
    return Gpu(
        table["gpu"],
        table["measured"],
        table["source"],
        table["peak_tflops"] * 1e12,
        table["memory_tbytes"] * 1e12,
        table["processors"],
        table["launch_us"] * 1e-6,
        table["empty_block_ns"] * 1e-9,
        {
            kernel: {pass_: Speed(dense * 1e12, window * 1e12) for pass_, (dense, window) in passes.items()}
            for kernel, passes in table["kernels"].items()
        },
    )


@dataclass(frozen=True)
class Shape:
    """The sizes of a call of scoped attention."""

    batch: int
    queries: int
    pieces: tuple[Span, ...] = ()
    """Tokens [begin, end) of a sequence whose queries these are; empty for a whole sequence."""
    group: int = 1
    """Query heads for each key-value head."""
    head_dim: int = 128
    itemsize: int = 2
    documents: Documents | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        keys = max((end for _, end in self.pieces), default=self.queries)
        return keys if self.documents is None else min(self.documents.longest, keys)

    def pairs(self, scope: int) -> float:
        """Query-key pairs that a head sees; with documents as if all were as long as a token's document is on average."""
        if self.documents is None:
            spans = self.pieces or ((0, self.queries),)
            return self.batch * sum(visible_pairs([scope], end, begin) for begin, end in spans)
        mean = max(1, round(self.documents.mean))
        return self.batch * self.queries * visible_pairs([scope], mean) / mean


@dataclass(frozen=True)
class Split:
    """Which heads variable-length attention takes, and the time predicted for a pass."""

    wide_from: int
    """Heads of this scope or more are its; larger than any scope if there are none."""
    seconds: float


def split_seconds(scopes: Sequence[int], shape: Shape, gpu: Gpu, dense: str, pass_: Pass, wide_from: int) -> float:
    """Seconds of a pass in which heads of scope `wide_from` or more go through the kernel `dense`, others through Triton."""
    cut = [min(scope, shape.longest) for scope in scopes]
    wide = [scope for scope, whole in zip(cut, scopes, strict=True) if whole >= wide_from]
    narrow = [scope for scope, whole in zip(cut, scopes, strict=True) if whole < wide_from]
    calls = [_call(scope, wide.count(scope), shape, gpu, dense, pass_) for scope in sorted(set(wide))]
    others = [_call(scope, narrow.count(scope), shape, gpu, "triton", pass_) for scope in sorted(set(narrow))]
    work = sum(work for work, _ in calls + others)
    wide_alone = sum(max(call) + gpu.launch for call in calls)
    narrow_alone = max((longest for _, longest in others), default=0.0) + gpu.launch * bool(others)
    return max(work + gpu.launch, wide_alone, narrow_alone)


def _call(scope: int, heads: int, shape: Shape, gpu: Gpu, kernel: str, pass_: Pass) -> tuple[float, float]:
    """Seconds for the work of heads of one scope, and for its longest block of queries."""
    speed, tokens = gpu.kernels[kernel][pass_], shape.batch * shape.queries
    flops = FLOPS_PER_PAIR[pass_] * shape.head_dim
    edge = speed.edge if scope < shape.longest else 0.0
    moved = MOVED[pass_] * (1 + 1 / shape.group) * tokens * shape.head_dim * shape.itemsize
    work = heads * max((shape.pairs(scope) + edge * tokens) * flops / speed.dense, moved / gpu.memory)
    if kernel != "triton" and shape.documents is not None:
        blocks = shape.documents.number * -(-min(shape.longest, shape.queries) // BLOCK_ROWS)
        work += heads * gpu.empty_block * max(0.0, blocks - tokens / BLOCK_ROWS)
    return work, (scope + edge) * BLOCK_ROWS * flops / (speed.dense / gpu.processors)


@lru_cache(maxsize=4096)
def best_split(scopes: tuple[int, ...], shape: Shape, gpu: Gpu, dense: str | None, pass_: Pass) -> Split:
    """The split by scope with the fewest wide heads, of those within 2 % of the fastest: more heads are more calls.

    Args:
        scopes: of all heads, in tokens. All heads of one scope go the same way.
        dense: the kernel for wide heads, "FA2" or "FA3"; None is none, which leaves all heads to Triton.
    """
    none = max(scopes) + 1
    thresholds = [none] if dense is None else [none, *sorted(set(scopes), reverse=True)]
    splits = [Split(least, split_seconds(scopes, shape, gpu, dense or "", pass_, least)) for least in thresholds]
    fastest = min(split.seconds for split in splits)
    return next(split for split in splits if split.seconds <= NEAR * fastest)
