"""A training run's plan: memory, FLOPs, traffic and time, and what to change if it does not fit."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farsight.configs.load import load_config, parse_options, read_toml
from farsight.configs.schema import JobConfig
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError
from farsight.launch.plan.costs import StepTime, flops_per_token, step_time, tokens_per_step
from farsight.launch.plan.hardware import Efficiency, Gpu, usable_bytes
from farsight.launch.plan.heads import HeadLayoutCost, chosen_head_layout, compare_head_layouts, imbalance, layers_of
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.memory import RankMemory, Types, rank_memory
from farsight.launch.plan.suggest import Options, changed, suggest
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.position.scope import HeadLayout, cost_ratio
from farsight.training.stages import load_recipe
from farsight.training.tokenizer import chosen_tokenizer


@dataclass(frozen=True)
class Plan:
    """A training run's plan on a number of GPUs of one kind."""

    name: str
    config: JobConfig
    gpus: int
    gpu: Gpu
    efficiency: Efficiency
    layout: ParallelLayout
    memory: list[RankMemory]
    """Memory of each pipeline rank."""
    time: StepTime
    flops_per_token: float
    imbalance: tuple[float, float, float]
    """Attention pairs of the busiest rank over the mean: across TP ranks, across CP ranks, across both."""
    pairs_ratio: float
    """All causal pairs over the pairs that heads see."""
    parameters: int
    head_layouts: dict[HeadLayout, HeadLayoutCost]
    notes: list[str] = field(default_factory=list)
    changes: Options = field(default_factory=dict)
    """Changes made to a config that can't run as written."""
    suggestion: Options | None = None
    """Changes with which a plan that does not fit would fit."""

    @property
    def worst(self) -> RankMemory:
        """The pipeline rank that takes most memory."""
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
        """Model FLOPs utilisation: a share of the GPUs' peak FLOP/s."""
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
    """Plans a training run. A config that can't run as written is planned with the first change with which it runs and fits.

    Raises:
        ConfigError: the config can't run on this number of GPUs, and no change that was tried helps.
    """

    def would_fit(other: JobConfig) -> bool:
        return fits(_memory(other, ParallelLayout.of(other, gpus)), gpu, efficiency)

    if config.engine == "deepspeed":
        raise ConfigError(
            f'{name}: engine = "deepspeed" can\'t be planned: memory and traffic are those of FSDP. To plan the same run '
            'under FSDP leave --engine out, or set it to "torchtitan".'
        )
    config, notes = _with_vocabulary(config)
    changes: Options = {}
    try:
        layout = ParallelLayout.of(config, gpus)
    except ConfigError as error:
        found = suggest(config, gpus, would_fit)
        if found is None:
            raise ConfigError(f"{name}: {error}") from error
        changes, config = found, changed(config, found)
        notes.append(f"as written it can't run: {error}")
        layout = ParallelLayout.of(config, gpus)

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
    """Whether every pipeline rank fits into the GPU's usable memory."""
    return max(rank.peak for rank in memory) <= usable_bytes(gpu, efficiency)


def _memory(config: JobConfig, layout: ParallelLayout) -> list[RankMemory]:
    return [rank_memory(config, layout, rank) for rank in range(layout.pp)]


def _with_vocabulary(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """Fills in the embedding's size if the config leaves it to the tokenizer; returns the config and notes on it."""
    if config.architecture.vocab_size:
        return config, []
    t = chosen_tokenizer(config)
    there = t.kind == "bytes" or (t.path and Path(t.path).expanduser().exists())
    trained = not there and t.kind in ("auto", "sentencepiece")
    size = t.vocab_size if trained else load_tokenizer(t).vocab_size
    rounded = -(-size // 64) * 64  # as train.py does
    config = dataclasses.replace(config, architecture=dataclasses.replace(config.architecture, vocab_size=rounded))
    return config, [f"vocabulary of {rounded:,}: tokenizer.vocab_size, as the tokenizer is not trained yet"] * trained


def read_configs(path: Path, options: list[str], stage: str | None) -> tuple[int, dict[str, JobConfig]]:
    """Reads a config or recipe; returns the recipe's number of GPUs (1 for a config), and the configs by name.

    Raises:
        ConfigError: settings that can't be used, or no such stage.
    """
    if "stages" not in read_toml(path):
        if stage is not None:
            raise ConfigError(f"{path} is not a recipe: it has no stage {stage!r}.")
        return 1, {path.stem: load_config(["--job.config_file", str(path), *options])}
    recipe, stages = load_recipe(path, parse_options(options))
    names = [s.name for s in stages]
    if stage is not None and stage not in names:
        raise ConfigError(f"{path} has no stage {stage!r}; it has {', '.join(names)}.")
    return recipe.gpus, {f"{recipe.name} {s.name}": s.config for s in stages if stage in (None, s.name)}
