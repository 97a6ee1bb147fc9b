"""Checks settings that have the right type but cannot be used: contradictory, unsupported, or without effect here."""

import dataclasses
import math
from operator import attrgetter
from pathlib import Path

from farsight.configs.evaluations import check_evaluations
from farsight.configs.metrics import check_plasticity
from farsight.configs.schema import Job, JobConfig
from farsight.errors import ConfigError


def check(config: JobConfig) -> None:
    """Refuses settings that contradict each other or are not supported.

    Raises:
        ConfigError: naming the options, their values, and what to set instead.
    """
    a, t = config.architecture, config.training
    if a.n_heads % a.n_kv_heads:
        raise ConfigError(
            f"architecture.n_heads = {a.n_heads} must be a multiple of architecture.n_kv_heads = {a.n_kv_heads}."
        )
    if a.head_dim % 2:
        raise ConfigError(f"architecture.head_dim = {a.head_dim} must be even: RoPE rotates pairs.")
    if a.rotary_dim % 2 or a.rotary_dim > a.head_dim:
        raise ConfigError(
            f"architecture.rotary_dim = {a.rotary_dim} must be even and at most head_dim = {a.head_dim}; 0 rotates all of them."
        )
    if t.tokens and t.global_batch_size < 1:
        raise ConfigError(f"training.tokens = {t.tokens:g} needs training.global_batch_size to give a number of steps.")
    if config.checkpoint.keep_latest_k == 1:
        raise ConfigError("checkpoint.keep_latest_k = 1 would leave nothing to resume from during a save; set 2.")
    _check_folders(config)
    check_store(config.job)
    _check_schedule(config)
    if problem := check_plasticity(config.metrics, t.seq_len, a.n_heads):
        raise ConfigError(problem)
    check_evaluations(config.evaluations, config.checkpoint, config.validation)
    _check_together(config)
    _check_engine(config)


def _check_folders(config: JobConfig) -> None:
    for name in _FOLDERS:
        folder = attrgetter(name)(config)
        if Path(folder).is_absolute() or ".." in Path(folder).parts or not Path(folder).parts:
            raise ConfigError(f"{name} = {folder!r} must name a folder inside the run folder, without '..'.")


def check_store(job: Job) -> None:
    """Refuses a run folder on a store that can't be written, and two of them.

    Raises:
        ConfigError: naming the option and its value.
    """
    for name, value in (("dump_folder", job.dump_folder), ("store", job.store)):
        scheme, colon, rest = value.partition("://")
        if (colon or (name == "store" and value)) and (scheme not in ("s3", "gs") or "/" not in rest.strip("/")):
            raise ConfigError(
                f"job.{name} = {value!r} must be a folder on a store that can be written, as in s3://bucket/runs/x."
            )
    if job.store and "://" in job.dump_folder:
        raise ConfigError(
            f"job.dump_folder = {job.dump_folder!r} and job.store = {job.store!r} are both on a store: leave one out."
        )


def _check_schedule(config: JobConfig) -> None:
    if not config.training.steps and not config.training.tokens:
        return  # fine-tuning by epochs: steps are counted once the data is read
    s, steps = config.lr_scheduler, training_steps(config)
    total = s.total_steps or steps
    if total < steps:
        raise ConfigError(f"lr_scheduler.total_steps = {total} is less than the {steps} training steps.")
    if s.warmup_steps > total:
        raise ConfigError(f"lr_scheduler.warmup_steps = {s.warmup_steps} exceeds the schedule's {total} steps.")


