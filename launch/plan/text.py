"""A training run's plan as text for a terminal, and the summary that a fine-tuning run shows before it trains."""

from textwrap import wrap
from typing import TYPE_CHECKING

from farsight.configs.finetuning import FinetuneConfig
from farsight.launch.plan.costs import StepTime, bandwidth
from farsight.launch.plan.hardware import Device, Machine, find_device
from farsight.launch.plan.heads import chosen_head_layout
from farsight.launch.plan.memory import RankMemory, rank_memory
from farsight.launch.plan.run import Run
from farsight.launch.plan.suggest import as_options, change_text, suggestions
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.position.layers import describe, layer_selection
from farsight.units import GIB, count, duration, gib, shown_seconds

if TYPE_CHECKING:
    from farsight.launch.plan.plan import Plan

WIDTH = 110


def plan_text(plan: "Plan") -> str:
    """One plan: header, memory, work, traffic, time, orders of heads, and whether it fits."""
    if plan.run.finetune:
        memory = memory_text(plan.run, plan.machine.device)
        return "\n".join([*_head(plan), "", memory, "", *_finetuning_time(plan)])
    lines = [*_head(plan), "", *_memory(plan), "", *_work(plan), "", *_time(plan)]
    if plan.head_layouts:
        lines += ["", *_head_layouts(plan)]
    return "\n".join([*lines, "", *_verdict(plan)])


def _head(plan: "Plan") -> list[str]:
    t, layout = plan.config.training, plan.layout
    nodes = -(-layout.world_size // plan.machine.gpu.per_node)
    where = f"{layout.world_size} × {plan.machine.kind}" + (f" in {nodes} nodes" if nodes > 1 else "")
    batch, each = plan.run.tokens_per_step // t.seq_len, f"{layout.rows} on a rank at a time"
    if layout.pp > 1:
        each += f", {layout.microbatches} in a pass of the pipeline ({layout.schedule})"
    if layout.accumulation > 1:
        each += f", accumulated {layout.accumulation} times"
    size = f"{count(plan.parameters)} parameters, {t.seq_len:,} tokens a sequence, {batch:,} sequences a step"
    if plan.run.finetune:
        size = f"{t.seq_len:,} tokens a row, {batch:,} rows a step"
    lines = [f"{plan.name} on {where}: {layout}", f"{size} ({each})"]
    if plan.changes:
        lines.append(f"planned with {as_options(plan.changes)}")
    lines += [f"note: {note}" for note in plan.notes]
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="  ")]


def _memory(plan: "Plan") -> list[str]:
    labels = []
    for rank, stages in enumerate(plan.layout.stages):
        held = "layers " + ", ".join(f"{s.layers.start}-{s.layers.stop - 1}" for s in stages if s.layers)
        held += ", embedding" * stages[0].first + ", head" * any(stage.last for stage in stages)
        labels.append(f"pp {rank}: {held}" if plan.layout.pp > 1 else held)
    width = max(24, *(len(label) + 2 for label in labels))
    title = f"{'memory of a rank, GiB':<{width}}"
    lines = [
        f"{title}{'param':>7}{'grad':>7}{'optim':>7}{'saved':>7}{'caches':>8}{'+ block':>9}{'or loss':>9}{'= peak':>8}"
    ]
    for label, m in zip(labels, plan.memory, strict=True):
        narrow = "".join(f"{gib(size, 1):>7}" for size in (m.parameters, m.gradients, m.optimizer, m.saved))
        wide = f"{gib(sum(m.caches.values()), 1):>8}{gib(m.in_block, 1):>9}{gib(m.in_loss, 1):>9}{gib(m.peak, 1):>8}"
        lines.append(f"{'  ' + label:<{width}}{narrow}{wide}")
    mode = plan.config.activation_checkpoint.mode
    lines.append(f"  saved: activations, checkpointing {mode!r}; the peak has the larger of block and loss")
    return lines


