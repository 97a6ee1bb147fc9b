"""How a run is divided over its ranks: degrees, micro-batches and pipeline stages, as the run itself would."""

import math
from dataclasses import dataclass

from farsight.configs.check import check_pipeline, check_processes, model_parallel_ranks
from farsight.configs.schema import JobConfig
from farsight.parallel.pipeline import layers_by_stage

FOLDED = "ZBVZeroBubble"
"""The schedule in which a rank has the n-th stage from the front and the n-th from the back."""

SPLIT = "InterleavedZeroBubble"
"""The schedule in which gradients by weights are computed apart, to fill gaps."""


@dataclass(frozen=True)
class Stage:
    """A contiguous run of layers, with the embedding or the head where it is the first or the last."""

    layers: range
    first: bool
    last: bool

    def holds(self, name: str) -> bool:
        """Whether a parameter of this name is the stage's."""
        kind, _, rest = name.partition(".")
        if kind == "layers":
            return int(rest.partition(".")[0]) in self.layers
        return self.first if kind == "tok_embeddings" else self.last


@dataclass(frozen=True)
class Layout:
    """Degrees of each kind of parallelism, and what a rank does with them in a step."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    schedule: str
    stages: tuple[tuple[Stage, ...], ...]
    """Of each pipeline rank, in order."""
    rows: int
    """Sequences of a micro-batch."""
    microbatches: int
    """Of one pass through the pipeline; 1 without one."""
    accumulation: int
    """Passes of a step."""

    @classmethod
    def of(cls, config: JobConfig, gpus: int) -> "Layout":
        """The layout of a config on so many GPUs.

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
    def fsdp(self) -> int:
        """Ranks over which parameters are sharded: those that hold parts of a sequence hold parts of the model too."""
        return self.dp_shard * self.cp

    @property
    def sharded(self) -> bool:
        """Whether FSDP is around the model; as in `parallel.parallelize`, with other parallelism even on one shard."""
        return self.fsdp > 1 or self.tp > 1 or self.pp > 1

    @property
    def stages_a_rank(self) -> int:
        return len(self.stages[0])

    @property
    def bubble(self) -> float:
        """Share of a pass in which a pipeline rank waits, for stages of equal cost."""
        if self.pp == 1:
            return 0.0
        m = self.microbatches
        if self.schedule == FOLDED:
            return 1 - m / max(m, 2 * self.pp - 1)  # PyTorch orders as if there were so many, and leaves some out
        if self.schedule == SPLIT:  # forward pass, gradients by inputs, gradients by weights: a slot each
            return (self.pp - 1) / (3 * self.stages_a_rank * m + self.pp - 1)
        return (self.pp - 1) / (self.stages_a_rank * m + self.pp - 1)

    def in_flight(self, rank: int) -> int:
        """Micro-batches times stages whose activations a pipeline rank holds at once, at most.

        As PyTorch's schedules start: 1F1B with one micro-batch for each stage that is still to come, interleaved ones
        with two for each rank to come and a round for each further stage (with split backward passes, one for each rank
        and the rounds), the folded one with two for each rank.
        """
        every = self.microbatches * self.stages_a_rank
        if self.pp == 1 or self.schedule in ("GPipe", "LoopedBFS"):
            return every
        if self.schedule == FOLDED:
            return min(every, 2 * self.pp)
        if self.stages_a_rank == 1:
            return min(every, self.pp - rank)
        a_round = self.microbatches // max(1, self.microbatches // self.pp)
        if self.schedule == SPLIT:
            return min(every, (self.stages_a_rank - 1) * a_round + self.pp)
        return min(every, (self.stages_a_rank - 1) * a_round + 2 * (self.pp - 1 - rank) + 1)

    def degrees(self) -> dict[str, int]:
        """By name of the mesh dimension, outermost first, as ranks are numbered."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }

    def reach(self, dimension: str) -> int:
        """Consecutive ranks that a group of this dimension spans; FSDP's groups span `cp` too."""
        names = list(self.degrees())
        first = names.index(dimension)
        return math.prod(list(self.degrees().values())[first:])

    def __str__(self) -> str:
        shown = [f"{name} {degree}" for name, degree in self.degrees().items() if degree > 1]
        return " × ".join(shown) or "one process"


def _stages(config: JobConfig) -> tuple[tuple[Stage, ...], ...]:
    """As `parallel.pipeline` cuts them, and as PyTorch's schedules give them to ranks: in turn, or folded in the middle."""
    p = config.parallelism
    if p.pipeline_parallel_degree == 1:
        return ((Stage(range(config.architecture.n_layers), True, True),),)
    runs = layers_by_stage(config)
    stages = [Stage(run, number == 0, number == len(runs) - 1) for number, run in enumerate(runs)]
    pp = p.pipeline_parallel_degree
    if p.pipeline_parallel_schedule == FOLDED:
        return tuple((stages[rank], stages[-1 - rank]) for rank in range(pp))
    return tuple(tuple(stages[rank::pp]) for rank in range(pp))
