"""Figures of how a model's layers encode position."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farsight.configs.schema import NoRotary, Rotating
from farsight.configs.typed import to_dict
from farsight.model.build import ModelConfig
from farsight.model.position.garfa import LayerGarfa, alpha, head_scales
from farsight.model.position.layers import LayerPosition
from farsight.model.position.rope import rope_frequencies
from farsight.model.position.scope import cost_ratio


def as_toml(config: ModelConfig) -> str:
    """The sections of a training config that give the same model, and its trained length."""
    import tomli_w  # here, so that figures need none

    return tomli_w.dumps(
        {
            "architecture": to_dict(config.architecture),
            "position": to_dict(config.position),
            "training": {"seq_len": config.trained_length},
        }
    )


def wavelengths(rotary: Rotating, head_dim: int, length: int) -> Tensor:
    """Tokens per full turn of each pair of dimensions, in a sequence of `length` tokens: fp32 [H/2]."""
    return 2 * math.pi / rope_frequencies(rotary, head_dim, length).inv_freq


def head_wavelengths(rotary: Rotating, garfa: LayerGarfa, head_dim: int, length: int) -> Tensor:
    """The same for each key/value head under GARFA: fp32 [K, H/2]."""
    scales = head_scales(torch.tensor(garfa.raw), head_dim, garfa.equation)
    return wavelengths(rotary, head_dim, length) / scales


def share_by_distance(layers: Sequence[LayerPosition], length: int) -> Tensor:
    """Share of all layers' heads that see a key 0, 1, … length − 1 tokens back: fp32 [length]."""
    scopes = torch.tensor(sorted(scope for layer in layers for scope in layer.scopes))
    return 1 - torch.searchsorted(scopes, torch.arange(length), right=True) / len(scopes)


def figures(config: ModelConfig, length: int) -> dict[str, Any]:
    """The numbers that the picture shows."""
    layers, head_dim = config.layers(length), config.architecture.rotated_dim
    return {
        "length": length,
        "trained_length": config.trained_length,
        "embedding": config.position.embedding,
        "pairs_of_dense_over_visible": pair_ratio(layers, length),
        "layers": [
            {
                "rotary": layer.rotary.kind,
                "wavelengths": []
                if isinstance(layer.rotary, NoRotary)
                else wavelengths(layer.rotary, head_dim, length).tolist(),
                "scopes": [min(scope, length) for scope in layer.scopes],
                "alibi_slopes": list(layer.alibi_slopes("the figures of positions") or ()),
                "garfa": None if layer.garfa is None else _garfa_figures(layer, layer.garfa, head_dim, length),
            }
            for layer in layers
        ],
    }


def _garfa_figures(layer: LayerPosition, garfa: LayerGarfa, head_dim: int, length: int) -> dict[str, Any]:
    assert not isinstance(layer.rotary, NoRotary)
    return {
        "alpha": alpha(torch.tensor(garfa.raw)).tolist(),
        "queries": garfa.queries,
        "wavelengths": head_wavelengths(layer.rotary, garfa, head_dim, length).tolist(),
    }


def pair_ratio(layers: Sequence[LayerPosition], length: int) -> float:
    """Query-key pairs of dense causal attention divided by those that the layers compute."""
    return cost_ratio(length, tuple(min(scope, length) for layer in layers for scope in layer.scopes))
