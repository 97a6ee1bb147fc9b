"""Query heads of a model and the key heads they use."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from farsight.analysis.capture.options import HEADS
from farsight.configs.schema import NoRotary
from farsight.model.build import ModelConfig
from farsight.model.position.layers import LayerPosition


@dataclass(frozen=True)
class Head:
    """A query head and the key head it attends with."""

    layer: int
    head: int
    """Index among the layer's query heads, in the order of the weights."""
    kv_head: int
    """head // (query heads / key heads): plasticity thesis, equation 4.1."""
    scope: int
    """Tokens it can see, itself included; the sequence length if it sees all of them."""
    rotates: bool
    """Whether RoPE rotates it."""
    slope: float = 0.0
    """ALiBi's slope: −slope · distance is added to q·k / √H."""

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


def draw_heads(config: ModelConfig, length: int, most: int = HEADS, seed: int = 0) -> list[Head]:
    """Draws `most` of the model's query heads uniformly, in model order; all of them if it has no more.

    Args:
        length: tokens per sequence, which scopes and slopes may depend on.
    """
    a = config.architecture
    every = range(a.n_layers * a.n_heads)
    layers = config.layers(length)
    drawn = sorted(random.Random(seed).sample(every, min(most, len(every))))
    return [describe_head(config, layers, *divmod(number, a.n_heads), length) for number in drawn]


def describe_head(config: ModelConfig, layers: Sequence[LayerPosition], layer: int, head: int, length: int) -> Head:
    """Describes a query head, given the model's layers at this length."""
    a, position = config.architecture, layers[layer]
    slopes = position.alibi_slopes("captured heads")
    return Head(
        layer=layer,
        head=head,
        kv_head=head // (a.n_heads // a.n_kv_heads),
        scope=min(position.scopes[head], length),
        rotates=not isinstance(position.rotary, NoRotary),
        slope=0.0 if slopes is None else slopes[head],
    )


def distinct_key_heads(heads: Sequence[Head]) -> list[tuple[int, int]]:
    """(layer, key head) of every key head these query heads use, each once: the rows of "k" in a capture."""
    return list(dict.fromkeys((head.layer, head.kv_head) for head in heads))


def key_rows(heads: Sequence[Head]) -> list[int]:
    """Each head's row of "k"."""
    row = {key_head: number for number, key_head in enumerate(distinct_key_heads(heads))}
    return [row[head.layer, head.kv_head] for head in heads]
