"""Formulas for a rank's memory at the peak of a training step, from the shapes in `model/` and `parallel/`.

Bytes throughout. For its backward pass a block keeps what its operators save: the residual stream before each norm, the
norms' outputs, queries, keys, values, output and log-sum-exp of attention, and three hidden vectors of the feed-forward.
A test compares this with the storages that autograd saves.

`tokens` are those of a micro-batch that a context-parallel rank holds. `stream` is the residual stream.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from farsight.configs.schema import JobConfig, NoRotary
from farsight.kernels.chunked_loss import CHUNK_LOGITS
from farsight.launch.plan.heads import halo_bytes, keys_seen_numbers, layers_of
from farsight.launch.plan.layout import ParallelLayout, PipelineStage
from farsight.model.build import ModelConfig, build_model, trained_layers
from farsight.model.position.layers import LayerPosition

ADAM_MOMENTS = 2


@dataclass(frozen=True)
class RankMemory:
    """Memory of a pipeline rank in bytes; if the ranks of a stage differ, that of the rank that holds most."""

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    """Activations of all micro-batches in flight."""
    recomputed: int
    """Activations of one block that is recomputed in the backward pass."""
    gradients_of_activations: int
    """Those of one block."""
    logits: int
    """Those of a chunk of tokens, and the loss's gradients with respect to the head and hidden states."""
    caches: dict[str, int]
    """`rope`: tables; `halo`: received keys; `pipeline`: receive buffers."""
    gathered: int
    """FSDP's copies of parameters and gradients of whole blocks, autocast's copies of weights, DDP's buckets."""
    gathered_head: int
    """FSDP's copy of the head."""

    @property
    def activations(self) -> int:
        return self.saved + self.recomputed + self.gradients_of_activations

    @property
    def in_block(self) -> int:
        """Held only while a block's gradients are computed."""
        return self.recomputed + self.gradients_of_activations + self.gathered

    @property
    def in_loss(self) -> int:
        """Held only while the loss and its gradients are computed."""
        return self.logits + self.gathered_head

    @property
    def peak(self) -> int:
        """The most held at once: blocks' gradients and the loss's are not computed at the same time."""
        held = self.parameters + self.gradients + self.optimizer + self.saved + sum(self.caches.values())
        return held + max(self.in_block, self.in_loss)