def _work(plan: "Plan") -> list[str]:
    by_tp, by_cp, both = plan.imbalance
    seen = "all heads see all earlier tokens"
    if plan.pairs_ratio > 1:
        seen = f"heads see 1/{plan.pairs_ratio:.2f} of the pairs that dense heads see"
    lines = [f"{count(plan.flops_per_token, 'G')} FLOP a token; {seen}"]
    if plan.layout.tp * plan.layout.cp > 1:
        lines.append(f"attention of the busiest rank over the mean: {both:.2f} (tp {by_tp:.2f}, cp {by_cp:.2f})")
    degrees = plan.layout.degrees()
    for name, size in plan.time.traffic.items():
        if size:
            over = "NVLink" if plan.layout.reach(name) <= plan.machine.gpu.per_node else "network"
            seconds = size / bandwidth(plan.layout, name, plan.machine)
            degree = f"{name} {degrees[name]}"
            if name == "dp_shard" and plan.layout.cp > 1:
                degree += f" × cp {plan.layout.cp}"
            lines.append(f"  traffic {degree:<20}{size / GIB:>9.1f} GiB a step over {over:<8}{seconds:>8.1f} s")
    return lines


def _time(plan: "Plan") -> list[str]:
    steps = plan.config.training.steps
    return [
        f"step {shown_seconds(plan.time.total)}: {_shares(plan.time)}",
        f"{plan.tokens_per_second:,.0f} tokens/s, {count(plan.tokens_per_second * 86400)} tokens a day, "
        f"MFU {100 * plan.mfu:.0f} %; {steps:,} steps take {duration(steps * plan.time.total)}",
    ]


def _finetuning_time(plan: "Plan") -> list[str]:
    time, steps = plan.time, plan.config.training.steps
    run = f"; {steps:,} steps take {duration(steps * time.total)}" if steps else ""
    return [
        f"{count(plan.flops_per_token, 'G')} FLOP a token; step {shown_seconds(time.total)}: {_shares(time)}",
        f"{plan.tokens_per_second:,.0f} tokens/s{run}",
    ]


def _shares(time: StepTime) -> str:
    """The parts of a step's time that take more than half a per cent of it."""
    shown = {name: seconds / time.total for name, seconds in time.parts.items() if seconds > 0.005 * time.total}
    words = {"matmul": "products", "data_parallel": "data parallel"}
    return ", ".join(f"{words.get(name, name)} {100 * share:.0f} %" for name, share in shown.items())


def _head_layouts(plan: "Plan") -> list[str]:
    chosen = chosen_head_layout(plan.config)
    first = next(iter(plan.head_layouts.values()))
    tp = "".join(f"{f'tp {degree}':>8}" for degree in first.imbalance)
    cp = "".join(f"{f'cp {ranks}, GiB':>13}" for ranks in first.halo_bytes)
    lines = [f"{'order of heads':<26}{tp}{cp}{'KV cache':>11}"]
    for name, cost in plan.head_layouts.items():
        label = name + " (chosen)" * (name == chosen)
        tp = "".join(f"{value:>8.2f}" for value in cost.imbalance.values())
        cp = "".join(f"{size / GIB:>13.2f}" for size in cost.halo_bytes.values())
        lines.append(f"  {label:<24}{tp}{cp}{100 * cost.cache_share:>9.0f} %")
    lines.append("  tp: imbalance; cp: keys received in one row's forward pass; KV cache: share of a dense one")
    return lines


def _verdict(plan: "Plan") -> list[str]:
    device = plan.machine.device
    usable = f"{gib(plan.worst.peak, 1)} GiB of {gib(device.usable, 1)} usable on {device.name}"
    if plan.fits:
        lines = [f"fits: {usable}"]
        if plan.layout.bubble > 0.3:
            lines.append(
                f"the pipeline waits {100 * plan.layout.bubble:.0f} % of the time: raise training.local_batch_size, "
                "which is its number of micro-batches"
            )
        return lines
    if plan.suggestion is None:
        return [f"does not fit: {usable}; the note above says what would"]
    return [f"does not fit: {usable}", f"would fit with {as_options(plan.suggestion)}"]


def assumptions_text(machine: Machine) -> str:
    """The assumptions behind a plan's times."""
    gpu, e = machine.gpu, machine.efficiency
    return (
        f"assumed for {machine.kind}: {gpu.bf16_flops / 1e12:.0f} TFLOP/s, memory {gpu.hbm / 1e12:.2f} TB/s, "
        f"NVLink {gpu.nvlink / 1e9:.0f} GB/s, network {gpu.network / 1e9:.0f} GB/s;\n"
        f"reached: matmul {e.matmul:.2f}, attention {machine.attention('forward'):.2f} forward and "
        f"{machine.attention('backward'):.2f} backward (× {e.windows:.2f} in heads with shorter scopes), "
        f"memory {e.hbm:.2f}, links {e.links:.2f};\n"
        f"data-parallel traffic hides behind {e.overlap:.2f} of the computation; each row is one document"
    )


