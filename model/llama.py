"""The decoder: embedding, blocks, norm, head. `model/build.py` decides the settings of each layer.

Shapes: B batch, L sequence, D model, V vocabulary, H head dimension.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from farsight.configs.schema import Architecture, NoRotary, QueryScaling
from farsight.kernels.chunked_loss import chunked_cross_entropy
from farsight.kernels.scoped_attention.choice import can_run_triton
from farsight.model.attention import Attention
from farsight.model.norm import build_norm
from farsight.model.position.garfa import HeadRope
from farsight.model.position.layers import LayerPosition
from farsight.model.position.rope import RopeFrequencies, rope_frequencies, rope_tables
from farsight.model.position.sinusoidal import sinusoidal_embedding

_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")),
}
"""Each activation, and the gradient of its input from that of its output."""


class _GatedLinearUnit(torch.autograd.Function):
    """act(a) · b. Saves only a and b, a third less than autograd would: act(a) is cheap to recompute."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.activation = activation
        gate = _ACTIVATIONS[activation][0](a)
        # Compiled by PyTorch 2.11, a function loses its gradient if its last operator returns a tensor it was given.
        return gate * b if torch.compiler.is_compiling() else gate.mul_(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, b), (act, act_backward) = ctx.saved_tensors, _ACTIVATIONS[ctx.activation]
        return act_backward(grad * b, a), act(a).mul_(grad), None