def rank_memory(config: JobConfig, layout: ParallelLayout, rank: int) -> RankMemory:
    """The memory of pipeline rank `rank`."""
    model = ModelConfig.from_job(config)
    trained, a, stages = trained_layers(config), config.architecture, layout.stages[rank]
    layers = layers_of(model)
    offload = offloads(config, layout)
    kept = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    types, tokens = Types.of(config, layout), local_tokens(config, layout)
    own = [w for w in weights(model, layout.tp) if any(stage.holds(w.name) for stage in stages)]
    shards = {w.name: w.shard(layout.fsdp) for w in own}
    updated = [w for w in own if is_trained(w.name, trained)]

    blocks = [_block_bytes(config, layout, number, layers[number]) for s in stages for number in s.layers]
    saved_by_stage = [saved_activations(config, layout, stage) for stage in stages]
    in_flight = layout.in_flight(rank)
    halo = max(
        (halo_bytes(config, layout, layers[n].scopes, types.product) for s in stages for n in s.layers),
        default=0,
    )
    # Activations come from the previous stage, gradients from the next one.
    received = sum((not stage.first) + (not stage.last) for stage in stages)
    rotaries = {layers[n].rotary for s in stages for n in s.layers} - {NoRotary()}
    last = any(stage.last for stage in stages)
    logits, gathered_head = loss_bytes(config, layout, types, trained is None) if last else (0, 0)
    copies = 0
    if blocks:
        copies = _gathered(
            config, layout, own, max((w for w in own if w.layer is not None), key=lambda w: w.layer or 0)
        )
    return RankMemory(
        parameters=0 if offload else kept * sum(shards.values()),
        gradients=0 if offload else kept * sum(shards[w.name] for w in updated),
        optimizer=0 if offload else sum(ADAM_MOMENTS * kept * shards[w.name] + 4 for w in updated),
        saved=sum(saved_by_stage) * in_flight // len(stages),
        recomputed=max(blocks, default=0) if config.activation_checkpoint.mode in ("full", "selective") else 0,
        gradients_of_activations=block_gradients(config, layout, types) if blocks else 0,
        logits=logits,
        caches={
            "rope": rope_tables_bytes(a.head_dim, tokens, len(rotaries)) * -(-in_flight // len(stages)),
            "halo": halo,
            "pipeline": received * layout.microbatches * tokens // layout.tp * a.dim * types.stream,
        },
        gathered=copies,
        gathered_head=gathered_head,
    )


@dataclass(frozen=True)
class Types:
    """Bytes per number."""

    stream: int
    """In the residual stream; without FSDP, autocast leaves it in the parameters' type."""
    product: int
    """In inputs and outputs of matrix products."""
    reduced: int
    """In gradient reductions."""

    @classmethod
    def of(cls, config: JobConfig, layout: ParallelLayout) -> "Types":
        t = config.training
        sizes = {name: TORCH_DTYPE_MAP[getattr(t, name)].itemsize for name in ("dtype", "mixed_precision_param")}
        product = sizes["mixed_precision_param"]
        reduced = TORCH_DTYPE_MAP[t.mixed_precision_reduce].itemsize
        return cls(product if layout.sharded else sizes["dtype"], product, reduced)


def local_tokens(config: JobConfig, layout: ParallelLayout) -> int:
    """Tokens of a micro-batch that a context-parallel rank holds."""
    return layout.rows * config.training.seq_len // layout.cp


# Parameters


@dataclass(frozen=True)
class Weight:
    """A parameter, as a tensor-parallel rank holds it."""

    name: str
    shape: tuple[int, ...]

    @property
    def layer(self) -> int | None:
        kind, _, rest = self.name.partition(".")
        return int(rest.partition(".")[0]) if kind == "layers" else None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard(self, ranks: int) -> int:
        """Numbers on the first of `ranks` FSDP ranks: rows are split into equal parts, of which the last may be shorter."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


@cache
def weights(model: ModelConfig, tp: int) -> tuple[Weight, ...]:
    """The model's parameters as a tensor-parallel rank holds them, read off the model on the meta device."""
    with torch.device("meta"):
        parameters = [(name, tuple(p.shape)) for name, p in build_model(model).named_parameters()]
    return tuple(Weight(name, _divided(name, shape, tp)) for name, shape in parameters)


def _divided(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """A parameter's shape on a tensor-parallel rank: norms are whole, `wo` and `w2` split by inputs, all others by rows."""
    if name.endswith("norm.weight"):
        return shape
    if name.endswith(("wo.weight", "w2.weight")):
        return shape[0], shape[1] // tp
    return shape[0] // tp, *shape[1:]


def offloads(config: JobConfig, layout: ParallelLayout) -> bool:
    """Whether parameters, gradients and moments are in host memory: FSDP moves them there, so it has to wrap the model."""
    return config.training.enable_cpu_offload and layout.sharded


def stays_gathered(config: JobConfig) -> bool:
    """Whether FSDP keeps blocks gathered from the forward to the backward pass: if set so, and by default in pipelines."""
    policy = config.parallelism.fsdp_reshard_after_forward
    return policy == "never" or (policy == "default" and config.parallelism.pipeline_parallel_degree > 1)


def is_trained(name: str, trained: Sequence[int] | None) -> bool:
    """Whether the parameter of this name trains, if only the layers `trained` do (None: all parameters)."""
    layer = Weight(name, ()).layer
    return trained is None or layer in trained


def _gathered(config: JobConfig, layout: ParallelLayout, own: Sequence[Weight], largest: Weight) -> int:
    """Bytes of `RankMemory.gathered`; under FSDP, a block's parameters, the next one's and their receive buffer, and the block's
    gradients before and in their reduction."""
    types = Types.of(config, layout)
    block = sum(w.numel for w in own if w.layer == largest.layer)
    everything = sum(w.numel for w in own)
    if not layout.sharded:
        cast = types.product * everything if types.product < types.stream else 0
        return cast + (4 * everything if layout.dp_replicate > 1 else 0)
    reduction = (types.product + types.reduced) * block
    if stays_gathered(config):
        # Gathered once per pass; gradients of its micro-batches are summed unsharded.
        added_up = types.reduced * everything if layout.microbatches > 1 else 0
        return types.product * everything + added_up + reduction
    tied = config.architecture.tie_embeddings * config.architecture.vocab_size * config.architecture.dim // layout.tp
    return types.product * (3 * block + tied) + reduction


# Activations


def saved_activations(config: JobConfig, layout: ParallelLayout, stage: PipelineStage, fused_norms: bool = True) -> int:
    """Bytes that a stage keeps for a micro-batch between its forward and backward pass, without the loss's gradients.

    Args:
        fused_norms: RMSNorm keeps only its input and a scale, as on GPUs; on CPUs it keeps its normalised input too.
    """
    layers = layers_of(ModelConfig.from_job(config))
    trained, a, types = trained_layers(config), config.architecture, Types.of(config, layout)
    lowest = -1 if trained is None else min(trained)
    stream = local_tokens(config, layout) // layout.tp * a.dim * types.stream
    ac, saved = config.activation_checkpoint, 0
    for number in stage.layers:
        if number < lowest:
            continue  # no gradients pass here
        again = ac.mode == "full" or (ac.mode == "selective" and recomputes(ac.selective_ac_option, number))
        if not again:
            saved += _block_bytes(config, layout, number, layers[number], fused_norms)
            continue
        saved += stream
        if ac.mode == "selective" and ac.selective_ac_option == "op":
            saved += _kept_results(config, layout)
    if stage.last:
        saved += last_norm_bytes(config, layout, types, fused_norms)
    return saved


def last_norm_bytes(config: JobConfig, layout: ParallelLayout, types: Types, fused_norms: bool = True) -> int:
    """Bytes that the norm before the head keeps: its input and a scale."""
    tokens = local_tokens(config, layout) // layout.tp
    return tokens * ((1 if fused_norms else 2) * config.architecture.dim * types.stream + 4)


def rope_tables_bytes(head_dim: int, tokens: int, kinds: int) -> int:
    """Bytes of the RoPE tables: two in fp32 over all tokens for each of `kinds` distinct rotations."""
    return 8 * head_dim * tokens * kinds


def recomputes(option: str, layer: int) -> bool:
    """Whether selective checkpointing recomputes in this layer: every n-th block, counted from 1, or all blocks for "op"."""
    return option == "op" or not int(option) or (layer + 1) % int(option) == 0


def _block_bytes(
    config: JobConfig, layout: ParallelLayout, number: int, position: LayerPosition, fused_norms: bool = True
) -> int:
    """Bytes that autograd keeps for one block in pre-training."""
    a, types, trained = config.architecture, Types.of(config, layout), trained_layers(config)
    # Linear layers' inputs are kept for weight gradients: whole sequences, even where TP divides the stream.
    read = 2 * a.dim + a.ffn_dim // layout.tp if trained is None or number in trained else 0
    return block_bytes(config, layout, types, position, read * types.product, fused_norms)


def block_bytes(
    config: JobConfig,
    layout: ParallelLayout,
    types: Types,
    position: LayerPosition,
    read: int,
    fused_norms: bool = True,
) -> int:
    """Bytes that autograd keeps for one block.

    Args:
        position: the layer's scopes and rotation.
        read: bytes per token of its linear layers' inputs.
        fused_norms: see `saved_activations`.
    """
    a, tokens = config.architecture, local_tokens(config, layout)
    heads, kv_heads = a.n_heads // layout.tp * a.head_dim, a.n_kv_heads // layout.tp * a.head_dim
    stream = tokens // layout.tp * (2 * a.dim * types.stream + 2 * 4)  # before both norms, with the norms' scales
    unfused = 0 if fused_norms else tokens // layout.tp * 2 * a.dim * types.stream
    if a.qk_norm:
        stream += tokens * ((heads + kv_heads) * types.product + 4 * (heads + kv_heads) // a.head_dim)
        unfused += 0 if fused_norms else tokens * (heads + kv_heads) * types.product
    attention = 2 * heads * types.product + 4 * a.n_heads // layout.tp  # queries, output, log-sum-exp
    hidden = 2 * a.ffn_dim // layout.tp
    keys = 2 * kv_heads * types.product * tokens
    if layout.cp > 1:
        keys = types.product * layout.rows * keys_seen_numbers(config, layout, position.scopes)
        attention += heads * types.product  # outputs by piece, and joined
    return stream + unfused + tokens * (read + hidden * types.product + attention) + keys


def _kept_results(config: JobConfig, layout: ParallelLayout) -> int:
    """Bytes that operator-wise checkpointing keeps besides a block's input: attention, and every second matrix product.

    In the order of the forward pass (wk, wv, wq, wo, w1, w3, w2) these are wk, wq, w1 and w2.
    """
    a, types = config.architecture, Types.of(config, layout)
    heads, kv_heads = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    products = kv_heads + heads + a.ffn_dim + a.dim * layout.tp  # w2's is whole on every rank, until it is summed
    return local_tokens(config, layout) * ((products + heads) * types.product + 4 * a.n_heads) // layout.tp


def block_gradients(config: JobConfig, layout: ParallelLayout, types: Types) -> int:
    """Bytes of gradients that exist at once in a block's backward pass: three hidden vectors and two stream vectors per token."""
    a = config.architecture
    return local_tokens(config, layout) * (3 * a.ffn_dim * types.product + 2 * a.dim * types.stream) // layout.tp


def loss_bytes(config: JobConfig, layout: ParallelLayout, types: Types, head_trained: bool) -> tuple[int, int]:
    """Bytes that `kernels.chunked_loss` holds, and FSDP's copy of the head.

    The loss holds a chunk's logits twice in fp32, and gradients with respect to hidden states and, if trained, the head.
    """
    a, tokens = config.architecture, local_tokens(config, layout)
    vocabulary = a.vocab_size // layout.tp
    chunk = min(tokens, config.loss.chunk_tokens or max(1, CHUNK_LOGITS // vocabulary))
    head = vocabulary * a.dim
    # Below fp32 the logits' gradient also exists in the type of the products.
    logits = (8 if types.product == 4 else 8 + types.product) * chunk * vocabulary + tokens * a.dim * types.product
    if head_trained:
        logits += head * (4 if types.product == 4 else 4 + 2 * types.product)
    return logits, types.product * head if layout.sharded else 0
