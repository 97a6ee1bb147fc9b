"""A recipe's plan as text: a table of its stages, and how positions change from stage to stage."""

from collections.abc import Sequence

from farsight.configs.check import MODEL_PARALLEL, model_parallel_ranks
from farsight.configs.optimizers import AdamW, AdamW8bit
from farsight.configs.schema import JobConfig
from farsight.launch.plan.optimizer import optimizer_bytes
from farsight.launch.plan.weights import weights
from farsight.launch.recipe.check import free_bytes
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.position.layers import describe
from farsight.training.stages import Stage
from farsight.units import gib


def plan_text(stages: Sequence[Stage], processes: int) -> str:
    """Describes a recipe on a number of processes: a table of stages, parameters, disk space, and positions."""
    return "\n".join([*_table(stages, processes), *_totals(stages), "", *_positions(stages)])


def _table(stages: Sequence[Stage], processes: int) -> list[str]:
    lines = [
        f"{'stage':<16}{'length':>9}{'batch':>7}{'tokens/step':>13}{'steps':>11}{'tokens':>10}{'lr':>10}  "
        f"{'layout':<22}starts from"
    ]
    total = 0
    for stage in stages:
        c = stage.config
        t = c.training
        batch = (
            t.global_batch_size
            if t.global_batch_size > 0
            else t.local_batch_size * (processes // model_parallel_ranks(c))
        )
        total += batch * t.seq_len * t.steps
        start = c.checkpoint.initial_load_path or "random weights"
        lines.append(
            f"{stage.name:<16}{t.seq_len:>9,}{batch:>7}{batch * t.seq_len:>13,}{t.steps:>11,}"
            f"{batch * t.seq_len * t.steps:>10.3g}{c.optimizer.lr:>10.1e}  {_layout(c, processes):<22}"
            f"{start} ({stage.optimizer} optimizer)"
        )
    model = ModelConfig.from_job(stages[-1].config)
    embedding = _embedding(stages) and f"{_embedding(stages)}, whose size the tokenizer sets"
    lines.append(
        f"{count_parameters(model):,} parameters{embedding}, {total:.3g} tokens, {processes} GPU{'s' * (processes > 1)}"
    )
    return lines


def _totals(stages: Sequence[Stage]) -> list[str]:
    lines = [
        f"{stage.name} trains only layers {stage.config.training.layers}"
        for stage in stages
        if stage.config.training.layers
    ]
    root, checkpoint = stages[0].folder.parent, stages[0].config.checkpoint
    kept = checkpoint.keep_latest_k and checkpoint.keep_latest_k + bool(checkpoint.keep_best)
    # An old checkpoint is deleted once the new one is complete.
    size, free = max(checkpoint_bytes(stage.config) for stage in stages), free_bytes(root)
    lines.append(
        f"run folder {root}: checkpoints of {gib(size)} GiB{_embedding(stages)}, up to {f'{kept + 1} of them' if kept else 'one a save'} in each "
        f"stage ({gib(free)} GiB free there)"
    )
    return lines


def _embedding(stages: Sequence[Stage]) -> str:
    """A remark on figures that leave out the embedding, because the tokenizer sets its size."""
    return "" if stages[-1].config.architecture.vocab_size else " plus the embedding"


def disk_warning(stages: Sequence[Stage]) -> list[str]:
    """A warning if the disk lacks room for a checkpoint of a stage that is still to be trained.

    It is no reason to refuse: a dry run may be on another machine, and what is free can change before the first save.
    """
    root = stages[0].folder.parent
    saved = [stage.config for stage in stages if not stage.finished and stage.config.checkpoint.enable]
    size = max(map(checkpoint_bytes, saved), default=0)
    free = free_bytes(root)
    if size <= free:
        return []
    return [
        f"Warning: a checkpoint of {gib(size)} GiB does not fit in the {gib(free)} GiB free at {root}: saving will fail. Make room, or "
        "set recipe.folder to a larger disk."
    ]


def checkpoint_bytes(config: JobConfig) -> int:
    """Bytes of a checkpoint: all weights, and the optimizer's state of those that train, whose moments are saved in fp32."""
    optimizer = AdamW() if isinstance(config.optimizer, AdamW8bit) else config.optimizer
    own = [*weights(config)]
    return sum(w.packed for w in own) + sum(optimizer_bytes(optimizer, own, 1))


def _layout(config: JobConfig, processes: int) -> str:
    """The degrees of parallelism, such as "dp 2 × tp 8 × pp 4"."""
    degrees = {"dp": processes // model_parallel_ranks(config)}
    for name, short in zip(MODEL_PARALLEL, ("tp", "pp", "cp"), strict=True):
        degrees[short] = getattr(config.parallelism, f"{name}_parallel_degree")
    return " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name == "dp")


def _positions(stages: Sequence[Stage]) -> list[str]:
    """Describes the first stage's layers in full, and for later stages only what changes, column by column."""
    lines: list[str] = []
    last: list[list[str]] = []
    for stage in stages:
        text = describe(ModelConfig.from_job(stage.config).layers())
        rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
        if not last or [row[0] for row in rows] != [row[0] for row in last] or rows[0] != last[0]:
            lines += [f"{stage.name}:", *(f"  {line}" for line in text.splitlines())]
        else:
            changed: dict[str, list[str]] = {}
            for before, now in zip(last[1:], rows[1:], strict=True):
                columns = zip(rows[0], before, now, strict=True)
                change = ", ".join(f"{name} {a} → {b}" for name, a, b in columns if a != b)
                changed.setdefault(change, []).append(now[0])
            all_alike = len(changed) == 1
            shown = [
                change + (f" in layers {','.join(layers)}" * (not all_alike))
                for change, layers in changed.items()
                if change
            ]
            lines.append(f"{stage.name}: {'; '.join(shown) or 'positions as before'}")
        last = rows
    return lines
