"""Global batches of packed documents; their order depends only on the seed and the global batch size.

A global batch has G rows, the *lanes*. Each lane is an independent stream of documents, packed into rows; row j of step n is
the n-th row of lane j. Data-parallel rank r of W owns lanes r·G/W … (r+1)·G/W - 1 and reads nothing else. So the batches are
the same on any number of ranks, and since the state is saved per lane, a run can resume on another number of ranks.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from farsight.configs import schema
from farsight.data.mixture import MixedSource, Mixture
from farsight.data.packing import Packed, Packer, Rows
from farsight.data.prefetch import Prefetch
from farsight.data.processes import read_in_processes
from farsight.data.replica import ALONE, Replica
from farsight.data.sources.build import open_sources
from farsight.data.sources.documents import DocumentSource, Split
from farsight.data.sources.identity import difference
from farsight.data.tokenizers.tokenizer import Tokenizer, padding_id
from farsight.errors import DataError

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

ORDER_KEY = "order"
"""Key of a loader's state: JSON of everything that the order of its batches depends on."""
_FILES = "the files of "
"""Prefix of the keys that identify a source's files."""
_NOT_IDENTITY = ("path", "data_dir", "data_files")
"""Fields that may change between save and resume: moved data is the same data."""
_ADDED = {"packing": "cut"}
"""Fields that older checkpoints lack, with what was done then."""


@dataclass(frozen=True)
class Place:
    """The position of a loader after a complete step."""

    state: dict[str, Any]
    """The part of it that a checkpoint saves, besides the order."""
    epochs: Any
    """Passes over the data, as the loader's `epochs`."""
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rows that could not be used, by source and reason, since the process started."""
    packed: Packed = field(default_factory=Packed)
    """Padding and cut documents in this rank's rows of the step that ends here."""


@dataclass(frozen=True)
class LoaderFacts:
    """A loader's properties that every rank of a replica knows, including those that do not read."""

    order: dict[str, Any]
    """Everything that the order of batches depends on: a flat dict, keyed by the names of the settings."""
    start: Place
    micro_batches_per_step: int


class ReadAheadLoader:
    """The endless micro-batches of one data-parallel rank, which a thread prepares at least one step ahead.

    Iterating again continues after the last complete step that was delivered, and ends the older iteration. A loader of this
    class itself is one of a rank that does not read: its replica's reading rank gives it the batches, and the places in the data.
    """

    _running: Prefetch[tuple[Batch, Place | None]] | None = None
    replica: Replica = ALONE
    most: int | None = None
    """Micro-batches of an iteration; None is no limit. What lies beyond them is not read ahead."""
    arrange: Callable[[Sequence[Rows]], list[Rows]] | None = None
    """Makes the micro-batches of a step of those that were read, from the same rows, in the thread that reads."""

    def __init__(self, facts: LoaderFacts):
        self.facts, self._place = facts, facts.start

    def _read(self, state: dict[str, Any]) -> Iterator[tuple[Rows, Place | None]]:
        """Micro-batches from a state on; the last of each step with the place after it, others with None. For the reading rank."""
        raise NotImplementedError  # every loader that reads overrides it

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        running = self._running = self._prefetched(self._place.state)
        try:
            for batch, place in running:
                if place is not None:
                    self._place = place
                yield batch
        finally:
            running.close()
        raise RuntimeError("this iteration of the loader was ended by a newer one; use that one.")

    def _prefetched(self, state: dict[str, Any]) -> Prefetch[tuple[Batch, Place | None]]:
        """Batches from a state on. Only its thread refers to the items, so they are closed where they are read."""
        shared = self.replica.share(lambda: islice(self._arranged(state), self.most))
        batches = ((to_batch(rows), place) for rows, place in shared.items)
        return Prefetch(batches, max(2, self.micro_batches_per_step), shared.close)

    def _arranged(self, state: dict[str, Any]) -> Iterator[tuple[Rows, Place | None]]:
        step: list[Rows] = []
        for rows, place in self._read(state):
            if self.arrange is None:
                yield rows, place
                continue
            step.append(rows)
            if place is not None:
                *others, last = self.arrange(step)
                yield from ((one, None) for one in others)
                yield last, place
                step = []

    def close(self) -> None:
        """Stops the background thread. Iterating again starts another."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def micro_batches_per_step(self) -> int:
        """G/(W·b)."""
        return self.facts.micro_batches_per_step

    @property
    def epochs(self) -> Any:
        """Passes over the data in the steps delivered so far."""
        return self._place.epochs

    @property
    def skipped(self) -> dict[str, dict[str, int]]:
        """Rows that could not be used in the steps delivered so far, by source and reason."""
        return self._place.skipped

    @property
    def packed(self) -> Packed:
        """Padding and cut documents in this rank's rows of the last step delivered."""
        return self._place.packed

    def rewind(self) -> None:
        """Goes back to the first batch."""
        self._go_to(self.facts.start.state)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last complete step that was delivered; a step in progress counts as not begun."""
        return {ORDER_KEY: json.dumps(self.facts.order), **self._place.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the state's step; an empty state starts from the first batch.

        Raises `DataError`, naming both values, if the state has another order of data.
        """
        if not state_dict:
            self.rewind()
            return
        refuse_other_order(json.loads(state_dict[ORDER_KEY]), self.facts.order)
        self._go_to({key: state_dict[key] for key in self.facts.start.state})

    def check_order(self, saved: dict[str, Any]) -> None:
        """Raises `DataError` unless the order of data that a checkpoint was saved under is this loader's.

        Call it before loading: where the checkpoint has fewer lanes, loading fails with nothing but a missing key.
        """
        refuse_other_order(saved, self.facts.order)

    def _go_to(self, state: dict[str, Any]) -> None:
        self.close()
        self._place = replace(self._place, state=state)


