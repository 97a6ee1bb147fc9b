"""Streams documents of any dataset that `datasets.load_dataset` can stream.

A streamed dataset has no row numbers, but it has shards (files). With at least as many shards as lanes each lane reads
shards of its own; with fewer, the lanes of a shard take its rows in turn. Shards and turns are drawn again for every
pass. Within a shard the rows keep their order: shuffle a dataset once, when it is written.

Only the column of the text is read, so files may differ in all others.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count, islice
from typing import Any

from farsight.configs import schema
from farsight.configs.finetuning import InstructionHub
from farsight.data.order import hash64, shuffled
from farsight.data.sources.documents import Document, DocumentSource, check_text, text_of
from farsight.data.sources.failures import in_words, is_not_json, what_to_do
from farsight.data.sources.identity import identify
from farsight.errors import DataError
from farsight.progress import progress

_ROWS_AT_ONCE = 256


class StreamedDataset(DocumentSource):
    """One split of a `datasets` dataset, or of several folders of one."""

    def __init__(self, config: schema.HubSource, seed: int, **shared: Any):
        super().__init__(**shared)
        self._config = config
        self._seed = seed
        self._files: list[str] = []
        """Paths or URLs of all shards, if known."""
        self._places: list[tuple[Any, int]] = []
        """The dataset of each shard, and the shard's number there."""
        folders = folders_of(config)
        with progress(folders, desc=f"Opening {config.name}", unit="folder", disable=len(folders) == 1) as shown:
            for folder in shown:
                dataset, files = open_streamed(config, folder, self.name)
                self._files += files
                self._places += [(dataset, number) for number in range(dataset.num_shards)]
        self.shards = len(self._places)
        self._scans: dict[int, _Scan] = {}
        self._count = cache(lambda most: sum(1 for _ in islice(self._all_rows(), most)))  # called by every lane

    def lane(self, lane: int, lanes: int) -> "StreamedLane":
        return StreamedLane(self, self._seed, lane, lanes)

    def read_rows(self) -> Iterator[Document | None]:
        return (self.document(*row) for row in self._all_rows())

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"shards": self.shards}
        if self._files and all(os.path.isfile(file) for file in self._files):
            found["files"] = identify(self._files)
        elif self._files:
            # By name, without the revision (hf://datasets/NAME@REVISION/FILE): a new one may only change the description.
            found["files"] = [[name, name] for name in (re.sub(r"@[0-9a-f]{40}/", "/", file) for file in self._files)]
        return found

    def rows_if_fewer(self, than: int) -> int | None:
        if self.shards >= than:
            return None
        rows = self._count(than)
        return rows if rows < than else None

    def read_row(self, row: int) -> Document | None:
        return self.document(*next(islice(self._all_rows(), row, None)))

    def _all_rows(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Shard, row number within the shard, and value of each row."""
        for shard in range(self.shards):
            for row, value in self.rows(shard):
                yield shard, row, value

    def rows(self, shard: int, start: int = 0, step: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows start, start + step, … of a shard, with their row numbers.

        Other rows are skipped while still in Arrow, so the lanes of one shard don't each decode all of it.
        """
        first, wanted = 0, start
        for table in self._tables(shard):
            while wanted < first + table.num_rows:
                yield wanted, {name: table.column(name)[wanted - first].as_py() for name in table.column_names}
                wanted += step
            first += table.num_rows

    def read_shard(self, shard: int, start: int, step: int) -> Iterator[tuple[int, Document | None]]:
        """Rows start, start + step, … of a shard: their numbers, and their documents or None for a row that is skipped."""
        if self.split == "validation":
            return self._scans.setdefault(shard, _Scan(self, shard)).rows(start, step)
        return ((row, self.document(shard, row, value)) for row, value in self.rows(shard, start, step))

    def document(self, shard: int, row: int, value: dict[str, Any]) -> Document | None:
        """The document of a row of `rows`; None if it is skipped."""
        file = self._name_of(shard)
        return text_of(self, value, self._config.field, f"{file} row {row}", file)

    def _name_of(self, shard: int) -> str:
        """A shard's name in errors: its file, if every shard is one."""
        if len(self._files) == self.shards:
            return self._files[shard]
        return f"{place_of(self._config)} [{self._config.split}] shard {shard}"

    def _tables(self, shard: int) -> Iterator[Any]:
        dataset, number = self._places[shard]
        tables = dataset.shard(num_shards=dataset.num_shards, index=number).iter(batch_size=_ROWS_AT_ONCE)
        at = 0
        while True:
            try:
                table = next(tables)
            except StopIteration:
                return
            except Exception as error:
                # The library raises anything from ArrowInvalid to HTTP errors, without naming the place.
                file = self._files[shard] if len(self._files) == self.shards else "that file of the dataset"
                remedy = what_to_do(error, place_of(self._config)) or _repair(error, self._config, file)
                raise DataError(
                    f"{self.name}: shard {shard} of {self.shards} can't be read after row {at}: {in_words(error)}. {remedy}"
                ) from error
            yield table
            at += table.num_rows


class _Scan:
    """A shard that is read once for all lanes: keeps its documents of the split, which are few in validation."""

    def __init__(self, source: StreamedDataset, shard: int):
        self._source, self._shard = source, shard
        self._rows = source.rows(shard)
        self._documents: dict[int, Document] = {}
        self._read = 0

    def rows(self, start: int, step: int) -> Iterator[tuple[int, Document | None]]:
        """Rows start, start + step, … and their documents, as those of `StreamedDataset.read_shard`."""
        for row in count(start, step):
            while self._read <= row:
                if (found := next(self._rows, None)) is None:
                    return
                if (document := self._source.document(self._shard, *found)) is not None:
                    self._documents[self._read] = document
                self._read += 1
            yield row, self._documents.get(row)


class StreamedLane:
    """A lane's position in a streamed dataset: the pass, the index among the lane's shards, the next row of that shard."""

    def __init__(self, source: StreamedDataset, seed: int, lane: int, lanes: int):
        self._source, self._seed, self._lane, self._lanes = source, seed, lane, lanes
        self.epoch, self._at, self._row = 0, 0, -1
        self._rows: Iterator[tuple[int, Document | None]] | None = None
        self.load_state([0, 0, -1])

    def load_state(self, state: list[int]) -> None:
        if self._rows is not None and state[:2] == [self.epoch, self._at] and state[2] >= self._row:
            self._row = state[2]  # further on in the open shard
            return
        self.epoch, self._at, self._row = state
        self._shards, self._first, self._step = self._share(self.epoch)
        if self._row < 0:
            self._row = self._first
        self._rows = None

    def state(self) -> list[int]:
        return [self.epoch, self._at, self._row]

    def read(self) -> Document | None:
        shard = self._shards[self._at]
        if self._rows is None:
            self._rows = self._source.read_shard(shard, self._row, self._step)
        for row, document in self._rows:
            if row >= self._row:
                self._row = row + self._step
                return document
        if self._at + 1 < len(self._shards):
            self.load_state([self.epoch, self._at + 1, -1])
        else:
            self.load_state([self.epoch + 1, 0, -1])
        return None

    def _share(self, epoch: int) -> tuple[list[int], int, int]:
        """The lane's shards in this pass, its first row in each, and the step between its rows."""
        shards, lanes = self._source.shards, self._lanes
        epoch_seed = hash64(self._seed, epoch)
        if shards >= lanes:
            return [shuffled(i, shards, epoch_seed) for i in range(self._lane, shards, lanes)], 0, 1
        turn = shuffled(self._lane, lanes, epoch_seed)
        shard = turn % shards
        return [shard], turn // shards, len(range(shard, lanes, shards))


def folders_of(config: schema.HubSource | InstructionHub) -> list[str]:
    """The folders of a dataset that a source names; [""] is all of it."""
    return [config.data_dir] if isinstance(config.data_dir, str) else list(config.data_dir)


def place_of(config: schema.HubSource | InstructionHub) -> str:
    """A dataset's name in messages; with its files, to tell apart formats such as "json"."""
    files = config.data_files or ", ".join(folders_of(config))
    return f"{config.name} ({files})" if files else config.name


def open_dataset(config: InstructionHub, name: str) -> Any:
    """A source's whole dataset (`datasets.Dataset`), from the library's cache if it is there; fine-tuning reads it."""
    import datasets

    with _opening(config, name):
        return datasets.load_dataset(**_arguments(config, config.data_dir), split=config.split)


def open_streamed(config: schema.HubSource, folder: str, name: str) -> tuple[Any, list[str]]:
    """The text column of a folder ("" for all) of a streamed dataset, and the paths or URLs of its files if known."""
    import datasets

    with _opening(config, name):
        builder = datasets.load_dataset_builder(**_arguments(config, folder))
        dataset = builder.as_streaming_dataset(split=config.split)
        if dataset.features is not None:
            place = f"{name}, {folder}" if len(folders_of(config)) > 1 else name
            check_text(place, config.field, dataset.features.arrow_schema)
        _read_only(builder, config.field)
        dataset = dataset.select_columns([config.field]).with_format("arrow")
    return dataset, list((builder.config.data_files or {}).get(config.split, []))


def _read_only(builder: Any, field: str) -> None:
    """Makes a builder read one column.

    The library casts every file to the columns of the first one, and stops at a file that has others.
    """
    import pyarrow as pa
    from datasets.table import table_cast

    if hasattr(builder.config, "columns"):  # Parquet: the others are not even fetched
        builder.config.columns = [field]
    if hasattr(builder, "_cast_table"):
        text = pa.schema([(field, pa.string())])
        # JSON rows without the column get nulls: bad rows. Parquet files without it are refused before.
        builder._cast_table = lambda table, **_: table_cast(
            table.select([name for name in table.column_names if name == field]), text
        )


def _arguments(config: schema.HubSource | InstructionHub, folder: str) -> dict[str, Any]:
    """Arguments of `datasets.load_dataset` for a source."""
    if not config.name:
        raise DataError(
            'huggingface source: name is empty. Set it to a dataset\'s name, or to a format such as "json".'
        )
    return {
        "path": config.name,
        "name": config.config or None,
        "data_dir": folder or None,
        "data_files": config.data_files or None,
    }


@contextmanager
def _opening(config: schema.HubSource | InstructionHub, name: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        # Anything from a missing file (StopIteration, for a glob without matches) to a network error.
        remedy = what_to_do(error, place_of(config))
        if remedy is None and _is_local(config) and is_not_json(error):
            remedy = _repair(error, config, config.data_files or "the file")
        if remedy is None:
            hub = ", and that the hub can be reached (or that the dataset is in the local cache)"
            remedy = (
                f"Check its name, config = '{config.config}', split = '{config.split}', data_dir = '"
                f"{', '.join(folders_of(config))}' and data_files = '{config.data_files}'{'' if _is_local(config) else hub}."
            )
        raise DataError(f"{name}: it can't be opened: {in_words(error)}. {remedy}") from error


def _is_local(config: schema.HubSource | InstructionHub) -> bool:
    """True if a source names files of this machine: a dataset in a folder, or a format with local files."""
    files = [config.data_files, *folders_of(config)]
    return os.path.isdir(config.name) or ("/" not in config.name and any(files) and "://" not in "".join(files))


def _repair(error: Exception, config: schema.HubSource | InstructionHub, file: str) -> str:
    """Advice for a damaged file; for local JSON lines also how to skip those that are not JSON."""
    remedy = f"Repair or replace {file}."
    if isinstance(config, schema.HubSource) and _is_local(config) and is_not_json(error):
        remedy += (
            ' Streaming can\'t skip lines that are not JSON: to leave them out, run `farsight prepare` with kind = "jsonl" and '
            'data.on_bad_row = "skip", and read its shards (kind = "shards").'
        )
    return remedy
