"""Formulas for the cost of a training step: FLOPs, bytes over each mesh dimension, and seconds.

A pipeline rank's time for a micro-batch consists of matrix products, attention on its busiest rank, memory-bound
operations, and collectives that are not hidden. A share of it hides data-parallel traffic. Each row of a batch counts as one
document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from farsight.configs.schema import JobConfig, NoRotary
from farsight.launch.plan.hardware import Efficiency, Gpu
from farsight.launch.plan.heads import layers_of, rank_pairs, received_in_forward
from farsight.launch.plan.layout import ParallelLayout, PipelineStage
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
"""Bytes that `kernels.chunked_loss` reads and writes per logit; its passes over a chunk are not fused."""
OPTIMIZER_PASSES = 8
"""Reads and writes of a rank's parameters: the gradient norm reads the gradient; AdamW reads parameter, gradient and two
moments, and writes all but the gradient."""


@dataclass
class Seconds:
    """A rank's time for a micro-batch or a step, in seconds."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Norms, rotation, SwiGLU, residual sums, softmax of the loss."""
    tp: float = 0.0
    """Collectives of tensor parallelism."""
    cp: float = 0.0
    """Exchanges of context parallelism."""

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory + self.tp + self.cp

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, on the slowest pipeline rank."""

    compute: Seconds
    bubble: float
    """Waiting in the pipeline."""
    data_parallel: float
    """Traffic that the computation does not hide."""
    optimizer: float
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes that a rank sends in a step (and receives), by mesh dimension."""

    @property
    def total(self) -> float:
        return self.compute.total + self.bubble + self.data_parallel + self.optimizer


def flops_per_token(config: JobConfig) -> float:
    """FLOPs of training per token, as runs report them: without recomputation, and only for the pairs that heads see."""
    tokens = config.training.seq_len
    positions = torch.arange(tokens)[None]
    return (
        batch_flops(config.architecture, layers_of(ModelConfig.from_job(config)), positions, trained_layers(config))
        / tokens
    )


def step_time(config: JobConfig, layout: ParallelLayout, gpu: Gpu, efficiency: Efficiency) -> StepTime:
    """The step's time on the slowest pipeline rank, and its traffic: the maximum over pipeline ranks in each dimension."""
    times = [_rank_step(config, layout, rank, gpu, efficiency) for rank in range(layout.pp)]
    slowest = max(times, key=lambda time: time.total)
    most = {name: max(time.traffic[name] for time in times) for name in slowest.traffic}
    return StepTime(slowest.compute, slowest.bubble, slowest.data_parallel, slowest.optimizer, most)


def tokens_per_step(config: JobConfig, layout: ParallelLayout) -> int:
    """Tokens of an optimizer step, over all ranks."""
    rows = layout.rows * layout.microbatches * layout.accumulation * layout.dp_replicate * layout.dp_shard
    return rows * config.training.seq_len


def _rank_step(config: JobConfig, layout: ParallelLayout, rank: int, gpu: Gpu, efficiency: Efficiency) -> StepTime:
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


def _stage_seconds(
    config: JobConfig, layout: ParallelLayout, stage: PipelineStage, gpu: Gpu, efficiency: Efficiency
) -> Seconds:
    """Time of a micro-batch in a pipeline stage, forward and backward."""
    layers, a, types = layers_of(ModelConfig.from_job(config)), config.architecture, Types.of(config, layout)
    tokens = local_tokens(config, layout)
    peak = gpu.fp32_flops if types.product == 4 else gpu.bf16_flops
    links = {name: bandwidth(layout, name, gpu, efficiency) for name in ("tp", "cp")}
    seconds = Seconds()
    for number in stage.layers:
        passes = Passes.of(config, number)
        weights_read = layer_matmul_weights(a) // layout.tp
        pairs = layout.rows * pairs_of_busiest_rank(config, layout, layers[number], efficiency.windows)
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
    """A block's work per step, in units of its forward pass; attention in FLOPs per pair and head dimension."""

    matmul: float
    attention: float
    memory: float
    exchanges: float

    @classmethod
    def of(cls, config: JobConfig, layer: int) -> "Passes":
        """The passes of a layer, with recomputation. Attention takes 4 forward and 10 backward, which recomputes scores."""
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


