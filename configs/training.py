"""Config sections of a training run."""

from dataclasses import dataclass, field
from typing import Literal

from farsight.ranges import Count, NonNegative, Positive, Share, Size, SizeOrAuto


@dataclass
class Job:
    """The run itself: its config file and its folder."""

    config_file: str | None = None
    """TOML file to read; command-line options override it."""
    dump_folder: str = ""
    """Run folder: everything the run writes goes here. Empty: runs/<name of the config file>."""
    store: str = ""
    """Object store to keep the run's checkpoints in, and a copy of its other files: s3://bucket/runs/x or gs://…; dump_folder is
    then the folder for those files on this machine. A dump_folder of that form sets both, to it and to runs/x."""
    description: str = "Farsight"
    """The run's name in the log and in its files."""
    print_config: bool = False
    """Print the whole config at the start."""


@dataclass
class Model:
    """The model's size, and conversion of its layers to float8."""

    flavor: str = ""
    """Model size: the name of a file in configs/sizes/. Empty uses [architecture] as it is."""
    converters: list[Literal["quantize.linear.float8"]] = field(default_factory=list)
    """["quantize.linear.float8"] computes the blocks' linear layers in float8 (GPUs of compute capability 8.9 or
    more, with the package torchao); [quantize.linear.float8] says how they are scaled. Head, embedding and norms
    stay as they are."""
    print_after_conversion: bool = False
    """Print the model after `converters` have changed it."""


@dataclass
class Training:
    """Batches, steps and precision."""

    local_batch_size: Size = 8
    """Sequences that a rank processes at a time."""
    global_batch_size: SizeOrAuto = -1
    """Sequences per optimizer step, over all ranks and accumulated passes; -1 takes local_batch_size on every
    data-parallel rank."""
    seq_len: Size = 2048
    """Tokens per sequence."""
    max_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    steps: Size = 10000
    """Optimizer steps."""
    enable_cpu_offload: bool = False
    """FSDP keeps parameters, gradients and optimizer state in host memory."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of parameters, gradients and optimizer state. "bfloat16" keeps no fp32 copy of the weights."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which layers compute; FSDP casts the weights, on one rank too."""
    gc_freq: Size = 50
    """Steps between Python garbage collections, which all ranks run at the same step."""
    tokens: NonNegative = 0.0
    """Length of training in tokens; sets `steps` from the global batch size and sequence length. 0 uses `steps`."""
    layers: str = ""
    """Train only these layers ("0:8", "-8:", as in position.rules); all other parameters keep their initial values."""


@dataclass
class LRScheduler:
    """Learning-rate schedule: warm-up, a constant phase, decay."""

    warmup_steps: Count = 200
    """Steps over which the rate rises to its peak; the first has 1/warmup_steps of it."""
    total_steps: Size | None = None
    """Length of the schedule in steps; None takes training.steps. A longer one leaves the decay unfinished."""
    decay_ratio: Share | None = None
    """Share of the steps, at the end, over which the rate decays; before that it is constant. None: the decay starts
    right after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Share = 0.0
    """Learning rate at the end of the decay, as a share of optimizer.lr."""


@dataclass
class ActivationCheckpoint:
    """Recomputation of activations in the backward pass."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """"full" recomputes whole blocks, "selective" part of them, "memory_budget" leaves the choice to
    torch.compile."""
    selective_ac_option: str = "2"
    """With "selective": "op" recomputes all but expensive operations, "attention" all but attention and what context
    parallelism receives for it, which saves most of the time at long lengths for little memory; a number n every n-th block."""
    early_stop: bool = False
    """Stop recomputing as soon as all needed activations exist."""
    memory_budget: Share = 0.5
    """With "memory_budget": 0 keeps what "full" would keep, 1 all that the compiled forward pass keeps."""
    visualize_memory_budget_pareto: bool = False
    """Plot run time against memory for all budgets, in the run folder."""
    preserve_rng_state: bool = True
    """Recompute with the same random numbers; this takes time."""


@dataclass(frozen=True)
class Attention:
    """The kernel for scoped attention."""

    backend: Literal["auto", "reference", "banded", "triton", "hybrid", "flex", "flash"] = "auto"
    """Kernel for scoped attention; "auto" picks by device and says which it took. "triton" and "hybrid" (wide heads through
    PyTorch's FlashAttention, in bf16 and fp16, the others through Triton) need a GPU, "flex" (PyTorch's FlexAttention) a GPU
    to train, "flash" a GPU, bf16 or fp16, and the package flash-attn."""


@dataclass(frozen=True)
class Loss:
    """Computation of the loss."""

    chunk_tokens: Count = 0
    """Tokens whose logits exist at once; 0 picks a chunk of about 32M logits, and at least 2,048 tokens where the head trains."""


@dataclass
class Validation:
    """The loss on held-out documents, measured during training."""

    enable: bool = True
    """Measure the loss on held-out documents."""
    local_batch_size: Count = 0
    """0 takes training.local_batch_size."""
    seq_len: Count = 0
    """0 takes training.seq_len."""
    freq: Size = 500
    """Steps between validations; one more comes before the first step and one after the last."""
    steps: SizeOrAuto = 10
    """Batches of held-out documents, the same ones each time."""


@dataclass
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the model with torch.compile, block by block."""
    backend: str = "inductor"
    """torch.compile's backend."""


@dataclass
class Profiling:
    """Traces of steps and of memory."""

    enable_profiling: bool = False
    """Trace steps with PyTorch's profiler."""
    save_traces_folder: str = "profile_traces"
    """Folder for traces, inside the run folder."""
    profile_freq: Size = 10
    """Steps from one trace, or memory snapshot, to the next."""
    profiler_active: Size = 1
    """Steps in a trace."""
    profiler_warmup: Count = 3
    """Steps before each trace that the profiler runs but does not keep."""
    enable_memory_snapshot: bool = False
    """Write snapshots of the GPU's memory."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder for snapshots, inside the run folder."""


@dataclass
class Float8Linear:
    """Scaling of linear layers in float8, with `model.converters`."""

    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers weights in float8; for "tensorwise"."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights at once after a step; for "tensorwise"."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """How tensors are scaled; None is "tensorwise"."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules to leave in their own type; those whose sizes are not multiples of 16 always stay so."""
    emulate: bool = False
    """Emulate float8 on hardware without it; for tests."""


@dataclass
class QuantizedLinear:
    """Linear layers."""

    float8: Float8Linear = field(default_factory=Float8Linear)


@dataclass
class Quantize:
    """Layers in fewer bits."""

    linear: QuantizedLinear = field(default_factory=QuantizedLinear)


@dataclass
class Debug:
    """Seeds and determinism."""

    seed: Count | None = 0
    """Seeds the initial weights."""
    deterministic: bool = False
    """Use deterministic algorithms where they exist."""
    deterministic_warn_only: bool = False
    """Warn about operations that have none, instead of failing."""
