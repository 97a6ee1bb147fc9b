"""Documents of a mixture one after another, each at most once: tokenizers are trained on them, models measured on them."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farsight.configs import schema
from farsight.data.mixture import MixedSource
from farsight.data.sources.build import open_sources
from farsight.data.sources.documents import AnyDocument, DocumentSource, Split, text_hash
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.files import written_whole
from farsight.progress import progress


@dataclass(frozen=True)
class Sample:
    """A document that passed its source's length filters."""

    document: AnyDocument
    source: str
    tokens: int
    """Without bos and eos."""


def sample_texts(config: schema.Data, max_bytes: int, split: Split = "train") -> Iterator[str]:
    """Texts of one split, mixed by weight in bytes, until `max_bytes` are read or every source is exhausted."""
    total = 0
    for found in _mixed(config, open_sources(config, split), lambda _, document: document.size):
        if found is not None:
            _, document, size = found
            total += size
            yield document.text
        if total >= max_bytes:
            return


def sample_documents(config: schema.Data, tokenizer: Tokenizer, split: Split) -> Iterator[Sample]:
    """Documents of one split that pass their sources' filters, mixed by weight in tokens, until every source is exhausted.

    Copies of a text are left out. A progress bar counts the rows that are read.
    """
    sources = open_sources(config, split, tokenizer)
    mixed = [
        MixedSource(share, source, tokenizer, tokenizer.vocab_size)
        for share, source in zip(config.sources, sources, strict=True)
    ]
    seen: set[int] = set()

    def tokens(choice: int, document: AnyDocument) -> int | None:
        if (found := mixed[choice].text_tokens(document)) is None:
            return None
        known = len(seen)
        seen.add(text_hash(document.text.encode()))
        return len(found) if len(seen) > known else None

    with progress(desc="Reading documents", total=None, unit="row", unit_scale=True) as shown:
        for found in _mixed(config, sources, tokens):
            if found is not None:
                choice, document, count = found
                shown.set_postfix_str(f"{len(seen):,} pass the filters", refresh=False)
                yield Sample(document, sources[choice].name, count)
            shown.update()


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Writes documents as JSON lines: {"text", "tokens", "source", "document"}; the last two say where each came from."""
    with written_whole(path) as part, open(part, "w", encoding="utf-8") as file:
        for sample in samples:
            place = {"source": sample.source, "document": sample.document.key}
            line = {"text": sample.document.text, "tokens": sample.tokens, **place}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _mixed(
    config: schema.Data, sources: list[DocumentSource], size: Callable[[int, AnyDocument], int | None]
) -> Iterator[tuple[int, AnyDocument, int] | None]:
    """Reads each source once, always the one furthest behind its weight: its number, a document and the document's size.

    Yields None for a row that the source skips or `size` excludes by None.
    """
    readers = {i: source.lane(0, 1) for i, source in enumerate(sources)}
    given = [0.0] * len(sources)
    while readers:
        choice = min(readers, key=given.__getitem__)
        document = readers[choice].read()
        if readers[choice].epoch > 0:
            del readers[choice]
            continue
        measured = None if document is None else size(choice, document)
        if document is None or measured is None:
            yield None
            continue
        given[choice] += measured / config.sources[choice].weight
        yield choice, document, measured
