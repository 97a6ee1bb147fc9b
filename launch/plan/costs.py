"""What a training step takes: FLOPs, bytes over each mesh dimension, and seconds, by formula.

A pipeline rank's time for a micro-batch is matrix products, attention of its busiest rank, what only passes over memory,
and the collectives that nothing hides; data-parallel traffic hides behind it, up to a share. Each row of a batch counts as
one document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from farsight.configs.schema import JobConfig, NoRotary
from farsight.launch.plan.hardware import Efficiency, Gpu
from farsight.launch.plan.heads import layers_of, rank_pairs, received_in_forward
from farsight.launch.plan.layout import Layout, Stage
from farsight.launch.plan.memory import (
    Types,
    Weight,
    is_trained,
    local_tokens,
    offloads,
    recomputes,
    stays_gathered,
    weights,
)
from farsight.model.build import ModelConfig, trained_layers
from farsight.model.flops import batch_flops, layer_matmul_weights
from farsight.model.position.layers import LayerPosition

BYTES_A_LOGIT = 40
"""Read and written by `kernels.chunked_loss`, whose passes over a chunk's logits are not fused."""
OPTIMIZER_PASSES = 8
"""Over a rank's parameters: gradient norm; AdamW reads parameter, gradient and moments, writes all but the gradient."""


@dataclass
class Seconds:
    """Of a rank, for a micro-batch or a step."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Norms, rotation, SwiGLU, residual sums, softmax of the loss."""
    tp: float = 0.0
    cp: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory + self.tp + self.cp

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, on the pipeline rank that takes longest."""

    compute: Seconds
    bubble: float
    data_parallel: float
    """What the computation does not hide."""
    optimizer: float
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes that the rank sends (and receives as many) in a step, by mesh dimension."""

    @property
    def total(self) -> float:
        return self.compute.total + self.bubble + self.data_parallel + self.optimizer


def flops_per_token(config: JobConfig) -> float:
    """What training needs, as runs report it: no recomputation, and only the pairs that heads see."""
    tokens = config.training.seq_len
    positions = torch.arange(tokens)[None]
    return (
        batch_flops(config.architecture, layers_of(ModelConfig.from_job(config)), positions, trained_layers(config))
        / tokens
    )


def step_time(config: JobConfig, layout: Layout, gpu: Gpu, efficiency: Efficiency) -> StepTime:
    """The step's time and traffic. Traffic is the most of any rank in each dimension."""
    times = [_rank_step(config, layout, rank, gpu, efficiency) for rank in range(layout.pp)]
    slowest = max(times, key=lambda time: time.total)
    most = {name: max(time.traffic[name] for time in times) for name in slowest.traffic}
    return StepTime(slowest.compute, slowest.bubble, slowest.data_parallel, slowest.optimizer, most)


def tokens_per_step(config: JobConfig, layout: Layout) -> int:
    rows = layout.rows * layout.microbatches * layout.accumulation * layout.dp_replicate * layout.dp_shard
    return rows * config.training.seq_len


def _rank_step(config: JobConfig, layout: Layout, rank: int, gpu: Gpu, efficiency: Efficiency) -> StepTime:
    stages, microbatches = layout.stages[rank], layout.microbatches
    one = sum((_stage_seconds(config, layout, stage, gpu, efficiency) for stage in stages), Seconds())
    a_pass = one * microbatches
    waiting = a_pass.total * layout.bubble / (1 - layout.bubble)
    traffic = step_traffic(config, layout, rank)

    data = {name: traffic[name] / bandwidth(layout, name, gpu, efficiency) for name in ("dp_shard", "dp_replicate")}
    compute = a_pass * layout.accumulation
    hidden = efficiency.overlap * compute.total
    exposed = max(0.0, sum(data.values()) - hidden)
    optimizer = _optimizer_seconds(config, layout, stages, gpu, efficiency)
    return StepTime(compute, waiting * layout.accumulation, exposed, optimizer, traffic)


