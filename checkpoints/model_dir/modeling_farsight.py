"""A decoder for `transformers` whose layers and heads may each have their own position mechanism.

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

Needs only `torch` and `transformers` >= 5. `config.json` gives each layer's position mechanism as numbers: how many tokens a
head sees (its scope), its ALiBi slope, and the RoPE frequencies of the layer's queries and keys, if any.

Attention processes the queries in blocks, and for each group of heads of equal scope only the keys within reach, so time and
memory are proportional to what the heads see. Rows may be padded on either side, as given by `attention_mask`.

Shapes: B batch, L queries, T keys, D model, N query heads, K key/value heads, H head dimension.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn

try:
    from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
except ImportError as error:
    raise ImportError(
        f"This model needs transformers 5 or later, and {transformers.__version__} is installed: "
        'pip install -U "transformers>=5"'
    ) from error
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

QUERY_BLOCK = 512
"""Queries per call of the attention kernel if heads have scopes or slopes."""


class FarsightConfig(PreTrainedConfig):
    """Shapes and each layer's position mechanism.

    Args:
        layer_kinds: index into `kinds` for each layer.
        kinds: `rotary` (index into `rotaries`, or None), `scopes` (tokens that each of the N heads sees, itself included;
            None sees all), `scope_ranks` (None, or h for each head: past `trained_length` its scope is the length to
            the power of h / N, rounded up), `alibi_slopes` (one for each head, or None) and, if each head's keys have
            their own frequencies, `garfa` (see `head_frequencies`).
        rotaries: `inv_freq` (radians per token, H/2 of them) and `attention_factor`; or, if they depend on the
            length, `dynamic` (theta, factor, original_length) or `longrope` (short and long `inv_freq`,
            original_length).
        sinusoidal: add sinusoidal embeddings to those of the tokens.
        qk_norm: apply RMSNorm to each head's queries and keys.
        trained_length: sequence length in the last stage of training.
    """

    model_type = "farsight"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  as transformers declares it

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        initializer_range=0.02,
        use_cache=True,
        qk_norm=False,
        sinusoidal=False,
        trained_length=2048,
        layer_kinds=(0,),
        kinds=({"rotary": None, "scopes": None, "scope_ranks": None, "alibi_slopes": None},),
        rotaries=(),
        tie_word_embeddings=False,
        **more,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.qk_norm = qk_norm
        self.sinusoidal = sinusoidal
        self.trained_length = trained_length
        self.layer_kinds = list(layer_kinds)
        self.kinds = list(kinds)
        self.rotaries = list(rotaries)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)


def rope_frequencies(rotary, head_dim, length, device):
    """Radians per token of each pair of dimensions, fp32 [H/2]."""
    if "dynamic" in rotary:  # NTK-aware scaling whose factor grows with the sequence
        settings = rotary["dynamic"]
        original, factor = settings["original_length"], settings["factor"]
        growth = factor * max(length, original) / original - (factor - 1)
        theta = settings["theta"] * growth ** (head_dim / (head_dim - 2))
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return (1.0 / theta**exponents).to(device)
    if "longrope" in rotary:
        settings = rotary["longrope"]
        values = settings["long_inv_freq" if length > settings["original_length"] else "short_inv_freq"]
    else:
        values = rotary["inv_freq"]
    return torch.tensor(values, dtype=torch.float32, device=device)


def head_frequencies(inv_freq, garfa):
    """GARFA: each key/value head k multiplies the base by alpha = 0.1 + 9.9·sigmoid(raw[k]), or its square root.

    `garfa` has `raw`, `exponent` (1/2 for the square root, else 1) and `queries` (apply a group's factor to its queries, not
    only to the keys). Returns fp32 [K, 1, H/2]; factors are computed in fp64, so that an alpha of 1 changes nothing.
    """
    alpha = 0.1 + 9.9 * torch.tensor(garfa["raw"], dtype=torch.float32, device="cpu").double().sigmoid()
    pairs = torch.arange(0, 2 * len(inv_freq), 2, dtype=torch.float64, device="cpu") / (2 * len(inv_freq))
    scales = alpha[:, None, None] ** (-pairs * garfa["exponent"])
    return inv_freq * scales.float().to(inv_freq.device)


def rope_tables(inv_freq, attention_factor, positions_BL):
    """cos and sin of the angles at each position, for both halves of a head: fp32 [B, 1 or heads, L, H]."""
    angles = positions_BL[:, None, :, None].float() * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class Turn(NamedTuple):
    """Rotates the queries and keys of layers with the same RoPE."""

    cos: torch.Tensor
    sin: torch.Tensor
    inv_freq: torch.Tensor
    attention_factor: float
    positions_BL: torch.Tensor

    @classmethod
    def of(cls, rotary, head_dim, length, positions_BL):
        inv_freq = rope_frequencies(rotary, head_dim, length, positions_BL.device)
        factor = rotary["attention_factor"]
        return cls(*rope_tables(inv_freq, factor, positions_BL), inv_freq, factor, positions_BL)

    def __call__(self, q_BNLH, k_BKLH, garfa):
        q_tables = k_tables = self.cos, self.sin
        if garfa is not None:
            frequencies = head_frequencies(self.inv_freq, garfa)
            k_tables = rope_tables(frequencies, self.attention_factor, self.positions_BL)
            if garfa["queries"]:
                group = q_BNLH.shape[1] // k_BKLH.shape[1]
                q_tables = tuple(table.repeat_interleave(group, dim=1) for table in k_tables)
        return rotate(q_BNLH, *q_tables), rotate(k_BKLH, *k_tables)


def rotate(x_BNLH, cos, sin):
    x = x_BNLH.float()
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x_BNLH.dtype)


def sinusoidal_embedding(positions_BL, dim):
    """Sines in even dimensions and cosines in odd ones, fp32 [B, L, D]; angles in fp64, for large positions."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions_BL.device) / dim
    angles = positions_BL[..., None].double() * torch.exp(-math.log(10000.0) * exponents)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def head_scopes(kind, trained_length, length):
    """Tokens that each head sees in a sequence of `length`; None if all heads see everything."""
    ranks, scopes = kind["scope_ranks"], kind["scopes"]
    if ranks is None or length <= trained_length:
        return scopes
    longest, grown = max(length, *scopes), []
    for rank in ranks:
        scope = max(1, int(longest ** (rank / len(ranks))) - 1)
        while scope ** len(ranks) < longest**rank:  # in integers: float powers are inexact
            scope += 1
        grown.append(scope)
    return grown


