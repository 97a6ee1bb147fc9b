"""Settings that fit their types and still cannot be used: out of range, at odds with each other, or of no effect here."""

import dataclasses
import math
from operator import attrgetter
from pathlib import Path

from farsight.configs.metrics import check_plasticity
from farsight.configs.schema import JobConfig
from farsight.errors import UserError


class ConfigError(UserError):
    """A configuration that cannot be used; the message names the option, its value and what to set instead."""


def check(config: JobConfig) -> None:
    """Refuses settings that contradict each other, naming both sides."""
    a, t = config.architecture, config.training
    if a.n_heads % a.n_kv_heads:
        raise ConfigError(
            f"architecture.n_heads = {a.n_heads} must be a multiple of architecture.n_kv_heads = {a.n_kv_heads}."
        )
    if a.head_dim % 2:
        raise ConfigError(f"architecture.head_dim = {a.head_dim} must be even: RoPE rotates pairs.")
    if t.tokens and t.global_batch_size < 1:
        raise ConfigError(
            f"training.tokens = {t.tokens:g} needs training.global_batch_size, to know how many steps it is."
        )
    if config.checkpoint.keep_latest_k == 1:
        raise ConfigError(
            "checkpoint.keep_latest_k = 1 would leave nothing to resume from while a save is under way; set 2."
        )
    _check_folders(config)
    _check_schedule(config)
    if problem := check_plasticity(config.metrics, t.seq_len, a.n_heads):
        raise ConfigError(problem)
    _check_unsupported(config)
    _check_engine(config)


def _check_folders(config: JobConfig) -> None:
    for name in _FOLDERS:
        folder = attrgetter(name)(config)
        if Path(folder).is_absolute() or ".." in Path(folder).parts or not Path(folder).parts:
            raise ConfigError(f"{name} = {folder!r} must name a folder inside the run folder, without '..'.")


def _check_schedule(config: JobConfig) -> None:
    if not config.training.steps and not config.training.tokens:
        return  # fine-tuning by epochs counts its steps when it has read the data
    s, steps = config.lr_scheduler, training_steps(config)
    total = s.total_steps or steps
    if total < steps:
        raise ConfigError(f"lr_scheduler.total_steps = {total} is less than the {steps} training steps.")
    if s.warmup_steps > total:
        raise ConfigError(f"lr_scheduler.warmup_steps = {s.warmup_steps} exceeds the schedule's {total} steps.")