def _stage_seconds(config: JobConfig, layout: Layout, stage: Stage, gpu: Gpu, efficiency: Efficiency) -> Seconds:
    """A micro-batch, forward and backward."""
    layers, a, types = layers_of(ModelConfig.from_job(config)), config.architecture, Types.of(config, layout)
    tokens = local_tokens(config, layout)
    peak = gpu.fp32_flops if types.product == 4 else gpu.bf16_flops
    links = {name: bandwidth(layout, name, gpu, efficiency) for name in ("tp", "cp")}
    seconds = Seconds()
    for number in stage.layers:
        passes = Passes.of(config, number)
        weights_read = layer_matmul_weights(a) // layout.tp
        pairs = layout.rows * pairs_of_busiest(config, layout, layers[number], efficiency.windows)
        collective = _tp_bytes(config, layout)
        seconds += Seconds(
            matmul=2 * weights_read * tokens * passes.matmul / (peak * efficiency.matmul),
            attention=a.head_dim * pairs * passes.attention / (peak * efficiency.attention),
            memory=memory_bytes(config, layers[number])
            * tokens
            / layout.tp
            * passes.memory
            / (gpu.hbm * efficiency.hbm),
            tp=4 * collective * passes.exchanges / links["tp"],
            cp=received_in_forward(config, layout, layers[number].scopes, types.product)
            * passes.exchanges
            / links["cp"],
        )
    if stage.last:
        trained = trained_layers(config) is None
        logits = tokens * a.vocab_size // layout.tp
        seconds += Seconds(
            matmul=2 * a.dim * logits * (3 if trained else 2) / (peak * efficiency.matmul),
            memory=BYTES_A_LOGIT * logits / (gpu.hbm * efficiency.hbm),
            tp=2 * _tp_bytes(config, layout) / links["tp"],
        )
    if stage.first:
        seconds += Seconds(tp=2 * _tp_bytes(config, layout) / links["tp"])
    return seconds


@dataclass(frozen=True)
class Passes:
    """How often a block's work is done in a step, in units of its forward pass; attention in FLOPs a pair and head dim."""

    matmul: float
    attention: float
    memory: float
    exchanges: float

    @classmethod
    def of(cls, config: JobConfig, layer: int) -> "Passes":
        """Recomputation included; attention's backward is 10 for 4, since it computes the scores again."""
        trained, ac, a = trained_layers(config), config.activation_checkpoint, config.architecture
        lowest = -1 if trained is None else min(trained)
        if layer < lowest:
            return cls(1, 4, 1, 1)
        backward = 2 if trained is None or layer in trained else 1
        again_matmul = again_attention = again = 0.0
        if ac.mode == "full" or (ac.mode == "selective" and recomputes(ac.selective_ac_option, layer)):
            again_matmul = again_attention = again = 1.0
            if ac.mode == "selective" and ac.selective_ac_option == "op":
                again_attention = 0.0
                # wv, wo and w3: every second product.
                done = a.dim * (a.head_dim * (a.n_kv_heads + a.n_heads) + a.ffn_dim)
                again_matmul = done / layer_matmul_weights(a)
        return cls(1 + backward + again_matmul, 14 + 4 * again_attention, 3 + again, 2 + again)


def pairs_of_busiest(config: JobConfig, layout: Layout, position: LayerPosition, windows: float) -> float:
    """Pairs of one row on the rank with most, those of heads that do not see the whole sequence counted as 1 / windows."""
    tokens, cut = config.training.seq_len, config.parallelism.context_parallel_load_balancer
    part = len(position.scopes) // layout.tp
    most = 0.0
    for rank in range(layout.tp):
        own = position.scopes[rank * part : (rank + 1) * part]
        wide = tuple(scope for scope in own if scope >= tokens)
        narrow = tuple(scope for scope in own if scope < tokens)
        (full,), (cut_off,) = (rank_pairs(heads, tokens, 1, layout.cp, cut) for heads in (wide, narrow))
        most = max(most, *(f + c / windows for f, c in zip(full, cut_off, strict=True)))
    return most


def memory_bytes(config: JobConfig, position: LayerPosition) -> int:
    """Read and written for each token of a layer's forward pass outside products: two norms, two sums, SwiGLU, rotation."""
    a = config.architecture
    numbers = 2 * 2 * a.dim + 2 * 3 * a.dim + 3 * a.ffn_dim
    heads = (a.n_heads + a.n_kv_heads) * a.head_dim
    numbers += 2 * heads * (not isinstance(position.rotary, NoRotary)) + 2 * heads * a.qk_norm
    return 2 * numbers


# Traffic


