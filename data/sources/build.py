"""Opens the data sources of a config and checks them."""

import math
from typing import Any, Literal

from farsight.configs import schema
from farsight.data.order import hash64
from farsight.data.sources.documents import DocumentSource, Split
from farsight.data.sources.files import open_files
from farsight.data.sources.shards import ShardSource
from farsight.data.sources.streamed import StreamedDataset, place_of
from farsight.data.tokenizers.base import Tokenizer
from farsight.errors import DataError

__all__ = ["DataError", "DocumentSource", "Split", "open_source", "open_sources"]


def open_sources(config: schema.Data, split: Split, tokenizer: Tokenizer | None = None) -> list[DocumentSource]:
    """Opens every source of the mixture, for the loaders. Raises `DataError` for an invalid weight or filter.

    `tokenizer`: the run's, if there is one yet.
    """
    check_shares(config)
    return [
        open_source(source, config.held_out, split, hash64(config.seed, i), config.on_bad_row, tokenizer)
        for i, source in enumerate(config.sources)
    ]


def check_shares(config: schema.Data) -> None:
    """Raises `DataError` for an invalid weight or filter, or if there is no source."""
    if not config.sources:
        raise DataError("data.sources is empty; add at least one [[data.sources]].")
    for i, source in enumerate(config.sources):
        name = f"data.sources[{i}] ({source.kind})"
        if not (source.weight > 0 and math.isfinite(source.weight)):
            raise DataError(f"{name}: weight = {source.weight}; set a positive number, or remove the source.")
        if source.min_tokens < 0 or source.max_tokens < 0:
            raise DataError(
                f"{name}: min_tokens = {source.min_tokens}, max_tokens = {source.max_tokens}; lengths can't be "
                "negative, and 0 is no limit."
            )
        if source.packing == "best_fit" and not config.mask_documents:
            raise DataError(
                f'{name}: packing = "best_fit" keeps documents whole, but with data.mask_documents = false a row is one text, in which '
                'tokens see other documents and padding. Set data.mask_documents = true, or packing = "cut".'
            )
        if source.max_tokens and source.max_tokens < source.min_tokens:
            raise DataError(
                f"{name}: no length is both at least min_tokens = {source.min_tokens} and at most max_tokens = "
                f"{source.max_tokens}."
            )


def check_held_out(held_out: float, split: Split) -> None:
    """Raises `DataError` for a share of held-out documents that is none, or that leaves the split without any."""
    if not 0 <= held_out < 1:
        raise DataError(f"data.held_out = {held_out}: it is a share of the documents; set 0 … 0.99, e.g. 0.01.")
    if split == "validation" and held_out == 0:
        raise DataError("data.held_out = 0 keeps no documents for validation; set e.g. 0.01, or turn validation off.")


def open_source(
    config: schema.Source,
    held_out: float,
    split: Split,
    seed: int,
    on_bad_row: Literal["error", "skip"] = "error",
    tokenizer: Tokenizer | None = None,
) -> DocumentSource:
    """Opens one source of a config.

    `held_out`: share of the documents, selected by a hash of their text, that make up the "validation" split; the rest
    is "train". `seed`: shuffles the documents. `tokenizer`: the run's, which tokens must come from.

    Raises `DataError` if there is nothing to read, for an invalid share, and for tokens of another tokenizer.
    """
    check_held_out(held_out, split)
    place = getattr(config, "path", "")
    name = f"{config.kind} source" + (f" '{place}'" if place else "")
    shared: dict[str, Any] = {"name": name, "held_out": held_out, "split": split, "on_bad_row": on_bad_row}
    try:
        if isinstance(config, schema.HubSource):
            return StreamedDataset(config, seed, **(shared | {"name": f"huggingface source '{place_of(config)}'"}))
        if isinstance(config, schema.ShardsSource):
            return ShardSource(config, seed, tokenizer, **shared)
        return open_files(config, name, seed, shared)
    except OSError as error:
        raise DataError(f"{name}: {error}. Correct the source's path, or its permissions.") from error
