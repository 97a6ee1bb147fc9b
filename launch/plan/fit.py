"""Fits a pre-training run to a number of GPUs: local batch and accumulation, then degrees of parallelism, then recomputation.

The global batch, the sequence length and the schedule stay, and with them the losses: `parallel/` computes the same in every layout.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Generic

from farsight.configs.check import MODEL_PARALLEL, model_parallel_ranks
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.launch.plan.costs import step_time
from farsight.launch.plan.hardware import GPUS, Machine
from farsight.launch.plan.memory import memory_of
from farsight.launch.plan.run import Run
from farsight.launch.plan.suggest import C, Options, changed
from farsight.units import gib

ASSUMED = "h100-80g"
"""The kind of GPU that layouts are compared on where none is known."""
TENSOR = (1, 2, 4, 8)
"""Degrees of tensor parallelism to try: it exchanges activations in every layer, and so stays within a node."""
PIPELINE = (2, 3, 4, 6, 8)
"""Degrees of pipeline parallelism to try where no other layout divides the batch over the GPUs."""
BATCH, LOCAL = "training.global_batch_size", "training.local_batch_size"
MODE, OFFLOAD = "activation_checkpoint.mode", "training.enable_cpu_offload"
LAYOUT = (
    LOCAL, "validation.local_batch_size", MODE, OFFLOAD, *(f"parallelism.{name}_parallel_degree" for name in MODEL_PARALLEL),
    "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree",
)  # fmt: skip
"""Settings that a fit may change, beside a global batch that is not set; none changes what is learnt."""
MOST_GPUS = 4096
"""Largest number of GPUs to name in a refusal."""


@dataclass(frozen=True)
class Fitted(Generic[C]):
    """A config that runs on the GPUs at hand."""

    config: C
    options: Options
    """The settings that differ from the config as it was written."""
    why: str
    """The reason for them; empty if nothing differs."""


@dataclass(frozen=True)
class _Tried:
    """A change that was tried."""

    options: Options
    over: float
    """Bytes that the GPU lacks."""
    seconds: float
    """Planned time of a step."""

    @property
    def cost(self) -> int:
        """0 if the GPU's memory is enough, 1 if everything is recomputed for that, 2 if the state is in host memory, 3 if it is not."""
        return 3 if self.over else 2 if OFFLOAD in self.options else 1 if MODE in self.options else 0