def pairs_of_busiest_rank(config: JobConfig, layout: ParallelLayout, position: LayerPosition, windows: float) -> float:
    """Query-key pairs of one row on the busiest rank; pairs of heads that see less than the sequence count 1 / windows."""
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
    """Bytes that a layer's forward pass reads and writes per token outside of products: two norms, two sums, SwiGLU, rotation."""
    a = config.architecture
    numbers = 2 * 2 * a.dim + 2 * 3 * a.dim + 3 * a.ffn_dim
    heads = (a.n_heads + a.n_kv_heads) * a.head_dim
    numbers += 2 * heads * (not isinstance(position.rotary, NoRotary)) + 2 * heads * a.qk_norm
    return 2 * numbers


# Traffic


def bandwidth(layout: ParallelLayout, dimension: str, gpu: Gpu, efficiency: Efficiency) -> float:
    """Bytes per second that a rank reaches in collectives of this dimension: NVLink's if its groups lie within a node.

    A group over several nodes uses the network adapter of each of its members in a node, with one ring per adapter.
    """
    reach = layout.reach(dimension)
    if reach <= gpu.per_node:
        return gpu.nvlink * efficiency.links
    size = layout.fsdp if dimension == "dp_shard" else layout.degrees()[dimension]
    members = max(1, gpu.per_node // (reach // size))
    if dimension in ("cp", "pp"):  # sent from rank to rank, over the rank's own adapter
        members = 1
    return min(gpu.nvlink, members * gpu.network) * efficiency.links


def step_traffic(config: JobConfig, layout: ParallelLayout, rank: int) -> dict[str, int]:
    """Bytes that each GPU of pipeline rank `rank` sends (and receives) in a step, by mesh dimension.

    All-gather and reduce-scatter are assumed to be rings, with (n - 1) / n of the whole; all-reduce takes twice that.
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
    # A stage sends activations forward, unless it is the last, and gradients back, unless it is the first.
    sent = sum((not stage.last) + (not stage.first) for stage in stages)
    return {
        "dp_replicate": 2 * (r - 1) * replicated // r,
        "dp_shard": (n - 1) * (gathered + reduced) * passes // n,
        "cp": int(exchanged * micro),
        "tp": int((blocks + ends) * _tp_bytes(config, layout) * micro),
        "pp": sent * hidden * micro,
    }


def gathers(config: JobConfig, layout: ParallelLayout, weight: Weight) -> int:
    """Number of times FSDP gathers a weight in a pass, with groups as in `parallel.parallelize.apply_fsdp`.

    Once for the forward pass, and again for the backward pass if the copy was freed and gradients pass there. With
    "always" in a pipeline each micro-batch counts, which is an upper bound: two in a row share a copy.
    """
    head = weight.name in ("norm.weight", "output.weight")
    root = config.architecture.tie_embeddings and weight.layer is None  # FSDP keeps the outermost group gathered
    if root or stays_gathered(config) or (head and config.parallelism.fsdp_reshard_after_forward == "default"):
        return 1
    trained, number = trained_layers(config), -1 if weight.layer is None else weight.layer  # the embedding comes first
    if trained is not None and not head and number < min(trained) - 1:
        return layout.microbatches  # no gradients pass here, but FSDP prefetches one group more than it needs
    return 2 * layout.microbatches


def _tp_bytes(config: JobConfig, layout: ParallelLayout) -> int:
    """Bytes of one all-gather or reduce-scatter of a micro-batch's residual stream."""
    whole = local_tokens(config, layout) * config.architecture.dim * Types.of(config, layout).stream
    return whole * (layout.tp - 1) // layout.tp


def _optimizer_seconds(
    config: JobConfig, layout: ParallelLayout, stages: Sequence[PipelineStage], gpu: Gpu, efficiency: Efficiency
) -> float:
    """Time of AdamW and the gradient norm, at memory speed; with CPU offload at PCIe speed, with transfers of parameters and
    gradients."""
    model, trained = ModelConfig.from_job(config), trained_layers(config)
    own = [w for w in weights(model, layout.tp) if any(stage.holds(w.name) for stage in stages)]
    updated = sum(w.shard(layout.fsdp) for w in own if is_trained(w.name, trained))
    if not offloads(config, layout):
        return 4 * OPTIMIZER_PASSES * updated / (gpu.hbm * efficiency.hbm)
    shards = sum(w.shard(layout.fsdp) for w in own)
    moved = layout.accumulation * (2 * shards + updated)
    return 4 * (OPTIMIZER_PASSES * updated + moved) / (gpu.host * efficiency.links)
