"""Attention over keys cached before RoPE and rotated at every step, by the relative positions that a method assigns.

A prompt is read in spans of queries. A method cuts their pairs with keys into regions in which the relative position is the
difference of a query position and a key position, so that a region is plain attention. The last token of a prompt, whose logits
choose the first new token, and every token after it are decoded: the query is at position 0 and each key at minus its relative
position P, which is plain RoPE if P is the distance. In layers with ALiBi P takes the place of the distance; layers without either
are unchanged.

Shape suffixes: B batch, R rows that start together, L queries, T keys, N query heads, K key-value heads, G = N/K, H head dim.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from farsight.configs.schema import DynamicNtkRope, LongRope, NoRotary
from farsight.errors import ConfigError
from farsight.inference.extend.logit_noise import logit_noise
from farsight.inference.kv_cache import Batch, LayerCache
from farsight.kernels.scoped_attention import ScoreBias, Visibility
from farsight.model.attention import Attention
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.model.position.rope import RopeFrequencies, rope_tables
from farsight.model.position.scope import DENSE_SCOPE

SCORES = 2**26
"""Attention scores held in memory at once while a prompt is read."""


class Region(NamedTuple):
    """Pairs of queries and keys of one sequence whose relative position is the difference of two positions."""

    queries: slice
    """Indices within the requested span."""
    keys: slice
    """Indices from the sequence's first token."""
    query_positions: Tensor
    """[l]; whole numbers if the method interpolates."""
    key_positions: Tensor
    """[t], or [R, t] where rows differ; a pair's relative position is the query's position minus the key's."""
    seen: Tensor
    """bool [l, t]: the pairs that belong to the region."""
    noise: Tensor | None = None
    """[l, t]: standard deviation of the noise added to the logits."""


class Distances(NamedTuple):
    """The keys up to a decoded query."""

    positions: Tensor
    """[…, T]: relative position of each key."""
    noise: Tensor | None = None
    """[…, T]: as in Region."""


class PositionMap(Protocol):
    """The relative positions of one sequence."""

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        """Regions that cover every pair of the prompt's queries [first, stop) and the keys up to each exactly once."""
        ...


class Step:
    """Relative positions for one decoded query in each row, with RoPE tables cached for the layers that share them."""

    def __init__(self, distances: Distances, interpolated: bool = False) -> None:
        self.positions_BT, self.noise_BT = distances
        self.interpolated = interpolated
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def tables(self, rotation: "LayerRotation") -> tuple[Tensor, Tensor]:
        """The tables that rotate the keys."""
        if rotation.row not in self._tables:
            self._tables[rotation.row] = rotation.tables(-self.positions_BT, self.interpolated)
        return self._tables[rotation.row]


class SharedPositions(Protocol):
    """Relative positions shared by layers, which call it in their order."""

    interpolated: bool
    """Whether logits of two whole positions are interpolated, rather than the positions."""
    seed: int
    """Seed of the noise, if there is any."""

    def nbytes(self, layer: "RemappedLayer") -> int:
        """Bytes kept for a layer's positions, beside its keys and values."""
        ...

    def observe(self, layer: "RemappedLayer", rows: Sequence[int], q_RLNH: Tensor, first: int) -> None:
        """Receives a layer's queries of a prompt, from index `first` on, before `regions` is called for them."""
        ...

    def map_of(self, rows: Sequence[int]) -> PositionMap:
        """Positions for rows of the batch that start together."""
        ...

    def step(self, layer: "RemappedLayer", q_BNH: Tensor, column: int) -> Step:
        """Positions for the queries in a column of the batch."""
        ...


