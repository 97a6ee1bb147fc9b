"""Global batches of packed documents; their order depends only on the seed and the global batch size.

A global batch has G rows, the *lanes*. Each lane is an independent stream of documents, packed into rows; row j of step n is
the n-th row of lane j. Data-parallel rank r of W owns lanes r·G/W … (r+1)·G/W - 1 and reads nothing else. So the batches are
the same on any number of ranks, and since the state is saved per lane, a run can resume on another number of ranks.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from farsight.configs import schema
from farsight.data.mixture import MixedSource, Mixture
from farsight.data.packing import Packed, Packer, Rows
from farsight.data.processes import read_in_processes
from farsight.data.read_ahead import Batch, LoaderFacts, Place, ReadAheadLoader, shared_loader
from farsight.data.replica import ALONE, Replica
from farsight.data.saved_order import source_settings
from farsight.data.sources.build import open_sources
from farsight.data.sources.documents import DocumentSource, Split
from farsight.data.tokenizers.tokenizer import Tokenizer, padding_id
from farsight.errors import DataError

logger = logging.getLogger(__name__)


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
