"""A decoder for `transformers` whose layers and heads may each have their own position mechanism.

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

Needs only `torch` >= 2.5 and `transformers` >= 4.46. `config.json` gives each layer's position mechanism as numbers: how many
tokens a head sees (its scope), its ALiBi slope, and the RoPE frequencies of the layer's queries and keys, if any.

Attention processes the queries in blocks, and for each group of heads of equal scope only the keys within reach, so time and
memory are proportional to what the heads see. Rows may be padded on either side, as given by `attention_mask`. Caches may be
dynamic or static; those that drop keys are refused. Attention weights are returned with `attn_implementation="eager"`.

Shapes: B batch, L queries, T keys, D model, N query heads, K key/value heads, H head dimension.
"""

from __future__ import annotations  # Python 3.9 runs it too

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 46):
    raise ImportError(
        f"This model needs transformers 4.46 or later, and {transformers.__version__} is installed: "
        'pip install -U "transformers>=4.46"'
    )
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:  # before 4.52

    class GradientCheckpointingLayer(nn.Module):  # type: ignore[no-redef]  # what later versions have
        gradient_checkpointing = False

        def __call__(self, *arguments):
            if self.gradient_checkpointing and self.training:
                return self._gradient_checkpointing_func(super().__call__, *arguments)
            return super().__call__(*arguments)


QUERY_BLOCK = 512
"""Queries per call of the attention kernel if heads have scopes or slopes."""
NORMS = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names of the norms before and after attention, and before and after the feed-forward, for each placement."""
DROP_KEYS = {"SlidingWindowCache", "SinkCache", "HybridCache", "HybridChunkedCache", "EncoderDecoderCache"}
"""Caches that do not keep every token, or not in one place."""


class FarsightConfig(PretrainedConfig):
    """Shapes and each layer's position mechanism.

    Args:
        hidden_act: activation of the feed-forward's gate, by transformers' name.
        norm_placement: RMSNorm of what attention and feed-forward read ("pre"), of what they add ("post"), or both ("sandwich").
        zero_centered_norms: multiply normalised numbers by 1 + weight.
        qk_norm: apply RMSNorm to queries and keys, to each head's or (`qk_norm_span` = "projection") to all heads' together.
        attention_bias: biases of no projection ("none"), of those of queries, keys and values ("qkv"), or of all four ("all").
        mlp_bias: biases of the feed-forward's projections.
        rotary_dim: dimensions of each head that rotate, its first ones; 0 rotates all.
        softmax_scale: factor on the scores before the softmax; None is 1 / sqrt(head_dim).
        scaled_embeddings: multiply embeddings by sqrt(hidden_size), rounded to their dtype.
        query_scaling: None, or `beta` and `original_length`: the query at position p is multiplied by
            1 + beta · ln(1 + floor(p / original_length)).
        layer_kinds: index into `kinds` for each layer.
        kinds: `rotary` (index into `rotaries`, or None), `scopes` (tokens that each of the N heads sees, itself included;
            None sees all), `scope_ranks` (None, or h for each head: past `trained_length` its scope is the length to
            the power of h / N, rounded up), `alibi_slopes` (one for each head, or None) and, if each head's keys have
            their own frequencies, `garfa` (see `head_frequencies`).
        rotaries: `inv_freq` (radians per token, one for each pair of dimensions that rotates) and `attention_factor`; or, if they depend on the
            length, `dynamic` (theta, factor, original_length) or `longrope` (short and long `inv_freq`,
            original_length).
        sinusoidal: add sinusoidal embeddings to those of the tokens.
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
        hidden_act="silu",
        rms_norm_eps=1e-5,
        norm_placement="pre",
        zero_centered_norms=False,
        max_position_embeddings=2048,
        initializer_range=0.02,
        use_cache=True,
        qk_norm=False,
        qk_norm_span="head",
        attention_bias="none",
        mlp_bias=False,
        rotary_dim=0,
        softmax_scale=None,
        scaled_embeddings=False,
        query_scaling=None,
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
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.norm_placement = norm_placement
        self.zero_centered_norms = zero_centered_norms
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.qk_norm = qk_norm
        self.qk_norm_span = qk_norm_span
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.rotary_dim = rotary_dim
        self.softmax_scale = softmax_scale
        self.scaled_embeddings = scaled_embeddings
        self.query_scaling = query_scaling
        self.sinusoidal = sinusoidal
        self.trained_length = trained_length
        self.layer_kinds = list(layer_kinds)
        self.kinds = list(kinds)
        self.rotaries = list(rotaries)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)


