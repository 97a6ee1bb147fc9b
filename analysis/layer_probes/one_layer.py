"""Changes a single layer of a model, leaving the rest as it is: its RoPE, or its output by adding noise.

    probe = RopeProbe(layer=3, masked=True)
    mean_loss(Decoder(model, config, probe), tokens_SL)

Shape suffixes: B batch, S sequences, L tokens, D model, N query heads, K key-value heads, H head dim, F = H/2 frequencies.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farsight.configs.schema import NoRotary, Rotating
from farsight.errors import ConfigError
from farsight.evals.perplexity.measure import window_nll
from farsight.inference.decoder import Decoder
from farsight.inference.kv_cache import Batch, LayerCache, RollingLayer, rolling_layers
from farsight.kernels.head_rotation import rotate_heads
from farsight.model.attention import Attention
from farsight.model.build import ModelConfig, set_length
from farsight.model.context import PassThrough
from farsight.model.llama import Llama
from farsight.model.position.rope import RopeFrequencies, rope_frequencies, rope_tables, rotate


@dataclass(frozen=True)
class RopeProbe:
    """Changes how one layer's queries and keys are rotated: an `inference.extend` extension that has no `--extend` name.

    For a changed base, scaled RoPE is recomputed from it, and GARFA's factors multiply the resulting frequencies. ALiBi and
    scopes still use the true positions.
    """

    layer: int
    """A layer with RoPE."""
    base: float = 1.0
    """Factor on theta (GARFA, section 3.2)."""
    group: int = 1
    """k: token m is rotated as if at floor(m / k), so k tokens share a position (LASP, section 4.1)."""
    masked: bool = False
    """Every token is rotated as if at position 0 (LASP, equation 6). YaRN's temperature stays."""

    def change(self, config: ModelConfig) -> ModelConfig:
        return config

    def caches(self, model: Llama, config: ModelConfig, batch: Batch) -> dict[str, LayerCache]:
        name, caches = str(self.layer), rolling_layers(model, batch)
        rotary = model.positions[self.layer].rotary
        assert not isinstance(rotary, NoRotary), f"layer {self.layer} does not rotate"
        frequencies = rope_frequencies(self.rotary(rotary), model.architecture.rotated_dim, model.length)
        return {**caches, name: _ProbedLayer(dict(model.attentions())[name], batch, frequencies, self)}

    def rotary(self, rotary: Rotating) -> Rotating:
        """The layer's RoPE with the base changed and the same scaling."""
        return dataclasses.replace(rotary, theta=rotary.theta * self.base)

    def positions(self, positions_BL: Tensor) -> Tensor:
        """The positions to rotate by."""
        return torch.zeros_like(positions_BL) if self.masked else positions_BL // self.group


class _ProbedLayer(PassThrough):
    """A rolling cache of keys rotated by a probe."""

    rotates = True

    def __init__(self, attention: Attention, batch: Batch, frequencies: RopeFrequencies, probe: RopeProbe) -> None:
        self.cache = RollingLayer(attention, batch, len(attention.scopes) // attention.group)
        super().__init__(self.cache)
        self.group, self.garfa, self.probe = attention.group, attention.garfa, probe
        self.frequencies = frequencies._replace(inv_freq=frequencies.inv_freq.to(batch.device))

    def pass_keys(self, k_BLKH: Tensor) -> Tensor:
        first, L = self.cache.tokens, k_BLKH.shape[1]
        columns_BL = torch.arange(first, first + L, device=k_BLKH.device)[None]
        if self.cache.starts_B is not None:
            columns_BL = (columns_BL - self.cache.starts_B[:, None]).clamp_min(0)
        self.positions_BL = self.probe.positions(columns_BL)
        return self._rotated(k_BLKH, keys=True)

    def pass_queries(self, q_BLNH: Tensor) -> Tensor:
        return self._rotated(q_BLNH, keys=False)

    def _rotated(self, x: Tensor, keys: bool) -> Tensor:
        """Rotates queries or keys as `model.attention.Attention` does, at the probe's positions."""
        if self.garfa is None or not (keys or self.garfa.queries):
            return rotate(x, *rope_tables(self.positions_BL, self.frequencies))
        inv_freq_KF = self.garfa(self.frequencies.inv_freq)
        if not keys:
            inv_freq_KF = inv_freq_KF.repeat_interleave(self.group, dim=0)
        attention_factor = inv_freq_KF.new_full((), self.frequencies.attention_factor)
        return rotate_heads(x, self.positions_BL, inv_freq_KF, attention_factor)


@contextmanager
def noise_after(block: nn.Module, factor: float, seed: int) -> Iterator[None]:
    """Adds Gaussian noise to a layer's output hidden states inside this context (LASP, A.2).

    Its standard deviation is `factor` times the root mean square of the token's own hidden state. The massive activations of
    a first token therefore don't affect the noise of others, and neither does batching.

    Args:
        seed: seeds a generator that successive calls then draw from.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def add(_: nn.Module, __: tuple[Tensor, ...], h_BLD: Tensor) -> Tensor:
        if h_BLD.device not in generators:
            generators[h_BLD.device] = torch.Generator(h_BLD.device).manual_seed(seed)
        noise_BLD = torch.randn(h_BLD.shape, generator=generators[h_BLD.device], device=h_BLD.device)
        rms_BL1 = h_BLD.float().square().mean(-1, keepdim=True).sqrt()
        return h_BLD + (factor * rms_BL1 * noise_BLD).to(h_BLD.dtype)

    handle = block.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def mean_loss(decoder: Decoder, tokens_SL: Tensor) -> float:
    """Mean negative log-likelihood, in nats, of all tokens but the first of each sequence."""
    set_length(decoder.model, decoder.config, tokens_SL.shape[1])
    rows = list(tokens_SL)
    sums, counts = window_nll(decoder.model, rows, firsts=[1] * len(rows), decoder=decoder)
    return float(sums[0] / counts[0])


def probed(decoder: Decoder, probe: RopeProbe) -> Decoder:
    """A decoder for the same model with a probe."""
    return Decoder(decoder.model, decoder.config, probe, decoder.chunk)


def rotating_layers(config: ModelConfig, length: int | None = None) -> list[bool]:
    """Whether each layer has RoPE."""
    return [not isinstance(layer.rotary, NoRotary) for layer in config.layers(length)]


def refuse_own_keys(decoder: Decoder) -> None:
    """Raises ConfigError for an extension that caches and rotates keys itself: a probe would replace it."""
    if decoder.rotates_own_keys:
        raise ConfigError(
            "--extend: this method rotates keys itself, and so does a probe, so they can't be combined; use a method that "
            "changes frequencies (linear, ntk, yarn, …)."
        )