# Where a run writes, below its own folder.
_FOLDERS = (
    "checkpoint.folder", "metrics.save_tb_folder", "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)  # fmt: skip

FLOAT8 = "quantize.linear.float8"
"""torchtitan's name for linear layers in float8."""

# Options of torchtitan that mean nothing here, or would do harm: what to set instead.
_UNSUPPORTED = {
    "training.dataset": "name sources in [data]",
    "training.dataset_path": "name sources in [data]",
    "training.dataloader": "the loader reads ahead by itself",
    "validation.dataset": "validation takes held-out documents of [data]",
    "validation.dataset_path": "validation takes held-out documents of [data]",
    "validation.dataloader": "the loader reads ahead by itself",
    "model.name": 'leave it at "farsight"',
    "model.hf_assets_path": "use tokenizer.path, and checkpoint.initial_load_path for weights",
    "model.tokenizer_path": "use tokenizer.path",
    "quantize.linear.mx": "linear layers are computed in bf16, or in float8 (model.converters)",
    "quantize.grouped_mm": "these models have no experts",
    "metrics.enable_wandb": "read metrics.jsonl or TensorBoard's files",
    "metrics.save_for_all_ranks": "figures are those of all ranks together",
    "metrics.disable_color_printing": "nothing is printed in colour",
    "checkpoint.last_save_model_only": "model/ is written anyway, and a run that is stopped has to save all of its state",
    "checkpoint.last_save_in_hf": "model/ is written anyway",
    "checkpoint.export_dtype": "use `farsight convert to-hf … --dtype`",
    "checkpoint.create_seed_checkpoint": "initial weights are the same on every layout without one",
    "checkpoint.initial_load_in_hf": "name the directory in checkpoint.initial_load_path; what it is, is seen",
    "checkpoint.initial_load_in_hf_quantized": "quantised weights are not read",
    "optimizer.early_step_in_backward": "a step has to wait for the finite check and for clipping",
    "comm.mode": "use torchrun",
    "fault_tolerance": "runs resume from checkpoints",
    "memory_estimation": "it is torchtitan's own tool, for its own models",
    "parallelism.expert_parallel_degree": "these models have no experts",
    "parallelism.expert_tensor_parallel_degree": "these models have no experts",
    "parallelism.module_fqns_per_model_part": "layers are split over pipeline stages by their FLOPs",
    "parallelism.pipeline_parallel_first_stage_less_layers": "layers are split over pipeline stages by their FLOPs",
    "parallelism.pipeline_parallel_last_stage_less_layers": "layers are split over pipeline stages by their FLOPs",
    "parallelism.pipeline_parallel_layers_per_stage": "use parallelism.pipeline_parallel_stages_per_rank",
    "parallelism.pipeline_parallel_schedule_csv": "name a schedule in parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "these models have no experts",
    "parallelism.disable_loss_parallel": "whole logits never exist, and so cost nothing to divide",
    "parallelism.context_parallel_rotate_method": "keys go once, to the ranks whose queries see them",
}


def _check_unsupported(config: JobConfig) -> None:
    plain = JobConfig()
    for name, instead in _UNSUPPORTED.items():
        value, default = map(attrgetter(name), (config, plain))
        if value != default:
            shown = f" = {value!r}" if not dataclasses.is_dataclass(value) else ""
            raise ConfigError(f"{name}{shown} is not supported: {instead}.")
    if config.compile.enable and config.attention.backend == "flash":
        raise ConfigError(
            'attention.backend = "flash" reads scopes on the host, which torch.compile cannot: set compile.enable = false '
            'or attention.backend = "triton".'
        )
    if set(config.compile.components) - {"model"}:
        raise ConfigError(f'compile.components = {config.compile.components}: only ["model"] is compiled.')
    if config.model.converters not in ([], [FLOAT8]):
        raise ConfigError(f'model.converters = {config.model.converters}: only ["{FLOAT8}"] is known.')
    if config.quantize.linear.float8 != plain.quantize.linear.float8 and not config.model.converters:
        raise ConfigError(f'quantize.linear.float8 does nothing here: set model.converters = ["{FLOAT8}"] too.')
    c = config.parallelism
    parts = c.context_parallel_degree * (2 if c.context_parallel_load_balancer == "zigzag" else 1)
    for name, length in _lengths(config).items():
        if c.context_parallel_degree > 1 and length % parts:
            raise ConfigError(
                f"{name} = {length} is not a multiple of {parts}, the spans into which "
                f'context_parallel_degree = {c.context_parallel_degree} cuts it ("{c.context_parallel_load_balancer}").'
            )
    check_tensor_parallel(config)
    check_pipeline(config)
    if config.training.enable_cpu_offload and c.data_parallel_shard_degree == 1 and model_parallel_ranks(config) == 1:
        raise ConfigError(
            "training.enable_cpu_offload needs FSDP: set parallelism.data_parallel_shard_degree to -1 or more than 1."
        )


def check_tensor_parallel(config: JobConfig) -> None:
    """Refuses a tensor-parallel degree that does not divide what is divided over its ranks.

    Raises:
        ConfigError: naming the option and its value.
    """
    a, degree = config.architecture, config.parallelism.tensor_parallel_degree
    context = config.parallelism.context_parallel_degree
    divided = {
        "architecture.n_kv_heads": a.n_kv_heads,
        "architecture.ffn_dim": a.ffn_dim,
        "architecture.vocab_size": a.vocab_size,
        **{
            f"{name} / {context} context-parallel ranks": length // context for name, length in _lengths(config).items()
        },
    }
    for name, value in divided.items():
        if value % degree:
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {degree} does not divide {name} = {value}: use a divisor of it."
            )
    if config.parallelism.enable_async_tensor_parallel and (degree == 1 or not config.compile.enable):
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel is a pass of torch.compile over tensor-parallel blocks: set "
            "compile.enable = true and tensor_parallel_degree above 1."
        )


