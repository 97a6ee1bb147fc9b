"""Translates between our parameter names and Hugging Face's.

RoPE rotates half-split pairs, as in Hugging Face's models, so weights only need renaming.
"""

_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.wq.bias": "self_attn.q_proj.bias",
    "attention.wk.bias": "self_attn.k_proj.bias",
    "attention.wv.bias": "self_attn.v_proj.bias",
    "attention.wo.bias": "self_attn.o_proj.bias",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention_post_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w1.bias": "mlp.gate_proj.bias",
    "feed_forward.w2.bias": "mlp.down_proj.bias",
    "feed_forward.w3.bias": "mlp.up_proj.bias",
    "ffn_post_norm.weight": "post_mlp_layernorm.weight",
}
_MODEL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items()}
_MODEL_BACK = {theirs: ours for ours, theirs in _MODEL.items()}


def to_hf_name(name: str) -> str:
    """`layers.3.attention.wq.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("layers."):
        return _MODEL[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_LAYER[rest]}"


def readable_name(name: str) -> str:
    """`to_hf_name` for messages; names without a counterpart, such as an adapter's, are returned unchanged."""
    try:
        return to_hf_name(name)
    except KeyError:
        return name


def to_peft_name(name: str) -> str:
    """An adapter's tensor by PEFT's name in a file: `layers.3.attention.wq.lora_A.default.weight` →
    `base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight`."""
    linear, _, rest = name.partition(".lora_")
    module = to_hf_name(linear + ".weight").removesuffix(".weight")
    part = rest.split(".")[0]
    return f"base_model.model.{module}.lora_{part}" + (".weight" if part in ("A", "B") else "")


def from_hf_name(name: str) -> str | None:
    """The reverse of `to_hf_name`; None for a tensor that our Llama does not have."""
    if not name.startswith("model.layers."):
        return _MODEL_BACK.get(name)
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    ours = _LAYER_BACK.get(rest)
    return None if ours is None else f"layers.{layer}.{ours}"
