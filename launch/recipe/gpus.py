"""The GPUs that a recipe runs on: their number, their kind, and the layout of each stage on them."""

import dataclasses
import os
import shlex
from collections.abc import Collection, Sequence

from farsight.errors import ConfigError
from farsight.launch.plan.fit import ASSUMED, fit
from farsight.launch.plan.hardware import ANY, GPUS, Machine, find_gpu
from farsight.launch.plan.suggest import as_options
from farsight.training.stages import Recipe, Stage
from farsight.units import GIB


def ranks_of(nproc: int | None, torchrun: str | None, launcher: str | None) -> int | None:
    """The number of ranks that will be started; None if only the launcher knows.

    Args:
        torchrun: its arguments.
        launcher: a command of another launcher; Slurm's says its number of tasks in the environment.
    """
    if torchrun:
        from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

        given = get_args_parser().parse_args([*shlex.split(torchrun), "script"])
        least, most = parse_min_max_nnodes(given.nnodes)
        return least * determine_local_world_size(given.nproc_per_node) if least == most else None
    if launcher:
        return int(os.environ.get("SLURM_NTASKS", "0")) or None
    return nproc or 1


def machine_of(kind: str | None) -> Machine | None:
    """GPUs of this kind, or of this machine's if none is named; None if memory is left out, or there is no GPU here.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind == ANY:
        return None
    if kind:
        return Machine(kind, find_gpu(kind))
    import torch

    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    like = next((known for known in GPUS if known.split("-")[0] in here.name.lower().replace(" ", "")), ASSUMED)
    return Machine(here.name, dataclasses.replace(GPUS[like], memory_gib=here.total_memory / GIB))


def fit_stages(
    recipe: Recipe, stages: Sequence[Stage], gpus: int, machine: Machine | None, given: Collection[str]
) -> tuple[list[Stage], list[str]]:
    """The stages fitted to the GPUs, and a line on each that was changed and is still to be trained.

    Args:
        machine: the GPUs, whose memory stages have to fit; None leaves memory out.
        given: options that stay as they are.

    Raises:
        ConfigError: nothing fits a stage that is still to be trained; names it.
    """
    fitted, said = [], []
    beside = [stage.config for stage in stages if not stage.finished]
    for stage in stages:
        try:
            found = fit(stage.config, gpus, machine, given, recipe.gpus, beside)
        except ConfigError as error:
            if not stage.finished:
                raise ConfigError(f"stage {stage.name}: {error}") from error
        else:
            if found.options and not stage.finished:
                where = f"{gpus} GPU{'s' * (gpus > 1)}"
                said.append(
                    f"stage {stage.name} fitted to {where} by {as_options(found.options)}: as written, {found.why}."
                )
            stage = dataclasses.replace(stage, config=found.config)
        fitted.append(stage)
    if said:
        memory = (
            f"The GPUs' memory is taken to be that of {machine.kind}."
            if machine
            else (
                f"No memory was checked, as no kind of GPU is known (--gpu KIND names one); layouts that fit {ASSUMED} were preferred."
            )
        )
        said.append(f"Sequences per step, lengths and schedules are as written, and so are the losses. {memory}")
    return fitted, said