def shared_loader(build: Callable[[], ReadAheadLoader], replica: Replica) -> ReadAheadLoader:
    """The loader that `build` makes on the rank that reads for its replica; on the others one that gets its batches.

    All ranks of the replica call it; an error is raised on all of them.
    """
    loader = replica.build(build, lambda built: built.facts, ReadAheadLoader)
    loader.replica = replica
    return loader


class Loader(ReadAheadLoader):
    """Packed documents of a mixture.

    Yields ({"input": int64 [b, L], "positions": int64 [b, L], "document_starts": int32 [b, L]}, labels: int64 [b, L]),
    G/(W·b) of them per step; labels are IGNORE (-100) after the last token of a document. `epochs` are the completed passes
    over each source, in the order of `data.sources`; the most of any of this rank's lanes. The state is one of each lane, so
    data-parallel ranks save disjoint parts of one checkpoint, and any number of them can load their own lanes from it.
    """

    def __init__(
        self,
        config: schema.Data,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        vocab_size: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        split: Split = "train",
    ):
        """`vocab_size`: the model's; larger ids are refused. `global_batch_size` G and `micro_batch_size` b: in rows.

        Raises `DataError` for sizes that don't divide, and for data that can't be read.
        """
        if seq_len < 1:
            raise DataError(f"training.seq_len = {seq_len}; set at least 1.")
        self._lane_ids = rows_of_rank(global_batch_size, micro_batch_size, dp_rank, dp_world_size)
        self._seq_len = seq_len
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._config = config
        self._padding_id = padding_id(tokenizer)
        self._reports_passes = split == "train"  # the few held-out documents are read many times
        self._part = partial(
            Loader, replace(config, reader_processes=0), tokenizer,
            seq_len=seq_len, vocab_size=vocab_size, global_batch_size=global_batch_size, micro_batch_size=1,
        )  # fmt: skip
        self._sources = open_sources(config, split, tokenizer)
        self._mixed = [
            MixedSource(share, source, tokenizer, vocab_size)
            for share, source in zip(config.sources, self._sources, strict=True)
        ]
        if dp_rank == 0 and split == "train":
            self._report_shared()
        self._epochs = [0] * len(self._sources)
        super().__init__(
            LoaderFacts(
                _describe_order(config, tokenizer, self._sources, global_batch_size, seq_len),
                Place({_lane_key(lane): "" for lane in self._lane_ids}, self._epochs),
                len(self._lane_ids) // micro_batch_size,
            )
        )

    def _read(self, state: dict[str, str]) -> Iterator[tuple[Rows, Place | None]]:
        if self._reports_passes and self._config.reader_processes:
            return self._read_in_processes(state)
        return self._read_here(state)

    def _read_in_processes(self, state: dict[str, str]) -> Iterator[tuple[Rows, Place | None]]:
        """As `_read_here`: each process has some of the lanes, those of a rank of a run with more ranks."""
        lanes, size = len(self._lane_ids), self._micro_batch_size
        count = max(n for n in range(1, self._config.reader_processes + 1) if lanes % n == 0)
        first = self._lane_ids[0] // (lanes // count)
        ranks = self._global_batch_size // (lanes // count)
        work = [partial(_read_part, self._part, first + n, ranks, state) for n in range(count)]
        with closing(read_in_processes(work, lanes // count)) as steps:
            for of_parts in steps:
                rows = [row for part in of_parts for row, _ in part]
                place = _joined([place for part in of_parts if (place := part[-1][1]) is not None])
                self._report_passes(place.epochs)
                for start in range(0, lanes, size):
                    yield Rows.joined(rows[start : start + size]), place if start + size == lanes else None

    def _read_here(self, state: dict[str, str]) -> Iterator[tuple[Rows, Place | None]]:
        lanes = [
            _Lane(self._mixed, self._config, lane, self._global_batch_size, self._padding_id, state[_lane_key(lane)])
            for lane in self._lane_ids
        ]
        self._epochs = _passes(lanes)
        size = self._micro_batch_size
        while True:
            packed = []
            for start in range(0, len(lanes), size):
                rows = Rows.empty(size, self._seq_len)
                for i, lane in enumerate(lanes[start : start + size]):
                    packed.append(lane.packer.fill(rows, i))
                if start + size < len(lanes):
                    yield rows, None
            self._report_passes(_passes(lanes))
            state = {_lane_key(lane.lane): lane.state() for lane in lanes}
            yield rows, Place(state, self._epochs, self._skipped(), Packed.all_of(packed))

    def _skipped(self) -> dict[str, dict[str, int]]:
        return {
            f"data.sources[{i}], {source.name}": dict(source.skipped)
            for i, source in enumerate(self._sources)
            if source.skipped
        }

    def _report_shared(self) -> None:
        """Logs which sources have fewer documents than the batch has rows, and warns if even their parts are too short."""
        for i, mixed in enumerate(self._mixed):
            rows = mixed.source.rows_if_fewer(self._global_batch_size)
            if rows is None:
                continue
            name, size = f"data.sources[{i}], {mixed.source.name}", self._global_batch_size
            counted = f"{rows} document" + "s" * (rows != 1)
            logger.info(f"{name}: {counted} for the {size} rows of a batch: documents are cut, each row reads a part")
            if (tokens := int(mixed.typical_tokens(size))) < self._seq_len:
                logger.warning(
                    f"{name}: rows of a batch have {self._seq_len} tokens, and these parts about {tokens}. Add text, or lower "
                    "training.global_batch_size or training.seq_len: until then rows repeat each other."
                )

    def _report_passes(self, epochs: list[int]) -> None:
        for source, before, now in zip(self._sources, self._epochs, epochs, strict=True):
            if now > before and self._reports_passes:
                skipped = f"; rows skipped so far: {dict(source.skipped)}" if source.skipped else ""
                logger.info("%s: pass %d over it begins%s", source.name, now + 1, skipped)
        self._epochs = epochs


class ValidationLoader:
    """The same micro-batches at every iteration. They are kept in memory, so documents are read and tokenised once."""

    def __init__(self, count: int, batches: Callable[[], Iterable[Batch]]):
        """`batches`: gives this rank's `count` micro-batches at the first iteration."""
        self._batches: Callable[[], Iterable[Batch]] | None = batches
        self._count = count
        self._kept: list[Batch] = []

    def __len__(self) -> int:
        """Micro-batches per iteration on this rank."""
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is not None:
            self._kept, self._batches = list(self._batches()), None  # what the sources keep is no longer needed
        for inputs, labels in self._kept:
            yield dict(inputs), labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


def build_loader(job_config: schema.JobConfig, tokenizer: Tokenizer, dp_rank: int, dp_world_size: int) -> Loader:
    """The training loader of a config for one data-parallel rank."""
    return Loader(
        job_config.data,
        tokenizer,
        seq_len=job_config.training.seq_len,
        vocab_size=job_config.architecture.vocab_size or tokenizer.vocab_size,
        global_batch_size=global_batch_size(job_config, dp_world_size),
        micro_batch_size=job_config.training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
    )


def build_validation_loader(
    job_config: schema.JobConfig, tokenizer: Tokenizer, dp_rank: int, dp_world_size: int, replica: Replica = ALONE
) -> ValidationLoader:
    """The validation loader of a config for one data-parallel rank: the first batches of the held-out documents.

    A validation step is a global batch as large as in training, so the batches don't depend on the number of ranks.
    Micro-batches have `validation.local_batch_size` rows, or fewer if that doesn't divide a rank's share.
    """
    steps = job_config.validation.steps
    if steps < 1:
        raise DataError(
            f"validation.steps = {steps}: held-out documents are packed endlessly; set the number of batches."
        )
    batch_size = global_batch_size(job_config, dp_world_size)
    rows = max(1, batch_size // dp_world_size)
    at_most = min(rows, max(1, job_config.validation.local_batch_size))
    loader = shared_loader(
        lambda: Loader(
            job_config.data,
            tokenizer,
            seq_len=job_config.validation.seq_len,
            vocab_size=job_config.architecture.vocab_size or tokenizer.vocab_size,
            global_batch_size=batch_size,
            micro_batch_size=next(size for size in range(at_most, 0, -1) if rows % size == 0),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            split="validation",
        ),
        replica,
    )
    count = loader.most = steps * loader.micro_batches_per_step

    def batches() -> Iterator[Batch]:
        yield from islice(loader, count)
        loader.close()

    return ValidationLoader(count, batches)


def _read_part(
    part: Callable[..., Loader], rank: int, ranks: int, state: dict[str, str]
) -> Iterator[tuple[Rows, Place | None]]:
    """Rows of a rank one by one, in a process of its own."""
    loader = part(dp_rank=rank, dp_world_size=ranks)
    return loader._read({key: state[key] for key in loader.facts.start.state})


def _joined(places: list[Place]) -> Place:
    """The place of a rank whose lanes are at several loaders' places."""
    skipped: dict[str, Counter[str]] = {}
    for place in places:
        for source, reasons in place.skipped.items():
            skipped.setdefault(source, Counter()).update(reasons)
    return Place(
        {key: value for place in places for key, value in place.state.items()},
        [max(epochs) for epochs in zip(*(place.epochs for place in places), strict=True)],
        {source: dict(reasons) for source, reasons in skipped.items()},
        Packed.all_of(place.packed for place in places),
    )


class _Lane:
    """One row of the global batch: a mixture of documents and the packer that makes rows of them."""

    def __init__(
        self, sources: list[MixedSource], config: schema.Data, lane: int, lanes: int, padding_id: int, state: str
    ):
        self.lane = lane
        self.mixture = Mixture(sources, config.seed, lane, lanes)
        best_fit = sum(source.weight for source in sources if source.best_fit) / sum(
            source.weight for source in sources
        )
        self.packer = Packer(self.mixture.draw, config.mask_documents, padding_id, best_fit)
        if not state:
            return
        saved = json.loads(state)
        if "offset" in saved:  # saved when one document at most was waiting: the mixture's state is from before it
            self.mixture.load_state(saved["mixture"])
            self.packer.resume([(self.mixture.draw(), saved["offset"])])
            return
        places, packed = [place for place, _ in saved["waiting"]], [packed for _, packed in saved["waiting"]]
        self.packer.resume(zip(self.mixture.load_state(saved["mixture"], places), packed, strict=True))

    def state(self) -> str:
        return json.dumps({"mixture": self.mixture.state(), "waiting": self.packer.waiting})


def _passes(lanes: list[_Lane]) -> list[int]:
    """The latest pass that any lane has begun, for each source."""
    return [max(epochs) for epochs in zip(*(lane.mixture.epochs for lane in lanes), strict=True)]


def rows_of_rank(global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_world_size: int) -> range:
    """The rows of each global batch that belong to a data-parallel rank. Raises `DataError` for sizes that don't divide."""
    if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (micro_batch_size * dp_world_size):
        raise DataError(
            f"a global batch of {global_batch_size} rows can't be cut into micro-batches of {micro_batch_size} on "
            f"{dp_world_size} data-parallel ranks. Set training.global_batch_size to a multiple of "
            f"{micro_batch_size} × {dp_world_size} (training.local_batch_size × ranks)."
        )
    rows = global_batch_size // dp_world_size
    return range(dp_rank * rows, (dp_rank + 1) * rows)


def global_batch_size(job_config: schema.JobConfig, dp_world_size: int) -> int:
    """Rows per optimizer step: as configured, or one micro-batch per rank."""
    asked = job_config.training.global_batch_size
    return asked if asked > 0 else job_config.training.local_batch_size * dp_world_size


def to_batch(rows: Rows) -> Batch:
    """A loader's batch of some rows [b, L], as the trainer takes it.

    The tensors share the rows' memory; where there are GPUs, they are pinned copies, which copy to a GPU without being waited for.
    """

    def tensor(array: np.ndarray) -> torch.Tensor:
        shared = torch.from_numpy(array)
        return shared.pin_memory() if torch.cuda.is_available() else shared

    inputs = {"input": tensor(rows.inputs), "positions": tensor(rows.positions)}
    return inputs | {"document_starts": tensor(rows.document_starts)}, tensor(rows.labels)


def _lane_key(lane: int) -> str:
    return f"lane_{lane:05d}"


def _describe_order(
    config: schema.Data, tokenizer: Tokenizer, sources: list[DocumentSource], global_batch_size: int, seq_len: int
) -> dict[str, Any]:
    order: dict[str, Any] = {
        "training.global_batch_size": global_batch_size,
        "training.seq_len": seq_len,
        "data.seed": config.seed,
        "data.held_out": config.held_out,
        "data.mask_documents": config.mask_documents,
        "the tokenizer (fingerprint)": tokenizer.fingerprint,
        "the number of data.sources": len(sources),
    }
    for i, (share, source) in enumerate(zip(config.sources, sources, strict=True)):
        order |= {f"data.sources[{i}].{key}": value for key, value in source_settings(share).items()}
        order |= {f"the {key} of data.sources[{i}]": value for key, value in source.describe().items()}
        if source.rows_if_fewer(global_batch_size) is not None:
            order[f"the way rows of a batch share data.sources[{i}]"] = "parts of documents"
    return order


def source_settings(source: Any) -> dict[str, Any]:
    """The settings of a source (a dataclass of the config) that affect the order of data."""
    return {key: value for key, value in asdict(source).items() if key not in _NOT_IDENTITY}


def refuse_other_order(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises `DataError`, naming both values, where a checkpoint's order of data differs from the current one."""
    differences = list(_differences(saved, now))
    if differences:
        raise DataError(
            "\n  ".join(["the checkpoint's data order can't be continued, because these changed:", *differences])
            + "\nSet them back, or begin a new order, as a new stage does: a run in a folder of its own "
            "(job.dump_folder) that starts from the checkpoint's weights (checkpoint.initial_load_path)."
        )


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for key in saved | now:
        if key.startswith(_FILES):
            if key not in saved:
                logger.info("the checkpoint does not record %s: whether they have changed is not known", key)
            elif key in now and (change := difference(saved[key], now[key])):
                yield f"{key}: {change}"
        elif (old := saved.get(key, _ADDED.get(key.rpartition(".")[2]))) != now.get(key):
            yield f"{key} was {old}, is {now.get(key)}"
