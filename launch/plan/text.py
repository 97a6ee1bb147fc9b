"""A training run's plan as text for a terminal."""

from textwrap import wrap
from typing import TYPE_CHECKING

from farsight.launch.plan.costs import bandwidth
from farsight.launch.plan.hardware import Efficiency, Gpu
from farsight.launch.plan.heads import chosen_head_layout
from farsight.launch.plan.memory import RankMemory
from farsight.launch.plan.suggest import as_options
from farsight.units import GIB, count, duration, gib, shown_seconds

if TYPE_CHECKING:
    from farsight.launch.plan.plan import Plan

WIDTH = 110


def plan_text(plan: "Plan", kind: str) -> str:
    """One plan: header, memory, work, traffic, time, orders of heads, and whether it fits."""
    lines = [*_head(plan, kind), "", *_memory(plan), "", *_work(plan), "", *_time(plan)]
    if plan.head_layouts:
        lines += ["", *_head_layouts(plan)]
    return "\n".join([*lines, "", *_verdict(plan, kind)])


def _head(plan: "Plan", kind: str) -> list[str]:
    t, layout = plan.config.training, plan.layout
    nodes = -(-plan.gpus // plan.gpu.per_node)
    where = f"{plan.gpus} × {kind}" + (f" in {nodes} nodes" if nodes > 1 else "")
    batch = plan.tokens_per_step // t.seq_len
    each = f"{layout.rows} on a rank at a time"
    if layout.pp > 1:
        each += f", {layout.microbatches} in a pass of the pipeline ({layout.schedule})"
    if layout.accumulation > 1:
        each += f", accumulated {layout.accumulation} times"
    lines = [
        f"{plan.name} on {where}: {layout}",
        f"{count(plan.parameters)} parameters, {t.seq_len:,} tokens a sequence, {batch:,} sequences a step ({each})",
    ]
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
    for label, memory in zip(labels, plan.memory, strict=True):
        lines.append(f"{'  ' + label:<{width}}{_memory_row(memory)}")
    mode = plan.config.activation_checkpoint.mode
    lines.append(f"  saved: activations, checkpointing {mode!r}; the peak has the larger of block and loss")
    return lines


def _memory_row(memory: RankMemory) -> str:
    caches = sum(memory.caches.values())
    narrow = (memory.parameters, memory.gradients, memory.optimizer, memory.saved)
    return (
        "".join(f"{gib(size, 1):>7}" for size in narrow)
        + f"{gib(caches, 1):>8}{gib(memory.in_block, 1):>9}{gib(memory.in_loss, 1):>9}{gib(memory.peak, 1):>8}"
    )


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
            over = "NVLink" if plan.layout.reach(name) <= plan.gpu.per_node else "network"
            seconds = size / bandwidth(plan.layout, name, plan.gpu, plan.efficiency)
            degree = f"{name} {degrees[name]}"
            if name == "dp_shard" and plan.layout.cp > 1:
                degree += f" × cp {plan.layout.cp}"
            lines.append(f"  traffic {degree:<20}{size / GIB:>9.1f} GiB a step over {over:<8}{seconds:>8.1f} s")
    return lines


def _time(plan: "Plan") -> list[str]:
    time, compute = plan.time, plan.time.compute
    parts = {
        "products": compute.matmul,
        "attention": compute.attention,
        "memory": compute.memory,
        "tp": compute.tp,
        "cp": compute.cp,
        "bubble": time.bubble,
        "data parallel": time.data_parallel,
        "optimizer": time.optimizer,
    }
    shown = [
        f"{name} {100 * seconds / time.total:.0f} %" for name, seconds in parts.items() if seconds > 0.005 * time.total
    ]
    steps = plan.config.training.steps
    return [
        f"step {shown_seconds(time.total)}: {', '.join(shown)}",
        f"{plan.tokens_per_second:,.0f} tokens/s, {count(plan.tokens_per_second * 86400)} tokens a day, "
        f"MFU {100 * plan.mfu:.0f} %; {steps:,} steps take {duration(steps * time.total)}",
    ]


def _head_layouts(plan: "Plan") -> list[str]:
    chosen = chosen_head_layout(plan.config)
    first = next(iter(plan.head_layouts.values()))
    columns = [f"tp {degree}" for degree in first.imbalance]
    halos = [f"cp {ranks}, GiB" for ranks in first.halo_bytes]
    lines = [
        f"{'order of heads':<26}"
        + "".join(f"{column:>8}" for column in columns)
        + "".join(f"{column:>13}" for column in halos)
        + f"{'KV cache':>11}"
    ]
    for name, cost in plan.head_layouts.items():
        lines.append(
            f"  {name + ' (chosen)' * (name == chosen):<24}"
            + "".join(f"{value:>8.2f}" for value in cost.imbalance.values())
            + "".join(f"{size / GIB:>13.2f}" for size in cost.halo_bytes.values())
            + f"{100 * cost.cache_share:>9.0f} %"
        )
    lines.append("  tp: imbalance; cp: keys received in one row's forward pass; KV cache: share of a dense one")
    return lines


def _verdict(plan: "Plan", kind: str) -> list[str]:
    usable = f"{gib(plan.worst.peak, 1)} GiB of {gib(plan.usable_bytes, 1)} usable on {kind}"
    if plan.fits:
        lines = [f"fits: {usable}"]
        if plan.layout.bubble > 0.3:
            lines.append(
                f"the pipeline waits {100 * plan.layout.bubble:.0f} % of the time: raise training.local_batch_size, "
                "which is its number of micro-batches"
            )
        return lines
    if plan.suggestion is None:
        return [f"does not fit: {usable}; no change that was tried helps: use more GPUs, or larger ones"]
    return [f"does not fit: {usable}", f"would fit with {as_options(plan.suggestion)}"]


def assumptions_text(gpu: Gpu, e: Efficiency, kind: str) -> str:
    """The assumptions behind a plan's times."""
    return (
        f"assumed for {kind}: {gpu.bf16_flops / 1e12:.0f} TFLOP/s, memory {gpu.hbm / 1e12:.2f} TB/s, "
        f"NVLink {gpu.nvlink / 1e9:.0f} GB/s, network {gpu.network / 1e9:.0f} GB/s;\n"
        f"reached: matmul {e.matmul:.2f}, attention {e.attention:.2f} (× {e.windows:.2f} in heads with shorter scopes), "
        f"memory {e.hbm:.2f}, links {e.links:.2f};\n"
        f"data-parallel traffic hides behind {e.overlap:.2f} of the computation; each row is one document"
    )