# Fine-tuning


def summary(config: FinetuneConfig, ranks: int) -> str:
    """Describes the base's layers, the trained parameters, the optimizer, and the memory of one of `ranks` ranks."""
    device = find_device()
    run = Run.of(config, ranks, device.cpu)
    layers, model, base, o = run.layers, ModelConfig.from_job(config), config.base_model, config.optimizer
    double = ", double quantised" * (base.double_quantization and base.quantization != "int8")
    kept = f"linear layers in {base.quantization}{double}, the rest in {base.dtype}"
    trained = {
        "lora": (f"LoRA of rank {config.lora.rank} on layers", layers.lora),
        "garfa": ("GARFA on layers", layers.garfa),
        "layers": ("all weights of layers", layers.whole),
    }
    return "\n".join(
        [
            f"base {base.path}: {count_parameters(model):,} parameters, {base.dtype if base.quantization == 'none' else kept}",
            describe(model.layers()),
            *(
                f"{what} {layer_selection(numbers)}: {run.trained(group):,} parameters"
                for group, (what, numbers) in trained.items()
                if numbers
            ),
            f"{o.title}: lr {o.lr:g}, betas {o.beta1:g} and {o.beta2:g}, eps {o.eps:g}, weight decay {o.weight_decay:g}",
            memory_text(run, device),
        ]
    )


def memory_text(run: Run, device: Device) -> str:
    """A table of fine-tuning's memory by part, whether it fits the device, and if not, what to change."""
    memory = rank_memory(run)
    unit, size_of = ("GiB", GIB) if memory.peak >= GIB else ("MiB", 2**20)  # a test's model takes a few MiB
    lines = [f"{'memory of a rank' if run.layout.world_size > 1 else 'memory':<22}{unit:>8}"]
    for name, note in _notes(memory, run).items():
        label = "trained parameters" if name == "adapters" else name
        lines.append(f"  {label:<20}{memory.parts[name] / size_of:>8.2f}  {note}".rstrip())
    peak = f"  {'at the peak':<20}{memory.peak / size_of:>8.2f}  {unit}"
    lines.append(f"{peak} of {gib(device.usable)} GiB usable: {device.name}")
    if memory.paged:
        lines.append(f"  and {gib(memory.paged)} GiB of moments that move to host memory when the GPU is full")
    if memory.peak <= device.usable:
        return "\n".join([*lines, "fits"])
    excess = gib(memory.peak - device.usable)
    lines.append(f"does not fit: {excess} GiB too much. Changes, and what each alone would save:")
    alone, enough = suggestions(run, device)
    lines += [change_text(change, memory.peak) for change in alone]
    lines.append(
        "no change that was tried is enough: use a larger GPU, or several with data_parallel_shard_degree = -1"
        if enough is None
        else f"fits with {as_options(enough)}"
    )
    return "\n".join(lines)


def _notes(memory: RankMemory, run: Run) -> dict[str, str]:
    """A description of each part in `RankMemory.parts`."""
    base, mode = run.base, run.config.activation_checkpoint.mode
    kind = base.quantization if base.quantization != "none" else base.dtype
    double = " with double quantisation" if base.quantization in ("nf4", "fp4") and base.double_quantization else ""
    labels = {"lora": "LoRA", "garfa": "GARFA", "layers": "layers"}
    counts = ", ".join(f"{label} {run.trained(group):,}" for group, label in labels.items() if run.trained(group))
    copies = {
        "one dequantised weight": memory.dequantized,
        f"{base.dtype} copies of trained parameters": memory.casts,
        "FSDP's copies of two blocks": memory.gathered,
    }
    saved = f"{100 * memory.saved / memory.activations:.0f} % saved, the rest in one block"
    return {
        "base": f"{kind}{double}; norms, embedding and head {base.dtype}",
        "adapters": f"{counts}, fp32",
        "gradients": "fp32",
        "optimizer": run.config.optimizer.title,
        "activations": f"{saved}; checkpointing {mode!r}",
        "logits": "of a chunk",
        "transient": ", ".join(name for name, size in copies.items() if size),
        "other": "",
    }
