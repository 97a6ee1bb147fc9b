"""Formulas for the cost of a training step: FLOPs, bytes over each mesh dimension, and seconds.

A pipeline rank's time for a micro-batch consists of matrix products, attention on its busiest rank, memory-bound
operations, and collectives that are not hidden. A share of it hides data-parallel traffic. Each row of a batch counts as one
document.
"""

from dataclasses import dataclass, field, replace

import torch

from farsight.configs.schema import Architecture, NoRotary
from farsight.kernels.scoped_attention.cost import FLOPS_PER_PAIR, Pass
from farsight.launch.plan.adapters import added_work
from farsight.launch.plan.hardware import Machine
from farsight.launch.plan.heads import rank_pairs, received_in_forward
from farsight.launch.plan.layout import ParallelLayout, PipelineStage
from farsight.launch.plan.run import Run
from farsight.launch.plan.weights import Weight
from farsight.model.build import trained_layers
from farsight.model.flops import Adapters, batch_flops, layer_matmul_weights
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
    """Norms, rotation, activation, residual sums, softmax of the loss."""
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

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        others = {"bubble": self.bubble, "data_parallel": self.data_parallel, "optimizer": self.optimizer}
        return vars(self.compute) | others


def flops_per_token(run: Run) -> float:
    """FLOPs of training per token, as runs report them: without recomputation, and only for the pairs that heads see."""
    tokens = run.config.training.seq_len
    adapters = Adapters(run.layers.lowest, run.trained("lora")) if run.finetune else None
    positions, trained = torch.arange(tokens)[None], trained_layers(run.config)
    return batch_flops(run.config.architecture, run.positions, positions, trained, adapters) / tokens


def step_time(run: Run, machine: Machine) -> StepTime:
    """The step's time on the slowest pipeline rank, and its traffic: the maximum over pipeline ranks in each dimension."""
    times = [_rank_step(run, rank, machine) for rank in range(run.layout.pp)]
    slowest = max(times, key=lambda time: time.total)
    return replace(slowest, traffic={name: max(time.traffic[name] for time in times) for name in slowest.traffic})


def _rank_step(run: Run, rank: int, machine: Machine) -> StepTime:
    layout, traffic = run.layout, step_traffic(run, rank)
    one = sum((_stage_seconds(run, stage, machine) for stage in layout.stages[rank]), Seconds())
    a_pass = one * layout.microbatches
    compute = a_pass * layout.accumulation
    data = sum(traffic[name] / bandwidth(layout, name, machine) for name in ("dp_shard", "dp_replicate"))
    return StepTime(
        compute,
        bubble=a_pass.total * layout.bubble / (1 - layout.bubble) * layout.accumulation,
        data_parallel=max(0.0, data - machine.efficiency.overlap * compute.total),
        optimizer=_optimizer_seconds(run, rank, machine),
        traffic=traffic,
    )


