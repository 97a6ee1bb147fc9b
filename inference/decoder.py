"""A model that reads prompts in chunks and then goes on token by token, with a cache.

    decoder = Decoder(model, config)
    rows = decoder.start([len(prompt)], new_tokens=100)
    logits_BV = decoder.logits(rows.read(prompt_BL))[:, -1]

Positions, scopes that grow and RoPE that depends on the length are set once, for the length that the sequence may reach,
before its first token is read: what is kept stays right.

Shape suffixes: B batch, L tokens, D model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farsight.configs.schema import NoRotary
from farsight.inference.extend import Extension
from farsight.inference.finite import check_finite
from farsight.inference.kv_cache import Batch, LayerCache, dense_bytes, rolling_layers
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.model.position.rope import rope_frequencies

CHUNK = 1024
"""Tokens of a prompt that are read at once."""


@dataclass
class Usage:
    """What generating has taken so far."""

    tokens_read: int = 0
    """Of prompts, padding left out."""
    seconds_reading: float = 0.0
    tokens_written: int = 0
    """After the first of each row, which reading the prompt gives."""
    seconds_writing: float = 0.0
    cache_bytes: int = 0
    """Of the largest batch."""
    dense_cache_bytes: int = 0
    """What it would have been if every head kept every token."""


class Decoder:
    """A model with what it needs to read and to go on.

    Args:
        model: in evaluation mode; its weights stay as they are, its positions are set for the rows that are read.
        config: the model's, as `extension.change` left it.
        extension: training-free way to read further than the model was trained, which keeps and turns keys itself.
        chunk: tokens of a prompt that are read at once. It changes memory and speed, and nothing else.
        name: for errors.
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
    def turns_own_keys(self) -> bool:
        """Whether the extension keeps and turns keys itself, and does not just change the model's positions."""
        if self.extension is None:
            return False
        one_token = Batch((0,), 1, 1, torch.device("cpu"), torch.float32)
        return self.extension.caches(self.model, self.config, one_token) is not None

    def start(self, lengths: Sequence[int], new_tokens: int = 0) -> "Rows":
        """Makes the caches for rows of these lengths, which may each grow by `new_tokens`."""
        return Rows(self, lengths, new_tokens)

    def alike(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """The rows in groups whose positions are the same, so that reading them together changes none.

        Args:
            rows: their numbers.
            lengths: that each of them may reach.
        """
        groups: dict[tuple, list[int]] = {}
        for row, length in zip(rows, lengths, strict=True):
            layers = self.config.layers(length)
            rotaries = {layer.rotary for layer in layers if not isinstance(layer.rotary, NoRotary)}
            head_dim = self.config.architecture.head_dim
            turns = [tuple(rope_frequencies(rotary, head_dim, length).inv_freq.tolist()) for rotary in rotaries]
            groups.setdefault((layers, frozenset(turns)), []).append(row)
        return list(groups.values())

    @torch.no_grad()
    def logits(self, h_BLD: Tensor) -> Tensor:
        """fp32 [B, L, V] of what `Rows.read` returned.

        Raises:
            ConfigError: logits that are not finite, as a damaged model gives them.
        """
        logits_BLV = self.model.head(h_BLD).float()
        check_finite(logits_BLV, self.model, self.name)
        return logits_BLV

    @torch.no_grad()
    def hidden_states(self, tokens_L: Tensor, progress: Callable[[int], object] | None = None) -> Tensor:
        """[L, D] of one sequence, every token read as a prompt's."""
        rows = self.start([len(tokens_L)])
        parts = []
        for h_BLD in rows.chunks(tokens_L[None]):
            parts.append(h_BLD[0])
            if progress is not None:
                progress(h_BLD.shape[1])
        return torch.cat(parts)


class Rows:
    """Sequences that are read together, padded on the left to the same length, and their caches.

    Attributes:
        batch: what the caches were made for.
        tokens: columns read so far.
    """

    def __init__(self, decoder: Decoder, lengths: Sequence[int], new_tokens: int) -> None:
        self.decoder, longest = decoder, max(lengths)
        model, self.length = decoder.model, longest + new_tokens
        self.layers = decoder.config.layers(self.length)
        self._place()
        weight = next(model.parameters())
        # Products run in the dtype of the norms, which 4-bit weights leave alone.
        dtype = model.norm.weight.dtype if model.norm is not None else weight.dtype
        starts = tuple(longest - length for length in lengths)
        self.batch = Batch(starts, longest, self.length, weight.device, dtype)
        self.starts_B = self.batch.starts_B
        caches = None if decoder.extension is None else decoder.extension.caches(model, decoder.config, self.batch)
        self.caches: dict[str, LayerCache] = rolling_layers(model, self.batch) if caches is None else caches
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and whatever else is kept for these rows."""
        return sum(cache.nbytes for cache in self.caches.values())

    @property
    def dense_nbytes(self) -> int:
        """Bytes of keys and values if every head kept every token."""
        return dense_bytes(self.decoder.model, self.batch)

    def _place(self) -> None:
        """Sets the model's positions for these rows, should others have been read in between."""
        if self.decoder.model.positions is not self.layers:
            self.decoder.model.set_position(self.layers, self.length)

    @torch.no_grad()
    def read(self, tokens_BL: Tensor) -> Tensor:
        """Hidden states of the next tokens, [B, L, D]: one token a row, or a chunk of a prompt.

        Where rows are padded, padding holds any token.
        """
        self._place()
        L = tokens_BL.shape[1]
        if self.tokens + L > self.length:
            raise ValueError(
                f"{self.tokens} tokens were read and {L} are to be: these rows were started for {self.length}; give `start` "
                "more new_tokens"
            )
        positions = torch.arange(self.tokens, self.tokens + L, device=tokens_BL.device)[None]
        if self.starts_B is not None:
            positions = (positions - self.starts_B[:, None]).clamp_min(0)
        attentions = dict(self.decoder.model.attentions())
        try:
            for name, attention in attentions.items():
                attention.context = self.caches[name]
            h_BLD = self.decoder.model.hidden_states(tokens_BL, positions)
        finally:
            for attention in attentions.values():
                attention.context = None
        self.tokens += L
        return h_BLD

    def chunks(self, tokens_BL: Tensor) -> Iterator[Tensor]:
        """Hidden states of a prompt, chunk by chunk."""
        for tokens in tokens_BL.split(self.decoder.chunk, dim=1):
            yield self.read(tokens)
