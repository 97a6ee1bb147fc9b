"""Attention of model families that do not go through transformers' attention interface, written so that it does.

Each adapter replaces the `forward` of a family's attention modules: the module's own projections, then `attention.route`.
What goes through it after that is as for every other model: queries and keys of each head, and ALiBi's slopes.

Shapes: B batch, L tokens of the call, T keys so far, N query heads, K key/value heads, H head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from farsight.inference.foreign.attention import route

_attend = partial(route, sdpa_attention_forward)


def _biased(
    module: Any, q_BNLH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, mask: Tensor, scaling: float
) -> tuple[Tensor, None]:
    """Attention with a mask in fp32: in 16 bits, ALiBi's distances past 256 would be rounded."""
    scores_BNLT = (q_BNLH @ k_BNTH.transpose(-1, -2)).float() * scaling + mask
    return (scores_BNLT.softmax(-1).to(v_BNTH.dtype) @ v_BNTH).transpose(1, 2), None


_attend_biased = partial(route, _biased)


def _mpt(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """MPT: ALiBi. transformers builds the bias for max_seq_len tokens and fails after them; the slopes have no such limit."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=-1))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, module.layer_idx)
    slopes_N = (position_bias[:, 0, -1] - position_bias[:, 0, -2]).float()
    # Distances from the last key: a row's constant does not change its softmax.
    bias_NT = slopes_N[:, None] * torch.arange(1 - k.shape[2], 1, device=k.device)
    mask = bias_NT[None, :, None]
    if attention_mask is not None:
        mask = mask.masked_fill(attention_mask, torch.finfo(mask.dtype).min)
    o, _weights = _attend_biased(module, q, k, v, mask, slopes_N, scaling=module.softmax_scale)
    return module.out_proj(o.flatten(2)), None


def _bloom(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """BLOOM: ALiBi."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, module.layer_idx)
    bias = alibi.view(len(q), module.num_heads, 1, -1)
    slopes_N = bias[0, :, 0, 1] - bias[0, :, 0, 0] if bias.shape[-1] > 1 else None
    mask = bias.float() if attention_mask is None else bias.float() + attention_mask
    o, _weights = _attend_biased(module, q, k, v, mask, slopes_N, scaling=module.inv_norm_factor)
    return module.dense(o.flatten(2)) + residual, None


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Falcon: RoPE, or ALiBi, which the model has added to its mask. `_split_heads` repeats grouped keys; the first of each is kept."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    q, k, v = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
    repeats = k.shape[1] // module.num_kv_heads
    k, v = k[:, ::repeats], v[:, ::repeats]
    slopes_N = None
    if alibi is None:
        assert position_embeddings is not None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    elif alibi.shape[-1] > 1:
        slopes_N = (alibi[0, :, 0, 1] - alibi[0, :, 0, 0]) * module.inv_norm_factor
    if layer_past is not None:
        k, v = layer_past.update(k, v, module.layer_idx)
    module.num_key_value_groups = module.num_heads // module.num_kv_heads
    o, _weights = _attend(module, q, k, v, attention_mask, slopes_N, scaling=module.inv_norm_factor)
    return module.dense(o.flatten(2)), None


ADAPTERS: dict[str, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "mpt": ("MptAttention", _mpt),
    "bloom": ("BloomAttention", _bloom),
    "falcon": ("FalconAttention", _falcon),
}
"""By model type: the class of the attention modules, and their new `forward`."""


def adapt(model: PreTrainedModel) -> None:
    """Replaces the attention of a model of one of these families."""
    name, forward = ADAPTERS[model.config.model_type]
    for module in model.modules():
        if type(module).__name__ == name:
            # On several devices accelerate has wrapped `forward` and calls the original by this name.
            place = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
            setattr(module, place, partial(forward, module))
