"""Base of methods whose relative positions depend only on the lengths of a sequence and its prompt, not on its tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from farsight.inference.extend.remapped import (
    Distances,
    Region,
    RemappedLayer,
    Step,
    check_remappable,
    remapped_layers,
)
from farsight.inference.kv_cache import Batch, LayerCache
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama


class FixedMap(Protocol):
    """The relative positions of one sequence: a `remapped.PositionMap` that also covers decoded queries."""

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]: ...

    def distances(self, query: int, device: torch.device) -> Distances:
        """Relative positions of the keys [0, query] for a decoded query."""
        ...


class FixedMethod(ABC):
    """A method of this kind: a dataclass whose fields are its settings.

    With the defaults of all of them, sequences within the trained window are left as they are. Settings that differ hold for
    sequences of every length.
    """

    name: ClassVar[str]
    interpolated: ClassVar[bool] = False
    seed: int = 0

    @abstractmethod
    def positions(self, window: int, prompt: int, length: int) -> FixedMap:
        """The relative positions of a sequence.

        Args:
            window: sequence length that the model was trained on, in tokens.
            prompt: tokens in the prompt.
            length: largest length of the sequence.

        Raises:
            ConfigError: settings that do not fit these lengths.
        """

    def change(self, config: ModelConfig) -> ModelConfig:
        check_remappable(self.name, config)
        window = config.trained_length
        self.positions(window, 1, window + 1)  # checks the settings: what fails here fails for longer sequences too
        return config

    def caches(self, model: Llama, config: ModelConfig, batch: Batch) -> dict[str, LayerCache]:
        window, maps, chosen = config.trained_length, dict[int, FixedMap](), self != type(self)()
        for start in set(batch.starts):
            prompt, length = batch.prompt - start, batch.most_tokens - start
            remapped = chosen or length > window
            maps[start] = self.positions(window, prompt, length) if remapped else PlainPositions()
        shared = FixedPositions([maps[start] for start in batch.starts], batch, self.interpolated, self.seed)
        return remapped_layers(model, batch, [shared] * len(model.layers))


class FixedPositions:
    """A batch's relative positions, which depend only on the lengths of its sequences.

    Args:
        maps: one for each row, all of one method.
    """

    def __init__(self, maps: Sequence[FixedMap], batch: Batch, interpolated: bool, seed: int) -> None:
        self.maps, self.batch, self.interpolated, self.seed = maps, batch, interpolated, seed
        self._column = -1
        self._step: Step | None = None

    def nbytes(self, layer: RemappedLayer) -> int:
        return 0

    def observe(self, layer: RemappedLayer, rows: Sequence[int], q_RLNH: Tensor, first: int) -> None:
        pass

    def map_of(self, rows: Sequence[int]) -> FixedMap:
        return self.maps[rows[0]]

    def step(self, layer: RemappedLayer, q_BNH: Tensor, column: int) -> Step:
        if self._step is None or self._column != column:
            pairs = zip(self.maps, self.batch.starts, strict=True)
            found = [positions.distances(column - start, q_BNH.device) for positions, start in pairs]
            noise = None
            if any(distances.noise is not None for distances in found):
                # A row that is still short has no noise.
                noise = _right_aligned([n if n is not None else torch.zeros_like(p) for p, n in found])
            distances = Distances(_right_aligned([positions for positions, _ in found]), noise)
            self._column, self._step = column, Step(distances, self.interpolated)
        return self._step


def _right_aligned(rows: Sequence[Tensor]) -> Tensor:
    """Stacks rows of [t] to [B, T], with zeros before shorter ones."""
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    """bool [l, t]: whether each key is at or before each query."""
    return keys <= queries[:, None]


class PlainPositions:
    """Every key at its true distance, as the model was trained."""

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        queries, keys = torch.arange(first, stop, device=device), torch.arange(stop, device=device)
        yield Region(slice(0, stop - first), slice(0, stop), queries, keys, causal(queries, keys))

    def distances(self, query: int, device: torch.device) -> Distances:
        return Distances(torch.arange(query, -1, -1, device=device, dtype=torch.float32))
