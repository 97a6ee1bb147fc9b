"""What a run will take, before it runs and without a GPU: memory, FLOPs, traffic, time, and what to change if it does not fit.

    farsight plan configs/recipes/scope_llama3_8b.toml --gpus 64 --gpu h100-80g
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
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farsight.cli import bounded, command
from farsight.configs.check import ConfigError
from farsight.configs.load import load_config, parse_options, read_toml
from farsight.configs.schema import JobConfig
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.files import prepare_file, write_text
from farsight.launch.plan.costs import StepTime, flops_per_token, step_time, tokens_per_step
from farsight.launch.plan.finetune import is_finetuning, plan_finetuning, read_finetune_config
from farsight.launch.plan.hardware import GPUS, Efficiency, Gpu, find_gpu, usable_bytes
from farsight.launch.plan.heads import HeadLayoutCost, chosen_head_layout, compare_head_layouts, imbalance, layers_of
from farsight.launch.plan.layout import Layout
from farsight.launch.plan.memory import RankMemory, Types, rank_memory
from farsight.launch.plan.suggest import Options, changed, suggest
from farsight.launch.plan.text import assumptions_text, plan_text
from farsight.launch.recipe import load_recipe
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.position.scope import Layout as HeadLayout
from farsight.model.position.scope import cost_ratio
from farsight.training.tokenizer import chosen_tokenizer

ADJUSTABLE = ("matmul", "attention", "windows", "overlap")
"""The efficiencies that have an option."""


@dataclass(frozen=True)
class Plan:
    """A run's plan on so many GPUs of a kind."""

    name: str
    config: JobConfig
    gpus: int
    gpu: Gpu
    efficiency: Efficiency
    layout: Layout
    memory: list[RankMemory]
    """Of each pipeline rank."""
    time: StepTime
    flops_per_token: float
    imbalance: tuple[float, float, float]
    """Attention of the busiest rank over the mean: across TP, across CP, both."""
    pairs_ratio: float
    """All causal pairs over those that heads see."""
    parameters: int
    head_layouts: dict[HeadLayout, HeadLayoutCost]
    notes: list[str] = field(default_factory=list)
    changes: Options = field(default_factory=dict)
    """Made to a config that can't be run as it is."""
    suggestion: Options | None = None
    """Where it does not fit."""

    @property
    def worst(self) -> RankMemory:
        return max(self.memory, key=lambda memory: memory.peak)

    @property
    def usable_bytes(self) -> float:
        return usable_bytes(self.gpu, self.efficiency)

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.gpu, self.efficiency)

    @property
    def tokens_per_step(self) -> int:
        return tokens_per_step(self.config, self.layout)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.time.total

    @property
    def mfu(self) -> float:
        return self.flops_per_token * self.tokens_per_second / (self.gpus * self.gpu.bf16_flops)

    def as_dict(self) -> dict[str, Any]:
        """The plan as `--json` writes it; bytes and seconds throughout."""
        own, a, t = self.worst, self.time.compute, self.time
        by_tp, by_cp, both = self.imbalance
        return {
            "name": self.name,
            "gpus": self.gpus,
            "layout": self.layout.degrees(),
            "per_rank_bytes": _bytes(own),
            "pipeline_ranks": [
                {"layers": [[s.layers.start, s.layers.stop] for s in stages], **_bytes(memory)}
                for stages, memory in zip(self.layout.stages, self.memory, strict=True)
            ],
            "usable_bytes": int(self.usable_bytes),
            "fits": self.fits,
            "flops_per_token": self.flops_per_token,
            "step_seconds": t.total,
            "seconds": {
                **vars(a), "bubble": t.bubble, "data_parallel": t.data_parallel, "optimizer": t.optimizer
            },
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_day": self.tokens_per_second * 86400,
            "steps": self.config.training.steps,
            "mfu": self.mfu,
            "attention_imbalance": both,
            "attention_imbalance_by": {"tp": by_tp, "cp": by_cp},
            "dense_over_visible_pairs": self.pairs_ratio,
            "traffic_bytes": t.traffic,
            "head_layouts": {name: dataclasses.asdict(cost) for name, cost in self.head_layouts.items()},
            "parameters": self.parameters,
            "changes": self.changes,
            "suggestion": self.suggestion,
            "notes": self.notes,
            "assumptions": {"gpu": vars(self.gpu), "efficiency": vars(self.efficiency)},
        }  # fmt: skip


def _bytes(memory: RankMemory) -> dict[str, int]:
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "activations_saved": memory.saved,
        **{f"cache_{name}": size for name, size in memory.caches.items()},
        "gathered": memory.gathered,
        "gathered_head": memory.gathered_head,
        "peak": memory.peak,
    }