def rope_frequencies(rotary, rotated_dim, length, device):
    """Radians per token of each pair of dimensions that rotates, fp32."""
    if "dynamic" in rotary:  # NTK-aware scaling whose factor grows with the sequence
        settings = rotary["dynamic"]
        original, factor = settings["original_length"], settings["factor"]
        growth = factor * max(length, original) / original - (factor - 1)
        theta = settings["theta"] * growth ** (rotated_dim / (rotated_dim - 2))
        exponents = torch.arange(0, rotated_dim, 2, dtype=torch.float32, device="cpu") / rotated_dim
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
    only to the keys). Returns fp32 [K, 1, pairs]; factors are computed in fp64, so that an alpha of 1 changes nothing.
    """
    alpha = 0.1 + 9.9 * torch.tensor(garfa["raw"], dtype=torch.float32, device="cpu").double().sigmoid()
    pairs = torch.arange(0, 2 * len(inv_freq), 2, dtype=torch.float64, device="cpu") / (2 * len(inv_freq))
    scales = alpha[:, None, None] ** (-pairs * garfa["exponent"])
    return inv_freq * scales.float().to(inv_freq.device)


def rope_tables(inv_freq, attention_factor, positions_BL):
    """cos and sin of the angles at each position, for both halves of what rotates: fp32 [B, 1 or heads, L, rotated]."""
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
    def of(cls, rotary, rotated_dim, length, positions_BL):
        inv_freq = rope_frequencies(rotary, rotated_dim, length, positions_BL.device)
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
    """Rotates the first dimensions of each head, as many as the tables have."""
    turned, rest = x_BNLH[..., : cos.shape[-1]].float(), x_BNLH[..., cos.shape[-1] :]
    turned = (turned * cos + turned.roll(turned.shape[-1] // 2, dims=-1) * sin).to(x_BNLH.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


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


def score_mask(queries, keys, scopes, slopes, valid_BT, dtype):
    """The keys at indices `keys` that the queries at `queries` see: booleans, or with slopes what is added to scores.

    `scopes` is one number, or like `slopes` a tensor [heads, 1, 1]. Broadcasts to [B, heads, L, T].
    """
    distance = queries[:, None] - keys
    mask = (distance >= 0) & (distance < scopes)
    if valid_BT is not None:
        # Padding sees itself: some kernels give NaN for a row without keys, which then spreads.
        mask = (mask & valid_BT[:, None, None, keys]) | (distance == 0)
    return mask if slopes is None else (-slopes * distance.float()).masked_fill(~mask, float("-inf")).to(dtype)


def per_head(numbers, device):
    return None if numbers is None else torch.tensor(numbers, device=device)[:, None, None]


def attend(q_BNLH, k_BKTH, v_BKTH, scopes, slopes, valid_BT, scale):
    """Causal attention of the last L of T tokens; a head sees `scopes[head]` tokens, itself included.

    `valid_BT` is False at padding; None means no padding. Returns [B, N, L, H].
    """
    (N, L), (K, T) = q_BNLH.shape[1:3], k_BKTH.shape[1:3]
    plain = valid_BT is None and slopes is None and (scopes is None or min(scopes) >= T)
    if plain and L in (1, T):
        return F.scaled_dot_product_attention(q_BNLH, k_BKTH, v_BKTH, is_causal=L > 1, scale=scale, enable_gqa=N != K)
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
        slope = per_head(None if slopes is None else [slopes[head] for head in heads], device)
        parts = []
        for start in range(0, L, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, L)
            first, last = max(0, T - L + start - scope + 1), T - L + stop  # keys within reach of the block
            queries, keys = torch.arange(T - L + start, last, device=device), torch.arange(first, last, device=device)
            mask = score_mask(queries, keys, scope, slope, valid_BT, q.dtype)
            parts.append(
                F.scaled_dot_product_attention(
                    q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], attn_mask=mask, scale=scale
                )
            )
        result = torch.cat(parts, dim=2)
        if every:
            return result
        out = out.index_copy(1, torch.tensor(heads, device=device), result)
    return out


def attend_whole(q_BNLH, k_BKTH, v_BKTH, scopes, slopes, valid_BT, scale):
    """The same output as `attend`'s, and the attention weights [B, N, L, T] as whole matrices."""
    (N, L), (K, T), device = q_BNLH.shape[1:3], k_BKTH.shape[1:3], q_BNLH.device
    k_BNTH, v_BNTH = (x.repeat_interleave(N // K, dim=1) for x in (k_BKTH, v_BKTH))
    keys = torch.arange(T, device=device)
    scopes = T if scopes is None else per_head(scopes, device)
    # Slopes of 0 for heads without any: the mask is then what is added to scores.
    slopes = per_head([0.0] * N if slopes is None else slopes, device)
    mask = score_mask(keys[T - L :], keys, scopes, slopes, valid_BT, torch.float32)
    scores = (q_BNLH @ k_BNTH.transpose(2, 3)).float() * (q_BNLH.shape[-1] ** -0.5 if scale is None else scale)
    weights = (scores + mask).softmax(dim=-1).to(q_BNLH.dtype)
    return weights @ v_BNTH, weights


class FarsightRMSNorm(nn.RMSNorm):
    def __init__(self, config, dim):
        super().__init__(dim, eps=config.rms_norm_eps)
        self.zero_centered = config.zero_centered_norms

    def forward(self, x):
        if self.zero_centered:  # in fp32: rounded to bf16, 1 + weight would lose small weights
            return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return super().forward(x)


class FarsightAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim, self.trained_length = layer, config.head_dim, config.trained_length
        self.scale, self.kind = config.softmax_scale, config.kinds[config.layer_kinds[layer]]
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        inner, outer = config.attention_bias in ("qkv", "all"), config.attention_bias == "all"
        self.q_proj = nn.Linear(config.hidden_size, query, bias=inner)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=inner)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=inner)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=outer)
        self.whole_norm = config.qk_norm_span == "projection"
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = FarsightRMSNorm(config, query if self.whole_norm else config.head_dim)
            self.k_norm = FarsightRMSNorm(config, key if self.whole_norm else config.head_dim)

    def heads(self, x, norm=None):
        """[B, heads, L, H], normalised."""
        if norm is not None and self.whole_norm:
            x, norm = norm(x), None
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def forward(self, x, step, past_key_values):
        q, k = self.heads(self.q_proj(x), self.q_norm), self.heads(self.k_proj(x), self.k_norm)
        v = self.heads(self.v_proj(x))
        if step.query_scale is not None:
            q = q * step.query_scale.to(q.dtype)
        if self.kind["rotary"] is not None:
            q, k = step.turns[self.kind["rotary"]](q, k, self.kind.get("garfa"))
        if past_key_values is not None:
            slots = torch.arange(step.total - k.shape[2], step.total, device=k.device)
            k, v = past_key_values.update(k, v, self.layer, {"cache_position": slots})
            if isinstance(past_key_values, StaticCache):  # its empty slots follow
                k, v = k[:, :, : step.total], v[:, :, : step.total]
            if k.shape[2] != step.total:
                raise ValueError(
                    f"{type(past_key_values).__name__} gives {k.shape[2]} keys for {step.total} tokens: this model takes "
                    "a cache that keeps every token, such as DynamicCache"
                )
        scopes = head_scopes(self.kind, self.trained_length, step.length)
        given = q, k, v, scopes, self.kind["alibi_slopes"], step.valid, self.scale
        out, weights = attend_whole(*given) if step.want_weights else (attend(*given), None)
        return self.o_proj(out.transpose(1, 2).flatten(-2)), weights


class FarsightMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.act = ACT2FN[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class FarsightDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer):
        super().__init__()
        self.norms = NORMS[config.norm_placement]
        for name in filter(None, self.norms):
            setattr(self, name, FarsightRMSNorm(config, config.hidden_size))
        self.self_attn = FarsightAttention(config, layer)
        self.mlp = FarsightMLP(config)

    def forward(self, x, step, past_key_values):
        before_attention, after_attention, before_mlp, after_mlp = (
            getattr(self, name) if name else nn.Identity() for name in self.norms
        )
        attended, weights = self.self_attn(before_attention(x), step, past_key_values)
        x = x + after_attention(attended)
        return x + after_mlp(self.mlp(before_mlp(x))), weights


class Step(NamedTuple):
    """Values of a forward pass that all layers use."""

    turns: list
    query_scale: torch.Tensor | None
    """fp32 [B, 1, L, 1]."""
    valid: torch.Tensor | None
    """[B, T], False at padding."""
    length: int
    """Positions of the longest row, for what depends on the length."""
    total: int
    """Tokens in the cache and in the input."""
    want_weights: bool


class FarsightPreTrainedModel(PreTrainedModel):
    config_class = FarsightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FarsightDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # `attend` uses torch's kernels whatever attention is requested: HELMET requests flash_attention_2.
    _supports_sdpa = True
    _supports_flash_attn = True
    # Read by transformers before version 5.
    _supports_flash_attn_2 = True
    _supports_cache_class = True
    _supports_static_cache = True
    _supports_quantized_cache = True
    # 4.54 and 4.55 ask this of static caches; `get_compiled_call` compiles nothing.
    _can_compile_fullgraph = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, FarsightRMSNorm):
            nn.init.constant_(module.weight, 0.0 if module.zero_centered else 1.0)

    def get_input_embeddings(self):
        return self.base_model.embed_tokens

    def set_input_embeddings(self, embeddings):
        self.base_model.embed_tokens = embeddings