def bandwidth(layout: Layout, dimension: str, gpu: Gpu, efficiency: Efficiency) -> float:
    """Bytes a second of a rank in collectives of this dimension: NVLink where its groups lie in one node.

    A group that leaves its nodes uses the adapter of each of its members there: a ring on each, with a part of the data.
    """
    reach = layout.reach(dimension)
    if reach <= gpu.per_node:
        return gpu.nvlink * efficiency.links
    size = layout.fsdp if dimension == "dp_shard" else layout.degrees()[dimension]
    members = max(1, gpu.per_node // (reach // size))
    if dimension in ("cp", "pp"):  # sent from rank to rank, over the rank's own adapter
        members = 1
    return min(gpu.nvlink, members * gpu.network) * efficiency.links


def step_traffic(config: JobConfig, layout: Layout, rank: int) -> dict[str, int]:
    """Bytes that a rank of pipeline rank `rank` sends, or receives, in a step, by mesh dimension.

    Rings are taken for all-gather, reduce-scatter and all-reduce: (n - 1) / n of the whole, twice for the last.
    """
    model, types, stages = ModelConfig.from_job(config), Types.of(config, layout), layout.stages[rank]
    trained = trained_layers(config)
    own = [w for w in weights(model, layout.tp) if any(stage.holds(w.name) for stage in stages)]
    updated = sum(w.numel for w in own if is_trained(w.name, trained))
    passes, micro = layout.accumulation, layout.accumulation * layout.microbatches

    n, r = layout.fsdp, layout.dp_replicate
    gathered, reduced = types.product * sum(w.numel * gathers(config, layout, w) for w in own), types.reduced * updated
    replicated = reduced // n * passes if layout.sharded else 4 * updated
    layers = layers_of(model)
    exchanged = sum(
        received_in_forward(config, layout, layers[number].scopes, types.product) * Passes.of(config, number).exchanges
        for stage in stages
        for number in stage.layers
    )
    blocks = sum(4 * Passes.of(config, number).exchanges for stage in stages for number in stage.layers)
    ends = sum(2 * (stage.first + stage.last) for stage in stages)
    hidden = local_tokens(config, layout) // layout.tp * config.architecture.dim * types.stream
    # A stage sends activations on, unless it is the last, and gradients back, unless it is the first.
    sent = sum((not stage.last) + (not stage.first) for stage in stages)
    return {
        "dp_replicate": 2 * (r - 1) * replicated // r,
        "dp_shard": (n - 1) * (gathered + reduced) * passes // n,
        "cp": int(exchanged * micro),
        "tp": int((blocks + ends) * _tp_bytes(config, layout) * micro),
        "pp": sent * hidden * micro,
    }


def gathers(config: JobConfig, layout: Layout, weight: Weight) -> int:
    """How often FSDP makes a weight whole in a pass, as `parallel.parallelize.apply_fsdp` wraps it.

    For the forward pass, and again for the backward pass where it has let go of it and there is one. With "always" in a
    pipeline each micro-batch counts, which is the most there can be: two in a row share a copy.
    """
    head = weight.name in ("norm.weight", "output.weight")
    root = config.architecture.tie_embeddings and weight.layer is None  # FSDP keeps the outermost group
    if root or stays_gathered(config) or (head and config.parallelism.fsdp_reshard_after_forward == "default"):
        return 1
    trained, number = trained_layers(config), -1 if weight.layer is None else weight.layer  # the embedding comes first
    if trained is not None and not head and number < min(trained) - 1:
        return layout.microbatches  # no gradient passes here; one group further FSDP has prefetched for nothing
    return 2 * layout.microbatches


def _tp_bytes(config: JobConfig, layout: Layout) -> int:
    """Of one all-gather or reduce-scatter of a micro-batch's residual stream."""
    whole = local_tokens(config, layout) * config.architecture.dim * Types.of(config, layout).stream
    return whole * (layout.tp - 1) // layout.tp


def _optimizer_seconds(
    config: JobConfig, layout: Layout, stages: Sequence[Stage], gpu: Gpu, efficiency: Efficiency
) -> float:
    """AdamW and the gradient norm: as fast as memory is; with CPU offload as fast as PCIe, parameters and gradients too."""
    model, trained = ModelConfig.from_job(config), trained_layers(config)
    own = [w for w in weights(model, layout.tp) if any(stage.holds(w.name) for stage in stages)]
    updated = sum(w.shard(layout.fsdp) for w in own if is_trained(w.name, trained))
    if not offloads(config, layout):
        return 4 * OPTIMIZER_PASSES * updated / (gpu.hbm * efficiency.hbm)
    shards = sum(w.shard(layout.fsdp) for w in own)
    moved = layout.accumulation * (2 * shards + updated)
    return 4 * (OPTIMIZER_PASSES * updated + moved) / (gpu.host * efficiency.links)