# Folders that a run writes, relative to its run folder.
_FOLDERS = (
    "checkpoint.folder", "metrics.save_tb_folder", "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)  # fmt: skip

FLOAT8 = "quantize.linear.float8"
"""The converter of linear layers to float8."""


def _check_together(config: JobConfig) -> None:
    """Refuses settings of which one rules out the other."""
    if config.compile.enable and config.attention.backend == "flash":
        raise ConfigError(
            'attention.backend = "flash" reads scopes on the host, which torch.compile can\'t trace: set compile.enable = '
            'false or attention.backend = "triton".'
        )
    if config.quantize.linear.float8 != JobConfig().quantize.linear.float8 and not config.model.converters:
        raise ConfigError(f'quantize.linear.float8 does nothing here: set model.converters = ["{FLOAT8}"] too.')
    float8 = config.quantize.linear.float8
    if float8.enable_fsdp_float8_all_gather and float8.recipe_name not in (None, "tensorwise"):
        raise ConfigError(
            f"{FLOAT8}.enable_fsdp_float8_all_gather needs one scale for a whole weight, and {FLOAT8}.recipe_name = "
            f'{float8.recipe_name!r} has one for each row: set it to "tensorwise", or the former to false.'
        )
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        raise ConfigError(
            f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp does nothing here: set enable_fsdp_float8_all_gather = true too."
        )
    if config.checkpoint.exclude_from_loading and config.checkpoint.initial_load_model_only:
        raise ConfigError(
            "checkpoint.exclude_from_loading does nothing here, since the model alone is loaded: set "
            "checkpoint.initial_load_model_only = false too."
        )
    c = config.parallelism
    parts = c.context_parallel_degree * (2 if c.context_parallel_load_balancer == "zigzag" else 1)
    for name, length in _lengths(config).items():
        if c.context_parallel_degree > 1 and length % parts:
            raise ConfigError(
                f"{name} = {length} is not a multiple of {parts}, the number of spans that "
                f'context_parallel_degree = {c.context_parallel_degree} ("{c.context_parallel_load_balancer}") cuts it into.'
            )
    ac, p = config.activation_checkpoint, config.profiling
    option = ac.selective_ac_option
    if ac.mode == "selective" and option not in ("op", "attention") and not option.isdecimal():
        raise ConfigError(
            f'activation_checkpoint.selective_ac_option = {option!r} must be "op", "attention" or a number, as in "2".'
        )
    if ac.mode == "selective" and option == "op" and config.compile.enable and c.context_parallel_degree > 1:
        raise ConfigError(
            'activation_checkpoint.selective_ac_option = "op" can\'t see matrix products that torch.compile has compiled between '
            'the exchanges of context parallelism: set it to "attention", or compile.enable = false.'
        )
    if ac.mode == "memory_budget" and not config.compile.enable:
        raise ConfigError(
            'activation_checkpoint.mode = "memory_budget" needs torch.compile: set compile.enable = true.'
        )
    if p.profiler_active + p.profiler_warmup > p.profile_freq:
        raise ConfigError(
            f"profiling.profile_freq = {p.profile_freq} is less than the {p.profiler_warmup} steps of profiler_warmup and the "
            f"{p.profiler_active} of profiler_active together."
        )
    check_tensor_parallel(config)
    check_pipeline(config)
    if config.training.enable_cpu_offload and c.data_parallel_shard_degree == 1 and model_parallel_ranks(config) == 1:
        raise ConfigError(
            "training.enable_cpu_offload needs FSDP: set parallelism.data_parallel_shard_degree to -1 or more than 1."
        )
    if config.training.enable_cpu_offload and config.optimizer.kind == "muon":
        raise ConfigError(
            'optimizer.kind = "muon" gathers matrices on the GPU, and training.enable_cpu_offload keeps them in host memory: '
            'set it to false, or optimizer.kind = "adamw".'
        )


def check_tensor_parallel(config: JobConfig) -> None:
    """Refuses a tensor-parallel degree that does not divide every size split over its ranks.

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
            "parallelism.enable_async_tensor_parallel needs torch.compile and tensor parallelism: set compile.enable = true "
            "and tensor_parallel_degree above 1."
        )


def _lengths(config: JobConfig) -> dict[str, int]:
    """Tokens per sequence, by the option that sets them."""
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len or config.training.seq_len
    return lengths


def check_pipeline(config: JobConfig) -> None:
    """Refuses settings that no pipeline can run with, whatever the number of processes.

    Raises:
        ConfigError: naming the option and its value.
    """
    p, t, v = config.parallelism, config.training, config.validation
    if p.pipeline_parallel_degree == 1:
        return
    name = f"parallelism.pipeline_parallel_degree = {p.pipeline_parallel_degree}"
    if t.local_batch_size % p.pipeline_parallel_microbatch_size:
        raise ConfigError(
            f"training.local_batch_size = {t.local_batch_size} is not a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size = {p.pipeline_parallel_microbatch_size}."
        )
    # PyTorch's schedules refuse these too, but only once the run has started.
    pp, number = p.pipeline_parallel_degree, t.local_batch_size // p.pipeline_parallel_microbatch_size
    batches = f"training.local_batch_size = {t.local_batch_size} gives a pipeline {number} micro-batches"
    if p.pipeline_parallel_schedule == "1F1B" and number < pp:
        raise ConfigError(f"{batches}, and 1F1B needs one for each of its {pp} stages.")
    rounds = max(1, number // pp)
    if p.pipeline_parallel_schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and number % rounds:
        raise ConfigError(
            f"{batches}, and {p.pipeline_parallel_schedule} needs a multiple of {rounds}: use a multiple of {pp}."
        )
    single, folded = p.pipeline_parallel_schedule in ("1F1B", "GPipe"), p.pipeline_parallel_schedule == "ZBVZeroBubble"
    stages = p.pipeline_parallel_stages_per_rank
    if stages and ((single and stages != 1) or (folded and stages != 2) or (not single and stages < 2)):
        raise ConfigError(
            f"parallelism.pipeline_parallel_stages_per_rank = {stages}: {p.pipeline_parallel_schedule} has "
            f"{'1' if single else '2' if folded else '2 or more'}; 0 takes the schedule's default."
        )
    if config.compile.enable and p.pipeline_parallel_schedule.endswith("ZeroBubble"):
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {p.pipeline_parallel_schedule!r} splits backward passes, which "
            'torch.compile can\'t: set compile.enable = false or the schedule "Interleaved1F1B".'
        )
    if config.architecture.tie_embeddings:
        raise ConfigError(
            f"{name}: with architecture.tie_embeddings the first and the last stage would share a weight."
        )
    if t.layers:
        raise ConfigError(
            f"{name}: training.layers = {t.layers!r} would leave stages with nothing to train; divide the model by "
            "tensor_parallel_degree, context_parallel_degree and data_parallel_shard_degree instead."
        )
    if v.enable and (v.local_batch_size not in (0, t.local_batch_size) or v.seq_len not in (0, t.seq_len)):
        raise ConfigError(
            f"{name}: stages exchange tensors of one shape, so validation.local_batch_size and seq_len have to equal "
            "training's; set them to 0."
        )


# Options that DeepSpeed handles differently or not at all, with what to do instead.
_NOT_WITH_DEEPSPEED = {
    "parallelism.tensor_parallel_degree": "ZeRO shards the state of whole layers over all ranks",
    "parallelism.pipeline_parallel_degree": "ZeRO shards the state of whole layers over all ranks",
    "parallelism.context_parallel_degree": 'set engine = "pytorch" for sequences that one GPU cannot hold',
    "parallelism.data_parallel_replicate_degree": "one model is sharded over all ranks; see deepspeed.zero_stage",
    "parallelism.data_parallel_shard_degree": "one model is sharded over all ranks; see deepspeed.zero_stage",
    "parallelism.fsdp_reshard_after_forward": "it only applies to FSDP; see deepspeed.zero_stage",
    "training.enable_cpu_offload": "set deepspeed.offload_optimizer, and offload_parameters with deepspeed.zero_stage = 3",
    "training.dtype": "fp32 weights are always kept; set training.mixed_precision_param",
    "model.converters": "ZeRO is not tested with float8",
    "training.layers": "DeepSpeed keeps no fp32 copy of weights that it does not train",
    "checkpoint.async_mode": "checkpoints are written directly from the weights, which the next step changes",
}


def _check_engine(config: JobConfig) -> None:
    plain, z = JobConfig(), config.deepspeed
    if config.engine == "pytorch":
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
            raise ConfigError(f'{name} = {value!r} does not work with engine = "deepspeed": {instead}.')
    if config.optimizer.kind not in ("adamw", "adam"):
        raise ConfigError(
            f'optimizer.kind = {config.optimizer.kind!r} does not work with engine = "deepspeed", which steps with PyTorch\'s '
            'AdamW or Adam: set "adamw", or engine = "pytorch".'
        )
    if z.offload_parameters and z.zero_stage != 3:
        raise ConfigError(
            f"deepspeed.offload_parameters needs sharded parameters: set deepspeed.zero_stage = 3, not {z.zero_stage}."
        )
    if config.compile.enable and z.zero_stage == 3:
        raise ConfigError(
            "compile.enable does not work with deepspeed.zero_stage = 3, whose parameters torch.compile can't trace: set it to "
            "false, or deepspeed.zero_stage = 2."
        )


MODEL_PARALLEL = ("tensor", "pipeline", "context")
"""The kinds of parallelism that divide a model or a sequence, as the degrees' names begin."""


def check_processes(config: JobConfig, processes: int) -> None:
    """Refuses degrees and a global batch that do not divide over this number of processes.

    Raises:
        ConfigError: naming the batch and the degrees.
    """
    t, p, ranks = config.training, config.parallelism, model_parallel_ranks(config)
    if processes < 1 or processes % ranks:
        degrees = {
            short: getattr(p, f"{name}_parallel_degree")
            for name, short in zip(MODEL_PARALLEL, ("TP", "PP", "CP"), strict=True)
        }
        shown = " × ".join(f"{short} {degree}" for short, degree in degrees.items() if degree > 1)
        raise ConfigError(
            f"The layout {shown} needs a multiple of {ranks} processes; there {'are' if processes > 1 else 'is'} {processes}."
        )
    copies, replicate, shard = processes // ranks, p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    if copies % replicate or (shard != -1 and replicate * shard != copies):
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree = {replicate} and data_parallel_shard_degree = {shard} do not "
            f"multiply to the run's {copies} data-parallel ranks ({processes} process{'es' * (processes > 1)}); set the latter to -1 to take the rest."
        )
    if t.enable_cpu_offload and shard == -1 and copies == replicate and ranks == 1:
        raise ConfigError(
            f"training.enable_cpu_offload needs FSDP, and of {processes} process{'es' * (processes > 1)} with "
            f"data_parallel_replicate_degree = {replicate} each has its own copy: set it to false, or start more."
        )
    if t.global_batch_size > 0 and t.global_batch_size % (t.local_batch_size * copies):
        raise ConfigError(
            f"training.global_batch_size = {t.global_batch_size} is not a multiple of "
            f"local_batch_size = {t.local_batch_size} times {copies} data-parallel ranks."
        )


def model_parallel_ranks(config: JobConfig) -> int:
    """Number of processes over which one model and sequence are divided."""
    return math.prod(getattr(config.parallelism, f"{name}_parallel_degree") for name in MODEL_PARALLEL)


def training_steps(config: JobConfig) -> int:
    """Number of optimizer steps: from `training.tokens` if given (rounded up), else `training.steps`."""
    t = config.training
    if not t.tokens:
        return t.steps
    return -(-int(t.tokens) // (t.global_batch_size * t.seq_len))
