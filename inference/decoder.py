"""Reads prompts in chunks, then decodes token by token, with a cache.

    decoder = Decoder(model, config)
    rows = decoder.start([len(prompt)], new_tokens=100)
    logits_BV = decoder.logits(rows.read(prompt_BL))[:, -1]

Anything that depends on the sequence length (growing scopes, length-dependent RoPE) is set before the first token is read, for
the length that the sequence may reach, so cached keys stay valid.

Shape suffixes: B batch, L tokens, D model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farsight.configs.schema import NoRotary
from farsight.inference.extend import Extension
from farsight.inference.finite import check_finite
from farsight.inference.kv_cache import Batch, LayerCache, RollingLayer, dense_bytes, rolling_layers
from farsight.inference.model_options import CHUNK
from farsight.model.adapt.quantized import is_quantized
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.model.position.rope import rope_frequencies

GRAPH_DEVICES = ("cuda",)
"""Devices whose kernels a graph can replay."""


@dataclass
class Usage:
    """Tokens, time and cache memory that generation has used so far."""

    tokens_read: int = 0
    """In prompts, without padding."""
    seconds_reading: float = 0.0
    tokens_written: int = 0
    """Without the first of each row, which comes from reading the prompt."""
    seconds_writing: float = 0.0
    cache_bytes: int = 0
    """Cache of the largest batch."""
    dense_cache_bytes: int = 0
    """The same if every head kept every token."""


class Decoder:
    """A model that can read and continue sequences.

    Args:
        model: in evaluation mode; its weights are left alone, its positions are set for the rows that are read.
        config: the model's, as returned by `extension.change`.
        extension: training-free context extension, which may keep and rotate keys itself.
        chunk: tokens of a prompt read at once; affects only memory and speed.
        name: used in error messages.
    """

    def __init__(
        self,
        model: Llama,
        config: ModelConfig,
        extension: Extension | None = None,
        chunk: int = CHUNK,
        name: str = "the model",
    ) -> None:
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}: set the tokens of a prompt to read at once, 1 or more")
        self.model, self.config, self.extension, self.chunk, self.name = model, config, extension, chunk, name
        self.usage = Usage()

    @property
    def module(self) -> nn.Module:
        """The module that holds the weights."""
        return self.model

    @property
    def rotates_own_keys(self) -> bool:
        """Whether the extension keeps and rotates keys itself, rather than only changing the model's positions."""
        if self.extension is None:
            return False
        one_token = Batch((0,), 1, 1, torch.device("cpu"), torch.float32)
        return self.extension.caches(self.model, self.config, one_token) is not None

    def start(self, lengths: Sequence[int], new_tokens: int = 0) -> "Rows":
        """Allocates caches for rows of these lengths, each of which may grow by `new_tokens`."""
        return Rows(self, lengths, new_tokens)

    def group_by_positions(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Groups rows that get the same positions, so that reading a group together changes no row's result.

        Args:
            rows: the rows' numbers.
            lengths: the length that each row may reach.
        """
        groups: dict[tuple, list[int]] = {}
        for row, length in zip(rows, lengths, strict=True):
            layers = self.config.layers(length)
            rotaries = {layer.rotary for layer in layers if not isinstance(layer.rotary, NoRotary)}
            rotated_dim = self.config.architecture.rotated_dim
            turns = [tuple(rope_frequencies(rotary, rotated_dim, length).inv_freq.tolist()) for rotary in rotaries]
            groups.setdefault((layers, frozenset(turns)), []).append(row)
        return list(groups.values())

    @torch.no_grad()
    def logits(self, h_BLD: Tensor) -> Tensor:
        """Logits of the hidden states that `Rows.read` returned, fp32 [B, L, V].

        Raises:
            ConfigError: logits that are not finite, as from a damaged model.
        """
        logits_BLV = self.model.head(h_BLD).float()
        check_finite(logits_BLV, self.model, self.name)
        return logits_BLV

    @torch.no_grad()
    def hidden_states(self, tokens_L: Tensor, progress: Callable[[int], object] | None = None) -> Tensor:
        """Hidden states of one sequence read as a prompt, [L, D]."""
        rows = self.start([len(tokens_L)])
        parts = []
        for h_BLD in rows.chunks(tokens_L[None]):
            parts.append(h_BLD[0])
            if progress is not None:
                progress(h_BLD.shape[1])
        return torch.cat(parts)


class Rows:
    """Sequences read together, left-padded to one length, with their caches.

    Attributes:
        batch: shape and dtype that the caches were allocated for.
        tokens: columns read so far.
        columns_11: the same on the device, int64 [1, 1], so that reading a token depends on tensors alone.
    """

    def __init__(self, decoder: Decoder, lengths: Sequence[int], new_tokens: int) -> None:
        self.decoder, longest = decoder, max(lengths)
        model, self.length = decoder.model, longest + new_tokens
        self.layers = decoder.config.layers(self.length)
        self.place()
        weight = next(model.parameters())
        # With 4-bit weights, products run in the dtype of the norms, which are not quantized.
        dtype = model.norm.weight.dtype if model.norm is not None else weight.dtype
        starts = tuple(longest - length for length in lengths)
        self.batch = Batch(starts, longest, self.length, weight.device, dtype)
        self.starts_B = self.batch.starts_B
        caches = None if decoder.extension is None else decoder.extension.caches(model, decoder.config, self.batch)
        self.caches: dict[str, LayerCache] = self.own_caches() if caches is None else caches
        self.tokens, self.columns_11 = 0, torch.zeros(1, 1, dtype=torch.int64, device=weight.device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and anything else kept for these rows."""
        return sum(cache.nbytes for cache in self.caches.values())

    @property
    def dense_nbytes(self) -> int:
        """Bytes of keys and values if every head kept every token."""
        return dense_bytes(self.decoder.model, self.batch)

    @property
    def capturable(self) -> bool:
        """True if reading a token can be captured in a CUDA graph: every layer has a rolling cache that decodes with tensors
        alone, and the weights are neither quantised, which may read values on the host, nor divided over processes."""
        model, device = self.decoder.model, self.batch.device
        return (
            device.type in GRAPH_DEVICES
            and all(isinstance(cache, RollingLayer) and cache.capturable for cache in self.caches.values())
            and not any(is_quantized(module) for module in model.modules())
            and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        )

    def own_caches(self) -> dict[str, LayerCache]:
        """The layers' caches without an extension that keeps its own, by number."""
        return rolling_layers(self.decoder.model, self.batch)

    def hidden_states(self, tokens_BL: Tensor, positions_BL: Tensor) -> Tensor:
        """Hidden states of the next tokens at these positions [B or 1, L], with every layer's cache in place."""
        return self.decoder.model.hidden_states(tokens_BL, positions_BL)

    def place(self) -> None:
        """Sets the model's positions for these rows again, in case others were read in between."""
        if self.decoder.model.positions is not self.layers:
            self.decoder.model.set_position(self.layers, self.length)

    @torch.no_grad()
    def read(self, tokens_BL: Tensor) -> Tensor:
        """Hidden states of the next tokens, [B, L, D]: one token a row, or a chunk of a prompt. Padding may hold any token."""
        self.place()
        L = tokens_BL.shape[1]
        self._check_room(L)
        positions = self.columns_11
        if L > 1:
            positions = positions + torch.arange(L, device=positions.device)
        if self.starts_B is not None:
            positions = (positions - self.starts_B[:, None]).clamp_min(0)
        attentions = dict(self.decoder.model.attentions())
        try:
            for name, attention in attentions.items():
                attention.context = self.caches[name]
            h_BLD = self.hidden_states(tokens_BL, positions)
        finally:
            for attention in attentions.values():
                attention.context = None
        self.tokens += L
        self.columns_11 += L
        return h_BLD

    def count_replayed(self) -> None:
        """Counts a token on the host that a CUDA graph is to read, which counts on the device alone."""
        self._check_room(1)
        self.tokens += 1
        for cache in self.caches.values():
            assert isinstance(cache, RollingLayer)
            cache.tokens += 1

    def _check_room(self, more: int) -> None:
        if self.tokens + more > self.length:
            raise ValueError(
                f"{self.tokens} tokens were read and {more} are to be: these rows were started for {self.length}; give `start` "
                "more new_tokens"
            )

    def chunks(self, tokens_BL: Tensor) -> Iterator[Tensor]:
        """Hidden states of a prompt, chunk by chunk."""
        for tokens in tokens_BL.split(self.decoder.chunk, dim=1):
            yield self.read(tokens)
