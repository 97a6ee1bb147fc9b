"""Estimates a run without a GPU: memory, FLOPs, traffic and time, and what to change if it does not fit.

    farsight plan scope_llama3_8b --gpus 32 --gpu h100-80g
    farsight plan configs/X.toml --gpus 8 --gpu a100-80g --json plan.json --training.seq_len 32768

CONFIG is a config, a recipe (every stage is planned as it fits itself to the GPUs, or only `--stage NAME`), or a config of `train.py finetune`, whose base
need not exist here if model.flavor names its size. Options of the form --section.key value change the config. If a batch or
layout does not divide over the GPUs, one that does is planned, with a note. With --json, a recipe's file has its
stages under "stages", and the figures of the last one (or the chosen one) at the top level, where a config has its own.

All figures are calculated: docs/training/plan.md and docs/finetuning/memory.md explain what is counted and assumed, and compare the
figures with measurements.
"""

import logging
import sys
from pathlib import Path

from farsight.cli import bounded, command, new_parser, positive, refuse_name
from farsight.configs.load import named_options, parse_options, read_toml
from farsight.configs.shipped import find_config
from farsight.launch.plan.hardware import GPUS, Efficiency, Machine, find_gpu
from farsight.outputs import add_json_option, write_json

EXPLAINED = {
    "matmul": "share of the peak FLOP/s that matrix products reach",
    "attention": "share of the peak FLOP/s that attention reaches in heads that see the whole sequence",
    "windows": "share of the attention speed that heads with shorter scopes reach",
    "overlap": "share of the computation time that can hide data-parallel traffic",
}
"""Help texts of the fields of `Efficiency` that are options."""


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("farsight plan", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("config", type=Path, help="TOML file or a shipped one's name: a config, or a recipe with [[stages]]")
    add("--tiny", action="store_true", help="plan its small form")
    add("--gpus", type=positive, help="number of GPUs (default: the recipe's, or 1 for a config)")
    add("--gpu", default="h100-80g", metavar="KIND", help=f"kind of GPU: {', '.join(GPUS)} (default: %(default)s)")
    add("--stage", help="plan only this stage of a recipe")
    add_json_option(parser)
    for name in EXPLAINED:
        default = getattr(Efficiency, name)
        add(
            f"--{name}",
            # An overlap of 0 is slow but possible; a run would take for ever with 0 for the others.
            type=bounded(float, least=0, most=1) if name == "overlap" else bounded(float, above=0, most=1),
            default=default,
            metavar="SHARE",
            help=f"{EXPLAINED[name]} (default: {'that of the GPU, by pass' if default is None else default})",
        )
    options, rest = parser.parse_known_args(arguments)
    refuse_name(parser, rest, "--nproc", "--gpus")
    options.config = find_config(options.config)
    rest += ["--tiny"] * options.tiny
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    from farsight.launch.plan.plan import make_plan
    from farsight.launch.plan.read import read_configs
    from farsight.launch.plan.text import assumptions_text, plan_text

    efficiency = Efficiency(**{name: getattr(options, name) for name in EXPLAINED})
    machine = Machine(options.gpu, find_gpu(options.gpu), efficiency)
    named, configs = read_configs(options.config, rest, options.stage)
    gpus = options.gpus or named
    recipe, given = "stages" in read_toml(options.config), named_options(parse_options(rest))
    stages = (named, [*configs.values()]) if recipe else (None, ())
    plans = [make_plan(name, config, gpus, machine, given, *stages) for name, config in configs.items()]
    print("\n\n".join(plan_text(plan) for plan in plans))
    print("\n" + assumptions_text(machine))
    figures = plans[-1].as_dict()
    if recipe:
        figures["stages"] = [plan.as_dict() for plan in plans]
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