def _degrees(ranks: int, pipelines: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Degrees of tensor, pipeline and context parallelism that multiply to `ranks`."""
    for pp in sorted({*pipelines}):
        for tp in TENSOR:
            if ranks % (tp * pp) == 0:
                yield tp, pp, ranks // (tp * pp)


@dataclass(frozen=True)
class _Search(Generic[C]):
    """A config to fit.

    Args:
        machine: GPUs whose memory bounds a layout; None takes any layout, and prefers those that fit the assumed kind.
        given: options that may not change.
        batch: sequences per step to keep; None leaves `training.global_batch_size` at -1.
    """

    config: C
    gpus: int
    machine: Machine | None
    given: frozenset[str]
    batch: int | None

    @cached_property
    def sized(self) -> C:
        """The config with an embedding."""
        return _sized(self.config)

    def best(self) -> Options | None:
        """The change with which the config runs and fits; None if there is none.

        The degrees of parallelism are kept if they can be, else each sequence is divided over as few GPUs as will do, in the way that
        is planned to be fastest. Where that takes recomputing everything, dividing sequences further is compared with it.
        """
        p = self.config.parallelism
        written = tuple(getattr(p, f"{name}_parallel_degree") for name in MODEL_PARALLEL)
        found: list[_Tried] = []
        for pipelines in ((1, written[1]), PIPELINE):
            sizes = [_degrees(ranks, pipelines) for ranks in range(1, self.gpus + 1) if self.gpus % ranks == 0]
            for degrees in ([written], *sizes):
                tried = [one for one in map(self._try, degrees) if one is not None]
                found += tried
                if any(one.cost == 0 for one in tried):
                    break
            if found:
                break
        return min(found, key=lambda one: (max(one.cost, 1), one.over, one.seconds)).options if found else None

    def possible(self) -> bool:
        """True if the batch can be divided over the GPUs, whatever memory they have."""
        p = self.config.parallelism
        pipelines = (1, p.pipeline_parallel_degree, *PIPELINE)
        sizes = (_degrees(ranks, pipelines) for ranks in range(1, self.gpus + 1) if self.gpus % ranks == 0)
        return any(True for degrees in chain.from_iterable(sizes) for _ in self._runs(degrees))

    def _runs(self, degrees: tuple[int, ...]) -> Iterator[tuple[Options, Run]]:
        """Changes with these degrees that can run, mildest first."""
        for options in self._changes(degrees):
            if not self.given.isdisjoint(options):
                continue
            try:
                run = Run.of(changed(self.sized, options), self.gpus)
            except ConfigError:
                if degrees[1] == 1:  # only a pipeline takes some numbers of rows and not others
                    return
                continue
            yield options, run

    def _try(self, degrees: tuple[int, ...]) -> "_Tried | None":
        """The mildest change with these degrees that fits; without a known GPU, else the first that divides the batch."""
        machine, first = self.machine or Machine(ASSUMED, GPUS[ASSUMED]), None
        for options, run in self._runs(degrees):
            over = max(0.0, max(memory.peak for memory in memory_of(run)) - machine.device.usable)
            one = _Tried(options, over, step_time(run, machine).total)
            if not over:
                return one
            first = first or one
        return first if self.machine is None else None

    def _changes(self, degrees: tuple[int, ...]) -> Iterator[Options]:
        """Changes with these degrees, mildest first: local batches from the largest on, recomputation, state in host memory."""
        config, copies = self.config, self.gpus // (degrees[0] * degrees[1] * degrees[2])
        t, p = config.training, config.parallelism
        rows = t.local_batch_size if self.batch is None else self.batch // max(1, copies)
        if not copies or (self.batch is not None and (not rows or self.batch % copies)):
            return
        options: Options = {}
        if self.batch is not None and self.batch != t.global_batch_size:
            options[BATCH] = self.batch
        for name, degree in zip(MODEL_PARALLEL, degrees, strict=True):
            if degree != getattr(p, f"{name}_parallel_degree"):
                options[f"parallelism.{name}_parallel_degree"] = degree
        shard = p.data_parallel_shard_degree
        if shard != -1 and shard * p.data_parallel_replicate_degree != copies:
            options["parallelism.data_parallel_shard_degree"] = -1
        if copies % p.data_parallel_replicate_degree:
            options["parallelism.data_parallel_replicate_degree"] = 1

        divisors = [size for size in range(rows, 0, -1) if rows % size == 0]
        piped = p.pipeline_parallel_degree > 1
        if degrees[1] > 1:  # the micro-batches of a pass: as many as before, else all of a step's
            sizes = sorted(divisors, key=lambda size: not (piped and size == t.local_batch_size))
        elif self.batch is None:
            sizes = [t.local_batch_size]
        else:
            at_once = p.pipeline_parallel_microbatch_size if piped else t.local_batch_size
            sizes = [size for size in divisors if size <= at_once]
        full: Options = {MODE: "full"} if config.activation_checkpoint.mode != "full" else {}
        for more in ({}, full, full | {OFFLOAD: True})[not full :]:
            for size in sizes:
                yield options | ({LOCAL: size} if size != t.local_batch_size else {}) | more


def fit(
    config: C,
    gpus: int,
    machine: Machine | None,
    given: Collection[str] = (),
    planned: int | None = None,
    beside: Collection[JobConfig] = (),
) -> Fitted[C]:
    """Fits a config of pre-training to a number of GPUs; it stays as it is where it runs as written.

    Args:
        machine: the GPUs, whose memory the run has to fit; None for an unknown kind, of which no memory is assumed.
        given: options as `section.key` that stay as they are.
        planned: GPUs that the config was written for, which set the global batch where it has none; None for `gpus`.
        beside: configs that are to run on the same GPUs; a refusal names numbers of them on which these run too.

    Raises:
        ConfigError: no layout divides the batch over the GPUs, or none fits their memory. The message says which numbers do.
    """
    search, why = _start(config, gpus, machine, given, planned)
    if why is None:
        return Fitted(config, {}, "")
    options = search.best()
    if options is not None:
        return Fitted(changed(config, options), options, why)

    every: list[JobConfig] = [config, *beside]

    @cache
    def works(number: int) -> bool:
        started = [_start(one, number, machine, given, planned) for one in every]
        short = [other for other, wrong in started if wrong is not None]
        return all(one.possible() for one in short) and all(one.best() is not None for one in short)

    raise ConfigError(_refusal(search, why, _near(works, gpus)))


def _start(
    config: C, gpus: int, machine: Machine | None, given: Collection[str], planned: int | None
) -> tuple[_Search[C], str | None]:
    """The search for a layout, and the reason why the config can't run as written or None."""
    if config.engine == "deepspeed":  # whose memory is not planned
        machine = None
    fixed, batch = frozenset(given), config.training.global_batch_size
    kept: int | None = batch if batch > 0 else None
    if batch < 1 and fixed.isdisjoint((BATCH, LOCAL)):
        kept = config.training.local_batch_size * max(1, (planned or gpus) // model_parallel_ranks(config))
    why = _problem(config, gpus, machine)
    if why is None and batch < 1 and kept is not None and (planned or gpus) != gpus:
        why = f"on {planned} GPU{'s' * (planned != 1)}, for which it is written, a step has {kept} sequences"
    return _Search(config, gpus, machine, fixed, kept), why


def _sized(config: C) -> C:
    """A config with an embedding of some size, where the tokenizer is to set it."""
    a = config.architecture
    return config if a.vocab_size else changed(config, {"architecture.vocab_size": 32768})


def can_run(config: C, gpus: int) -> bool:
    """True if the config runs on this number of GPUs as it is, whatever memory they have."""
    return _problem(config, gpus, None) is None


def _problem(config: C, gpus: int, machine: Machine | None) -> str | None:
    """The reason why a config can't run as written, or None."""
    try:
        run = Run.of(_sized(config), gpus)
    except ConfigError as error:
        return f"{str(error)[0].lower()}{str(error)[1:].rstrip('.')}"
    if machine is None:
        return None
    peak, usable = max(memory.peak for memory in memory_of(run)), machine.device.usable
    return None if peak <= usable else f"it takes {gib(peak, 1)} GiB of the {gib(usable, 1)} usable on {machine.kind}"


def _near(works: Callable[[int], bool], gpus: int) -> list[int]:
    """The largest number of GPUs below `gpus` that works, and the smallest above it; each only if there is one.

    Beyond twice the number, those between a number and its double are tried only if the double or the power of two among them works.
    """
    found = [next((n for n in range(gpus - 1, 0, -1) if works(n)), 0)]
    low = gpus
    while low < MOST_GPUS and not found[1:]:
        high = 2 * low
        if low == gpus or works(high) or works(2 ** (high.bit_length() - 1)):
            found += [n for n in range(low + 1, high + 1) if works(n)][:1]
        low = high
    return [n for n in found if n]


def _refusal(search: _Search, why: str, near: Sequence[int]) -> str:
    """The message that no layout fits.

    Args:
        near: numbers of GPUs on which one does.
    """
    gpus, machine = search.gpus, search.machine
    said = f"as written, {why}; no other layout of {gpus} GPU{'s' * (gpus > 1)} "
    fitting = " or ".join(map(str, near))
    if machine is not None and search.possible():
        enough = f": use {fitting} of them, or" if near else ", nor was a number of them found that does: use"
        return f"{said}fits the memory of {machine.kind} either{enough} GPUs with more memory."
    named = sorted(search.given.intersection((*LAYOUT, BATCH)))
    kept = f" with {', '.join(named)} as given" * bool(named)
    batch = search.config.training.global_batch_size if search.batch is None else search.batch
    enough = f"use {fitting} GPU{'s' * (near[-1] > 1)}" if near else "change the batch"
    return f"{said}divides {batch} sequences of {search.config.training.seq_len:,} tokens{kept}: {enough}."
