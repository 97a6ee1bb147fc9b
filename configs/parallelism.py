"""Config sections on ranks: parallelism, communication, and DeepSpeed."""

from dataclasses import dataclass
from typing import Literal

from farsight.ranges import Count, Size, SizeOrAuto


@dataclass
class Parallelism:
    """Division of the model, the sequences and the batch over ranks."""

    data_parallel_replicate_degree: Size = 1
    """Copies of the model, which exchange gradients once a step; with data_parallel_shard_degree above 1 too it is HSDP."""
    data_parallel_shard_degree: SizeOrAuto = -1
    """Ranks over which FSDP shards the model; -1 takes all that the other degrees leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees gathered parameters after the forward pass: "default" does so except under pipeline
    parallelism and where FSDP has one rank and only casts them."""
    tensor_parallel_degree: Size = 1
    """Ranks over which each layer's matrices are divided; includes sequence parallelism."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's traffic with matrix products; needs torch.compile."""
    pipeline_parallel_degree: Size = 1
    """Ranks over which the layers are divided as a pipeline."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Order in which micro-batches pass through the stages. "1F1B" and "GPipe" have one stage per rank; the interleaved
    schedules have several, which leaves less idle time; the zero-bubble ones fill that with weight gradients
    ("ZBVZeroBubble" has two stages per rank, with the first and the last on the same one)."""
    pipeline_parallel_microbatch_size: Size = 1
    """Sequences per micro-batch of a pipeline."""
    context_parallel_degree: Size = 1
    """Ranks over which each sequence is divided."""
    context_parallel_load_balancer: Literal["zigzag", "contiguous"] = "zigzag"
    """How sequences are split over context-parallel ranks: "zigzag" gives each rank a span from the front and one from
    the back, which balances causal attention; "contiguous" gives one span, and a little less to exchange."""
    pipeline_parallel_stages_per_rank: Count = 0
    """Stages on each rank; 0 takes 1, or 2 where the schedule interleaves. Layers are split over stages by their
    FLOPs."""


@dataclass
class Comm:
    """Timeouts of collectives."""

    init_timeout_seconds: Size = 300
    """Time limit of a collective until the first step is done; while ranks load or save, it is 12 hours."""
    train_timeout_seconds: Size = 100
    """Time limit of a collective afterwards, likewise."""
    trace_buf_size: Count = 20000
    """Collectives that torch's flight recorder keeps on each of several ranks; 0 records none."""
    save_traces_folder: str = "comm_traces"
    """Folder for what ranks record when they hang, inside the run folder (docs/training/hangs.md)."""


@dataclass(frozen=True)
class DeepSpeed:
    """ZeRO sharding with `engine = "deepspeed"`; precision, clipping, batches and the optimizer stay in their own sections."""

    zero_stage: Literal[1, 2, 3] = 2
    """ZeRO (Rajbhandari et al., 2020): shards the optimizer state (1), gradients too (2), parameters too (3)."""
    offload_optimizer: bool = False
    """Keep the optimizer state and fp32 weights in host memory, and step there."""
    offload_parameters: bool = False
    """Keep the parameters in host memory; stage 3 only."""