def _stage_seconds(run: Run, stage: PipelineStage, machine: Machine) -> Seconds:
    """Time of a micro-batch in a pipeline stage, forward and backward."""
    layout, a, tokens = run.layout, run.config.architecture, run.tokens
    speed, efficiency = machine.flops(run.product), machine.efficiency
    links = {name: bandwidth(layout, name, machine) for name in ("tp", "cp")}
    collective = _tp_bytes(run)
    seconds = Seconds()
    for number in stage.layers:
        passes, position = Passes.of(run, number), run.positions[number]
        flops = 2 * (layer_matmul_weights(a) // layout.tp) * tokens * passes.matmul
        # In pre-training these operations are taken to be in bf16.
        width = run.product if run.finetune else 2
        moved = width * numbers_moved(a, position) * tokens / layout.tp * passes.memory
        more_flops, more_moved = added_work(run, number, passes.matmul, passes.memory)
        pairs = layout.rows * pairs_of_busiest_rank(run, position, efficiency.windows)
        flops_at_peak = sum(
            times * FLOPS_PER_PAIR[pass_] / machine.attention(pass_) for pass_, times in passes.attention.items()
        )
        seconds += Seconds(
            matmul=(flops + more_flops) / (speed * efficiency.matmul),
            attention=a.head_dim * pairs * flops_at_peak / speed,
            memory=(moved + more_moved) / machine.hbm,
            tp=4 * collective * passes.collectives / links["tp"],
            cp=received_in_forward(run, position.scopes) * passes.halos / links["cp"],
        )
    if stage.last:
        logits = tokens * a.vocab_size // layout.tp
        seconds += Seconds(
            matmul=2 * a.dim * logits * (3 if run.everything else 2) / (speed * efficiency.matmul),
            memory=BYTES_A_LOGIT * logits / machine.hbm,
            tp=2 * collective / links["tp"],
        )
    if stage.first:
        seconds += Seconds(tp=2 * collective / links["tp"])
    return seconds


@dataclass(frozen=True)
class Passes:
    """A block's work per step, in units of its forward pass."""

    matmul: float
    attention: dict[Pass, float]
    """Forward and backward passes; the latter recomputes scores, and recomputation adds one of the former."""
    memory: float
    collectives: float
    """Of tensor parallelism."""
    halos: float
    """Exchanges of context parallelism."""

    @classmethod
    def of(cls, run: Run, layer: int) -> "Passes":
        """The passes of a layer, with recomputation."""
        if layer < run.layers.lowest:
            return cls(1, {"forward": 1}, 1, 1, 1)
        a, backward, again = run.config.architecture, 1 + (layer in run.layers.whole), float(run.recomputes(layer))
        again_matmul = again_attention = again
        if run.keeps_attention:
            again_attention = 0.0
        if run.recomputes(layer) and run.by_operator:
            # wv, wo and w3: every second product.
            done = a.dim * (a.head_dim * (a.n_kv_heads + a.n_heads) + a.ffn_dim)
            again_matmul = done / layer_matmul_weights(a)
        attention: dict[Pass, float] = {"forward": 1 + again_attention, "backward": 1}
        return cls(1 + backward + again_matmul, attention, 3 + again, 2 + again, 2 + again_attention)


def pairs_of_busiest_rank(run: Run, position: LayerPosition, windows: float) -> float:
    """Query-key pairs of one row on the busiest rank; pairs of heads that see less than the sequence count 1 / windows."""
    tokens, cut = run.config.training.seq_len, run.config.parallelism.context_parallel_load_balancer
    part = len(position.scopes) // run.layout.tp
    most = 0.0
    for rank in range(run.layout.tp):
        own = position.scopes[rank * part : (rank + 1) * part]
        wide = tuple(scope for scope in own if scope >= tokens)
        narrow = tuple(scope for scope in own if scope < tokens)
        (full,), (cut_off,) = (rank_pairs(heads, tokens, 1, run.layout.cp, cut) for heads in (wide, narrow))
        most = max(most, *(f + c / windows for f, c in zip(full, cut_off, strict=True)))
    return most


def numbers_moved(a: Architecture, position: LayerPosition) -> int:
    """Numbers that a layer's forward pass reads and writes per token outside of products: norms, two sums, activation, rotation."""
    heads = (a.n_heads + a.n_kv_heads) * a.head_dim
    norms = 4 if a.norm_placement == "sandwich" else 2
    rotated = not isinstance(position.rotary, NoRotary)
    return norms * 2 * a.dim + 2 * 3 * a.dim + 3 * a.ffn_dim + 2 * heads * rotated + 2 * heads * a.qk_norm


# Traffic


def bandwidth(layout: ParallelLayout, dimension: str, machine: Machine) -> float:
    """Bytes per second that a rank reaches in collectives of this dimension: NVLink's if its groups lie within a node.

    A group over several nodes uses the network adapter of each of its members in a node, with one ring per adapter.
    """
    gpu, links, reach = machine.gpu, machine.efficiency.links, layout.reach(dimension)
    if reach <= gpu.per_node:
        return gpu.nvlink * links
    size = layout.fsdp if dimension == "dp_shard" else layout.degrees()[dimension]
    members = max(1, gpu.per_node // (reach // size))
    if dimension in ("cp", "pp"):  # sent from rank to rank, over the rank's own adapter
        members = 1
    return min(gpu.nvlink, members * gpu.network) * links


def step_traffic(run: Run, rank: int) -> dict[str, int]:
    """Bytes that each GPU of pipeline rank `rank` sends (and receives) in a step, by mesh dimension.

    All-gather and reduce-scatter are assumed to be rings, with (n - 1) / n of the whole; all-reduce takes twice that.
    """
    layout, own, stages = run.layout, run.own(rank), run.layout.stages[rank]
    updated = sum(w.numel for w in own if w.trained)
    rounds, micro = layout.accumulation, layout.accumulation * layout.microbatches

    n, r = layout.fsdp, layout.dp_replicate
    # FSDP gathers in the type of the products; fine-tuning's weights as they are stored.
    gathered = sum((w.held(1) if run.finetune else run.product * w.numel) * gathers(run, w) for w in own)
    reduced = run.reduced * updated
    replicated = reduced // n if run.sharded else 4 * updated
    layers = [(Passes.of(run, i), run.positions[i].scopes) for stage in stages for i in stage.layers]
    exchanged = sum(received_in_forward(run, scopes) * passes.halos for passes, scopes in layers)
    collectives = sum(4 * passes.collectives for passes, _ in layers) + sum(
        2 * (stage.first + stage.last) for stage in stages
    )
    hidden = run.tokens // layout.tp * run.config.architecture.dim * run.product
    # A stage sends activations forward, unless it is the last, and gradients back, unless it is the first.
    sent = sum((not stage.last) + (not stage.first) for stage in stages)
    return {
        "dp_replicate": 2 * (r - 1) * replicated // r,
        "dp_shard": (n - 1) * (gathered + reduced) * rounds // n,
        "cp": int(exchanged * micro),
        "tp": int(collectives * _tp_bytes(run) * micro),
        "pp": sent * hidden * micro,
    }


def gathers(run: Run, weight: Weight) -> int:
    """Number of times FSDP gathers a weight in a pass, with groups as in `parallel.parallelize.apply_fsdp`.

    Once for the forward pass, and again for the backward pass if the copy was freed and gradients pass there. With
    "always" in a pipeline each micro-batch counts, which is an upper bound: two in a row share a copy.
    """
    number = -1 if weight.layer is None else weight.layer  # the embedding comes first
    if run.finetune:
        return 1 + (number >= run.layers.lowest)
    head = weight.name in ("norm.weight", "output.weight")
    root = run.config.architecture.tie_embeddings and weight.layer is None  # FSDP keeps the outermost group gathered
    if root or run.stays_gathered or (head and run.config.parallelism.fsdp_reshard_after_forward == "default"):
        return 1
    if not head and number < run.layers.lowest - 1:
        return run.layout.microbatches  # no gradients pass here, but FSDP prefetches one group more than it needs
    return 2 * run.layout.microbatches


def _tp_bytes(run: Run) -> int:
    """Bytes of one all-gather or reduce-scatter of a micro-batch's residual stream."""
    return run.tokens * run.config.architecture.dim * run.product * (run.layout.tp - 1) // run.layout.tp


def _optimizer_seconds(run: Run, rank: int, machine: Machine) -> float:
    """Time of AdamW and the gradient norm, at memory speed; with CPU offload at PCIe speed, with transfers of parameters and
    gradients."""
    own = run.own(rank)
    updated = sum(w.shard(run.layout.fsdp) for w in own if w.trained)
    if not run.offloads:
        return 4 * OPTIMIZER_PASSES * updated / machine.hbm
    shards = sum(w.shard(run.layout.fsdp) for w in own)
    moved = run.layout.accumulation * (2 * shards + updated)
    return 4 * (OPTIMIZER_PASSES * updated + moved) / (machine.gpu.host * machine.efficiency.links)