class FarsightModel(FarsightPreTrainedModel):
    """The decoder without its head. It stores only weights: tables and scopes are computed in `forward`."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FarsightDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = FarsightRMSNorm(config, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    @staticmethod
    def _prepare_4d_causal_attention_mask_with_cache_position(attention_mask, **_):
        """`generate` would make a whole matrix of it for a StaticCache; the rows' paddings are all that is needed."""
        return attention_mask

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
        return_dict=None,
        **more,
    ):
        config: FarsightConfig = self.config
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if output_attentions and config._attn_implementation != "eager":
            raise ValueError(
                "output_attentions needs whole matrices of attention weights: load the model with "
                'attn_implementation="eager"'
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, one of the two")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is not None:
            self.check_cache(past_key_values)
        elif (config.use_cache if use_cache is None else use_cache) and not (
            self.gradient_checkpointing and self.training
        ):
            past_key_values = DynamicCache()
        # `generate` gives the index of the first token, which a StaticCache before version 5 has to guess by its zeros.
        slots = more.get("cache_position")
        if slots is None:
            seen = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        else:
            seen = int(slots[0])
        total = seen + x.shape[1]
        valid = self.valid_tokens(attention_mask, total)
        if position_ids is None:
            if valid is None:
                position_ids = torch.arange(seen, total, device=x.device)[None]
            else:
                position_ids = (valid.long().cumsum(-1) - 1).clamp_min(0)[:, seen:]
        length = int(position_ids.max()) + 1
        if config.scaled_embeddings:
            x = x * torch.tensor(config.hidden_size**0.5, dtype=x.dtype, device=x.device)
        if config.sinusoidal:
            x = x + sinusoidal_embedding(position_ids, x.shape[-1]).to(x.dtype)
        rotated = config.rotary_dim or config.head_dim
        turns = [Turn.of(rotary, rotated, length, position_ids) for rotary in config.rotaries]
        step = Step(turns, self.query_scale(position_ids), valid, length, total, output_attentions)
        hidden_states, attentions = (), ()
        for layer in self.layers:
            hidden_states += (x,) if output_hidden_states else ()
            x, weights = layer(x, step, past_key_values)
            attentions += (weights,)
        x = self.norm(x)
        outputs = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
        )
        return outputs if wants_dict(config, return_dict) else outputs.to_tuple()

    def check_cache(self, cache):
        """Raises a ValueError for what is not a cache that keeps every token, which some head may see."""
        name = type(cache).__name__
        if self.gradient_checkpointing and self.training:
            raise ValueError(f"{name}: a cache would be filled twice by gradient checkpointing; pass none in training")
        known = isinstance(cache, Cache) and not DROP_KEYS.intersection(base.__name__ for base in type(cache).__mro__)
        if not known or any(getattr(cache, "is_sliding", ())):
            raise ValueError(f"{name} does not keep every token's keys in order; pass a DynamicCache or a StaticCache")

    @staticmethod
    def valid_tokens(attention_mask, total):
        """Booleans [B, T], False at padding; None where no row is padded."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; pass [batch, {total}], 1 for a token and 0 for "
                "padding, with the tokens in the cache"
            )
        valid = attention_mask[:, :total].bool()
        return None if valid.all() else valid

    def query_scale(self, positions_BL):
        if self.config.query_scaling is None:
            return None
        beta, original = self.config.query_scaling["beta"], self.config.query_scaling["original_length"]
        return 1 + beta * (positions_BL // original).float().log1p()[:, None, :, None]


def wants_dict(config, return_dict):
    return getattr(config, "return_dict", True) if return_dict is None else return_dict


class FarsightForCausalLM(FarsightPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = FarsightModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, embeddings):
        self.lm_head = embeddings

    @staticmethod
    def create_masks_for_generate(attention_mask=None, **_):
        """The same as `_prepare_4d_causal_attention_mask_with_cache_position`, for version 5."""
        return attention_mask

    def get_compiled_call(self, compile_config):
        """On GPUs `generate` compiles the call for a StaticCache; here shapes change with every token that is in it."""
        return self.__call__

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
        return_dict=None,
        logits_to_keep=0,
        num_logits_to_keep=None,  # its name before version 4.50
        **loss_kwargs,  # so named, because the Trainer of 4.46 looks for it
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
            return_dict=True,
            cache_position=loss_kwargs.get("cache_position"),
        )
        keep = logits_to_keep if num_logits_to_keep is None else num_logits_to_keep
        if isinstance(keep, torch.Tensor) and keep.dim() != 1:
            raise ValueError(f"logits_to_keep has {keep.dim()} dimensions; pass a number or the indices of tokens")
        keep = slice(-keep, None) if isinstance(keep, int) else keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=loss_kwargs.get("num_items_in_batch"),
            )
        given = CausalLMOutputWithPast(
            loss=loss, logits=logits, **{k: v for k, v in outputs.items() if k != "last_hidden_state"}
        )
        return given if wants_dict(self.config, return_dict) else given.to_tuple()
