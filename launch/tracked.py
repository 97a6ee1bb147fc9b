"""Describes a run to its trackers: its plan's figures, and a picture of its positions."""

from pathlib import Path
from typing import Any

from farsight.analysis.positions.picture import draw
from farsight.configs.schema import JobConfig
from farsight.launch.plan.costs import flops_per_token, step_time
from farsight.launch.plan.hardware import find_device
from farsight.launch.plan.memory import memory_of
from farsight.launch.plan.plan import Plan
from farsight.launch.plan.run import Run
from farsight.launch.recipe.gpus import machine_of
from farsight.model.build import ModelConfig, count_parameters
from farsight.units import GIB


def describe(config: JobConfig, ranks: int) -> dict[str, dict[str, Any]]:
    """The figures of the run's plan, under "plan"; writes `positions.png` into its run folder.

    Nothing is drawn for TensorBoard alone: it is on by default, and matplotlib takes seconds to load.
    """
    model = ModelConfig.from_job(config)
    if {*config.metrics.trackers} - {"tensorboard"}:
        draw(model, model.trained_length, Path(config.job.dump_folder) / "positions.png")
    if config.engine == "deepspeed":
        return {}  # plans are of FSDP
    return {"plan": plan_figures(config, ranks)}


def plan_figures(config: JobConfig, ranks: int) -> dict[str, Any]:
    """A run's layout, size and memory; with a GPU also its expected speed.

    Raises:
        ConfigError: batches or layers do not divide over the ranks.
    """
    run = Run.of(config, ranks, find_device().cpu)
    memory = memory_of(run)
    figures: dict[str, Any] = {
        "layout": str(run.layout),
        "parameters": count_parameters(ModelConfig.from_job(config)),
        "trained_parameters": run.trained(),
        "tokens_per_step": run.tokens_per_step,
        "flops_per_token": flops_per_token(run),
        "peak_gib": max(rank.peak for rank in memory) / GIB,
    }
    if (machine := machine_of(None)) is not None:
        plan = Plan("run", run, machine, memory, step_time(run, machine))
        figures |= {"step_seconds": plan.time.total, "tokens_per_second": plan.tokens_per_second, "mfu": plan.mfu}
    return figures
