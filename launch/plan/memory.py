"""Formulas for a rank's memory at the peak of a training step, from the shapes in `model/` and `parallel/`.

Bytes throughout. For its backward pass a block keeps what its operators save: the residual stream before each norm, the
norms' outputs, queries, keys, values, output and log-sum-exp of attention, and three hidden vectors of the feed-forward.
Tests compare this with the storages that autograd saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from farsight.configs.schema import NoRotary
from farsight.kernels.chunked_loss import chunk_of
from farsight.launch.plan import adapters
from farsight.launch.plan.heads import halo_bytes, keys_seen_numbers, received_in_forward
from farsight.launch.plan.layout import PipelineStage
from farsight.launch.plan.optimizer import optimizer_bytes
from farsight.launch.plan.run import Run
from farsight.launch.plan.weights import CODE_8BIT, Weight


@dataclass(frozen=True)
class RankMemory:
    """Memory of a pipeline rank in bytes; if the ranks of a stage differ, that of the rank that holds most."""

    frozen: int
    """Frozen weights, with their scales."""
    trained: int
    """Trained weights."""
    gradients: int
    optimizer: int
    paged: int
    """Moments that bitsandbytes moves to host memory when the GPU is full; not in any sum."""
    saved: int
    """Activations of all micro-batches in flight."""
    recomputed: int
    """Activations of one block that is recomputed in the backward pass."""
    gradients_of_activations: int
    """Those of one block."""
    logits: int
    """Those of a chunk of tokens, and the loss's gradients with respect to hidden states and, if it trains, the head."""
    caches: dict[str, int]
    """`rope`: tables; `halo`: received keys; `pipeline`: receive buffers; in fine-tuning `rows`: token ids and labels."""
    dequantized: int
    """One linear layer's weight, dequantised for its product."""
    casts: int
    """Copies of adapters in the type of the products, in blocks for which autograd keeps them."""
    gathered: int
    """FSDP's copies of parameters and gradients of whole blocks, or DDP's buckets."""
    gathered_head: int
    """FSDP's copy of the head."""

    @property
    def parameters(self) -> int:
        return self.frozen + self.trained

    @property
    def activations(self) -> int:
        return self.saved + self.recomputed + self.gradients_of_activations

    @property
    def in_block(self) -> int:
        """Held only while a block's gradients are computed."""
        return self.recomputed + self.gradients_of_activations + self.dequantized + self.gathered

    @property
    def in_loss(self) -> int:
        """Held only while the loss and its gradients are computed."""
        return self.logits + self.gathered_head

    @property
    def peak(self) -> int:
        """The most held at once: blocks' gradients and the loss's are not computed at the same time."""
        held = self.parameters + self.gradients + self.optimizer + self.saved + self.casts + sum(self.caches.values())
        return held + max(self.in_block, self.in_loss)

    @property
    def parts(self) -> dict[str, int]:
        """Fine-tuning's memory by part, in the order in which a run allocates them. The sum is more than the peak."""
        return {
            "base": self.frozen,
            "adapters": self.trained,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "transient": self.dequantized + self.casts + self.gathered,
            "other": sum(self.caches.values()),
        }


def memory_of(run: Run) -> list[RankMemory]:
    """The memory of each pipeline rank."""
    return [rank_memory(run, rank) for rank in range(run.layout.pp)]