def _lengths(config: JobConfig) -> dict[str, int]:
    """Tokens of a sequence, by the option that says so."""
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len or config.training.seq_len
    return lengths


def check_pipeline(config: JobConfig) -> None:
    """Refuses what a pipeline can't have, whatever the number of processes.

    Raises:
        ConfigError: naming the option and its value.
    """
    p, t, v = config.parallelism, config.training, config.validation
    if p.pipeline_parallel_degree == 1:
        return
    name = f"parallelism.pipeline_parallel_degree = {p.pipeline_parallel_degree}"
    if p.pipeline_parallel_microbatch_size < 1 or t.local_batch_size % p.pipeline_parallel_microbatch_size:
        raise ConfigError(
            f"training.local_batch_size = {t.local_batch_size} is not a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size = {p.pipeline_parallel_microbatch_size}."
        )
    # PyTorch's schedules refuse these too, but only when a run has started.
    pp, number = p.pipeline_parallel_degree, t.local_batch_size // p.pipeline_parallel_microbatch_size
    batches = f"training.local_batch_size = {t.local_batch_size} gives a pipeline {number} micro-batches"
    if p.pipeline_parallel_schedule == "1F1B" and number < pp:
        raise ConfigError(f"{batches}, and 1F1B needs one for each of its {pp} stages.")
    rounds = max(1, number // pp)
    if p.pipeline_parallel_schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and number % rounds:
        raise ConfigError(
            f"{batches}, and {p.pipeline_parallel_schedule} a multiple of {rounds}: use a multiple of {pp}."
        )
    single, folded = p.pipeline_parallel_schedule in ("1F1B", "GPipe"), p.pipeline_parallel_schedule == "ZBVZeroBubble"
    stages = p.pipeline_parallel_stages_per_rank
    if stages and ((single and stages != 1) or (folded and stages != 2) or (not single and stages < 2)):
        raise ConfigError(
            f"parallelism.pipeline_parallel_stages_per_rank = {stages}: {p.pipeline_parallel_schedule} has "
            f"{'1' if single else '2' if folded else '2 or more'}; 0 takes what the schedule has."
        )
    if config.compile.enable and p.pipeline_parallel_schedule.endswith("ZeroBubble"):
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {p.pipeline_parallel_schedule!r} splits backward passes, which "
            'torch.compile does not: set compile.enable = false or the schedule "Interleaved1F1B".'
        )
    if config.architecture.tie_embeddings:
        raise ConfigError(
            f"{name}: with architecture.tie_embeddings the first and the last stage would share a weight."
        )
    if t.layers:
        raise ConfigError(
            f"{name}: training.layers = {t.layers!r} would leave stages that train nothing; divide the model by "
            "tensor_parallel_degree, context_parallel_degree and data_parallel_shard_degree instead."
        )
    if v.enable and (v.local_batch_size not in (0, t.local_batch_size) or v.seq_len not in (0, t.seq_len)):
        raise ConfigError(
            f"{name}: stages exchange tensors of one shape, so validation.local_batch_size and seq_len have to be "
            "training's; set them to 0."
        )


