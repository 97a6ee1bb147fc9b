"""A causal model of transformers, seen as `inference.decoder` and the analyses see our own models.

What its layers are is measured, not looked up: two short sequences are read, and each attention layer says what it got.

Shapes: B batch, L tokens, D model, V vocabulary, H head dim.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from farsight.configs.schema import Architecture, NoRotary, Position, Rope
from farsight.errors import ConfigError
from farsight.inference.foreign.adapters import ADAPTERS, adapt
from farsight.inference.foreign.attention import ForeignLayer, route_interface, routed_layers
from farsight.model.build import ModelConfig
from farsight.model.position.bias import LayerBias
from farsight.model.position.layers import LayerPosition
from farsight.model.position.scope import DENSE_SCOPE

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names of the trained length in a config."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies change with the sequence."""
TOLERANCE = 0.05
"""Relative difference that rounding to 16 bits stays below, and another computation does not."""
_PROBE, _SHIFT = 4, 7
"""Tokens of the short sequences, and how much later the positions of another are."""


@dataclass(frozen=True)
class ForeignConfig(ModelConfig):
    """A foreign model's shapes and its layers as they were found."""

    found: tuple[LayerPosition, ...] = ()
    rope_type: str = "default"

    def layers(self, length: int | None = None) -> tuple[LayerPosition, ...]:
        return self.found


