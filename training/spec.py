"""The TrainSpec that torchtitan's Trainer builds pre-training from: model, parallelism, tokenizer, data, loss, metrics."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec, _extra_train_specs, register_train_spec

from farsight.configs.schema import JobConfig
from farsight.data.loader import build_loader
from farsight.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig, build_model, freeze_all_but, trained_layers
from farsight.model.flops import batch_flops
from farsight.parallel.parallelize import parallelize
from farsight.parallel.pipeline import LossShare, pipeline
from farsight.parallel.ranks import on_rank_zero
from farsight.parallel.zero import ZeroOptimizer
from farsight.training.metrics import RunMetrics
from farsight.training.tokenizer import chosen_tokenizer, prepare_tokenizer
from farsight.training.validation import Validator


@dataclass
class ModelArgs(BaseModelArgs):
    """The model config in the form torchtitan passes to the functions of its TrainSpec."""

    config: ModelConfig | None = None
    trained_layers: tuple[int, ...] | None = None

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        self.config = ModelConfig.from_job(job_config)
        self.trained_layers = trained_layers(job_config)

    def build(self) -> nn.Module:
        assert self.config is not None
        model = build_model(self.config)
        freeze_all_but(model, self.trained_layers)
        return model

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Returns the number of parameters, and FLOPs per token."""
        assert self.config is not None
        parameters = sum(p.numel() for p in model.parameters())
        # For a row that is a single document; each training step counts the pairs of its own batch.
        a, layers = self.config.architecture, self.config.layers()
        return parameters, batch_flops(a, layers, torch.arange(seq_len)[None], self.trained_layers) // seq_len


def register(config: JobConfig) -> None:
    """Registers pre-training's TrainSpec with torchtitan as `model.name = "farsight"`."""
    _extra_train_specs.pop("farsight", None)  # left by an earlier run in this process
    register_train_spec(
        "farsight",
        TrainSpec(
            model_cls=ModelArgs.build,  # type: ignore[arg-type]  # torchtitan asks for a class; a function that builds one does
            model_args={config.model.flavor: ModelArgs()},
            parallelize_fn=parallelize,
            pipelining_fn=pipeline,  # type: ignore[arg-type]  # takes our config, a subclass
            build_optimizers_fn=build_optimizers if config.engine == "torchtitan" else partial(_zero, config),
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=lambda dp_world_size, dp_rank, tokenizer, job_config: build_loader(
                job_config, tokenizer, dp_rank, dp_world_size
            ),
            build_tokenizer_fn=build_tokenizer,  # type: ignore[arg-type]  # takes our config, a subclass
            # The model returns the summed loss itself, so that logits never exist all at once.
            build_loss_fn=lambda job_config, **_: LossShare(),
            build_validator_fn=Validator,
            build_metrics_processor_fn=RunMetrics,
        ),
    )


def _zero(config: JobConfig, *parts: Any) -> ZeroOptimizer:
    return ZeroOptimizer(config, build_optimizers(*parts))


def build_tokenizer(config: JobConfig) -> Tokenizer:
    """Loads the run's tokenizer, or trains it if the config names none, and sets the vocabulary size in `config`.

    Raises:
        ConfigError: the tokenizer has more ids than the embedding.
    """
    trained = Path(config.job.dump_folder) / "tokenizer"
    config.tokenizer = chosen_tokenizer(config)
    on_rank_zero(lambda: prepare_tokenizer(config, trained), may_take_hours=True)
    if not config.tokenizer.path and config.tokenizer.kind != "bytes":
        config.tokenizer = replace(config.tokenizer, path=str(trained))
    tokenizer = load_tokenizer(config.tokenizer)
    vocab_size = config.architecture.vocab_size
    if not vocab_size:
        # A multiple of 64 divides evenly over tensor-parallel ranks and suits the matrix units.
        config.architecture = replace(config.architecture, vocab_size=-(-tokenizer.vocab_size // 64) * 64)
    elif tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"architecture.vocab_size = {vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; "
            "set it to 0 to take the tokenizer's."
        )
    return tokenizer
