"""What a run will take, before it runs and without a GPU: memory, FLOPs, traffic, time, and what to change if it does not fit.

    farsight plan scope_llama3_8b --gpus 64 --gpu h100-80g
    farsight plan configs/X.toml --gpus 8 --gpu a100-80g --json plan.json --training.seq_len 32768

It takes a config or a recipe, of which it plans every stage (`--stage NAME`: that one), or a config of `train.py finetune`, whose
base need not be here if model.flavor names its size. Options of the form --section.key
value change the config. A batch or layout that does not divide over the GPUs is planned with the nearest that does, and
says so. With --json a recipe's file has its stages under "stages", and the last one's figures (or the chosen one's) at the
top, where a config has its own.

Everything is calculated: docs/training/plan.md and docs/finetuning/memory.md say what is counted, what is assumed, and what it was compared
with.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from farsight.cli import bounded, command, positive
from farsight.configs.check import ConfigError
from farsight.configs.load import find_config, read_toml
from farsight.files import prepare_file, write_text
from farsight.launch.plan.hardware import GPUS, Efficiency, Gpu, find_gpu

EXPLAINED = {
    "matmul": "share of the peak FLOP/s that matrix products reach",
    "attention": "share that attention reaches where heads see everything",
    "windows": "share of that again, in heads that see less",
    "overlap": "share of computation behind which data-parallel traffic hides",
}
"""The fields of `Efficiency` that are options."""


@command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="farsight plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", type=Path, help="TOML file or a shipped one's name: a config, or a recipe with [[stages]]"
    )
    parser.add_argument("--tiny", action="store_true", help="plan its small form")
    parser.add_argument("--gpus", type=positive, help="how many (default: the recipe's; 1 for a config)")
    parser.add_argument("--gpu", default="h100-80g", metavar="KIND", help=f"{', '.join(GPUS)} (default: %(default)s)")
    parser.add_argument("--stage", help="of a recipe, this stage alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    for name in EXPLAINED:
        default = getattr(Efficiency, name)
        parser.add_argument(
            f"--{name}",
            # Without overlap a run is slow; without the others it would take for ever.
            type=bounded(float, least=0, most=1) if name == "overlap" else bounded(float, above=0, most=1),
            default=default,
            metavar="SHARE",
            help=f"{EXPLAINED[name]} ({default})",
        )
    options, rest = parser.parse_known_args(arguments)
    options.config = find_config(options.config)
    rest += ["--tiny"] * options.tiny
    if options.json:
        prepare_file(options.json)
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    from farsight.launch.plan.finetune import is_finetuning
    from farsight.launch.plan.plan import make_plan, read_configs
    from farsight.launch.plan.text import assumptions_text, plan_text

    gpu, efficiency = find_gpu(options.gpu), Efficiency(**{name: getattr(options, name) for name in EXPLAINED})
    if is_finetuning(options.config):
        return _plan_finetuning(options, rest, gpu, efficiency)
    named, configs = read_configs(options.config, rest, options.stage)
    gpus = options.gpus or named
    plans = [make_plan(name, config, gpus, gpu, efficiency) for name, config in configs.items()]
    print("\n\n".join(plan_text(plan, options.gpu) for plan in plans))
    print("\n" + assumptions_text(gpu, efficiency, options.gpu))
    if options.json:
        figures = plans[-1].as_dict()
        if "stages" in read_toml(options.config):
            figures["stages"] = [plan.as_dict() for plan in plans]
        write_text(options.json, json.dumps(figures, indent=2) + "\n")
    return 0


def _plan_finetuning(options: argparse.Namespace, rest: list[str], gpu: Gpu, efficiency: Efficiency) -> int:
    from farsight.launch.plan.finetune import plan_finetuning, read_finetune_config
    from farsight.launch.plan.text import assumptions_text

    gpus, path = options.gpus or 1, options.config
    if options.stage is not None:
        raise ConfigError(f"--stage {options.stage}: {path} is of `train.py finetune` and has no stages.")
    plan = plan_finetuning(path.stem, read_finetune_config(path, rest), gpus, options.gpu, gpu, efficiency)
    print(plan.text())
    print("\n" + assumptions_text(gpu, efficiency, options.gpu))
    if options.json:
        write_text(options.json, json.dumps(plan.as_dict(), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