# Options of torchtitan that DeepSpeed does otherwise or not at all: what to set instead.
_NOT_WITH_DEEPSPEED = {
    "parallelism.tensor_parallel_degree": "ZeRO shares out whole layers' state over all ranks",
    "parallelism.pipeline_parallel_degree": "ZeRO shares out whole layers' state over all ranks",
    "parallelism.context_parallel_degree": 'set engine = "torchtitan" for sequences that one GPU cannot hold',
    "parallelism.data_parallel_replicate_degree": "all ranks share out one model; see deepspeed.zero_stage",
    "parallelism.data_parallel_shard_degree": "all ranks share out one model; see deepspeed.zero_stage",
    "parallelism.fsdp_reshard_after_forward": "it is FSDP's; see deepspeed.zero_stage",
    "training.enable_cpu_offload": "set deepspeed.offload_optimizer, and offload_parameters with deepspeed.zero_stage = 3",
    "training.dtype": "fp32 weights are always kept; set training.mixed_precision_param",
    "model.converters": "ZeRO was not tried with float8",
    "training.layers": "DeepSpeed keeps no fp32 copy of weights that it does not train",
    "checkpoint.async_mode": "a checkpoint is written from the weights themselves, which the next step changes",
}


def _check_engine(config: JobConfig) -> None:
    plain, z = JobConfig(), config.deepspeed
    if config.engine == "torchtitan":
        for field in dataclasses.fields(z):
            value = getattr(z, field.name)
            if value != field.default:
                raise ConfigError(
                    f'deepspeed.{field.name} = {value!r} does nothing here: set engine = "deepspeed" too.'
                )
        return
    for name, instead in _NOT_WITH_DEEPSPEED.items():
        value, default = map(attrgetter(name), (config, plain))
        if value != default:
            raise ConfigError(f'{name} = {value!r} does not go with engine = "deepspeed": {instead}.')
    if z.offload_parameters and z.zero_stage != 3:
        raise ConfigError(
            f"deepspeed.offload_parameters needs parameters that are shared out: set deepspeed.zero_stage = 3, not {z.zero_stage}."
        )
    if config.compile.enable and z.zero_stage == 3:
        raise ConfigError(
            "compile.enable does not go with deepspeed.zero_stage = 3, whose parameters torch.compile cannot trace: set it to "
            "false, or deepspeed.zero_stage = 2."
        )


MODEL_PARALLEL = ("tensor", "pipeline", "context")
"""Parallelism over the parts of a model or sequence, as torchtitan names the degrees."""


def check_processes(config: JobConfig, processes: int) -> None:
    """Refuses a global batch that does not divide over the data-parallel ranks of so many processes.

    Raises:
        ConfigError: naming the batch and the degrees.
    """
    t, p, ranks = config.training, config.parallelism, model_parallel_ranks(config)
    if processes < 1 or processes % ranks:
        raise ConfigError(f"{processes} processes are not a multiple of the {ranks} over which a model is divided.")
    copies, replicate, shard = processes // ranks, p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    if copies % replicate or (shard != -1 and replicate * shard != copies):
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree = {replicate} and data_parallel_shard_degree = {shard} do not "
            f"make up the {copies} data-parallel ranks of {processes} processes; -1 for the latter takes what is left."
        )
    if t.global_batch_size > 0 and t.global_batch_size % (t.local_batch_size * copies):
        raise ConfigError(
            f"training.global_batch_size = {t.global_batch_size} is not a multiple of "
            f"local_batch_size = {t.local_batch_size} times {copies} data-parallel ranks."
        )


def model_parallel_ranks(config: JobConfig) -> int:
    """Processes over which one model and sequence are divided."""
    return math.prod(getattr(config.parallelism, f"{name}_parallel_degree") for name in MODEL_PARALLEL)


def training_steps(config: JobConfig) -> int:
    """Steps of the run: from `training.tokens` where given (rounded up), else `training.steps`."""
    t = config.training
    if not t.tokens:
        return t.steps
    return -(-int(t.tokens) // (t.global_batch_size * t.seq_len))