class FeedForward(nn.Module):
    """Gated linear unit: w2(act(w1 x) · w3 x); SwiGLU with SiLU, GeGLU with GELU."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.activation = a.activation
        self.w1 = nn.Linear(a.dim, a.ffn_dim, bias=a.mlp_bias)
        self.w2 = nn.Linear(a.ffn_dim, a.dim, bias=a.mlp_bias)
        self.w3 = nn.Linear(a.dim, a.ffn_dim, bias=a.mlp_bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D], in x's dtype."""
        return self.w2(_GatedLinearUnit.apply(self.w1(x_BLD), self.w3(x_BLD), self.activation))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms before them, after them or both."""

    def __init__(self, architecture: Architecture, position: LayerPosition, backend: str) -> None:
        super().__init__()
        a = architecture
        before, after = a.norm_placement != "post", a.norm_placement != "pre"
        self.attention_norm = build_norm(a, a.dim) if before else nn.Identity()
        self.attention = Attention(a, position, backend)
        self.attention_post_norm = build_norm(a, a.dim) if after else nn.Identity()
        self.ffn_norm = build_norm(a, a.dim) if before else nn.Identity()
        self.feed_forward = FeedForward(a)
        self.ffn_post_norm = build_norm(a, a.dim) if after else nn.Identity()

    def forward(
        self,
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        document_starts_BL: Tensor | None = None,
        head_rope: HeadRope | None = None,
        query_scale: Tensor | None = None,
    ) -> Tensor:
        """[B, L, D], in x's dtype; the other arguments are `Attention.forward`'s."""
        # As keyword arguments: tensor parallelism gathers positional arguments, and only the tokens need it.
        attended_BLD = self.attention(
            self.attention_norm(x_BLD),
            rope=rope,
            document_starts_BL=document_starts_BL,
            head_rope=head_rope,
            query_scale=query_scale,
        )
        h_BLD = x_BLD + self.attention_post_norm(attended_BLD)
        return h_BLD + self.ffn_post_norm(self.feed_forward(self.ffn_norm(h_BLD)))


class OutputHead(nn.Module):
    """Computes logits, or the summed loss without ever holding all logits.

    It is a separate module so that FSDP gathers the weight around this call. With tied embeddings it owns no weight and
    is given the embedding's. Under tensor parallelism each rank holds a part of the vocabulary, and is given the hidden
    states of its own tokens.
    """

    def __init__(self, dim: int, vocab_size: int, chunk_tokens: int, tied: bool) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, h_BLD: Tensor, labels_BL: Tensor | None, tied_weight: Tensor | None = None) -> Tensor:
        """Logits [B, L, V] in h's dtype; with labels (integers, -100 is ignored) the scalar sum of losses, fp32.

        Args:
            tied_weight: the embedding's weight [V, D], where the head has none.
        """
        weight_VD = self.weight if tied_weight is None else tied_weight
        assert weight_VD is not None
        group = None
        if isinstance(weight_VD, DTensor):
            assert isinstance(h_BLD, DTensor)
            mesh, weight_VD = weight_VD.device_mesh, weight_VD.to_local()
            group = mesh.get_group()
            # Each rank's part of the vocabulary contributes a part of every token's gradient.
            h_BLD = h_BLD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            if labels_BL is None:
                logits = DTensor.from_local(F.linear(h_BLD, weight_VD), mesh, [Shard(-1)], run_check=False)
                return logits.full_tensor()
        elif labels_BL is None:
            return F.linear(h_BLD, weight_VD)
        return chunked_cross_entropy(
            h_BLD.flatten(0, 1), weight_VD, labels_BL.flatten(), self.chunk_tokens, vocabulary_group=group
        )


class Llama(nn.Module):
    """A Llama-style decoder in which every layer may encode position in its own way.

    Args:
        architecture: shapes.
        layers: each layer's position, from `resolve_layers`.
        sinusoidal: add a sinusoidal position embedding to the token embeddings.
        query_scaling: factor on queries by their position; None for no factor.
        length: sequence length that length-dependent RoPE (dynamic NTK, LongRoPE) is set for.
        backend: attention kernel, as in `scoped_attention`.
        chunk_tokens: tokens whose logits the loss holds at once; 0 picks a number.
        init_seed: seeds `init_weights`.
    """

    rope_frequencies: Tensor
    token_shard: tuple[int, int] = (0, 1)
    """(i, n): the residual stream holds the i-th of n equal spans of the tokens; n > 1 under tensor parallelism."""

    def __init__(
        self,
        architecture: Architecture,
        layers: Sequence[LayerPosition],
        *,
        sinusoidal: bool,
        query_scaling: QueryScaling | None = None,
        length: int,
        backend: str = "auto",
        chunk_tokens: int = 0,
        init_seed: int = 0,
    ) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.sinusoidal, self.query_scaling, self.init_seed = sinusoidal, query_scaling, init_seed
        self.fill_parameter: Callable[[str, nn.Parameter], None] = self.init_parameter
        """Called by `init_weights` for each parameter; fine-tuning replaces it to read weights from a directory."""
        # Optional, because pipeline stages set the parts they do not hold to None.
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(a.vocab_size, a.dim)
        # A ModuleDict keyed by layer number, since a pipeline split would renumber a ModuleList.
        self.layers = nn.ModuleDict({str(i): Block(a, layer, backend) for i, layer in enumerate(layers)})
        self.norm: nn.RMSNorm | None = build_norm(a, a.dim)
        self.output: OutputHead | None = OutputHead(a.dim, a.vocab_size, chunk_tokens, a.tie_embeddings)

        # Layers that rotate alike share a row of frequencies, and thus one pair of tables in each forward pass.
        self.rotaries = tuple(dict.fromkeys(p.rotary for p in layers if not isinstance(p.rotary, NoRotary)))
        self.rotary_of_layer = {
            str(i): None if isinstance(p.rotary, NoRotary) else self.rotaries.index(p.rotary)
            for i, p in enumerate(layers)
        }
        frequencies = torch.empty(len(self.rotaries), a.rotated_dim // 2, dtype=torch.float32)
        self.register_buffer("rope_frequencies", frequencies, persistent=False)
        self.set_position(layers, length)

    def set_position(self, layers: Sequence[LayerPosition], length: int) -> None:
        """Sets scopes, slopes and frequencies for sequences of `length` tokens; shapes and rotary kinds must not change."""
        self.positions, self.length = tuple(layers), length
        frequencies = [rope_frequencies(r, self.architecture.rotated_dim, length) for r in self.rotaries]
        self.attention_factors = [f.attention_factor for f in frequencies]
        if frequencies and not self.rope_frequencies.is_meta:
            self.rope_frequencies.copy_(torch.stack([f.inv_freq for f in frequencies]))
        for name, attention in self.attentions():
            attention.set_position(self.positions[int(name)])

    def attentions(self) -> Iterator[tuple[str, Attention]]:
        """Each layer's number and attention module, whatever wraps the blocks."""
        for name, block in self.layers.items():
            yield name, cast(Attention, block.attention)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_starts: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Logits, or with `labels` the sum of the tokens' losses.

        Args:
            tokens: int64 ids [B, L], or [B, L, D] activations of the previous pipeline stage.
            positions: integers [B, L] or [1, L]; None counts from 0.
            document_starts: integers [B, L], the index in the row at which each token's document starts; None is one
                document per row.
            labels: int64 [B, L], next tokens; -100 where there is nothing to predict.

        Returns:
            [B, L, V] logits; an fp32 scalar with labels; [B, L, D] activations from a stage without the head.
        """
        h_BLD = self.hidden_states(tokens, positions, document_starts)
        return h_BLD if self.output is None else self.head(h_BLD, labels)

    def head(self, h_BLD: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [B, L, V] of hidden states [B, L, D], or with `labels` [B, L] the sum of their losses."""
        assert self.output is not None
        tied = self.tok_embeddings.weight if self.output.weight is None and self.tok_embeddings is not None else None
        return self.output(h_BLD, labels, tied)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor | None = None, document_starts: Tensor | None = None
    ) -> Tensor:
        """The input of the head, [B, L, D]; arguments are `forward`'s."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        h_BLD = tokens
        if self.tok_embeddings is not None:
            h_BLD = self.tok_embeddings(tokens)
            if self.architecture.scaled_embeddings:
                h_BLD = h_BLD * _rounded(self.architecture.dim**0.5, h_BLD.dtype)
            if self.sinusoidal:
                part, parts = self.token_shard
                own = positions.chunk(parts, dim=1)[part]
                h_BLD = h_BLD + sinusoidal_embedding(own, h_BLD.shape[-1]).to(h_BLD.dtype)

        tables = self._token_tables(positions) if positions.shape[1] == 1 else {}
        # With a gradient, tables would be kept until the backward pass, for each kind of rotation.
        kind = h_BLD.device.type, str(h_BLD.dtype), self.architecture.rotated_dim
        in_kernels = torch.is_grad_enabled() and can_run_triton(*kind)
        shared: dict[int, HeadRope] = {}
        query_scale = self._query_scale(positions)
        for name, block in self.layers.items():
            row, attention = self.rotary_of_layer[name], cast(Attention, block.attention)
            head_rope = self._head_rope(attention, row, positions)
            if row is not None and in_kernels and head_rope is None:
                if row not in shared:
                    shared[row] = self._shared_rope(attention, row, positions)
                head_rope = shared[row]
            elif row is not None and row not in tables:
                frequencies = RopeFrequencies(self.rope_frequencies[row], self.attention_factors[row])
                tables[row] = rope_tables(positions, frequencies)
            h_BLD = block(h_BLD, None if row is None else tables.get(row), document_starts, head_rope, query_scale)

        if self.norm is not None:
            h_BLD = self.norm(h_BLD)
        return h_BLD

    def _query_scale(self, positions: Tensor) -> Tensor | None:
        """The factor on each position's queries, fp32 [B or 1, L, 1, 1]; None for no factor."""
        if self.query_scaling is None:
            return None
        beta, original = self.query_scaling.beta, self.query_scaling.original_length
        return 1 + beta * (positions // original).float().log1p()[..., None, None]

    def _token_tables(self, positions: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """All layers' tables for one token a row, computed together where attention factors are equal; those of longer sequences
        are large, and made when a layer first needs them."""
        tables: dict[int, tuple[Tensor, Tensor]] = {}
        for factor in dict.fromkeys(self.attention_factors):
            rows = [row for row, own in enumerate(self.attention_factors) if own == factor]
            inv_freq_R11F = torch.stack([self.rope_frequencies[row] for row in rows])[:, None, None]
            cos_RBLH, sin_RBLH = rope_tables(positions, RopeFrequencies(inv_freq_R11F, factor))
            tables |= zip(rows, zip(cos_RBLH.unbind(), sin_RBLH.unbind(), strict=True), strict=True)
        return tables

    def _head_rope(self, attention: Attention, row: int | None, positions: Tensor) -> HeadRope | None:
        """The rotation of a layer with GARFA; None for other layers."""
        if attention.garfa is None:
            return None
        assert row is not None
        inv_freq_KF = attention.garfa(self.rope_frequencies[row])
        return HeadRope(positions, inv_freq_KF, self._attention_factor(row), attention.garfa.queries)

    def _shared_rope(self, attention: Attention, row: int, positions: Tensor) -> HeadRope:
        """A rotation of all heads by the same frequencies, for kernels that compute angles where they are used."""
        inv_freq_F, kv_heads = self.rope_frequencies[row], len(attention.scopes) // attention.group
        return HeadRope(positions, inv_freq_F.repeat(kv_heads, 1), self._attention_factor(row), queries=True)

    def _attention_factor(self, row: int) -> Tensor:
        return self.rope_frequencies.new_full((), self.attention_factors[row])

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialises parameters and buffers in place.

        Each parameter's values depend only on `init_seed` and its name, so that every parallel layout starts from the
        same weights. Linear layers: normal with std 0.02, truncated at 2 std; `wo` and `w2` are divided by sqrt(2·layers)
        (by sqrt(2·(layer + 1)) with `depth_init`), so that the residual stream does not grow with depth.
        """
        for name, parameter in list(self.named_parameters()):
            self.fill_parameter(unwrapped(name), parameter)
        if buffer_device is not None:
            self.rope_frequencies = self.rope_frequencies.to(buffer_device)
            for _, attention in self.attentions():
                for module in attention.modules():
                    for name, buffer in list(module.named_buffers(recurse=False)):
                        module.register_buffer(name, buffer.to(buffer_device), persistent=False)
        self.set_position(self.positions, self.length)

    @torch.no_grad()
    def init_parameter(self, name: str, parameter: Tensor) -> None:
        """Fills a parameter, sharded or not, with the initial values that belong to its name."""
        if name.endswith("norm.weight"):
            nn.init.constant_(parameter, 0.0 if self.architecture.zero_centered_norms else 1.0)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif name.endswith("garfa.raw"):
            garfa = cast(Attention, self.layers[name.split(".")[1]].attention).garfa
            assert garfa is not None
            copy_whole(parameter, torch.tensor(garfa.initial, device=parameter.device))
        else:
            _fill(parameter, self._init_std(name), name_seed(self.init_seed, name))

    def _init_std(self, name: str) -> float:
        a = self.architecture
        if name.startswith("tok_embeddings"):
            return a.dim**-0.5 if a.tie_embeddings or a.scaled_embeddings else 1.0
        if name.startswith("output"):
            return a.dim**-0.5
        if name.endswith(("wo.weight", "w2.weight")):
            depth = int(name.split(".")[1]) + 1 if a.depth_init else a.n_layers
            return 0.02 / (2 * depth) ** 0.5
        return 0.02


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number of that dtype."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def unwrapped(name: str) -> str:
    """A parameter's name without the prefixes that compilation and activation checkpointing add."""
    return re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name)


def name_seed(seed: int, name: str) -> int:
    """A seed for the parameter of that name: 56 bits that depend on nothing else."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "big")


def _fill(parameter: Tensor, std: float, seed: int) -> None:
    generator = torch.Generator(parameter.device).manual_seed(seed)
    full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    nn.init.trunc_normal_(full, std=std, a=-2 * std, b=2 * std, generator=generator)
    copy_whole(parameter, full)


def copy_whole(parameter: Tensor, full: Tensor) -> None:
    """Fills a parameter, or the rank's shard of one, from the full tensor."""
    if isinstance(parameter, DTensor):
        # Every rank has the same full tensor and keeps its own shard: nothing is sent.
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
        own = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        parameter.to_local().copy_(full[own])
    else:
        parameter.copy_(full)
