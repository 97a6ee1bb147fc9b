"""A planned run: a config on a number of GPUs, with the figures that formulas of memory and of time share."""

from dataclasses import dataclass
from functools import cache, cached_property

from farsight.configs.finetuning import Base, FinetuneConfig, Lora, Projection
from farsight.configs.schema import JobConfig
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.weights import Weight, itemsize, layers_that_train, lora_ranks, module_shapes, weights
from farsight.model.adapt.layers import AdaptedLayers
from farsight.model.build import ModelConfig
from farsight.model.position.layers import LayerPosition
from farsight.parallel.parallelize import wrapper


@cache
def layers_of(model: ModelConfig) -> tuple[LayerPosition, ...]:
    """Each layer's position settings at the trained length; cached, as a plan asks often."""
    return model.layers()


@dataclass(frozen=True, eq=False)
class Run:
    """A config on a number of GPUs."""

    config: JobConfig
    """Of fine-tuning with the base's `architecture` and `position`."""
    layout: ParallelLayout
    cpu: bool = False
    """Count activations as PyTorch keeps them on a CPU: norms that compute in another type or that train keep their output too,
    and dropout keeps its factors in the activations' type."""

    @classmethod
    def of(cls, config: JobConfig, gpus: int = 1, cpu: bool = False) -> "Run":
        """The run of a config on a number of GPUs.

        Raises:
            ConfigError: batches or layers do not divide over the degrees.
        """
        return cls(config, ParallelLayout.of(config, gpus), cpu)

    @property
    def finetune(self) -> FinetuneConfig | None:
        """The config if it is one of fine-tuning."""
        return self.config if isinstance(self.config, FinetuneConfig) else None

    @cached_property
    def sharded(self) -> bool:
        """True if FSDP wraps the model, or ZeRO takes its place."""
        return self.layout.fsdp > 1 or wrapper(self.config, self.layout) == "fsdp"

    @property
    def everything(self) -> bool:
        """Whether all parameters train, embedding and head too."""
        return self.finetune is None and not self.config.training.layers

    @cached_property
    def layers(self) -> AdaptedLayers:
        """The layers that train, by method."""
        return layers_that_train(self.config)

    @cached_property
    def base(self) -> Base:
        """The frozen weights' storage and the type of computation; pre-training's base is not quantised."""
        plain = Base(quantization="none", dtype=self.config.training.mixed_precision_param)
        return self.finetune.base_model if self.finetune else plain

    @cached_property
    def lora(self) -> Lora:
        """LoRA's settings."""
        return self.finetune.lora if self.finetune else Lora(enable=False)

    @property
    def turns_queries(self) -> bool:
        """Whether GARFA rotates queries too."""
        return self.finetune is not None and self.finetune.garfa.queries

    @cached_property
    def ranks(self) -> dict[int, dict[Projection, int]]:
        """The ranks of LoRA's matrices, by layer and module."""
        return lora_ranks(self.finetune, self.layers) if self.finetune else {}

    @cached_property
    def linears(self) -> dict[Projection, tuple[int, ...]]:
        """(outputs, inputs) of a block's linear layers."""
        return module_shapes(self.config)

    @cached_property
    def positions(self) -> tuple[LayerPosition, ...]:
        """Each layer's scopes and rotation."""
        return layers_of(ModelConfig.from_job(self.config))

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters, as a tensor-parallel rank holds them."""
        return tuple(weights(self.config, self.layout.tp))

    def own(self, rank: int) -> list[Weight]:
        """The parameters of a pipeline rank."""
        return [w for w in self.weights if any(stage.holds(w.layer, w.name) for stage in self.layout.stages[rank])]

    def trained(self, group: str = "", layer: int | None = None) -> int:
        """Number of trained parameters of a group of `Weight.group` and in a layer; by default, of all."""
        chosen = (w for w in self.weights if w.trained and group in ("", w.group) and layer in (None, w.layer))
        return sum(w.numel for w in chosen)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks."""
        layout = self.layout
        rows = layout.rows * layout.microbatches * layout.accumulation * layout.dp_replicate * layout.dp_shard
        return rows * self.config.training.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a context-parallel rank holds."""
        return self.layout.rows * self.config.training.seq_len // self.layout.cp

    @cached_property
    def product(self) -> int:
        """Bytes per number in inputs and outputs of matrix products, and in the residual stream."""
        return itemsize(self.base.dtype)

    @cached_property
    def reduced(self) -> int:
        """Bytes per number in gradient reductions."""
        return itemsize("float32")

    @property
    def offloads(self) -> bool:
        """Whether parameters, gradients and moments are in host memory: FSDP moves them there, so it has to wrap the model."""
        return self.config.training.enable_cpu_offload and self.sharded

    @property
    def stays_gathered(self) -> bool:
        """True if FSDP keeps blocks gathered from the forward to the backward pass: if set so, and by default in pipelines and
        where it only casts them."""
        p = self.config.parallelism
        policy = p.fsdp_reshard_after_forward
        return policy == "never" or (policy == "default" and (p.pipeline_parallel_degree > 1 or self.layout.fsdp == 1))

    @property
    def by_operator(self) -> bool:
        """Whether selective checkpointing recomputes all but expensive operations."""
        return self._selects("op")

    @property
    def keeps_attention(self) -> bool:
        """True if selective checkpointing keeps the results of attention and of the exchange before it."""
        return self._selects("op") or self._selects("attention")

    def _selects(self, option: str) -> bool:
        ac = self.config.activation_checkpoint
        return ac.mode == "selective" and ac.selective_ac_option == option

    def recomputes(self, layer: int) -> bool:
        """Whether the layer is recomputed, in whole or by operators; selective checkpointing can name every n-th, counted from 1.

        In fine-tuning, recomputation by operators counts as none.
        """
        ac = self.config.activation_checkpoint
        if self.by_operator:
            return self.finetune is None
        every = int(ac.selective_ac_option) if ac.mode == "selective" and not self.keeps_attention else 0
        return ac.mode == "full" or (ac.mode == "selective" and (not every or (layer + 1) % every == 0))
