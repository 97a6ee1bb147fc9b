"""Attention over keys that are kept as they were before RoPE and turned at every step, by the relative position that a method
gives each of them.

A prompt is read in spans of queries, whose pairs with keys a method cuts into regions where the relative position is the
difference of a position of the query and one of the key: a region is plain attention. The last token of a prompt, whose logits
choose the first new one, and every token after it are decoded: the query stands at 0 and each key at minus its own relative
position P, which is plain RoPE where P is the distance. Layers with ALiBi take −slope · P instead, layers without either attend
as they are.

Shape suffixes: B batch, R rows that start together, L queries, T keys, N query heads, K key-value heads, G = N/K, H head dim.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from farsight.configs.check import ConfigError
from farsight.configs.schema import DynamicNtkRope, LongRope, NoRotary
from farsight.inference.extend.logit_noise import logit_noise
from farsight.inference.kv_cache import Batch, LayerCache
from farsight.model.attention import Attention
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.model.position.rope import RopeFrequencies, rope_tables
from farsight.model.position.scope import DENSE_SCOPE

SCORES = 2**26
"""Scores that are held at once while a prompt is read."""


class Region(NamedTuple):
    """Pairs of queries and keys of one sequence whose relative position is the difference of two positions."""

    queries: slice
    """Of the span that was asked for."""
    keys: slice
    """From the sequence's first token."""
    query_positions: Tensor
    """[l], whole numbers where the method interpolates."""
    key_positions: Tensor
    """[t], or [R, t] where rows differ; a pair's relative position is the query's less the key's."""
    seen: Tensor
    """bool [l, t]: the pairs that belong to the region."""
    noise: Tensor | None = None
    """[l, t]: standard deviation of what is added to the logits."""


class Distances(NamedTuple):
    """What a query that is decoded has before it."""

    positions: Tensor
    """[…, T] relative position of each key."""
    noise: Tensor | None = None
    """[…, T], as a region's."""


class PositionMap(Protocol):
    """The relative positions of one sequence."""

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        """Every pair of the prompt's queries [first, stop) with the keys up to each, once."""
        ...


class Step:
    """The relative positions of a query in each row, and the tables of the layers that share them."""

    def __init__(self, distances: Distances, interpolated: bool = False) -> None:
        self.positions_BT, self.noise_BT = distances
        self.interpolated = interpolated
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def tables(self, turning: "Turning") -> tuple[Tensor, Tensor]:
        """That turn the keys."""
        if turning.row not in self._tables:
            self._tables[turning.row] = turning.tables(-self.positions_BT, self.interpolated)
        return self._tables[turning.row]


class SharedPositions(Protocol):
    """Relative positions that layers share. The layers come in their order."""

    interpolated: bool
    """Whether logits between those of two whole positions are interpolated, and not the positions."""
    seed: int
    """Of the noise, where there is any."""

    def nbytes(self, layer: "RemappedLayer") -> int:
        """Bytes that a layer keeps for them beside keys and values."""
        ...

    def observe(self, layer: "RemappedLayer", rows: Sequence[int], q_RLNH: Tensor, first: int) -> None:
        """Sees a layer's queries of a prompt, from `first` on, before `regions` is asked about them."""
        ...

    def map_of(self, rows: Sequence[int]) -> PositionMap:
        """For rows of the batch that start together."""
        ...

    def step(self, layer: "RemappedLayer", q_BNH: Tensor, column: int) -> Step:
        """For the queries in a column of the batch."""
        ...


@dataclass(frozen=True)
class Turning:
    """How a layer turns queries and keys."""

    row: int
    """Layers that turn alike have the same."""
    frequencies: RopeFrequencies

    def tables(self, positions: Tensor, interpolated: bool) -> tuple[Tensor, Tensor]:
        """`rope_tables` of [B, T] positions; interpolated ones lie on the line between their whole neighbours'.

        A logit is linear in the turned key, and so on the line between the logits at those two positions.
        """
        if not interpolated:
            return rope_tables(positions, self.frequencies)
        below = positions.floor()
        share = (positions - below)[..., None].float()
        pairs = zip(rope_tables(below, self.frequencies), rope_tables(below + 1, self.frequencies), strict=True)
        cos, sin = (low.lerp(high, share) for low, high in pairs)
        return cos, sin


def turned(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """`rotate` of [R, …, T, H] with tables [R or 1, T, H], by halves: without the copy that swaps them, it takes 0.7 of the
    time over a long cache."""
    cos, sin = (table.view(table.shape[0], *[1] * (x.dim() - 3), *table.shape[1:]) for table in tables)
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    # The tables repeat their halves, the sines with the first negative.
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., :half])
    torch.mul(second, cos[..., half:], out=out[..., half:]).addcmul_(first, sin[..., half:])
    return out.to(x.dtype)


