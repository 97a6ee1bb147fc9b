"""RiPRA: relevance-informed positional resource allocation (Zhao et al.), with the corrections listed in docs/inference/extensions.md.

A query has a budget of positions, `limit`, for the tokens before it. The nearest `near` tokens keep their distances; the rest of
the budget is divided among chunks of tokens by how well their mean key matches the query, and less with distance. Relevance is
computed in a few anchor layers; the layers after each share its positions.

Chunks are fixed in the sequence and counted from its start; distances are counted back from the query. Shape suffixes: B batch,
R rows that start together, C chunks, L queries, T keys, N query heads, K key-value heads, H head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farsight.errors import ConfigError
from farsight.inference.extend.fixed import PlainPositions, causal
from farsight.inference.extend.isotonic import isotonic_regression
from farsight.inference.extend.remapped import (
    Distances,
    Region,
    RemappedLayer,
    SharedPositions,
    Step,
    check_remappable,
    remapped_layers,
)
from farsight.inference.kv_cache import Batch, LayerCache
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama

EPSILON = 1e-6
"""ε of Eq. 6 and 7."""


@dataclass(frozen=True)
class Ripra:
    """RiPRA's settings (appendix A; tables 5, 6, 8 and figure 2 vary them)."""

    name: ClassVar[str] = "ripra"
    limit: int = 0
    """Budget of positions in tokens. 0: `limit_ratio` of the trained window."""
    limit_ratio: float = 0.5
    near: int = 0
    """Nearest tokens, which keep their distances. 0: 1,024, or half of the limit if that is less."""
    chunk: int = 256
    """Tokens in a chunk."""
    anchors: str = "0+middle"
    """Anchor layers, joined with +; "middle" is the layer at half the depth, "all" means every layer."""
    relevance: Literal["on", "off"] = "on"
    """off: all chunks are equally relevant."""
    isotonic: Literal["on", "off"] = "on"
    """off: resolution need not fall with distance."""
    round: Literal["on", "off"] = "off"
    """on: positions are rounded to whole numbers."""
    block: int = 0
    """Queries of a prompt that share the relevance of the first of them; 1 is exact. 0: 128, or a quarter of `near` if less."""

    def change(self, config: ModelConfig) -> ModelConfig:
        check_remappable(self.name, config)
        self.allocation(config.trained_length)
        self.anchor_layers(config.architecture.n_layers)
        return config

    def allocation(self, window: int) -> "Allocation":
        """The settings resolved for a model that was trained on sequences of `window` tokens."""
        limit = self.limit or int(self.limit_ratio * window)
        near = self.near or max(1, min(1024, limit // 2))
        block = self.block or max(1, min(128, near // 4))
        for name, value, least, most, why in (
            ("limit", limit, 2, window, "the tokens that the model was trained on"),
            ("near", near, 1, limit - 1, "less than the limit, which has to leave something for the rest"),
            ("chunk", self.chunk, 1, 2**31, ""),
            ("block", block, 1, near, "the near window, in which all of a block has to lie"),
        ):
            if not least <= value <= most:
                upper = f" to {most:,}, {why}" if why else " or more"
                raise ConfigError(f"--extend ripra: {name} = {value:,} must be {least}{upper}.")
        return Allocation(limit, near, self.chunk, block, self.isotonic == "on", self.round == "on")

    def anchor_layers(self, n_layers: int) -> tuple[int, ...]:
        """The anchor layers in ascending order, starting with layer 0."""
        named = range(n_layers) if self.anchors == "all" else self.anchors.split("+")
        try:
            layers = sorted({n_layers // 2 if layer == "middle" else int(layer) for layer in named})
        except ValueError:
            layers = []
        if not layers or layers[0] != 0 or layers[-1] >= n_layers:
            raise ConfigError(
                f"--extend ripra: anchors = {self.anchors!r} must name layers from 0 to {n_layers - 1}, layer 0 among them, "
                'for the layers before the next: "0+middle", "0+8+16" or "all".'
            )
        return tuple(layers)

    def caches(self, model: Llama, config: ModelConfig, batch: Batch) -> dict[str, LayerCache]:
        heads = {len(attention.scopes) for _, attention in model.attentions()}
        if heads != {config.architecture.n_heads}:
            raise ConfigError(
                "--extend ripra: relevance is a mean over all heads, and each process holds only some of them; run one process."
            )
        allocation = self.allocation(config.trained_length)
        anchors = self.anchor_layers(len(model.layers))
        groups = {
            anchor: RelevancePositions(anchor, model, batch, allocation, self.relevance == "on") for anchor in anchors
        }
        shared: list[SharedPositions] = [groups[max(a for a in anchors if a <= int(name))] for name in model.layers]
        return remapped_layers(model, batch, shared)


# ── From a query to positions ─────────────────────────────────────────────────────────────────────────


def chunk_scores(q_BNH: Tensor, fingerprints_BCKH: Tensor) -> Tensor:
    """Mean over query heads of their products with the chunks' fingerprints (Eq. 5), fp32 [B, C]. With grouped-query attention, a
    query head meets its key-value head's fingerprints."""
    K = fingerprints_BCKH.shape[2]
    q_BKH = q_BNH.float().unflatten(1, (K, -1)).sum(2)  # the group's heads meet the same fingerprint
    return torch.einsum("bkh,bckh->bc", q_BKH, fingerprints_BCKH) / q_BNH.shape[1]


def relevance_landscape(scores_BC: Tensor, chunks_B: Tensor) -> Tensor:
    """Scores rescaled to 0 … 1 over the first `chunks_B` chunks of each row (Eq. 6), fp64 [B, C]; 0 for other chunks."""
    there_BC = torch.arange(scores_BC.shape[1], device=scores_BC.device) < chunks_B[:, None]
    scores_BC = scores_BC.double()
    least_B1 = scores_BC.masked_fill(~there_BC, torch.inf).amin(1, keepdim=True)
    most_B1 = scores_BC.masked_fill(~there_BC, -torch.inf).amax(1, keepdim=True)
    return ((scores_BC - least_B1) / (most_B1 - least_B1 + EPSILON)).masked_fill(~there_BC, 0.0)


@dataclass(frozen=True)
class Allocation:
    """The division of a budget of positions."""

    limit: int
    near: int
    chunk: int
    block: int
    isotonic: bool
    round: bool

    def far_tokens(self, query_B: Tensor, chunks: int) -> Tensor:
        """int64 [B, C]: how many tokens of each chunk are more than `near` before the query at this index."""
        begin_C = torch.arange(chunks, device=query_B.device) * self.chunk
        return (query_B[:, None] - self.near - begin_C).clamp(0, self.chunk)

    def resolutions(self, landscape_BC: Tensor, query_B: Tensor) -> Tensor:
        """Positions for each token beyond the near window, by chunk (Eq. 7 and 8, and 3.3.2), fp64 [B, C].

        A token gets at most 1; what that leaves over goes to the others in proportion, until the budget is spent.

        Args:
            landscape_BC: relevance of each chunk.
            query_B: index of each row's query.
        """
        tokens_BC = self.far_tokens(query_B, landscape_BC.shape[1]).double()
        far_BC = tokens_BC > 0
        wanted_BC = landscape_BC.double() + EPSILON
        if self.isotonic:
            # Later chunks are nearer. Chunks that are not far come last with the largest value, so they pool with no other.
            wanted_BC = isotonic_regression(wanted_BC.masked_fill(~far_BC, 2.0))
        wanted_BC = wanted_BC.masked_fill(~far_BC, 0.0)
        # A context shorter than the limit does not use up the budget: every share is 1.
        budget_B1 = tokens_BC.sum(1, keepdim=True).clamp_max(self.limit - self.near)
        # The c largest wants get 1 and the rest divide what is left of the budget: take the first c that puts none of the rest above 1.
        sorted_BC, order_BC = wanted_BC.sort(1, descending=True)
        sizes_BC = tokens_BC.gather(1, order_BC)
        room_BC = budget_B1 - (sizes_BC.cumsum(1) - sizes_BC)
        rest_BC = (sizes_BC * sorted_BC).flip(1).cumsum(1).flip(1)
        fits_BC = room_BC * sorted_BC <= rest_BC
        first_B1 = fits_BC.int().argmax(1, keepdim=True)
        scale_B1 = room_BC.gather(1, first_B1) / rest_BC.gather(1, first_B1)
        return (wanted_BC * scale_B1).clamp_max(1.0).masked_fill(~far_BC, 0.0)

    def positions(self, resolutions_BC: Tensor, query_B: Tensor, tokens: int) -> Tensor:
        """P of the sequence's first `tokens` tokens (Eq. 11), fp64 [B, T]; tokens after the query are at minus their distance."""
        index_T = torch.arange(tokens, device=query_B.device)
        distance_BT = query_B[:, None] - index_T
        sizes_BC = self.far_tokens(query_B, resolutions_BC.shape[1])
        spent_BC = sizes_BC * resolutions_BC
        nearer_BC = spent_BC.flip(1).cumsum(1).flip(1) - spent_BC  # spent between this chunk and the near window
        chunk_BT = (index_T // self.chunk).expand_as(distance_BT)
        end_BT = index_T - index_T % self.chunk + sizes_BC.gather(1, chunk_BT)
        inside_BT = (end_BT - index_T) * resolutions_BC.gather(1, chunk_BT)
        far_BT = self.near + nearer_BC.gather(1, chunk_BT) + inside_BT
        positions_BT = torch.where(distance_BT <= self.near, distance_BT.double(), far_BT)
        return positions_BT.round() if self.round else positions_BT

    def block_of(self, query: int) -> int:
        """The block of a query past the limit; blocks start right after the limit and count from 0."""
        return (query - self.limit - 1) // self.block

    def block_begin(self, block: int) -> int:
        """First query of a block."""
        return self.limit + 1 + block * self.block

    def block_last(self, block: int, rows: Tensor) -> Tensor:
        """Last query of a block, repeated for each row of a tensor [R, …]."""
        return torch.full((len(rows),), self.block_begin(block + 1) - 1, device=rows.device)


# ── What layers share ─────────────────────────────────────────────────────────────────────────────────


class Fingerprints:
    """Running mean of each chunk's keys, before RoPE (Eq. 4)."""

    def __init__(self, rows: int, chunks: int, kv_heads: int, head_dim: int, chunk: int, device: torch.device) -> None:
        self.sums_BCKH = torch.zeros(rows, chunks, kv_heads, head_dim, device=device)
        self.chunk, self.counted = chunk, [0] * rows

    def extend(self, rows: Sequence[int], k_BKTH: Tensor, start: int, tokens: int) -> None:
        """Adds the keys of rows that begin in column `start`, up to `tokens` tokens."""
        counted = self.counted[rows[0]]
        new_RTKH = k_BKTH[rows, :, start + counted : start + tokens].transpose(1, 2).float()
        chunk_T = torch.arange(counted, tokens, device=k_BKTH.device) // self.chunk
        first, stop = counted // self.chunk, -(-tokens // self.chunk)
        sums_RCKH = self.sums_BCKH[rows, first:stop]
        self.sums_BCKH[rows, first:stop] = sums_RCKH.index_add(1, chunk_T - first, new_RTKH)
        for row in rows:
            self.counted[row] = tokens

    def means(self, rows: Sequence[int]) -> Tensor:
        """The means [R, C, K, H]; 0 for chunks without keys so far."""
        tokens_R1 = torch.tensor([self.counted[row] for row in rows], device=self.sums_BCKH.device)[:, None]
        begin_C = torch.arange(self.sums_BCKH.shape[1], device=tokens_R1.device) * self.chunk
        sizes_RC = (tokens_R1 - begin_C).clamp(1, self.chunk)
        return self.sums_BCKH[rows] / sizes_RC[..., None, None]


class RelevancePositions:
    """Relative positions of an anchor layer, shared by the layers up to the next anchor.

    A decoded query has its own positions. In a prompt, each block of queries past the limit shares the resolutions from its first
    query's relevance, laid out for its last query. So no query's positions depend on later tokens or exceed the limit, and a block
    is one plain attention. For the other queries of a block, the near window is shorter by their distance from the last.
    """

    interpolated, seed = False, 0

    def __init__(self, anchor: int, model: Llama, batch: Batch, allocation: Allocation, relevance: bool) -> None:
        a = model.architecture
        self.anchor, self.batch, self.allocation = anchor, batch, allocation
        self.chunks = -(-batch.most_tokens // allocation.chunk)
        rows = len(batch.starts)
        self.fingerprints = (
            Fingerprints(rows, self.chunks, a.n_kv_heads, a.head_dim, allocation.chunk, batch.device)
            if relevance
            else None
        )
        self.blocks: dict[int, dict[int, Tensor]] = {start: {} for start in batch.starts}
        """Resolutions of each block, fp64 [R, C], by the rows' start and the block's number."""
        self._column = -1
        self._step: Step | None = None

    def nbytes(self, layer: RemappedLayer) -> int:
        if layer.number != self.anchor or self.fingerprints is None:
            return 0
        return self.fingerprints.sums_BCKH.nbytes

    def landscape(self, layer: RemappedLayer, rows: Sequence[int], q_RNH: Tensor, query: int) -> Tensor:
        """Relevance of the chunks to the queries at index `query` of rows that start together, fp64 [R, C]."""
        if self.fingerprints is None:
            return torch.ones(len(rows), self.chunks, dtype=torch.float64, device=q_RNH.device)
        self.fingerprints.extend(rows, layer.k_BKTH, self.batch.starts[rows[0]], query + 1)
        scores_RC = chunk_scores(q_RNH, self.fingerprints.means(rows))
        chunks = torch.tensor([query // self.allocation.chunk + 1], device=q_RNH.device)
        return relevance_landscape(scores_RC, chunks)

    def observe(self, layer: RemappedLayer, rows: Sequence[int], q_RLNH: Tensor, first: int) -> None:
        if layer.number != self.anchor:
            return
        allocation, start, last = self.allocation, self.batch.starts[rows[0]], first + q_RLNH.shape[1] - 1
        blocks = self.blocks[start]
        # A block may continue from the chunk before; earlier ones are done.
        for block in [block for block in blocks if block < allocation.block_of(first)]:
            del blocks[block]
        if last <= allocation.limit:
            return
        for block in range(max(0, allocation.block_of(first)), allocation.block_of(last) + 1):
            begin = allocation.block_begin(block)
            if begin >= first:
                landscape_RC = self.landscape(layer, rows, q_RLNH[:, begin - first], begin)
                blocks[block] = allocation.resolutions(landscape_RC, allocation.block_last(block, landscape_RC))

    def map_of(self, rows: Sequence[int]) -> "BlockPositions":
        return BlockPositions(self.allocation, self.blocks[self.batch.starts[rows[0]]])

    def step(self, layer: RemappedLayer, q_BNH: Tensor, column: int) -> Step:
        if layer.number == self.anchor:
            self._step, self._column = Step(Distances(self.decoded(layer, q_BNH, column))), column
        assert self._step is not None
        assert self._column == column
        return self._step

    def decoded(self, layer: RemappedLayer, q_BNH: Tensor, column: int) -> Tensor:
        """Positions of the keys up to a column for the queries in it, fp32 [B, T]; those of padding are arbitrary."""
        allocation, starts = self.allocation, self.batch.starts
        query_B = torch.tensor([column - start for start in starts], device=q_BNH.device)
        distance_BT = (column - torch.arange(column + 1, device=q_BNH.device)).expand(len(starts), -1).float()
        if column - min(starts) <= allocation.limit:
            return distance_BT
        landscape_BC = q_BNH.new_zeros(len(starts), self.chunks, dtype=torch.float64)
        for start in set(starts):
            rows = [row for row, begins in enumerate(starts) if begins == start]
            landscape_BC[rows] = self.landscape(layer, rows, q_BNH[rows], column - start)
        resolutions_BC = allocation.resolutions(landscape_BC, query_B)
        positions_BT = allocation.positions(resolutions_BC, query_B, column + 1).float()
        # Positions count from each row's first token, so shift them to its column.
        for row, start in enumerate(starts):
            if start:
                positions_BT[row, start:] = positions_BT[row, : column + 1 - start].clone()
        return torch.where(query_B[:, None] <= allocation.limit, distance_BT, positions_BT)


@dataclass(frozen=True)
class BlockPositions:
    """Positions of the queries of prompts that start together, by block."""

    allocation: Allocation
    blocks: dict[int, Tensor]

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        allocation, begin = self.allocation, first
        while begin < stop:
            if begin <= allocation.limit:
                end = min(stop, allocation.limit + 1)
                for region in PlainPositions().regions(begin, end, device):
                    yield region._replace(queries=slice(begin - first, end - first))
            else:
                block = allocation.block_of(begin)
                end = min(stop, allocation.block_begin(block + 1))
                last_R = allocation.block_last(block, self.blocks[block])
                positions_RT = allocation.positions(self.blocks[block], last_R, end)
                queries, keys = torch.arange(begin, end, device=device), torch.arange(end, device=device)
                yield Region(
                    slice(begin - first, end - first),
                    slice(0, end),
                    queries - last_R[0],
                    -positions_RT,
                    causal(queries, keys),
                )
            begin = end
