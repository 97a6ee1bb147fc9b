"""Perplexity of a model on windows of documents, by context length and by position."""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError
from farsight.evals.windows import SIDE_BY_SIDE, TARGETS, Windows, first_target
from farsight.inference.decoder import CHUNK, Decoder
from farsight.inference.extend import Extension
from farsight.inference.loading import LoadedModel
from farsight.inference.model_options import reading_options
from farsight.inference.scope_growth import with_growing_scopes
from farsight.model.build import ModelConfig, set_length
from farsight.model.llama import Llama
from farsight.progress import progress
from farsight.remote import shown

WHOLE = 32768
"""Longest window read at once, as in training, without keeping any layer's keys and values. A longer one is read in chunks, which
holds the cache and one chunk's activations."""


def window_nll(
    model: Llama,
    rows: Sequence[Tensor],
    windows: Windows = SIDE_BY_SIDE,
    firsts: Sequence[int] | None = None,
    decoder: Decoder | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihoods over windows of one length, and the numbers of tokens in the sums.

    Args:
        model: set for this length.
        rows: the windows, [length] ids each.
        firsts: the first token that counts in each window; None counts the last 256 of each.
        decoder: reads the windows chunk by chunk; None reads each at once.

    Returns:
        Sums and counts, fp64 [1 + parts] each: over the tokens that count, then over each of `windows.parts`.
    """
    length, device = len(rows[0]), next(model.parameters()).device
    by_position = windows.parts(length)
    sums = torch.zeros(2, 1 + len(by_position), dtype=torch.float64)
    firsts = [first_target(length)] * len(rows) if firsts is None else firsts
    mine = list(zip(rows, firsts, strict=True))[windows.rank :: windows.world]
    with progress(desc=f"length {length:,}", total=len(mine), unit="window", unit_scale=True) as shown:
        for row, first in mine:
            ids = row.to(device)
            parts = [(first, len(row)), *by_position]
            for start, stop, nll in _pieces(model, ids, sorted({edge for part in parts for edge in part}), decoder):
                inside = torch.tensor([a <= start and stop <= b for a, b in parts])
                sums[0, inside] += nll
                sums[1, inside] += stop - start
            shown.update()
    if windows.world > 1:
        dist.all_reduce(sums)
    return sums[0], sums[1]


@torch.no_grad()
def _pieces(
    model: Llama, ids: Tensor, edges: Sequence[int], decoder: Decoder | None
) -> Iterator[tuple[int, int, float]]:
    """Splits a window's targets into pieces that cross no edge: yields each piece's start, stop and summed loss."""
    if len(ids) < 2:
        return
    if decoder is None:
        chunks = iter([model.hidden_states(ids[None, :-1])])
    else:
        chunks = decoder.start([len(ids) - 1], model.length - len(ids) + 1).chunks(ids[None, :-1])
    begin = 1  # the token at p predicts the one at p + 1
    for h_BLD in chunks:
        end = begin + h_BLD.shape[1]
        inside = [edge for edge in edges if begin < edge < end]
        cuts = [max(begin, edges[0]), *inside, min(end, edges[-1])] if edges[0] < end else []
        for start, stop in itertools.pairwise(sorted(set(cuts))):
            yield start, stop, float(model.head(h_BLD[:, start - begin : stop - begin], ids[None, start:stop]))
        begin = end


def perplexity_by_length(
    model: Llama,
    config: ModelConfig,
    documents: Sequence[Tensor],
    lengths: Sequence[int],
    windows: Windows = SIDE_BY_SIDE,
    extension: Extension | None = None,
    chunk: int = CHUNK,
    both: bool = True,
    decoder_type: type[Decoder] = Decoder,
) -> dict[str, dict[str, Any]]:
    """Perplexity at each length.

    Args:
        documents: [n] ids each.
        extension: context extension; `config` is the config that it returned.
        chunk: tokens read at once, in windows longer than WHOLE and with an extension.
        both: also read with scopes that grow, where these can.
        decoder_type: what reads them.

    Returns:
        {"lengths": {length: perplexity}}, for the model as trained. With buckets, also {"buckets": {length: [perplexity of
        each part of equal size]}} and {"log_buckets": {length: {"edges": tokens before, "perplexity": of each part of equal
        ratio}}}. With scopes that can grow and a length beyond the trained one, also "lengths_scope_length" and
        "log_buckets_scope_length" with grown scopes.

    Raises:
        ConfigError: documents too short for a length, or windows too short for the buckets or the stride.
    """
    check_lengths(documents, lengths, windows)
    if windows.final:
        documents = [document for document in documents if len(document) >= max(lengths)]
    readings = {"": config}
    grown = with_growing_scopes(config) if both else None
    if grown is not None and max(lengths) > config.trained_length:
        readings["_scope_length"] = grown
    set_length(model, config, max(lengths))  # a model that has no positions that far says so before any window is read
    result: dict[str, dict[str, Any]] = {
        f"{key}{reading}": {} for reading in readings for key in ("lengths", "buckets", "log_buckets")
    }
    for length in lengths:
        rows, firsts = zip(*windows.with_first_targets(documents, length), strict=True)
        values: list[float] = []
        for reading, positions in readings.items():
            if not reading or length > config.trained_length:  # up to there, grown scopes equal the trained ones
                set_length(model, positions, length)
                chunked = extension is not None or length > WHOLE
                decoder = decoder_type(model, positions, extension, chunk) if chunked else None
                values = _perplexities(*window_nll(model, rows, windows, firsts, decoder))
            result[f"lengths{reading}"][str(length)] = values[0]
            result[f"buckets{reading}"][str(length)] = values[1 : 1 + windows.buckets]
            by_ratio = {"edges": windows.log_edges(length), "perplexity": values[1 + windows.buckets :]}
            result[f"log_buckets{reading}"][str(length)] = by_ratio
    set_length(model, config, config.trained_length)
    if not windows.buckets:
        result = {key: value for key, value in result.items() if "buckets" not in key}
    result.pop("buckets_scope_length", None)
    return result


def check_lengths(documents: Sequence[Tensor], lengths: Sequence[int], windows: Windows) -> None:
    """Raises ConfigError if documents are too short for a length, or windows too short for the buckets or the stride."""
    longest = max((len(document) for document in documents), default=0)
    for length in lengths:
        if length < 2:
            raise ConfigError(f"length {length:,}: a window needs at least 2 tokens.")
        if length > longest:
            raise ConfigError(f"length {length:,}: the longest document has {longest:,} tokens; name a longer text.")
        if windows.buckets >= length:
            raise ConfigError(f"--buckets {windows.buckets}: a window of {length:,} has {length - 1:,} targets.")
        if windows.stride >= length:
            raise ConfigError(
                f"--sliding {windows.stride}: windows of {length:,} tokens overlap with a stride of {length - 1:,} or less."
            )


def _perplexities(sums: Tensor, counts: Tensor) -> list[float]:
    return [math.exp(min(mean, 700)) for mean in (sums / counts).tolist()]


def read_documents(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Tensor]:
    """The documents in the files that the command's options name, [n] ids each."""
    return [document for path in options.data for document in encode_file(path, tokenizer, options.field or "text")]


def measure(loaded: LoadedModel, options: argparse.Namespace, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """The model's figures on the files that the command's options name.

    Args:
        rank, world: this process's number, and how many share the windows; every process returns all figures.
    """
    windows = Windows(options.windows, options.documents, options.buckets, options.sliding, rank, world)
    decoder, config = loaded.decoder, loaded.config
    documents = read_documents(options, loaded.tokenizer)
    figures = perplexity_by_length(
        decoder.model,
        config,
        documents,
        options.lengths,
        windows,
        decoder.extension,
        decoder.chunk,
        loaded.scope_max is None,
        type(decoder),
    )
    kept = [d for d in documents if not windows.final or len(d) >= max(options.lengths)]
    return {
        **figures,
        "model": shown(loaded.path),
        "data": [str(path) for path in options.data],
        "tokens": sum(map(len, documents)),
        "documents": len(kept),
        "trained_length": loaded.trained_length,
        **reading_options(options),
        **({"stride": windows.stride} if windows.stride else {"targets": TARGETS}),
    }


def table(figures: dict[str, Any], trained_length: int) -> str:
    """The figures as text, one line for each length."""
    grown = figures.get("lengths_scope_length")
    lines = [f"{'length':>9}{'perplexity':>13}" + (f"{'scopes grown':>15}" if grown else "")]
    for length, value in figures["lengths"].items():
        mark = "  (trained)" if int(length) == trained_length else ""
        lines.append(f"{int(length):>9,}{value:>13.3f}" + (f"{grown[length]:>15.3f}" if grown else "") + mark)
    for length, values in figures.get("buckets", {}).items():
        lines.append(f"by position, {int(length):,} tokens: " + "  ".join(f"{value:.3f}" for value in values))
    return "\n".join(lines)
