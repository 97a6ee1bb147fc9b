"""The message for an out-of-memory error in fine-tuning: which part exceeds its estimate, and what to lower."""

from farsight.configs.finetuning import FinetuneConfig
from farsight.launch.plan.hardware import Device, find_device
from farsight.launch.plan.memory import RankMemory, rank_memory
from farsight.launch.plan.run import Run
from farsight.launch.plan.suggest import as_options, change_text, suggestions
from farsight.training.memory_recorder import MemoryMarks
from farsight.units import gib

SLACK = 1.1
"""A part counts as larger than estimated if it takes more than this times its estimate."""


def explain_out_of_memory(
    error: BaseException,
    config: FinetuneConfig,
    marks: MemoryMarks | None,
    device: Device | None = None,
    ranks: int = 1,
) -> str:
    """Compares estimated with actual memory by part, names the part that grew most, and lists changes with their savings.

    Args:
        error: torch's error; its first line says how much was requested.
        marks: from the run's `MemoryRecorder`; None if memory ran out while the base was loaded.
        device: the device and the memory that the run could use; None for this machine's.
        ranks: processes of the run.
    """
    marks, device = marks or MemoryMarks(phase="loading"), device or find_device()
    run = Run.of(config, ranks, device.cpu)
    memory = rank_memory(run)
    rows = _rows(memory, marks)
    when = {"loading": "while loading the base", "optimizer": "while the optimizer stepped"}
    phase = when.get(marks.phase, f"in the {marks.phase} pass")
    lines = [
        f"Out of memory {phase} on {device.name}: {str(error).splitlines()[0]}",
        f"{'':<34}{'estimate':>10}{'held':>10}  GiB",
    ]
    lines += [f"  {name:<32}{gib(expected):>10}{gib(held) if held else '-':>10}" for name, expected, held in rows]
    lines.append(_what_grew(rows, memory, device))
    alone, enough = suggestions(run, device)
    if alone:
        lines.append("Changes that save memory, mildest first:")
        lines += [f" {change_text(change, memory.peak)}" for change in alone]
    if memory.peak > device.usable and enough is not None:
        lines.append(f"By the estimate it would fit with {as_options(enough)}")
    return "\n".join(lines)


Row = tuple[str, int, int]
"""A part's name, its estimate and its actual size, in bytes."""


def _rows(memory: RankMemory, marks: MemoryMarks) -> list[Row]:
    state = memory.gradients + memory.optimizer
    before = marks.after_optimizer or marks.base
    rows = [("base and trained parameters", memory.parameters, marks.base)]
    if marks.after_optimizer:
        rows.append(("gradients and optimizer", state, max(0, marks.after_optimizer - marks.base)))
    if marks.at_failure and marks.phase != "loading":
        of_a_step = memory.peak - memory.parameters
        if marks.after_optimizer:
            of_a_step -= state
        rows.append(("activations, loss and transient", of_a_step, max(0, marks.at_failure - before)))
    return rows


def _what_grew(rows: list[Row], memory: RankMemory, device: Device) -> str:
    grown = [row for row in rows if row[2] > SLACK * row[1]]
    if grown:
        name, expected, held = max(grown, key=lambda row: row[2] - row[1])
        why = {
            "base and trained parameters": "the base is larger or less quantised than [base_model] says, or the device was not empty",
            "gradients and optimizer": "more parameters train than [lora] and [garfa] say",
            "activations, loss and transient": "rows are longer or more than training.seq_len and local_batch_size say, or "
            "activations are kept that the estimate counts as recomputed",
        }[name]
        return f"{name}: {gib(held - expected)} GiB more than estimated; {why}."
    if memory.peak > device.usable:
        return f"All as estimated: the peak is {gib(memory.peak)} GiB, and the run had {gib(device.usable)} GiB."
    return (
        f"All as estimated, and the peak of {gib(memory.peak)} GiB is within the {gib(device.usable)} GiB that the run had: "
        "other processes use memory of this device (nvidia-smi), or it is fragmented "
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."
    )
