"""A training run's plan: memory, FLOPs, traffic and time, and what to change if it does not fit."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.kernels.scoped_attention.cost import FLOPS_PER_PAIR
from farsight.launch.plan.costs import StepTime, flops_per_token, step_time
from farsight.launch.plan.fit import can_run, fit
from farsight.launch.plan.hardware import Machine
from farsight.launch.plan.heads import HeadLayoutCost, chosen_head_layout, compare_head_layouts, imbalance
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.memory import RankMemory, memory_of
from farsight.launch.plan.read import with_vocabulary
from farsight.launch.plan.run import Run
from farsight.launch.plan.suggest import Change, Options, suggestions
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.position.scope import HeadLayout, cost_ratio
from farsight.units import gib


@dataclass(frozen=True)
class Plan:
    """A training run's plan on a number of GPUs of one kind."""

    name: str
    run: Run
    machine: Machine
    memory: list[RankMemory]
    """Memory of each pipeline rank."""
    time: StepTime
    notes: list[str] = field(default_factory=list)
    changes: Options = field(default_factory=dict)
    """Changes made to a recipe's stage, or to a config that can't run as written."""
    tried: list[Change] = field(default_factory=list)
    """Changes to a fine-tuning run that does not fit, each tried alone."""
    suggestion: Options | None = None
    """Changes with which a plan that does not fit would fit."""

    @property
    def config(self) -> JobConfig:
        return self.run.config

    @property
    def layout(self) -> ParallelLayout:
        return self.run.layout

    @property
    def worst(self) -> RankMemory:
        """The pipeline rank that takes most memory."""
        return max(self.memory, key=lambda memory: memory.peak)

    @property
    def fits(self) -> bool:
        return self.worst.peak <= self.machine.device.usable

    @property
    def tokens_per_second(self) -> float:
        return self.run.tokens_per_step / self.time.total

    @cached_property
    def flops_per_token(self) -> float:
        return flops_per_token(self.run)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: a share of the GPUs' peak FLOP/s."""
        return self.flops_per_token * self.tokens_per_second / (self.layout.world_size * self.machine.gpu.bf16_flops)

    @cached_property
    def imbalance(self) -> tuple[float, float, float]:
        """Attention pairs of the busiest rank over the mean: across TP ranks, across CP ranks, across both."""
        cut = self.config.parallelism.context_parallel_load_balancer
        return imbalance(self._scopes, self.config.training.seq_len, self.layout.tp, self.layout.cp, cut)

    @property
    def pairs_ratio(self) -> float:
        """All causal pairs over the pairs that heads see."""
        length = self.config.training.seq_len
        return cost_ratio(length, tuple(min(scope, length) for layer in self._scopes for scope in layer))

    @property
    def _scopes(self) -> list[tuple[int, ...]]:
        return [layer.scopes for layer in self.run.positions]

    @cached_property
    def parameters(self) -> int:
        return count_parameters(ModelConfig.from_job(self.config))

    @cached_property
    def head_layouts(self) -> dict[HeadLayout, HeadLayoutCost]:
        """The cost of each order of heads, if the order matters."""
        return {} if chosen_head_layout(self.config) is None else compare_head_layouts(self.run)

    def as_dict(self) -> dict[str, Any]:
        """The plan as `--json` writes it; bytes and seconds throughout."""
        own, t, peak = self.worst, self.time, self.worst.peak
        by_tp, by_cp, both = self.imbalance
        attention = {pass_: self.machine.attention(pass_) for pass_ in FLOPS_PER_PAIR}
        figures: dict[str, Any] = {
            "name": self.name,
            "gpus": self.layout.world_size,
            "layout": self.layout.degrees(),
            "per_rank_bytes": _bytes(own),
            "pipeline_ranks": [
                {"layers": [[s.layers.start, s.layers.stop] for s in stages], **_bytes(memory)}
                for stages, memory in zip(self.layout.stages, self.memory, strict=True)
            ],
            "usable_bytes": int(self.machine.device.usable),
            "fits": self.fits,
            "flops_per_token": self.flops_per_token,
            "step_seconds": t.total,
            "seconds": t.parts,
            "tokens_per_step": self.run.tokens_per_step,
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
            "assumptions": {"gpu": vars(self.machine.gpu), "efficiency": vars(self.machine.efficiency) | {"attention": attention}},
        }  # fmt: skip
        if self.run.finetune:
            parts = {"parts": own.parts, "sum": sum(own.parts.values()), "paged": own.paged}
            figures["per_rank_bytes"] |= parts
            figures["trained_parameters"] = {name: self.run.trained(name) for name in ("lora", "garfa", "layers")}
            figures["changes"] = [
                {"options": change.options, "saves_bytes": peak - change.peak, "why": change.why}
                for change in self.tried
            ]
        return figures


def _bytes(memory: RankMemory) -> dict[str, int]:
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "gathered_head", "peak")
    caches = {f"cache_{name}": size for name, size in memory.caches.items()}
    return {name: getattr(memory, name) for name in names} | caches | {"activations_saved": memory.saved}


def make_plan(
    name: str,
    config: JobConfig,
    gpus: int,
    machine: Machine,
    given: Collection[str] = (),
    planned: int | None = None,
    beside: Collection[JobConfig] = (),
) -> Plan:
    """Plans a run. A recipe's stage is planned as it is fitted to the GPUs, and so is a config of pre-training that can't run as written.

    Args:
        given: options that stay as they are.
        planned: GPUs that a recipe is written for; None for a config.
        beside: the recipe's stages that are planned, all of which have to run on a number of GPUs that a refusal names.

    Raises:
        ConfigError: the config can't run on this number of GPUs, and no change that was tried helps.
    """
    finetunes = isinstance(config, FinetuneConfig)
    if config.engine == "deepspeed" and not finetunes:
        raise ConfigError(
            f'{name}: engine = "deepspeed" can\'t be planned: memory and traffic are those of FSDP. To plan the same run '
            'under FSDP leave --engine out, or set it to "pytorch".'
        )
    config, notes = with_vocabulary(config)
    if not finetunes and any(e.where == "inside" and e.device != "cpu" for e in config.evaluations):
        size = gib(2 * count_parameters(ModelConfig.from_job(config)))
        notes.append(
            f"while an evaluation runs inside, rank 0 holds the whole model too, {size} GiB in bf16, besides the memory below"
        )
    changes, suggestion = {}, None
    if not finetunes:
        runs = can_run(config, gpus)
        try:
            fitted = fit(config, gpus, machine, given, planned, beside)
        except ConfigError as error:
            if not runs:
                raise ConfigError(f"{name}: {error}") from error
            notes.append(str(error).rstrip("."))
        else:
            if planned or not runs:
                config, changes = fitted.config, fitted.options
                notes += [f"as written, {fitted.why}"] * bool(changes)
            else:
                suggestion = fitted.options or None
    try:
        run = Run.of(config, gpus)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    plan = Plan(name, run, machine, memory_of(run), step_time(run, machine), notes, changes, suggestion=suggestion)
    if run.finetune and not plan.fits:
        tried, enough = suggestions(run, machine.device)
        return dataclasses.replace(plan, tried=tried, suggestion=enough)
    return plan