def make_plan(name: str, config: JobConfig, gpus: int, gpu: Gpu, efficiency: Efficiency) -> Plan:
    """Plans a run; one that can't be run as it is, with the nearest change with which it can and fits.

    Raises:
        ConfigError: the config can't be run on so many GPUs, and no change that was tried helps.
    """

    def would_fit(other: JobConfig) -> bool:
        return fits(_memory(other, Layout.of(other, gpus)), gpu, efficiency)

    if config.engine == "deepspeed":
        raise ConfigError(
            f'{name}: engine = "deepspeed" is not planned: memory and traffic are counted as FSDP has them. To plan the '
            'same run under FSDP leave --engine out, or set it to "torchtitan".'
        )
    config, notes = _with_vocabulary(config)
    changes: Options = {}
    try:
        layout = Layout.of(config, gpus)
    except ConfigError as error:
        found = suggest(config, gpus, would_fit)
        if found is None:
            raise ConfigError(f"{name}: {error}") from error
        changes, config = found, changed(config, found)
        notes.append(f"as written it can't run: {error}")
        layout = Layout.of(config, gpus)

    model, length = ModelConfig.from_job(config), config.training.seq_len
    scopes, cut = [layer.scopes for layer in layers_of(model)], config.parallelism.context_parallel_load_balancer
    compared = chosen_head_layout(config) is not None
    plan = Plan(
        name, config, gpus, gpu, efficiency, layout,
        memory=_memory(config, layout),
        time=step_time(config, layout, gpu, efficiency),
        flops_per_token=flops_per_token(config),
        imbalance=imbalance(scopes, length, layout.tp, layout.cp, cut),
        pairs_ratio=cost_ratio(length, tuple(min(scope, length) for layer in scopes for scope in layer)),
        parameters=count_parameters(model),
        head_layouts=compare_head_layouts(config, layout, Types.of(config, layout).product) if compared else {},
        notes=notes,
        changes=changes,
    )  # fmt: skip
    return plan if plan.fits else dataclasses.replace(plan, suggestion=suggest(config, gpus, would_fit))


def fits(memory: Sequence[RankMemory], gpu: Gpu, efficiency: Efficiency) -> bool:
    """Whether every pipeline rank does."""
    return max(rank.peak for rank in memory) <= usable_bytes(gpu, efficiency)


def _memory(config: JobConfig, layout: Layout) -> list[RankMemory]:
    return [rank_memory(config, layout, rank) for rank in range(layout.pp)]


def _with_vocabulary(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """The embedding's size where the config leaves it to the tokenizer."""
    if config.architecture.vocab_size:
        return config, []
    t = chosen_tokenizer(config)
    there = t.kind == "bytes" or (t.path and Path(t.path).expanduser().exists())
    trained = not there and t.kind in ("auto", "sentencepiece")
    size = t.vocab_size if trained else load_tokenizer(t).vocab_size
    rounded = -(-size // 64) * 64  # as train.py does
    config = dataclasses.replace(config, architecture=dataclasses.replace(config.architecture, vocab_size=rounded))
    return config, [
        f"vocabulary of {rounded:,}: tokenizer.vocab_size, of a tokenizer that is not trained yet"
    ] * trained


def read_configs(path: Path, options: list[str], stage: str | None) -> tuple[int, dict[str, JobConfig]]:
    """The GPUs that a recipe names (1 for a config), and configs by name: a recipe's stages, or the config alone.

    Raises:
        ConfigError: settings that can't be used, or no such stage.
    """
    if "stages" not in read_toml(path):
        if stage is not None:
            raise ConfigError(f"{path} is no recipe: it has no stage {stage!r}.")
        return 1, {path.stem: load_config(["--job.config_file", str(path), *options])}
    recipe, stages = load_recipe(path, parse_options(options))
    names = [s.name for s in stages]
    if stage is not None and stage not in names:
        raise ConfigError(f"{path} has no stage {stage!r}; it has {', '.join(names)}.")
    return recipe.gpus, {f"{recipe.name} {s.name}": s.config for s in stages if stage in (None, s.name)}


@command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="farsight plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, help="TOML file: a config, or a recipe with [[stages]]")
    parser.add_argument("--gpus", type=bounded(int, least=1), help="how many (default: the recipe's; 1 for a config)")
    parser.add_argument("--gpu", default="h100-80g", metavar="KIND", help=f"{', '.join(GPUS)} (default: %(default)s)")
    parser.add_argument("--stage", help="of a recipe, this stage alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    for name in ADJUSTABLE:
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
    if options.json:
        prepare_file(options.json)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    gpu, efficiency = find_gpu(options.gpu), Efficiency(**{name: getattr(options, name) for name in ADJUSTABLE})
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
    gpus, path = options.gpus or 1, options.config
    if options.stage is not None:
        raise ConfigError(f"--stage {options.stage}: {path} is of `train.py finetune` and has no stages.")
    plan = plan_finetuning(path.stem, read_finetune_config(path, rest), gpus, options.gpu, gpu, efficiency)
    print(plan.text())
    print("\n" + assumptions_text(gpu, efficiency, options.gpu))
    if options.json:
        write_text(options.json, json.dumps(plan.as_dict(), indent=2) + "\n")
    return 0


EXPLAINED = {
    "matmul": "share of the peak FLOP/s that matrix products reach",
    "attention": "share that attention reaches where heads see everything",
    "windows": "share of that again, in heads that see less",
    "overlap": "share of computation behind which data-parallel traffic hides",
}


if __name__ == "__main__":
    sys.exit(main())