class ForeignModel:
    """A model of transformers with the interface of `model.llama.Llama` that reading needs.

    Raises:
        ConfigError: a model that does not attend as known here; names its type and the reason.
    """

    norm = None

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model = model
        bodies = (model.get_decoder(), model.base_model, getattr(model, "model", None))
        self.body: Any = next((body for body in bodies if body is not None and body is not model), None)
        """The model without its head."""
        if self.body is None:
            raise ConfigError(f"{name} has model_type {model.config.model_type!r}, which has no part without its head.")
        tokens_1L = torch.arange(_PROBE, device=self.device)[None]
        with torch.no_grad():
            expected = model(tokens_1L, use_cache=False).logits
        if model.config.model_type in ADAPTERS:
            adapt(model)
        elif model._can_set_attn_implementation():
            route_interface(model)
        else:
            raise ConfigError(unknown_attention(name, model.config.model_type))
        self._takes_positions = "position_ids" in inspect.signature(self.body.forward).parameters
        self._layers = self._find_layers(name)
        blocks = [re.match(r".*?\.\d+(?=\.)", module) for module in self._modules]
        self.layers = {str(n): model.get_submodule(b.group()) for n, b in enumerate(blocks) if b is not None}
        """The blocks, by number."""
        self.rotaries: list[Any] = [m for m in self.body.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
        self.config = self._describe(name)
        self.architecture, self.positions = self.config.architecture, self.config.found
        self.name = name
        self.longest = self._find_longest()
        """Tokens that its table of position embeddings has a row for; None without such a table."""
        self.length = self.config.trained_length
        with torch.no_grad():
            found = self.head(self.hidden_states(tokens_1L))
        # Logits that are not finite are refused where they are used, with the name of a damaged tensor.
        if expected.isfinite().all() and not relative_difference(expected, found) < TOLERANCE:
            raise ConfigError(
                f"{name} has model_type {model.config.model_type!r}, and read layer by layer it gives other logits than by "
                "itself: how it attends, or what its head does, is not known here."
            )

    # ── What its layers are ───────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _find_layers(self, name: str) -> list[ForeignLayer]:
        tokens_1L = torch.arange(_PROBE, device=self.device)[None]
        self.read(tokens_1L, tokens_1L)  # the positions are the same numbers
        found = routed_layers(self.model)
        layers = list(found.values())
        number = getattr(self.model.config.get_text_config(decoder=True), "num_hidden_layers", len(layers))
        shapes = {(layer.n_heads, layer.n_kv_heads, layer.head_dim) for layer in layers}
        why = None
        if not layers or len(layers) != number or any(layer.calls != 1 for layer in layers):
            why = f"{len(layers)} of its {number} layers attend once to all earlier tokens"
        elif len(shapes) > 1:
            why = "its layers have different numbers of heads"
        if why is not None:
            raise ConfigError(
                f"{name} has model_type {self.model.config.model_type!r}, and {why}: it can't be read here."
            )
        self._modules = list(found)
        for layer in layers:
            layer.scopes = (min(layer.window or DENSE_SCOPE, DENSE_SCOPE),) * layer.n_heads
        return layers

    @torch.no_grad()
    def _find_longest(self) -> int | None:
        tokens_1L = torch.arange(_PROBE, device=self.device)[None]
        with _Lookups() as lookups:
            self.read(torch.zeros_like(tokens_1L), tokens_1L)
        # With all tokens equal, only positions count upwards.
        tables = [
            len(weight) - int(ids[0, 0])
            for weight, ids in lookups.seen
            if ids.dim() == 2 and ids.shape[1] == _PROBE and bool((ids[0].diff() == 1).all())
        ]
        return min(tables, default=None)

    def check_length(self, length: int) -> None:
        """Checks that the model has a position for each of `length` tokens.

        Raises:
            ConfigError: its table of position embeddings is shorter.
        """
        if self.longest is not None and length > self.longest:
            raise ConfigError(
                f"{self.name} can't read {length:,} tokens: it learned an embedding for each of {self.longest:,} positions and has "
                f"none for later ones; read and write at most {self.longest:,} tokens."
            )

    @torch.no_grad()
    def _rotating(self, shift: int) -> list[bool]:
        """For each layer, whether it rotates keys: `shift` positions later they differ, and the layer's input does not."""
        inputs: list[Tensor] = []
        keys: list[Tensor] = []

        def keep(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs.append(args[0] if args else named["hidden_states"])

        hooks = [layer.module.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._layers]
        try:
            for layer in self._layers:
                layer.context = _KeepKeys(layer, keys)
            for later in (0, shift):
                tokens_1L = torch.arange(_PROBE, device=self.device)[None]
                self.read(tokens_1L, tokens_1L + later)
        finally:
            for hook in hooks:
                hook.remove()
            for layer in self._layers:
                layer.context = None
        many = len(self._layers)  # of the first reading, then as many of the second
        return [
            relative_difference(keys[n], keys[n + many]) > TOLERANCE > relative_difference(inputs[n], inputs[n + many])
            for n in range(many)
        ]

    def _describe(self, name: str) -> ForeignConfig:
        values, first = self.model.config.get_text_config(decoder=True), self._layers[0]
        length = next((int(n) for key in LENGTHS if (n := getattr(values, key, None))), None)
        if length is None:
            raise ConfigError(
                f"{name}: its config.json has none of {', '.join(LENGTHS)}, which say how long its training sequences were; "
                "add max_position_embeddings."
            )
        rotating = [False] * len(self._layers)
        if self._takes_positions and length > _PROBE:
            rotating = self._rotating(min(_SHIFT, length - _PROBE))
        rope = getattr(values, "rope_parameters", None) or {}
        found = []
        for layer, rotates in zip(self._layers, rotating, strict=True):
            bias = None
            if layer.slopes_N is not None:
                # That of scores q·k / √H, whatever the model's own scale.
                own = layer.slopes_N / (layer.scaling * layer.head_dim**0.5)
                bias = LayerBias("alibi", (tuple(own.tolist()),))
            found.append(LayerPosition(Rope() if rotates else NoRotary(), layer.scopes, bias))
        architecture = Architecture(
            vocab_size=values.vocab_size,
            dim=values.hidden_size,
            n_layers=len(self._layers),
            n_heads=first.n_heads,
            n_kv_heads=first.n_kv_heads,
            head_dim=first.head_dim,
        )
        return ForeignConfig(
            architecture,
            Position(rotary=Rope() if any(rotating) else NoRotary()),
            length,
            found=tuple(found),
            rope_type=rope.get("rope_type", "default"),
        )

    # ── Reading ───────────────────────────────────────────────────────────────────────────────────────

    def read(self, tokens_BL: Tensor, positions_BL: Tensor, **settings: Any) -> Any:
        """The output of the model without its head.

        Args:
            settings: of its `forward`: cache and mask.
        """
        if self._takes_positions:
            settings["position_ids"] = positions_BL.expand(len(tokens_BL), -1)
        settings.setdefault("use_cache", False)
        return self.body(input_ids=tokens_BL, **settings)

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """The input of the head, [B, L, D], for whole sequences."""
        if positions is None:
            self.check_length(tokens.shape[1])
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.read(tokens, positions).last_hidden_state

    def head(self, h_BLD: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [B, L, V], or with `labels` [B, L] the sum of their losses.

        The model computes them itself, with scales and caps that it may have, from these hidden states.
        """
        body, output = self.body, _Output(last_hidden_state=h_BLD)
        before = vars(body).get("forward")
        body.forward = lambda *_args, **_settings: output
        try:
            logits_BLV = self.model(inputs_embeds=h_BLD, use_cache=False).logits
        finally:
            if before is None:
                del body.forward
            else:
                body.forward = before
        if labels is None:
            return logits_BLV
        return F.cross_entropy(
            logits_BLV.float().flatten(0, 1), labels.flatten().to(logits_BLV.device), reduction="sum"
        )

    @contextmanager
    def unrotated(self) -> Iterator[None]:
        """Queries and keys reach the attention without rotation inside this context: all angles are 0."""

        def zero(_: nn.Module, _inputs: Any, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return torch.ones_like(tables[0]), torch.zeros_like(tables[1])

        hooks = [rotary.register_forward_hook(zero) for rotary in self.rotaries]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # ── As in our own models ──────────────────────────────────────────────────────────────────────────

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def rotary_of_layer(self) -> dict[str, int | None]:
        return {str(n): None if isinstance(p.rotary, NoRotary) else 0 for n, p in enumerate(self.positions)}

    @property
    def rope_frequencies(self) -> list[Tensor]:
        return [rotary.inv_freq.float() for rotary in self.rotaries]

    @property
    def attention_factors(self) -> list[float]:
        return [float(getattr(rotary, "attention_scaling", 1.0)) for rotary in self.rotaries]

    def attentions(self) -> Iterator[tuple[str, ForeignLayer]]:
        return ((str(number), layer) for number, layer in enumerate(self._layers))

    def set_position(self, layers: Sequence[LayerPosition], length: int) -> None:
        """Positions are the model's own; only the length that is set is kept. Raises ConfigError as `check_length` does."""
        self.check_length(length)
        self.length = length

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()


class _Output(BaseModelOutputWithPast):
    """The output of a model without its head, with None for the fields that only some families have."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Lookups(TorchFunctionMode):
    """Keeps the tables that are looked up inside this context, with the rows that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.embedding:
            ids, weight = (*args, *(kwargs[name] for name in ("input", "weight")[len(args) :]))[:2]
            self.seen.append((weight, ids))
        return function(*args, **kwargs)


class _KeepKeys:
    """A context that keeps a layer's keys and leaves the attention to the model."""

    rotates = False

    def __init__(self, layer: ForeignLayer, keys: list[Tensor]) -> None:
        self.layer, self.keys = layer, keys

    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Sequence[int]) -> "_KeepKeys":
        self.keys.append(k_BLKH)
        return self

    def attend(self, q_BLNH: Tensor, visibility: Any, backend: str) -> Tensor:
        return self.layer.their_attention(q_BLNH)


def unknown_attention(name: str, model_type: str) -> str:
    """The refusal of a model whose attention can't be reached."""
    return (
        f"{name} has model_type {model_type!r}, which does not go through transformers' attention interface and has no adapter; "
        f"those with one are {', '.join(sorted(ADAPTERS))}."
    )


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Norm of the difference over the expected norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
