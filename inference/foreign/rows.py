"""Reads and continues sequences with a foreign model: transformers' cache and masks in place of ours.

Shapes: B batch, L tokens, D model, T tokens so far.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from farsight.inference.decoder import Decoder, Rows
from farsight.inference.extend import Extension
from farsight.inference.foreign.attention import TheirCache
from farsight.inference.foreign.model import LENGTH_DEPENDENT, ForeignConfig, ForeignModel
from farsight.inference.model_options import CHUNK


class ForeignDecoder(Decoder):
    """`Decoder` of a foreign model; an extension is one that attends in the model's place."""

    def __init__(
        self,
        model: ForeignModel,
        config: ForeignConfig,
        extension: Extension | None = None,
        chunk: int = CHUNK,
        name: str = "the model",
    ) -> None:
        # What a decoder and its callers use of a Llama is what ForeignModel has.
        super().__init__(cast(Any, model), config, extension, chunk, name)
        self.foreign = model

    @property
    def module(self) -> nn.Module:
        return self.foreign.model

    def start(self, lengths: Sequence[int], new_tokens: int = 0) -> "ForeignRows":
        return ForeignRows(self, lengths, new_tokens)

    def group_by_positions(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        if self.foreign.config.rope_type in LENGTH_DEPENDENT:
            return [[row] for row in rows]  # transformers takes the frequencies of the longest row for all
        return [list(rows)]


class ForeignRows(Rows):
    """`Rows` of a foreign model.

    Without an extension, keys and values are in transformers' cache. An extension keeps them itself, unrotated.
    """

    capturable = False

    def __init__(self, decoder: ForeignDecoder, lengths: Sequence[int], new_tokens: int) -> None:
        super().__init__(decoder, lengths, new_tokens)
        self.past: Any = None
        """transformers' cache, which the model makes when it reads for the first time."""

    @property
    def foreign(self) -> ForeignModel:
        assert isinstance(self.decoder, ForeignDecoder)
        return self.decoder.foreign

    def place(self) -> None:
        pass

    def own_caches(self) -> dict[str, Any]:
        return {name: TheirCache(layer, partial(self._cached, int(name))) for name, layer in self.foreign.attentions()}

    def _cached(self, layer: int) -> Sequence[Tensor]:
        kept = [] if self.past is None else [self.past.layers[layer].keys, self.past.layers[layer].values]
        return [x for x in kept if isinstance(x, Tensor)]

    @property
    def dense_nbytes(self) -> int:
        a_token = sum(x.n_kv_heads * (x.head_dim + x.value_dim) for _, x in self.foreign.attentions())
        return a_token * len(self.batch.starts) * self.batch.most_tokens * self.batch.dtype.itemsize

    def hidden_states(self, tokens_BL: Tensor, positions_BL: Tensor) -> Tensor:
        if any(cache.rotates for cache in self.caches.values()):
            with self.foreign.unrotated():
                return self.foreign.hidden_states(tokens_BL, positions_BL)
        settings: dict[str, Any] = {"past_key_values": self.past, "use_cache": True}
        if self.starts_B is not None:
            columns_T = torch.arange(self.tokens + tokens_BL.shape[1], device=tokens_BL.device)
            settings["attention_mask"] = (columns_T >= self.starts_B[:, None]).long()
        read = self.foreign.read(tokens_BL, positions_BL, **settings)
        self.past = read.past_key_values
        return read.last_hidden_state
