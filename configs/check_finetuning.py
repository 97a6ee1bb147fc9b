"""Checks a fine-tuning run's settings that have the right type but cannot be used."""

from operator import attrgetter

from farsight.configs.check import model_parallel_ranks
from farsight.configs.evaluations import name_of
from farsight.configs.finetuning import PROJECTIONS, FinetuneConfig
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError

# Pre-training's options that have no effect in fine-tuning, with what to set instead.
NOT_FOR_FINETUNING = {
    "parallelism.tensor_parallel_degree": "PEFT's layers can't be divided; use data_parallel_shard_degree",
    "parallelism.pipeline_parallel_degree": "use data_parallel_shard_degree",
    "checkpoint.initial_load_path": "name the model directory in base_model.path",
    "checkpoint.keep_best": "adapter/ is always that of the step with the best validation loss",
    "training.dtype": "trained parameters are fp32; the rest is in base_model.dtype",
    "training.mixed_precision_param": "set base_model.dtype",
    "training.tokens": "set training.epochs or training.steps",
    "model.converters": "set base_model.quantization for linear layers",
    "lr_scheduler.total_steps": "set training.steps",
    "metrics.plasticity_freq": "rows are conversations; run farsight geometry and farsight plasticity on the adapter instead",
    "lr_scheduler.decay_ratio": "the decay always starts right after warm-up",
    "deepspeed.offload_parameters": "quantise the base to save memory, with base_model.quantization",
}


def check_base(config: FinetuneConfig, ranks: int) -> None:
    """Refuses settings that fine-tuning can't use; called once the base's shapes and positions are known.

    Args:
        ranks: processes of the run.

    Raises:
        ConfigError: naming the option and its value.
    """
    plain, b, t = JobConfig(), config.base_model, config.training
    for name, instead in NOT_FOR_FINETUNING.items():
        value, default = map(attrgetter(name), (config, plain))
        if value != default:
            raise ConfigError(f"{name} = {value!r} is not for fine-tuning: {instead}.")
    if not (config.lora.enable or config.garfa.enable or t.layers):
        raise ConfigError("nothing would train: set lora.enable, garfa.enable or training.layers.")
    if t.layers and config.lora.enable:
        raise ConfigError(
            f"training.layers = {t.layers!r} trains all weights of these layers, and lora.enable trains adapters instead: "
            "set lora.enable = false, or leave training.layers out and name the layers in lora.layers."
        )
    if t.layers and b.quantization != "none":
        raise ConfigError(
            f"training.layers = {t.layers!r} trains the base's own weights, which is not possible with "
            f'base_model.quantization = {b.quantization!r}: set it to "none".'
        )
    if not config.lora.modules:
        raise ConfigError(
            f"lora.modules = [] must name at least one of {', '.join(PROJECTIONS)}; to train without LoRA set lora.enable = "
            "false."
        )
    if config.early_stopping.patience and not config.validation.enable:
        raise ConfigError("early_stopping.patience needs validation: set validation.enable = true.")
    if config.lora.enable and config.lora.dora and b.quantization == "int8":
        raise ConfigError('lora.dora does not work with base_model.quantization = "int8": set "nf4" or "none".')
    for evaluation in config.evaluations:
        if evaluation.where == "beside":
            raise ConfigError(
                f'the evaluation {name_of(evaluation)} has where = "beside", which is for pre-training: set "inside", which writes the '
                "adapter and reads it with its base on rank 0."
            )
    shared = shares_out(config, ranks)
    _check_sharing(config, shared)
    _check_optimizer(config, shared)


def shares_out(config: FinetuneConfig, ranks: int) -> bool:
    """Whether FSDP shards the weights: over data-parallel shards, and over context-parallel ranks."""
    p = config.parallelism
    shards = p.data_parallel_shard_degree
    if shards == -1:
        shards = ranks // (p.data_parallel_replicate_degree * model_parallel_ranks(config))
    return config.engine == "pytorch" and (shards > 1 or p.context_parallel_degree > 1)


def _check_sharing(config: FinetuneConfig, shared: bool) -> None:
    """Refuses combinations of quantisation, sharding and engine; `shared` says that FSDP shards the weights."""
    quantization = config.base_model.quantization
    if shared and quantization != "none" and config.compile.enable:
        raise ConfigError(
            f"compile.enable does not work with base_model.quantization = {quantization!r} under FSDP, which makes new tensors "
            "in each pass: set it to false, or parallelism.data_parallel_replicate_degree to the number of GPUs and "
            "data_parallel_shard_degree = 1."
        )
    if shared and quantization == "int8":
        raise ConfigError(
            'base_model.quantization = "int8" keeps tensors that FSDP can\'t shard: use "nf4", or copies of the model '
            "(parallelism.data_parallel_replicate_degree = the number of GPUs, data_parallel_shard_degree = 1)."
        )
    if config.training.enable_cpu_offload and quantization != "none":
        raise ConfigError(
            f"training.enable_cpu_offload does not work with base_model.quantization = {quantization!r}, whose scales stay on "
            "the GPU: set it to false."
        )
    if config.engine == "deepspeed" and config.deepspeed.zero_stage == 3:
        raise ConfigError(
            "deepspeed.zero_stage = 3 shards weights of one type only, and here the base and the trained parameters differ: set "
            'zero_stage = 2, or engine = "pytorch", which shards both (parallelism.data_parallel_shard_degree).'
        )
    if config.engine == "deepspeed" and config.training.clip != "overall":
        raise ConfigError(
            f'training.clip = {config.training.clip!r} does not work with engine = "deepspeed", which computes one norm: set '
            '"overall".'
        )


def _check_optimizer(config: FinetuneConfig, shared: bool) -> None:
    import torch

    kind = config.optimizer.kind
    if not kind.startswith("paged"):
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f'optimizer.kind = {kind!r} pages GPU memory, and there is no GPU: set "adamw" or "adamw8bit".'
        )
    if shared:
        raise ConfigError(f'optimizer.kind = {kind!r} can\'t shard its state: set "adamw" or "adamw8bit".')
