"""Settings of a fine-tuning run that fit their types and still cannot be used."""

from operator import attrgetter

from farsight.configs.check import ConfigError, model_parallel_ranks
from farsight.configs.finetuning import PROJECTIONS, FinetuneConfig
from farsight.configs.schema import JobConfig

# Sections of pre-training that mean nothing here: what to set instead.
_UNSUPPORTED = {
    "parallelism.tensor_parallel_degree": "PEFT's layers are not divided; use data_parallel_shard_degree",
    "parallelism.pipeline_parallel_degree": "use data_parallel_shard_degree",
    "checkpoint.initial_load_path": "name the model directory in base_model.path",
    "training.dtype": "what trains is fp32; the rest is in base_model.dtype",
    "training.mixed_precision_param": "set base_model.dtype",
    "training.tokens": "set training.epochs or training.steps",
    "model.converters": "base_model.quantization says how linear layers are kept",
    "lr_scheduler.total_steps": "set training.steps",
    "metrics.plasticity_freq": "rows are conversations; run farsight geometry and farsight plasticity on the adapter instead",
    "lr_scheduler.decay_ratio": "the learning rate falls from the end of its warm-up on",
    "deepspeed.offload_parameters": "a quantised base is small; see base_model.quantization",
}


def check_base(config: FinetuneConfig, ranks: int) -> None:
    """Refuses what fine-tuning can't do on so many ranks, once the base's shapes and positions are known.

    Raises:
        ConfigError: naming the option and its value.
    """
    plain, b, t = JobConfig(), config.base_model, config.training
    for name, instead in _UNSUPPORTED.items():
        value, default = map(attrgetter(name), (config, plain))
        if value != default:
            raise ConfigError(f"{name} = {value!r} is not for fine-tuning: {instead}.")
    if not (config.lora.enable or config.garfa.enable or t.layers):
        raise ConfigError("nothing would train: set lora.enable, garfa.enable or training.layers.")
    if t.layers and config.lora.enable:
        raise ConfigError(
            f"training.layers = {t.layers!r} trains all of these layers' weights, and lora.enable small ones beside them: "
            "set lora.enable = false, or leave training.layers out and name the layers in lora.layers."
        )
    if t.layers and b.quantization != "none":
        raise ConfigError(
            f"training.layers = {t.layers!r} trains the base's own weights, which base_model.quantization = {b.quantization!r} "
            'cannot: set it to "none".'
        )
    if not config.lora.modules:
        raise ConfigError(
            f"lora.modules = [] must name at least one of {', '.join(PROJECTIONS)}; to train without LoRA set lora.enable = "
            "false."
        )
    if config.early_stopping.patience and not config.validation.enable:
        raise ConfigError("early_stopping.patience needs validation: set validation.enable = true.")
    if config.lora.enable and config.lora.dora and b.quantization == "int8":
        raise ConfigError('lora.dora does not go with base_model.quantization = "int8": set "nf4" or "none".')
    shared = shares_out(config, ranks)
    _check_sharing(config, shared)
    _check_optimizer(config, shared)


def shares_out(config: FinetuneConfig, ranks: int) -> bool:
    """Whether FSDP shares out the weights: over data-parallel shards, and over the ranks that cut sequences."""
    p = config.parallelism
    shards = p.data_parallel_shard_degree
    if shards == -1:
        shards = ranks // (p.data_parallel_replicate_degree * model_parallel_ranks(config))
    return config.engine == "torchtitan" and (shards > 1 or p.context_parallel_degree > 1)


def _check_sharing(config: FinetuneConfig, shared: bool) -> None:
    """`shared`: FSDP shares the weights out."""
    quantization = config.base_model.quantization
    if shared and quantization != "none" and config.compile.enable:
        raise ConfigError(
            f"compile.enable does not go with base_model.quantization = {quantization!r} under FSDP, which hands out new tensors "
            "at each pass: set it to false, or parallelism.data_parallel_replicate_degree to the number of GPUs and "
            "data_parallel_shard_degree = 1."
        )
    if shared and quantization == "int8":
        raise ConfigError(
            'base_model.quantization = "int8" keeps tensors that FSDP does not share out: use "nf4", or copies of the model '
            "(parallelism.data_parallel_replicate_degree = the number of GPUs, data_parallel_shard_degree = 1)."
        )
    if config.training.enable_cpu_offload and quantization != "none":
        raise ConfigError(
            f"training.enable_cpu_offload does not go with base_model.quantization = {quantization!r}, whose scales stay on the "
            "GPU: set it to false."
        )
    if config.engine == "deepspeed" and config.deepspeed.zero_stage == 3:
        raise ConfigError(
            "deepspeed.zero_stage = 3 shares out weights of one type, and here the base and what trains have two: set "
            'zero_stage = 2, or engine = "torchtitan", which shares out both (parallelism.data_parallel_shard_degree).'
        )
    if config.engine == "deepspeed" and config.training.clip != "overall":
        raise ConfigError(
            f'training.clip = {config.training.clip!r} does not go with engine = "deepspeed", which knows one norm: set "overall".'
        )


def _check_optimizer(config: FinetuneConfig, shared: bool) -> None:
    import torch

    name = config.optimizer.name
    if name in ("AdamW", "Adam"):
        return
    if name.startswith("Paged") and not torch.cuda.is_available():
        raise ConfigError(
            f'optimizer.name = {name!r} pages a GPU\'s memory, and there is none: set "AdamW" or "AdamW8bit".'
        )
    if config.engine == "deepspeed" or shared:
        raise ConfigError(f'optimizer.name = {name!r} does not share out its state: set "AdamW".')
