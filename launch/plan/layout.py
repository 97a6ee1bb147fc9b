"""The division of a run over its ranks: degrees, micro-batches and pipeline stages, as in the run itself."""

import math
from dataclasses import dataclass

from farsight.configs.check import check_pipeline, check_processes, model_parallel_ranks
from farsight.configs.schema import JobConfig
from farsight.parallel.pipeline import layers_by_stage

FOLDED = "ZBVZeroBubble"
"""The schedule in which each rank has the n-th stage from the front and the n-th from the back."""

SPLIT = "InterleavedZeroBubble"
"""The schedule in which weight gradients are computed separately, to fill gaps."""


@dataclass(frozen=True)
class PipelineStage:
    """A contiguous run of layers; the first stage also has the embedding, and the last one the head."""

    layers: range
    first: bool
    last: bool

    def holds(self, layer: int | None, name: str) -> bool:
        """True if the stage holds this parameter; `layer` is None for the embedding, the final norm and the head."""
        if layer is not None:
            return layer in self.layers
        return self.first if name.startswith("tok_embeddings") else self.last


@dataclass(frozen=True)
class ParallelLayout:
    """The degrees of parallelism, and how a step is divided into passes and micro-batches."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    schedule: str
    stages: tuple[tuple[PipelineStage, ...], ...]
    """Each pipeline rank's stages, in order."""
    rows: int
    """Sequences per micro-batch."""
    microbatches: int
    """Micro-batches per pass through the pipeline; 1 without a pipeline."""
    accumulation: int
    """Passes per optimizer step."""

    @classmethod
    def of(cls, config: JobConfig, gpus: int) -> "ParallelLayout":
        """The layout of a config on a number of GPUs.

        Raises:
            ConfigError: batches or layers do not divide over the degrees.
        """
        check_processes(config, gpus)
        p, t = config.parallelism, config.training
        tp, pp, cp = p.tensor_parallel_degree, p.pipeline_parallel_degree, p.context_parallel_degree
        copies = gpus // model_parallel_ranks(config)
        rows = p.pipeline_parallel_microbatch_size if pp > 1 else t.local_batch_size
        check_pipeline(config)
        batch = t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * copies
        return cls(
            p.data_parallel_replicate_degree,
            copies // p.data_parallel_replicate_degree,
            cp,
            tp,
            pp,
            p.pipeline_parallel_schedule,
            _stages(config),
            rows,
            t.local_batch_size // rows,
            batch // (t.local_batch_size * copies),
        )

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return math.prod(self.degrees().values())

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards parameters: data-parallel shards times context-parallel ranks."""
        return self.dp_shard * self.cp

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages per rank."""
        return len(self.stages[0])

    @property
    def bubble(self) -> float:
        """Share of a pass that a pipeline rank spends waiting, for stages of equal cost."""
        if self.pp == 1:
            return 0.0
        m = self.microbatches
        if self.schedule == FOLDED:
            return 1 - m / max(
                m, 2 * self.pp - 1
            )  # PyTorch schedules this many micro-batches and skips the missing ones
        if self.schedule == SPLIT:  # one slot each for the forward pass, input gradients and weight gradients
            return (self.pp - 1) / (3 * self.stages_per_rank * m + self.pp - 1)
        return (self.pp - 1) / (self.stages_per_rank * m + self.pp - 1)

    def in_flight(self, rank: int) -> int:
        """The most activations that a pipeline rank holds at once, counted in micro-batches times stages.

        This follows the warm-up of PyTorch's schedules: 1F1B starts with one micro-batch per later stage; interleaved
        schedules with two per later rank and a round per further stage (with split backward passes, one per rank and the
        rounds); the folded schedule with two per rank.
        """
        every = self.microbatches * self.stages_per_rank
        if self.pp == 1 or self.schedule in ("GPipe", "LoopedBFS"):
            return every
        if self.schedule == FOLDED:
            return min(every, 2 * self.pp)
        if self.stages_per_rank == 1:
            return min(every, self.pp - rank)
        per_round = self.microbatches // max(1, self.microbatches // self.pp)
        if self.schedule == SPLIT:
            return min(every, (self.stages_per_rank - 1) * per_round + self.pp)
        return min(every, (self.stages_per_rank - 1) * per_round + 2 * (self.pp - 1 - rank) + 1)

    def degrees(self) -> dict[str, int]:
        """Degrees by name of the mesh dimension, outermost first, as ranks are numbered."""
        return {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}

    def reach(self, dimension: str) -> int:
        """Number of consecutive ranks that a group of this dimension spans; FSDP's groups include `cp`."""
        return math.prod([*self.degrees().values()][[*self.degrees()].index(dimension) :])

    def __str__(self) -> str:
        shown = [f"{name} {degree}" for name, degree in self.degrees().items() if degree > 1]
        return " × ".join(shown) or "one process"


def _stages(config: JobConfig) -> tuple[tuple[PipelineStage, ...], ...]:
    """Each rank's stages, split as in `parallel.pipeline` and assigned as in PyTorch's schedules: in turn, or folded."""
    p = config.parallelism
    if p.pipeline_parallel_degree == 1:
        return ((PipelineStage(range(config.architecture.n_layers), True, True),),)
    runs = layers_by_stage(config)
    stages = [PipelineStage(run, number == 0, number == len(runs) - 1) for number, run in enumerate(runs)]
    pp = p.pipeline_parallel_degree
    if p.pipeline_parallel_schedule == FOLDED:
        return tuple((stages[rank], stages[-1 - rank]) for rank in range(pp))
    return tuple(tuple(stages[rank::pp]) for rank in range(pp))