def attend(q_BNLH, k_BKTH, v_BKTH, scopes, slopes, valid_BT):
    """Causal attention of the last L of T tokens; a head sees `scopes[head]` tokens, itself included.

    `valid_BT` is False at padding; None means no padding. Returns [B, N, L, H].
    """
    (N, L), (K, T) = q_BNLH.shape[1:3], k_BKTH.shape[1:3]
    plain = valid_BT is None and slopes is None and (scopes is None or min(scopes) >= T)
    if plain and L in (1, T):
        return F.scaled_dot_product_attention(q_BNLH, k_BKTH, v_BKTH, is_causal=L > 1, enable_gqa=N != K)
    scopes = [T] * N if scopes is None else [min(scope, T) for scope in scopes]
    heads_of = {}
    for head, scope in enumerate(scopes):
        heads_of.setdefault(scope, []).append(head)
    device = q_BNLH.device
    out = torch.empty_like(q_BNLH)
    for scope, heads in heads_of.items():
        every = len(heads) == N
        q = q_BNLH if every else q_BNLH[:, heads]
        kv = [head // (N // K) for head in heads]
        k, v = k_BKTH[:, kv], v_BKTH[:, kv]
        slope = None if slopes is None else torch.tensor([slopes[head] for head in heads], device=device)
        parts = []
        for start in range(0, L, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, L)
            first, last = max(0, T - L + start - scope + 1), T - L + stop  # keys within reach of the block
            queries = torch.arange(T - L + start, last, device=device)[:, None]
            distance = queries - torch.arange(first, last, device=device)
            mask = (distance >= 0) & (distance < scope)
            if valid_BT is not None:
                # Padding sees itself: some kernels give NaN for a row without keys, which then spreads.
                mask = (mask & valid_BT[:, None, None, first:last]) | (distance == 0)
            if slope is not None:
                bias = -slope[:, None, None] * distance.float()
                mask = bias.masked_fill(~mask, float("-inf")).to(q.dtype)
            parts.append(
                F.scaled_dot_product_attention(
                    q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], attn_mask=mask
                )
            )
        result = torch.cat(parts, dim=2)
        if every:
            return result
        out = out.index_copy(1, torch.tensor(heads, device=device), result)
    return out


class FarsightAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim, self.trained_length = layer, config.head_dim, config.trained_length
        self.kind = config.kinds[config.layer_kinds[layer]]
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x, turns, valid, length, past_key_values):
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.kind["rotary"] is not None:
            q, k = turns[self.kind["rotary"]](q, k, self.kind.get("garfa"))
        if past_key_values is not None:
            total = past_key_values.get_seq_length(self.layer) + k.shape[2]
            k, v = past_key_values.update(k, v, self.layer)
            if k.shape[2] != total:  # a StaticCache also returns empty slots, a sliding-window cache drops keys
                raise ValueError(
                    f"{type(past_key_values).__name__} gives {k.shape[2]} keys for {total} tokens: this model takes a "
                    "DynamicCache, which keeps every token and nothing else"
                )
        scopes = head_scopes(self.kind, self.trained_length, length)
        out = attend(q, k, v, scopes, self.kind["alibi_slopes"], valid)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class FarsightMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FarsightDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = FarsightAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FarsightMLP(config)

    def forward(self, x, turns, valid, length, past_key_values=None):
        x = x + self.self_attn(self.input_layernorm(x), turns, valid, length, past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


class FarsightPreTrainedModel(PreTrainedModel):
    config_class = FarsightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FarsightDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # `attend` uses torch's kernels whatever attention is requested: HELMET requests flash_attention_2.
    _supports_sdpa = True
    _supports_flash_attn = True


class FarsightModel(FarsightPreTrainedModel):
    """The decoder without its head. It stores only weights: tables and scopes are computed in `forward`."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FarsightDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        output_attentions=None,
        **_,
    ):
        config: FarsightConfig = self.config
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions is not supported: whole matrices of attention weights never exist here")
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, one of the two")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.dim()} dimensions; pass [batch, tokens], 1 for a token"
            )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not (self.gradient_checkpointing and self.training):
            past_key_values = DynamicCache()
        seen = past_key_values.get_seq_length() if isinstance(past_key_values, Cache) else 0
        total = seen + x.shape[1]
        valid = None
        if attention_mask is not None:
            valid = attention_mask[:, :total].bool()
            valid = None if valid.all() else valid
        if position_ids is None:
            if valid is None:
                position_ids = torch.arange(seen, total, device=x.device)[None]
            else:
                position_ids = (valid.long().cumsum(-1) - 1).clamp_min(0)[:, seen:]
        length = int(position_ids.max()) + 1
        if config.sinusoidal:
            x = x + sinusoidal_embedding(position_ids, x.shape[-1]).to(x.dtype)
        turns = [Turn.of(rotary, config.head_dim, length, position_ids) for rotary in config.rotaries]
        hidden_states = ()
        for layer in self.layers:
            hidden_states += (x,) if output_hidden_states else ()
            x = layer(x, turns, valid, length, past_key_values=past_key_values)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
        )


class FarsightForCausalLM(FarsightPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = FarsightModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        output_attentions=None,
        logits_to_keep=0,
        **more,
    ):
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            counted = {name: more[name] for name in ("num_items_in_batch",) if name in more}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
