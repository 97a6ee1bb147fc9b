"""Opens every data source of a run or recipe without training, and reads the first documents of each.

A recipe may reach a source only after days; what would stop it there is said before it starts.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from farsight import cli
from farsight.configs.schema import Data, HubSource, JobConfig, Source
from farsight.data.mixture import MixedSource
from farsight.data.order import hash64
from farsight.data.sources.build import check_held_out, check_shares, open_source
from farsight.data.sources.documents import AnyDocument, DocumentSource, Split, split_of
from farsight.data.sources.streamed import place_of
from farsight.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from farsight.progress import progress
from farsight.remote import local
from farsight.training.tokenizer import chosen_tokenizer, vocabulary_of

DOCUMENTS = 256
"""Documents to read of each source."""
_PLACES = 8
"""Places to read them from: as many files of a dataset, if it has them."""


@dataclass
class _Check:
    """One source, read for all stages that read it in the same way, and what came of it."""

    source: Source
    data: Data
    seed: int
    splits: tuple[Split, ...]
    tokenizer: Tokenizer | None
    vocab_size: int
    stages: list[str] = field(default_factory=list)
    documents: int = 0
    held_out: int = 0
    """Documents of the validation split."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each document that passes the length filter."""
    skipped: int = 0
    """Bad rows, with `on_bad_row = "skip"`."""
    problem: str | None = None

    def run(self, shown: "tqdm[Any]") -> None:
        """Reads the source; `shown` counts documents."""
        try:
            # Without filters and held-out documents: those are counted here, of all documents read.
            source, mixed = self._open(dataclasses.replace(self.source, min_tokens=0, max_tokens=0), 0.0, "train")
            source.least_bytes = 1  # documents that are too short count as read
            for document in _first_documents(source):
                self.documents += 1
                self.held_out += split_of(document.text.encode(), self.data.held_out) == "validation"
                if mixed is not None and (tokens := mixed.tokens(document)) is not None:
                    self.lengths.append(len(tokens))
                shown.update()
            self.skipped = sum(source.skipped.values())
            if source.rows_if_fewer(DOCUMENTS) is not None:  # few enough to say that no document passes
                for split in self.splits:
                    _, mixed = self._open(self.source, self.data.held_out, split)
                    if mixed is not None:
                        mixed.check_possible()
        except Exception as error:
            self.problem = cli.explain(error)
            if self.problem is None:
                raise

    def place(self) -> str:
        """The source's name, shortened."""
        place = f"{self.source.kind} {getattr(self.source, 'path', '')}"
        if isinstance(self.source, HubSource):
            place = f"{place_of(self.source)} {self.source.config}"
        return place.strip() if len(place) <= 60 else f"{place[:36]}…{place.strip()[-23:]}"

    def row(self) -> list[str]:
        """The source's line of the table."""
        passing = [f"{len(self.lengths)}", f"{fmean(self.lengths):,.0f}" if self.lengths else "–"]
        result = "opens" if self.lengths else "opens, but none of these passes"
        if self.problem:
            result = "fails"
        elif self.tokenizer is None:
            passing, result = ["–", "–"], "opens; no tokenizer to check lengths with"
        if self.skipped:
            result += f"; {self.skipped} bad rows"
        return [self.place(), ", ".join(self.stages), str(self.documents), str(self.held_out), *passing, result]

    def _open(self, config: Source, held_out: float, split: Split) -> tuple[DocumentSource, MixedSource | None]:
        source = open_source(config, held_out, split, self.seed, self.data.on_bad_row, self.tokenizer)
        if self.tokenizer is None:
            return source, None
        return source, MixedSource(self.source, source, self.tokenizer, self.vocab_size)


def open_data(configs: Sequence[tuple[str, JobConfig]]) -> tuple[str, list[str]]:
    """Opens every source of the configs and reads some documents, as the column, filters and vocabulary ask.

    Args:
        configs: name and config of each stage.

    Returns:
        A table of the sources, and a sentence for each problem, after the names of the stages that have it.
    """
    checks: dict[Any, _Check] = {}
    problems: dict[str, list[str]] = {}
    load = cache(load_tokenizer)
    for stage, config in configs:
        data = config.data
        tokenizer, vocab_size = None, 0
        splits: tuple[Split, ...] = ("train", "validation") if config.validation.enable else ("train",)
        try:
            check_shares(data)
            for split in splits:
                check_held_out(data.held_out, split)
            if not _trained_by_run(config):
                loaded = load(chosen_tokenizer(config))
                tokenizer, vocab_size = loaded, vocabulary_of(config, loaded)
        except Exception as error:
            if (sentence := cli.explain(error)) is None:
                raise
            problems.setdefault(sentence, []).append(stage)
        for number, source in enumerate(data.sources):
            source = dataclasses.replace(source, weight=1.0)
            key = (source, data.held_out, data.on_bad_row, splits, config.tokenizer, vocab_size)
            seed = hash64(data.seed, number)
            check = checks.setdefault(key, _Check(source, data, seed, splits, tokenizer, vocab_size))
            check.stages.append(stage)
    quiet = _quiet_libraries() if any(isinstance(c.source, HubSource) for c in checks.values()) else nullcontext()
    with quiet, progress(desc="Reading data", total=len(checks) * DOCUMENTS, unit="document") as shown:
        for check in checks.values():
            shown.set_postfix_str(check.place())
            check.run(shown)
            shown.total -= DOCUMENTS - check.documents
            if check.problem:
                problems.setdefault(check.problem, []).extend(check.stages)
    return _table(list(checks.values())), [
        f"{', '.join(dict.fromkeys(names))}: {said}" for said, names in problems.items()
    ]


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keeps the libraries' lines about each retry out of the output: the error says what failed."""
    import datasets  # noqa: F401  sets the levels of its loggers and of huggingface_hub's when it is first imported

    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub", "fsspec")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _trained_by_run(config: JobConfig) -> bool:
    """True if the run or recipe trains its tokenizer on its own data, and has not yet."""
    t, folder = config.tokenizer, Path(config.job.dump_folder)
    named = t.path and Path(t.path) not in (folder / "tokenizer", folder.parent / "tokenizer")
    if named or t.kind == "bytes" or (not t.path and config.checkpoint.initial_load_path):
        return False
    return not local(t.path or folder / "tokenizer").is_dir()


def _first_documents(source: DocumentSource) -> Iterator[AnyDocument]:
    """Documents of the first pass over a source, from several places."""
    for lane in range(_PLACES):
        reader = source.lane(lane, _PLACES)
        for _ in range(DOCUMENTS // _PLACES):
            document = reader.read()
            if reader.epoch:
                break
            if document is not None:
                yield document


def _table(checks: Sequence[_Check]) -> str:
    lines = [
        ["source", "stages", "documents", "held out", "pass", "mean tokens", ""],
        *(check.row() for check in checks),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = (0, 1, 6)
    aligned = (
        [f"{cell:<{w}}" if i in left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)
