"""Translates between our parameter names and Hugging Face's.

RoPE rotates half-split pairs, as in Hugging Face's models, so weights only need renaming.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

PRE = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
"""The modules of a layer with norms before attention and feed-forward: ours → theirs."""
_AFTER = {"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}
POST = {**{ours: theirs for ours, theirs in PRE.items() if ours not in ("attention_norm", "ffn_norm")}, **_AFTER}
"""Likewise with norms after them."""
SANDWICH = {**PRE, "ffn_norm": "pre_feedforward_layernorm", **_AFTER}
"""Likewise with norms on both sides."""
BY_PLACEMENT = {"pre": PRE, "post": POST, "sandwich": SANDWICH}
_MODEL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODEL_BACK = {theirs: ours for ours, theirs in _MODEL.items()}
_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "vision_model.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


@dataclass(frozen=True)
class TensorNames:
    """The names of a model's tensors in its files."""

    modules: Mapping[str, str] = field(default_factory=lambda: PRE)
    """Modules of a layer, ours → theirs; several of ours with the same of theirs are its rows, in this order."""
    vision: bool = False
    """True for the language model of a directory that holds a vision model too."""

    @cached_property
    def _back(self) -> dict[str, list[str]]:
        back: dict[str, list[str]] = {}
        for ours, theirs in self.modules.items():
            back.setdefault(theirs, []).append(ours)
        return back

    def of(self, name: str) -> str:
        """`layers.3.attention.wq.weight` → `model.layers.3.self_attn.q_proj.weight`."""
        if not name.startswith("layers."):
            return _MODEL[name]
        _, layer, rest = name.split(".", 2)
        module, _, kind = rest.rpartition(".")
        return f"model.layers.{layer}.{self.modules[module]}.{kind}"

    def parts(self, name: str) -> tuple[str, ...]:
        """Our parameters that a tensor of theirs holds, one after the other by rows; empty for a tensor that we do not have."""
        if self.vision:  # the hub's form, then that of transformers 5
            name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
        if not name.startswith("model.layers."):
            return (_MODEL_BACK[name],) if name in _MODEL_BACK else ()
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        if kind not in ("weight", "bias"):
            return ()
        return tuple(f"layers.{layer}.{ours}.{kind}" for ours in self._back.get(module, ()))

    def ignores(self, name: str) -> bool:
        """True for a tensor of the vision model, which is left out."""
        return self.vision and name.startswith(_VISION)


def readable_name(name: str, norm_placement: str = "pre") -> str:
    """A parameter's name in Hugging Face's files, for messages; names without one, such as an adapter's, stay as they are."""
    try:
        return TensorNames(BY_PLACEMENT[norm_placement]).of(name)
    except (KeyError, ValueError):
        return name
