"""Config sections of a training run: torchtitan's with our defaults and ranges, and those that it lacks."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torchtitan.config as titan

from farsight.ranges import Count, NonNegative, PartialShare, Positive, Range, Share, Size, SizeOrAuto


@dataclass(frozen=True)
class Loss:
    chunk_tokens: Count = 0
    """Tokens whose logits exist at once; 0 picks a chunk of about 32M logits."""


@dataclass(frozen=True)
class Attention:
    backend: Literal["auto", "reference", "banded", "triton", "flex", "flash"] = "auto"
    """Kernel for scoped attention; "auto" picks by device and says which it took. "triton" needs a GPU, "flex" (PyTorch's
    FlexAttention) a GPU to train, "flash" a GPU, bf16 or fp16, and the package flash-attn."""


@dataclass
class Job(titan.Job):
    config_file: str | None = None
    """TOML file to read; command-line options win over it."""
    dump_folder: str = ""
    """Run folder: everything the run writes goes here. Empty: runs/<config file's name>."""
    description: str = "Farsight"


@dataclass
class Model(titan.Model):
    name: str = "farsight"
    flavor: str = ""
    """A size: the name of a file in configs/sizes/. Empty takes [architecture] as it stands."""
    hf_assets_path: str = ""
    """Not used: the tokenizer is named in [tokenizer], weights to start from in [checkpoint] initial_load_path."""
    converters: list[str] = field(default_factory=list)
    """["quantize.linear.float8"] computes the blocks' linear layers in float8 (GPUs of compute capability 8.9 or more, with
    the package torchao); [quantize.linear.float8] says how they are scaled. Head, embedding and norms stay as they are."""


@dataclass
class Optimizer(titan.Optimizer):
    """AdamW or Adam over all weights that train."""

    name: Literal["AdamW", "Adam"] = "AdamW"  # type: ignore[assignment]  # torchtitan takes any string
    lr: Positive = 8e-4
    beta1: PartialShare = 0.9
    beta2: PartialShare = 0.95
    """Decay of the second moment's running mean; torchtitan's default, where PyTorch's is 0.999."""
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1


@dataclass
class LRScheduler(titan.LRScheduler):
    """The learning rate over the steps: warm-up, a constant stretch, decay."""

    warmup_steps: Count = 200
    total_steps: Size | None = None
    decay_ratio: Share | None = None
    min_lr_factor: Share = 0.0


@dataclass
class ActivationCheckpoint(titan.ActivationCheckpoint):
    """Which activations are recomputed in the backward pass."""

    memory_budget: Share = 0.5


@dataclass
class Comm(titan.Comm):
    """Timeouts of collectives."""

    init_timeout_seconds: Size = 300
    train_timeout_seconds: Size = 100
    trace_buf_size: Count = 20000


@dataclass
class Profiling(titan.Profiling):
    """Traces of steps and of memory."""

    profile_freq: Size = 10
    profiler_active: Size = 1
    profiler_warmup: Count = 3


@dataclass
class Checkpoint(titan.Checkpoint):
    load_step: Annotated[int, Range(least=0, also=-1)] = -1
    enable: bool = True
    last_save_model_only: bool = False
    """The last checkpoint keeps the optimizer too, so that a finished run can be continued."""
    keep_latest_k: Count = 2
    interval: Size = 500
    verify: bool = True
    """Compare every file with its checksums before a checkpoint is used; false looks at sizes alone."""
    accept_changes: tuple[Literal["position", "optimizer"], ...] = ()
    """What may differ from the checkpoint that the run resumes from: "position" (anything in [position]), "optimizer" (numbers
    in [optimizer], [lr_scheduler] and fine-tuning's [garfa]). Otherwise such changes are refused."""


@dataclass
class Training(titan.Training):
    local_batch_size: Size = 8
    global_batch_size: SizeOrAuto = -1
    seq_len: Size = 2048
    max_norm: Positive = 1.0
    steps: Size = 10000
    gc_freq: Size = 50
    tokens: NonNegative = 0.0
    """Length of training in tokens; sets `steps` from the global batch size and sequence length. 0 uses `steps`."""
    layers: str = ""
    """Train these layers alone ("0:8", "-8:", as in position.rules); all other parameters stay as they started."""


@dataclass
class Validation(titan.Validation):
    enable: bool = True
    freq: Size = 500
    """Steps between validations; one more comes before the first step and one after the last."""
    steps: SizeOrAuto = 10
    """Batches of held-out documents, the same ones each time."""
    local_batch_size: Count = 0
    """0 takes training.local_batch_size."""
    seq_len: Count = 0
    """0 takes training.seq_len."""


@dataclass
class Parallelism(titan.Parallelism):
    data_parallel_replicate_degree: Size = 1
    data_parallel_shard_degree: SizeOrAuto = -1
    tensor_parallel_degree: Size = 1
    context_parallel_degree: Size = 1
    pipeline_parallel_degree: Size = 1
    pipeline_parallel_microbatch_size: Size = 1
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"  # type: ignore[assignment]  # torchtitan takes any string
    """Order in which micro-batches pass through the stages. "1F1B" has one stage a rank; the interleaved ones several, and
    less idle time; the zero-bubble ones fill it with weight gradients ("ZBVZeroBubble": two stages a rank, the first and
    the last on the same)."""
    pipeline_parallel_stages_per_rank: Count = 0
    """Stages on each rank; 0 takes 1, or 2 where the schedule interleaves. Layers are split over stages by their FLOPs."""
    context_parallel_load_balancer: Literal["zigzag", "contiguous"] = "zigzag"  # type: ignore[assignment]  # torchtitan's values name its own kernels
    """How sequences are cut over context-parallel ranks: "zigzag" gives each a span from the front and one from the back,
    so that all have equally much before theirs; "contiguous" one span, and a little less to exchange."""


@dataclass
class Compile(titan.job_config.Compile):
    components: list[str] = field(default_factory=lambda: ["model"])
    """What `torch.compile` takes; "model" compiles block by block."""


@dataclass(frozen=True)
class DeepSpeed:
    """What `engine = "deepspeed"` shares out; precision, clipping, batches and the optimizer are torchtitan's sections."""

    zero_stage: Literal[1, 2, 3] = 2
    """ZeRO (Rajbhandari et al., 2020): ranks share out the optimizer's state (1), gradients too (2), parameters too (3)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and fp32 weights in host memory, and step there."""
    offload_parameters: bool = False
    """Keep the parameters in host memory; stage 3 only."""


@dataclass
class Debug(titan.Debug):
    seed: Count | None = 0
    """Seeds the initial weights."""