@dataclass(frozen=True)
class LayerRotation:
    """A layer's rotation of queries and keys."""

    row: int
    """Equal for layers with the same frequencies."""
    frequencies: RopeFrequencies

    def tables(self, positions: Tensor, interpolated: bool) -> tuple[Tensor, Tensor]:
        """`rope_tables` of positions [B, T]; with `interpolated`, linear interpolations between the tables of whole positions.

        A logit is linear in the rotated key, so this interpolates between the logits at the two whole positions.
        """
        if not interpolated:
            return rope_tables(positions, self.frequencies)
        below = positions.floor()
        share = (positions - below)[..., None].float()
        pairs = zip(rope_tables(below, self.frequencies), rope_tables(below + 1, self.frequencies), strict=True)
        cos, sin = (low.lerp(high, share) for low, high in pairs)
        return cos, sin


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates [R, …, T, H] with tables [R or 1, T, H], like `rotate` but half by half: saving the copy that swaps the halves takes
    0.7 of the time on a long cache. Narrower tables rotate the first dimensions."""
    cos, sin = (table.view(table.shape[0], *[1] * (x.dim() - 3), *table.shape[1:]) for table in tables)
    end = cos.shape[-1]
    half = end // 2
    first, second = x[..., :half].float(), x[..., half:end].float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    # The halves of a table are equal, up to the sign of the sines: those of the first half are negative.
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., :half])
    torch.mul(second, cos[..., half:], out=out[..., half:end]).addcmul_(first, sin[..., half:])
    out[..., end:] = x[..., end:]
    return out.to(x.dtype)


class RemappedLayer:
    """A layer whose cache keeps every value, and every key as it was before RoPE.

    Args:
        number: the layer's.
        positions: shared with other layers.
        rotation: None if the layer has no RoPE.
    """

    rotates = True

    def __init__(
        self,
        number: int,
        attention: Attention,
        batch: Batch,
        positions: SharedPositions,
        rotation: LayerRotation | None,
    ) -> None:
        kv_heads, self.head_dim = len(attention.scopes) // attention.group, attention.head_dim
        shape = len(batch.starts), kv_heads, batch.most_tokens, self.head_dim
        self.k_BKTH = torch.empty(shape, dtype=batch.dtype, device=batch.device)
        self.v_BKTH = torch.empty_like(self.k_BKTH)
        self.heads_N = torch.arange(attention.heads.start, attention.heads.stop, device=batch.device)
        self.number, self.batch, self.positions, self.rotation = number, batch, positions, rotation
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

    def attend(self, q_BLNH: Tensor, visibility: Visibility, backend: str) -> Tensor:
        assert visibility.document_starts_BL is None  # each row holds one document
        begin = self.tokens - q_BLNH.shape[1]
        decoded = max(begin, min(self.tokens, self.batch.prompt - 1))  # the prompt's last token is
        # In order, since positions may carry over from query to query.
        parts = [self._read(q_BLNH[:, : decoded - begin], begin, visibility.bias)] if decoded > begin else []
        for column in range(decoded, self.tokens):
            parts.append(self._decode(q_BLNH[:, column - begin], column, visibility.bias)[:, None])
        return torch.cat(parts, dim=1)

    def _read(self, q_BLNH: Tensor, begin: int, bias: ScoreBias | None) -> Tensor:
        """Attention of the prompts' queries from column `begin` on, together for rows that start together."""
        o_BLNH, stop = torch.zeros_like(q_BLNH), begin + q_BLNH.shape[1]
        for start in sorted(set(self.batch.starts)):
            if start >= stop:
                continue  # only padding so far
            rows = [row for row, begins in enumerate(self.batch.starts) if begins == start]
            column = max(start, begin)
            q_RLNH = q_BLNH[rows, column - begin :]
            k_RKTH, v_RKTH = (x[rows, :, start:stop] for x in (self.k_BKTH, self.v_BKTH))
            self.positions.observe(self, rows, q_RLNH, column - start)
            o_BLNH[rows, column - begin :] = self._prefill(rows, q_RLNH, k_RKTH, v_RKTH, column - start, bias)
        return o_BLNH

    def _prefill(
        self,
        rows: Sequence[int],
        q_RLNH: Tensor,
        k_RKTH: Tensor,
        v_RKTH: Tensor,
        first: int,
        bias: ScoreBias | None,
    ) -> Tensor:
        """Attention of the queries [first, T) of sequences with T keys so far, span by span."""
        (R, L, N, _), T = q_RLNH.shape, k_RKTH.shape[2]
        span = max(16, SCORES // (R * N * T))
        positions, parts = self.positions.map_of(rows), []
        for begin in range(first, first + L, span):
            stop = min(begin + span, first + L)
            regions = positions.regions(begin, stop, q_RLNH.device)
            q = q_RLNH[:, begin - first : stop - first].unflatten(2, (k_RKTH.shape[1], -1)).permute(0, 2, 3, 1, 4)
            o_RKGLH = self._attend(q, k_RKTH[:, :, :stop], v_RKTH[:, :, :stop], regions, begin, bias)
            parts.append(o_RKGLH.permute(0, 3, 1, 2, 4).flatten(2, 3))
        return torch.cat(parts, dim=1)

    def _attend(
        self,
        q_RKGLH: Tensor,
        k_RKTH: Tensor,
        v_RKTH: Tensor,
        regions: Iterable[Region],
        begin: int,
        bias: ScoreBias | None,
    ) -> Tensor:
        """Attention of one span, whose first query has index `begin`."""
        scores_RKGLT = q_RKGLH.new_full((*q_RKGLH.shape[:-1], k_RKTH.shape[2]), -torch.inf, dtype=torch.float32)
        for region in regions:
            q, k = q_RKGLH[..., region.queries, :], k_RKTH[:, :, region.keys]
            key_positions_RT = torch.atleast_2d(region.key_positions)
            if self.rotation is not None:
                q = rotated(q, self.rotation.tables(region.query_positions[None], False))
                k = rotated(k, self.rotation.tables(key_positions_RT, self.positions.interpolated))
            scores = (q @ k[:, :, None].transpose(-1, -2)).float() * self.head_dim**-0.5
            if bias is not None:
                relative_RLT = region.query_positions[:, None] - key_positions_RT[:, None]
                scores += bias(relative_RLT[:, None, None].float(), *scores.shape[1:3], 1, 1)
            if region.noise is not None:
                queries = torch.arange(begin, begin + q_RKGLH.shape[3], device=q.device)[region.queries]
                keys = torch.arange(k_RKTH.shape[2], device=q.device)[region.keys]
                scores += self._noise(region.noise, queries, keys).view(scores.shape[1:])
            part = scores_RKGLT[..., region.queries, region.keys]
            part.copy_(torch.where(region.seen, scores, part))
        return scores_RKGLT.softmax(-1).to(v_RKTH.dtype) @ v_RKTH[:, :, None]

    def _decode(self, q_BNH: Tensor, column: int, bias: ScoreBias | None) -> Tensor:
        """Attention of each row's query in one column."""
        step = self.positions.step(self, q_BNH, column)
        q_BKGH = q_BNH.unflatten(1, (self.k_BKTH.shape[1], -1))
        k_BKTH = self.k_BKTH[:, :, : column + 1]
        if self.rotation is not None:
            # At position 0 the query is not rotated, but still scaled by YaRN's temperature.
            scaled = q_BKGH.new_ones(self.head_dim)
            scaled[: 2 * len(self.rotation.frequencies.inv_freq)] = self.rotation.frequencies.attention_factor
            q_BKGH = q_BKGH * scaled
            k_BKTH = rotated(k_BKTH, step.tables(self.rotation))
        scores_BKGT = (q_BKGH @ k_BKTH.transpose(-1, -2)).float() * self.head_dim**-0.5
        if bias is not None:
            scores_BKGT += bias(step.positions_BT[:, None, None].float(), *scores_BKGT.shape[1:3], 1)
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
        """Noise [N, L, T], the same whichever rows and chunks are read together."""
        return logit_noise(self.positions.seed, self.number, self.heads_N, queries, keys) * std_LT


def remapped_layers(model: Llama, batch: Batch, positions: Sequence[SharedPositions]) -> dict[str, LayerCache]:
    """A cache for each layer, by its number; `positions` has one entry for each layer."""
    layers: dict[str, LayerCache] = {}
    for (name, attention), shared in zip(model.attentions(), positions, strict=True):
        row = model.rotary_of_layer[name]
        rotation = None
        if row is not None:
            frequencies = RopeFrequencies(model.rope_frequencies[row], model.attention_factors[row])
            rotation = LayerRotation(row, frequencies)
        layers[name] = RemappedLayer(int(name), attention, batch, shared, rotation)
    return layers


def check_remappable(name: str, config: ModelConfig) -> None:
    """Checks that a method can replace a model's positions.

    Raises:
        ConfigError: it cannot; names the method and the reason.
    """
    p, layers = config.position, config.layers()
    if all(isinstance(layer.rotary, NoRotary) and layer.bias is None for layer in layers):
        raise ConfigError(
            f"--extend {name}: the model has neither RoPE nor ALiBi, so there are no positions to change."
        )
    if p.embedding != "none":
        raise ConfigError(
            f"--extend {name}: the model adds {p.embedding} position embeddings to its tokens, which this method can't change."
        )
    for number, layer in enumerate(layers):
        if min(layer.scopes) < DENSE_SCOPE:
            raise ConfigError(
                f"--extend {name}: a head of layer {number} sees {min(layer.scopes):,} tokens; this method needs heads "
                "that see every token."
            )
        if layer.garfa is not None:
            raise ConfigError(
                f"--extend {name}: layer {number} has GARFA, with frequencies for each head; this method needs one set per layer."
            )
        if isinstance(layer.rotary, DynamicNtkRope | LongRope):
            raise ConfigError(
                f"--extend {name}: layer {number} has RoPE of kind {layer.rotary.kind!r}, which changes with the length itself."
            )
