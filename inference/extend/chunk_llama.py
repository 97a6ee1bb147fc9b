"""ChunkLlama: dual chunk attention (An et al., 2024), where positions restart in every chunk."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from farsight.errors import ConfigError
from farsight.inference.extend.fixed import FixedMap, FixedMethod, causal
from farsight.inference.extend.remapped import Distances, Region


@dataclass(frozen=True)
class ChunkLlama(FixedMethod):
    """Keys stand at j mod s. A query stands at i mod s for keys of its own chunk, at min(s + i mod s, c − 1) for those of the
    chunk before, and at c − 1 for all earlier ones, where c = s + w (section 3 and figure 2, whose positions end at c − 1; the
    official code ends at c)."""

    name: ClassVar[str] = "chunk_llama"
    chunk: int = 0
    """s in tokens. 0: 5/8 of the trained window, as in the official code."""
    window: int = 0
    """w in tokens: how far distances stay exact across a chunk boundary. 0: 1/8 of the trained window, as there."""

    def positions(self, window: int, prompt: int, length: int) -> FixedMap:
        chunk, local = self.chunk or max(1, window * 5 // 8), self.window or max(1, window // 8)
        if chunk < 1 or local < 1 or chunk + local > window:
            raise ConfigError(
                f"--extend chunk_llama: chunk = {chunk} and window = {local} must be at least 1 and together at most the "
                f"{window:,} tokens that the model was trained on."
            )
        return DualChunks(chunk, chunk + local)


@dataclass(frozen=True)
class DualChunks:
    """Dual chunk attention's relative positions."""

    chunk: int
    limit: int
    """c: the largest position plus one."""

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        s = self.chunk
        keys = torch.arange(stop, device=device)
        for number in range(first // s, (stop - 1) // s + 1):
            begin, end = max(first, number * s), min(stop, (number + 1) * s)
            own, before = number * s, max(0, number - 1) * s
            queries, span = torch.arange(begin, end, device=device), slice(begin - first, end - first)
            yield Region(span, slice(own, end), queries % s, keys[own:end] % s, causal(queries, keys[own:end]))
            if own > 0:
                positions = (s + queries % s).clamp_max(self.limit - 1)
                seen = torch.ones(end - begin, own - before, dtype=torch.bool, device=device)
                yield Region(span, slice(before, own), positions, keys[before:own] % s, seen)
            if before > 0:
                positions = torch.full_like(queries, self.limit - 1)
                seen = torch.ones(end - begin, before, dtype=torch.bool, device=device)
                yield Region(span, slice(0, before), positions, keys[:before] % s, seen)

    def distances(self, query: int, device: torch.device) -> Distances:
        s = self.chunk
        keys = torch.arange(query + 1, device=device)
        chunks_between = query // s - keys // s
        position = torch.full_like(keys, self.limit - 1)
        position[chunks_between == 1] = min(s + query % s, self.limit - 1)
        position[chunks_between == 0] = query % s
        return Distances((position - keys % s).float())
