"""The layers an adapter covers: `lora.layers` and `garfa.layers` of a config, as layer numbers."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farsight.configs.finetuning import FinetuneConfig
from farsight.errors import ConfigError
from farsight.model.build import trained_layers
from farsight.model.position.layers import select_layers


@dataclass(frozen=True)
class AdaptedLayers:
    """The layers that fine-tuning trains, by method."""

    lora: tuple[int, ...]
    garfa: tuple[int, ...]
    whole: tuple[int, ...]
    """Layers whose own weights are trained (`training.layers`)."""

    @property
    def lowest(self) -> int:
        """The lowest trained layer, where the backward pass ends."""
        return min((*self.lora, *self.garfa, *self.whole))


def adapted(config: FinetuneConfig) -> AdaptedLayers:
    """The layers that a config trains.

    Raises:
        ConfigError: layers that the base model does not have.
    """
    n_layers, chosen = config.architecture.n_layers, {}
    for name, part in (("lora", config.lora), ("garfa", config.garfa)):
        try:
            chosen[name] = adapted_layers(part.layers, n_layers, config.layer_profile) if part.enable else ()
        except ValueError as error:
            raise ConfigError(f"{name}.layers: {error}") from error
    return AdaptedLayers(chosen["lora"], chosen["garfa"], trained_layers(config) or ())


def adapted_layers(selection: str | tuple[int, ...], n_layers: int, profile: str = "") -> tuple[int, ...]:
    """The layers that a selection names, ascending.

    Args:
        selection: indices, or "all", "0,23:32", "sensitive:10", "random:10:123" (see `configs.finetuning.Lora.layers`).
        profile: JSON file with "delta", each layer's sensitivity.

    Raises:
        ValueError: a layer that the model does not have, or a profile that is missing or has another number of layers.
    """
    if not isinstance(selection, str):
        if wrong := [layer for layer in selection if not 0 <= layer < n_layers]:
            from_end = f'; to count from the end, write "{wrong[0]}" as a string' if -n_layers <= wrong[0] < 0 else ""
            raise ValueError(f"layer {wrong[0]} is not one of the model's {n_layers}: 0 to {n_layers - 1}{from_end}")
        if len({*selection}) < len(selection) or not selection:
            raise ValueError(f"layers {list(selection)} must name at least one layer, and none twice")
        return tuple(sorted(selection))
    if selection == "all":
        return tuple(range(n_layers))
    if match := re.fullmatch(r"sensitive:(\d+)", selection):
        return _sensitive(int(match[1]), n_layers, profile)
    if match := re.fullmatch(r"random:(\d+):(\d+)", selection):
        count, seed = int(match[1]), int(match[2])
        sensitive = _sensitive(count, n_layers, profile)
        others = [layer for layer in range(n_layers) if layer not in sensitive]
        if count > len(others):
            raise ValueError(f"{selection!r}: only {len(others)} layers are not in 'sensitive:{count}'")
        # The paper samples from the sorted layers outside the sensitive set.
        return tuple(sorted(random.Random(seed).sample(others, count)))
    return tuple(sorted(select_layers(selection, n_layers)))


def _sensitive(count: int, n_layers: int, profile: str) -> tuple[int, ...]:
    """The most sensitive layers of a profile; the lower layer wins a tie."""
    if not profile:
        raise ValueError(f"'sensitive:{count}' needs the layers' sensitivities: set layer_profile to their JSON file")
    try:
        delta = json.loads(Path(profile).read_text(encoding="utf-8"))["delta"]
        delta = [float(value) for value in delta]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'layer_profile = {profile!r} is not a JSON file with {{"delta": [...]}}: {error!r}') from None
    if len(delta) != n_layers:
        raise ValueError(f"layer_profile = {profile!r} has {len(delta)} layers, the model {n_layers}")
    if not 1 <= count <= n_layers:
        raise ValueError(f"'sensitive:{count}' must ask for 1 to {n_layers} layers")
    return largest(delta, count)


def largest(values: Sequence[float], count: int) -> tuple[int, ...]:
    """The layers of the `count` largest values, ascending; the lower layer wins a tie."""
    return tuple(sorted(sorted(range(len(values)), key=lambda layer: (-values[layer], layer))[:count]))