def rank_memory(run: Run, rank: int = 0) -> RankMemory:
    """The memory of pipeline rank `rank`."""
    layout, stages, base = run.layout, run.layout.stages[rank], run.base
    own, layers = run.own(rank), [number for stage in stages for number in stage.layers]
    on_gpu = [] if run.offloads else own
    trained = [w for w in on_gpu if w.trained]
    optimizer, paged = optimizer_bytes(run.config.optimizer, trained, layout.fsdp)
    in_flight = layout.in_flight(rank)
    # Activations come from the previous stage, gradients from the next one.
    received = sum((not stage.first) + (not stage.last) for stage in stages)
    caches = {
        "rope": rope_tables_bytes(run, layers) * -(-in_flight // len(stages)),
        "halo": max((halo_bytes(run, run.positions[n].scopes) for n in layers), default=0),
        "pipeline": received
        * layout.microbatches
        * run.tokens
        // layout.tp
        * run.config.architecture.dim
        * run.product,
    }
    if run.finetune:
        caches["rows"] = 4 * 8 * run.tokens
    logits, gathered_head = loss_bytes(run) if any(stage.last for stage in stages) else (0, 0)
    again = (block_bytes(run, n) for n in layers if n >= run.layers.lowest and run.recomputes(n))
    trained_bytes = sum(w.held(layout.fsdp) for w in trained)
    return RankMemory(
        # All scales of double quantisation share a table of values.
        frozen=sum(w.held(layout.fsdp) for w in on_gpu if not w.trained)
        + CODE_8BIT * (base.quantization in ("nf4", "fp4") and base.double_quantization),
        trained=trained_bytes,
        gradients=trained_bytes,
        optimizer=optimizer,
        paged=paged,
        saved=sum(saved_activations(run, stage) for stage in stages) * in_flight // len(stages),
        recomputed=max(again, default=0),
        gradients_of_activations=block_gradients(run) if layers else 0,
        logits=logits,
        caches=caches,
        dequantized=adapters.dequantized_bytes(run),
        casts=adapters.casts_bytes(run),
        gathered=_gathered(run, own, layers[-1]) if layers else 0,
        gathered_head=gathered_head,
    )


def _gathered(run: Run, own: Sequence[Weight], layer: int) -> int:
    """Bytes of `RankMemory.gathered`; under FSDP, a block's parameters, the next one's and their receive buffer, and the block's
    gradients before and in their reduction.

    Args:
        layer: any that the rank holds.
    """
    if run.finetune:
        return adapters.gathered_bytes(run)
    layout, a = run.layout, run.config.architecture
    block, everything = sum(w.numel for w in own if w.layer == layer), sum(w.numel for w in own)
    if not run.sharded:
        return 0
    reduction = (run.product + run.reduced) * block
    if run.stays_gathered:
        # Gathered once per pass; gradients of its micro-batches are summed unsharded.
        added_up = run.reduced * everything if layout.microbatches > 1 else 0
        return run.product * everything + added_up + reduction
    return run.product * (3 * block + a.tie_embeddings * a.vocab_size * a.dim // layout.tp) + reduction


# Activations


def saved_activations(run: Run, stage: PipelineStage) -> int:
    """Bytes that a stage keeps for a micro-batch between its forward and backward pass, without the loss's gradients."""
    recomputed = run.tokens // run.layout.tp * run.config.architecture.dim * run.product
    recomputed += adapters.kept_inputs(run)
    passed = [number for number in stage.layers if number >= run.layers.lowest]  # no gradients pass below
    saved = sum(
        recomputed + _kept_results(run, number) if run.recomputes(number) else block_bytes(run, number)
        for number in passed
    )
    return saved + stage.last * run.tokens // run.layout.tp * norm_bytes(run, run.everything)


def norm_bytes(run: Run, trains: bool) -> int:
    """Bytes per token that a norm over the residual stream keeps: its input and a scale."""
    return _norm_inputs(run, trains) * run.config.architecture.dim * _norm_width(run) + 4


def _norm_width(run: Run) -> int:
    """Bytes of a number in a norm's input; norms that multiply by 1 + weight compute in fp32."""
    return 4 if run.config.architecture.zero_centered_norms else run.product


def _norm_inputs(run: Run, trains: bool) -> int:
    """Copies of its input that a norm keeps: on CPUs a trained norm also keeps it normalised, and a frozen one in fp32."""
    return 2 if run.cpu and (trains or _norm_width(run) < 4) else 1


def rope_tables_bytes(run: Run, layers: Sequence[int]) -> int:
    """Bytes of the RoPE tables: two in fp32 over all tokens for each distinct rotation of these layers. GPUs train without any."""
    if not run.cpu:
        return 0
    rotaries = {run.positions[number].rotary for number in layers} - {NoRotary()}
    return 8 * run.config.architecture.rotated_dim * run.tokens * len(rotaries)


def block_bytes(run: Run, number: int) -> int:
    """Bytes that autograd keeps for one block."""
    a, layout, tokens, product = run.config.architecture, run.layout, run.tokens, run.product
    heads, kv_heads = a.n_heads // layout.tp * a.head_dim, a.n_kv_heads // layout.tp * a.head_dim
    whole = number in run.layers.whole
    norm = norm_bytes(run, whole)
    stream = tokens // layout.tp * (4 if a.norm_placement == "sandwich" else 2) * norm
    if a.qk_norm:
        inputs, scales = _norm_inputs(run, whole), (heads + kv_heads) // a.head_dim
        if a.qk_norm_span == "projection":
            scales = 2
        stream += tokens * ((heads + kv_heads) * inputs * _norm_width(run) + 4 * scales)
    attention = 2 * heads * product + 4 * a.n_heads // layout.tp  # queries, output, log-sum-exp
    hidden = 2 * a.ffn_dim // layout.tp
    keys = 2 * kv_heads * product * tokens
    if layout.cp > 1:
        keys = product * layout.rows * keys_seen_numbers(run, run.positions[number].scopes)
        attention += heads * product  # outputs by piece, and joined
    # Linear layers' inputs are kept for weight gradients: whole sequences, even where TP divides the stream.
    read = product * (2 * a.dim + a.ffn_dim // layout.tp) if whole else adapters.inputs_bytes(run, number)
    added = adapters.added_bytes(run, number, norm)
    return stream + tokens * (read + hidden * product + attention) + keys + added


def _kept_results(run: Run, number: int) -> int:
    """Bytes that selective checkpointing keeps besides a block's input: attention and the keys received for it, and by operators
    every second matrix product.

    In the order of the forward pass (wk, wv, wq, wo, w1, w3, w2) these are wk, wq, w1 and w2.
    """
    if not run.keeps_attention:
        return 0
    a, tp = run.config.architecture, run.layout.tp
    heads, kv_heads = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    products = kv_heads + heads + a.ffn_dim + a.dim * tp  # w2's is whole on every rank, until it is summed
    kept = heads + run.by_operator * products
    halo = received_in_forward(run, run.positions[number].scopes)
    return run.tokens * (kept * run.product + 4 * a.n_heads) // tp + halo


def block_gradients(run: Run) -> int:
    """Bytes of gradients that exist at once in a block's backward pass: three hidden vectors and two stream vectors per token."""
    a = run.config.architecture
    return run.tokens * (3 * a.ffn_dim * run.product + 2 * a.dim * run.product) // run.layout.tp


def loss_bytes(run: Run) -> tuple[int, int]:
    """Bytes that `kernels.chunked_loss` holds, and FSDP's copy of the head, which fine-tuning's estimate leaves out.

    The loss holds a chunk's logits twice in fp32, and gradients with respect to hidden states and, if trained, the head.
    """
    a, tokens, product = run.config.architecture, run.tokens, run.product
    vocabulary = a.vocab_size // run.layout.tp
    chunk = min(tokens, run.config.loss.chunk_tokens or chunk_of(vocabulary, "cuda", run.everything))
    head = vocabulary * a.dim
    # Below fp32 the logits' gradient also exists in the type of the products.
    logits = (8 if product == 4 else 8 + product) * chunk * vocabulary + tokens * a.dim * product
    if run.everything:
        logits += head * (4 if product == 4 else 4 + 2 * product)
    return logits, product * head if run.sharded and not run.finetune else 0
