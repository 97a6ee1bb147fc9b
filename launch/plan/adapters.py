"""Memory and work that fine-tuning adds to a block: adapters, GARFA, and a base that bitsandbytes has packed.

In pre-training it is 0. Products run under autocast with a bf16 base: trained parameters, which are fp32, have a bf16
copy.
"""

import math

from farsight.configs.finetuning import Projection
from farsight.launch.plan.run import Run


def inputs_bytes(run: Run, layer: int) -> int:
    """Bytes per token kept for the inputs of a layer's linear layers, whose own weights are frozen.

    Frozen weights keep none, except 8-bit ones in bitsandbytes. Adapters share their inputs with the projections that read
    the same, unless dropout gives each a copy.
    """
    a, lora = run.config.architecture, run.lora
    shared: dict[Projection, str] = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention"}
    shared |= {"gate_proj": "ffn", "up_proj": "ffn", "down_proj": "hidden"}  # o_proj reads what attention keeps
    sizes = {"attention": a.dim, "ffn": a.dim, "hidden": a.ffn_dim}
    read = {*sizes} if run.base.quantization == "int8" else set()
    own = 0
    for module, rank in run.ranks.get(layer, {}).items():
        outputs, inputs = run.linears[module]
        own += run.product * (rank + 2 * outputs * lora.dora)
        if lora.dropout:
            own += inputs * (run.product + _mask(run))
        elif module in shared:
            read.add(shared[module])
    return own + run.product * sum(sizes[name] for name in read)


def kept_inputs(run: Run) -> int:
    """Bytes that a recomputed block keeps: the inputs of bitsandbytes' 8-bit layers, which recomputation does not free."""
    a = run.config.architecture
    inputs = 2 * a.dim + a.n_heads * a.head_dim + a.ffn_dim
    return run.tokens * run.product * inputs * (run.base.quantization == "int8")


def added_bytes(run: Run, layer: int, norm: int) -> int:
    """Bytes that autograd keeps for a block besides those of `memory.block_bytes`; less than 0 if it keeps fewer.

    Args:
        norm: bytes per token that the block's first norm keeps.
    """
    a, lora, layers, kept = run.config.architecture, run.lora, run.layers, 0
    packed, adapted = run.base.quantization != "none", layer in layers.lora
    if lora.dora and lora.dropout and packed and adapted:
        # DoRA also multiplies dropout's output by the weight, which autograd keeps dequantised.
        kept += run.product * sum(math.prod(run.linears[module]) for module in lora.modules)
    if layer in layers.garfa:  # keys before their rotation, and queries if they are rotated too
        kept += run.tokens * run.product * a.head_dim * (a.n_kv_heads + a.n_heads * run.turns_queries)
    if layer == layers.lowest and layer not in layers.whole:
        # Its input needs no gradient: a norm before attention keeps nothing, and the projections' dropouts keep no masks.
        norm = norm * (a.norm_placement != "post") + run.product * a.dim * (run.base.quantization == "int8")
        masked = sum(module in lora.modules for module in ("q_proj", "k_proj", "v_proj")) * adapted
        kept -= run.tokens * (norm + masked * a.dim * _mask(run))
    return kept


def _mask(run: Run) -> int:
    """Bytes that dropout keeps per number: its mask, or on CPUs its factor."""
    return (run.product if run.cpu else 1) * bool(run.lora.dropout)


def dequantized_bytes(run: Run) -> int:
    """Bytes of the largest dequantised weight; for its row norms, DoRA also computes LoRA's product with an identity matrix, and
    its sum with the weight."""
    largest = max((w.numel for w in run.weights if w.linear and not w.trained), default=0)
    size = run.product * largest if run.base.quantization != "none" else 0
    if not (largest and run.lora.enable and run.lora.dora):
        return size
    inputs = max(run.linears[module][1] for module in run.lora.modules)
    identity = inputs**2 * (4 if run.product == 4 else 4 + run.product)
    return size + max(identity + run.product * largest, 3 * run.product * largest)


def casts_bytes(run: Run) -> int:
    """Bytes of cast weights that products keep for their input's gradient: in all blocks, but in only one of the recomputed ones."""
    if run.finetune is None or run.product == 4:
        return 0
    layers = range(run.config.architecture.n_layers)
    sizes = {layer: run.product * run.trained(layer=layer) for layer in layers}
    again = [size for layer, size in sizes.items() if run.recomputes(layer)]
    return sum(sizes.values()) - sum(again) + max(again, default=0)


def gathered_bytes(run: Run) -> int:
    """FSDP's unsharded copies in fine-tuning: a block's packed weights and adapters, the next one's, and one's gradients to reduce."""
    if run.layout.fsdp == 1:
        return 0
    layers = range(run.config.architecture.n_layers)
    frozen = [w for w in run.weights if not w.trained]
    packed = max(sum(w.packed if w.linear else 4 * w.numel for w in frozen if w.layer == layer) for layer in layers)
    trained = 4 * max(run.trained(layer=layer) for layer in layers)
    return 2 * (packed + trained) + trained


def added_work(run: Run, layer: int, products: float, passes: float) -> tuple[float, float]:
    """FLOPs, and bytes moved, in a layer for a micro-batch, besides those of the layer's own products and operations.

    Args:
        products: times that the layer's products are computed.
        passes: times that its other operations are.
    """
    flops, moved, tokens, lora, shapes = 0.0, 0.0, run.tokens, run.lora, run.linears
    if layer in run.layers.lora:
        flops += 2 * run.trained("lora", layer) * tokens * (products + 1)
        # Dropout reads and writes its input; the adapter's output is scaled and added.
        numbers = sum(2 * bool(lora.dropout) * shapes[m][1] + 4 * shapes[m][0] for m in lora.modules)
        moved += run.product * numbers * tokens * passes
    if run.base.quantization != "none":  # each product first dequantises its weight
        linears = [w for w in run.weights if w.layer == layer and w.linear and not w.trained]
        moved += sum(run.product * w.numel + w.held(1) for w in linears) * products
    return flops, moved