class RemappedLayer:
    """A layer whose cache keeps every key as it was before RoPE, and every value.

    Args:
        number: of the layer.
        positions: shared with other layers.
        turning: None where the layer does not rotate.
    """

    rotates = True

    def __init__(
        self, number: int, attention: Attention, batch: Batch, positions: SharedPositions, turning: Turning | None
    ) -> None:
        kv_heads, self.head_dim = len(attention.scopes) // attention.group, attention.head_dim
        shape = len(batch.starts), kv_heads, batch.most_tokens, self.head_dim
        self.k_BKTH = torch.empty(shape, dtype=batch.dtype, device=batch.device)
        self.v_BKTH = torch.empty_like(self.k_BKTH)
        self.heads_N = torch.arange(attention.heads.start, attention.heads.stop, device=batch.device)
        self.number, self.batch, self.positions, self.turning = number, batch, positions, turning
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        return self.k_BKTH.nbytes + self.v_BKTH.nbytes + self.positions.nbytes(self)

    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Sequence[int]) -> "RemappedLayer":
        stop = self.tokens + k_BLKH.shape[1]
        self.k_BKTH[:, :, self.tokens : stop] = k_BLKH.transpose(1, 2)
        self.v_BKTH[:, :, self.tokens : stop] = v_BLKH.transpose(1, 2)
        self.tokens = stop
        return self

    def attend(
        self,
        q_BLNH: Tensor,
        scopes_N: Tensor,
        document_starts_BT: Tensor | None,
        alibi_slopes_N: Tensor | None,
        backend: str,
    ) -> Tensor:
        assert document_starts_BT is None  # rows hold a document each
        begin = self.tokens - q_BLNH.shape[1]
        decoded = max(begin, min(self.tokens, self.batch.prompt - 1))  # the prompt's last token is
        # In their order: positions may be carried on from query to query.
        parts = [self._read(q_BLNH[:, : decoded - begin], begin, alibi_slopes_N)] if decoded > begin else []
        for column in range(decoded, self.tokens):
            parts.append(self._decode(q_BLNH[:, column - begin], column, alibi_slopes_N)[:, None])
        return torch.cat(parts, dim=1)

    def _read(self, q_BLNH: Tensor, begin: int, slopes_N: Tensor | None) -> Tensor:
        """Queries of prompts, from column `begin` on; rows that start together are taken together."""
        o_BLNH, stop = torch.zeros_like(q_BLNH), begin + q_BLNH.shape[1]
        for start in sorted(set(self.batch.starts)):
            if start >= stop:
                continue  # padding as yet
            rows = [row for row, begins in enumerate(self.batch.starts) if begins == start]
            column = max(start, begin)
            q_RLNH = q_BLNH[rows, column - begin :]
            k_RKTH, v_RKTH = (x[rows, :, start:stop] for x in (self.k_BKTH, self.v_BKTH))
            self.positions.observe(self, rows, q_RLNH, column - start)
            o_BLNH[rows, column - begin :] = self._prefill(rows, q_RLNH, k_RKTH, v_RKTH, column - start, slopes_N)
        return o_BLNH

    def _prefill(
        self,
        rows: Sequence[int],
        q_RLNH: Tensor,
        k_RKTH: Tensor,
        v_RKTH: Tensor,
        first: int,
        slopes_N: Tensor | None,
    ) -> Tensor:
        """The queries [first, T) of sequences of T keys as yet, a span at a time."""
        (R, L, N, _), T = q_RLNH.shape, k_RKTH.shape[2]
        span = max(16, SCORES // (R * N * T))
        positions, parts = self.positions.map_of(rows), []
        for begin in range(first, first + L, span):
            stop = min(begin + span, first + L)
            regions = positions.regions(begin, stop, q_RLNH.device)
            q = q_RLNH[:, begin - first : stop - first].unflatten(2, (k_RKTH.shape[1], -1)).permute(0, 2, 3, 1, 4)
            o_RKGLH = self._attend(q, k_RKTH[:, :, :stop], v_RKTH[:, :, :stop], regions, begin, slopes_N)
            parts.append(o_RKGLH.permute(0, 3, 1, 2, 4).flatten(2, 3))
        return torch.cat(parts, dim=1)

    def _attend(
        self,
        q_RKGLH: Tensor,
        k_RKTH: Tensor,
        v_RKTH: Tensor,
        regions: Iterable[Region],
        begin: int,
        slopes_N: Tensor | None,
    ) -> Tensor:
        """A span's attention; the sequences' first query is `begin`."""
        scores_RKGLT = q_RKGLH.new_full((*q_RKGLH.shape[:-1], k_RKTH.shape[2]), -torch.inf, dtype=torch.float32)
        for region in regions:
            q, k = q_RKGLH[..., region.queries, :], k_RKTH[:, :, region.keys]
            key_positions_RT = torch.atleast_2d(region.key_positions)
            if self.turning is not None:
                q = turned(q, self.turning.tables(region.query_positions[None], False))
                k = turned(k, self.turning.tables(key_positions_RT, self.positions.interpolated))
            scores = (q @ k[:, :, None].transpose(-1, -2)).float() * self.head_dim**-0.5
            if slopes_N is not None:
                relative_RLT = region.query_positions[:, None] - key_positions_RT[:, None]
                scores -= slopes_N.view(*scores.shape[1:3], 1, 1) * relative_RLT[:, None, None].float()
            if region.noise is not None:
                queries = torch.arange(begin, begin + q_RKGLH.shape[3], device=q.device)[region.queries]
                keys = torch.arange(k_RKTH.shape[2], device=q.device)[region.keys]
                scores += self._noise(region.noise, queries, keys).view(scores.shape[1:])
            part = scores_RKGLT[..., region.queries, region.keys]
            part.copy_(torch.where(region.seen, scores, part))
        return scores_RKGLT.softmax(-1).to(v_RKTH.dtype) @ v_RKTH[:, :, None]

    def _decode(self, q_BNH: Tensor, column: int, slopes_N: Tensor | None) -> Tensor:
        """The query of each row in a column."""
        step = self.positions.step(self, q_BNH, column)
        q_BKGH = q_BNH.unflatten(1, (self.k_BKTH.shape[1], -1))
        k_BKTH = self.k_BKTH[:, :, : column + 1]
        if self.turning is not None:
            # At position 0 the query is not turned, but takes its share of YaRN's temperature.
            q_BKGH = q_BKGH * self.turning.frequencies.attention_factor
            k_BKTH = turned(k_BKTH, step.tables(self.turning))
        scores_BKGT = (q_BKGH @ k_BKTH.transpose(-1, -2)).float() * self.head_dim**-0.5
        if slopes_N is not None:
            slopes = slopes_N.view(*scores_BKGT.shape[1:3], 1)
            scores_BKGT -= slopes * step.positions_BT[:, None, None].float()
        for row, start in enumerate(self.batch.starts):
            if step.noise_BT is not None:
                keys = torch.arange(column + 1 - start, device=q_BNH.device)
                noise_NLT = self._noise(step.noise_BT[row, None, start:], keys[-1:], keys)
                scores_BKGT[row, :, :, start:] += noise_NLT.view(*scores_BKGT.shape[1:3], -1)
            if start:
                scores_BKGT[row, :, :, :start] = -torch.inf
        o_BKGH = scores_BKGT.softmax(-1).to(q_BNH.dtype) @ self.v_BKTH[:, :, : column + 1]
        return o_BKGH.flatten(1, 2)

    def _noise(self, std_LT: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """[N, L, T], the same whichever rows and chunks are read together."""
        return logit_noise(self.positions.seed, self.number, self.heads_N, queries, keys) * std_LT


def remapped_layers(model: Llama, batch: Batch, positions: Sequence[SharedPositions]) -> dict[str, LayerCache]:
    """A cache for each layer, by its number; `positions` of each layer."""
    layers: dict[str, LayerCache] = {}
    for (name, attention), shared in zip(model.attentions(), positions, strict=True):
        row = model.rotary_of_layer[name]
        turning = None
        if row is not None:
            frequencies = RopeFrequencies(model.rope_frequencies[row], model.attention_factors[row])
            turning = Turning(row, frequencies)
        layers[name] = RemappedLayer(int(name), attention, batch, shared, turning)
    return layers


def check_remappable(name: str, config: ModelConfig) -> None:
    """Refuses models whose positions another method cannot take over.

    Raises:
        ConfigError: naming the method and what it does not fit.
    """
    p, layers = config.position, config.layers()
    if all(isinstance(layer.rotary, NoRotary) and layer.alibi_slopes is None for layer in layers):
        raise ConfigError(f"--extend {name}: the model has neither RoPE nor ALiBi, whose positions it could change.")
    if p.embedding != "none":
        raise ConfigError(
            f"--extend {name}: the model adds position embeddings to its tokens' ({p.embedding}), which grow all the same."
        )
    for number, layer in enumerate(layers):
        if min(layer.scopes) < DENSE_SCOPE:
            raise ConfigError(
                f"--extend {name}: a head of layer {number} sees {min(layer.scopes):,} tokens, and the method gives positions "
                "to all of a sequence's; it takes models whose heads see every token."
            )
        if layer.garfa is not None:
            raise ConfigError(
                f"--extend {name}: layer {number} has GARFA, whose heads turn at speeds of their own; one table would not do."
            )
        if isinstance(layer.rotary, DynamicNtkRope | LongRope):
            raise ConfigError(
                f"--extend {name}: layer {number} has RoPE of kind {layer.rotary.kind!r}, which changes with the length itself."
            )
