"""Perplexity by context length.

    farsight perplexity MODEL_DIR --data FILE --lengths 1024 4096 --json F
    torchrun --nproc_per_node 8 -m farsight perplexity MODEL_DIR OTHER_DIR --data BOOKS.jsonl --lengths 4096 131072 \\
        --documents --picture perplexity.png

A document is a line of a .jsonl file or a row of a .parquet file (its "text", or what --field names), or any other file
whole. Documents are tokenised without special tokens and cut into non-overlapping windows of each length from their first
token; an incomplete last window is dropped. A window counts with its last 256 tokens, so that every target has at least length − 256 tokens before it: the figure is exp of their mean
negative log-likelihood. With --documents, documents shorter than the longest length are left out and of each other one the
same final 256 tokens are predicted from contexts of each length (SCOPE 4.3).
With --sliding STRIDE, windows of each length move over every document by STRIDE tokens, the last one to its end, and every
token counts once: those of a document's first window, and of each other one those that the window before it has not seen,
which so have at least length − STRIDE tokens before them.
--buckets N also gives the perplexity of all of a window's tokens by their position in it: in N parts of equal size, and, for
the picture, in N of equal ratio.
--extend yarn:4 scales the RoPE of a model that was trained without scaling, as the baseline for longer contexts; RiPRA and others
need no retraining either (docs/inference/extensions.md).
Past the trained length, a model with scopes is measured as it was trained ("trained") and with scopes that grow with
the length ("length").
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farsight.cli import bounded, command
from farsight.configs.load import ConfigError
from farsight.data.texts import encode_file, has_fields
from farsight.evals.perplexity_picture import draw
from farsight.evals.ranks import sharing_processes
from farsight.evals.windows import SIDE_BY_SIDE, TARGETS, Windows, first_target
from farsight.inference.decoder import CHUNK, Decoder
from farsight.inference.extend import Extension
from farsight.inference.model_options import add_model_options, load
from farsight.inference.scope_growth import with_growing_scopes
from farsight.model.build import ModelConfig, set_length
from farsight.model.llama import Llama
from farsight.outputs import add_output_options, check_outputs, write_figures
from farsight.progress import progress

WHOLE = 32768
"""Tokens that a window may have to be read at once, as in training: no layer's keys and values are kept. Of longer ones no
more than a chunk's activations is held, beside the cache."""


def window_nll(
    model: Llama,
    rows: Sequence[Tensor],
    windows: Windows = SIDE_BY_SIDE,
    firsts: Sequence[int] | None = None,
    decoder: Decoder | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of the negative log-likelihoods of windows of one length, and the numbers of tokens that counted.

    Args:
        model: set for this length.
        rows: the windows, [length] ids each.
        firsts: the first token that counts in each; None has the last 256 of each count.
        decoder: reads the windows, chunk by chunk; None reads each at once.

    Returns:
        Two fp64 [1 + parts]: the tokens that count, then all tokens by their position, in the order of `windows.parts`.
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
    """The targets of a window in pieces that cross no edge: the first, the one after the last, and the sum of their losses."""
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
) -> dict[str, dict[str, Any]]:
    """Perplexity at each length.

    Args:
        documents: [n] ids each.
        extension: reads further than the model was trained; `config` is as it changed it.
        chunk: tokens that are read at once, of very long windows and with an extension.

    Returns:
        {"lengths": {length: perplexity}}, as the model was trained. With buckets, also {"buckets": {length: [perplexity of
        each part of equal size]}} and {"log_buckets": {length: {"edges": tokens before, "perplexity": of each part of equal
        ratio}}}. With scopes that can grow, and a length beyond the trained one, also "lengths_scope_length" and
        "log_buckets_scope_length" with scopes that grow.

    Raises:
        ConfigError: lengths, buckets or a stride that the documents or windows are too short for.
    """
    _check_lengths(documents, lengths, windows)
    if windows.final:
        documents = [document for document in documents if len(document) >= max(lengths)]
    readings = {"": config}
    grown = with_growing_scopes(config)
    if grown is not None and max(lengths) > config.trained_length:
        readings["_scope_length"] = grown
    result: dict[str, dict[str, Any]] = {
        f"{key}{reading}": {} for reading in readings for key in ("lengths", "buckets", "log_buckets")
    }
    for length in lengths:
        rows, firsts = zip(*windows.with_first_targets(documents, length), strict=True)
        values: list[float] = []
        for reading, positions in readings.items():
            if not reading or length > config.trained_length:  # up to it the scopes are the same
                set_length(model, positions, length)
                chunked = extension is not None or length > WHOLE
                decoder = Decoder(model, positions, extension, chunk) if chunked else None
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


def _check_lengths(documents: Sequence[Tensor], lengths: Sequence[int], windows: Windows) -> None:
    """Before hours are spent on the first of them."""
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


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight perplexity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, nargs="+", help="model directories, adapters or checkpoints")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text, .jsonl or .parquet; .gz or .zst too",
    )
    parser.add_argument("--field", help="key of the text in .jsonl, column in .parquet (text)")
    parser.add_argument(
        "--lengths", type=bounded(int, least=2), nargs="+", required=True, help="window lengths in tokens"
    )
    parser.add_argument(
        "--windows", type=bounded(int, least=0), default=0, help="at most this many windows a length (default: all)"
    )
    parser.add_argument("--documents", action="store_true", help="the same final 256 tokens of every long document")
    parser.add_argument(
        "--sliding",
        type=bounded(int, least=0),
        default=0,
        metavar="STRIDE",
        help="all tokens, from windows that overlap",
    )
    parser.add_argument(
        "--buckets", type=bounded(int, least=0), default=0, metavar="N", help="also by position, in N parts"
    )
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.sliding and (options.documents or options.buckets):
        parser.error("--sliding goes with neither --documents nor --buckets, which measure windows that lie apart")
    if options.field and not any(has_fields(path) for path in options.data):
        parser.error("--field goes with .jsonl or .parquet files: other texts are whole files")
    check_outputs(parser, options)
    with sharing_processes() as (rank, world):
        windows = Windows(options.windows, options.documents, options.buckets, options.sliding, rank, world)
        results = {str(folder): _measure(folder, options, windows) for folder in options.model_dir}
    if rank:
        return
    for folder, figures in results.items():
        if len(results) > 1:
            print(folder)
        print(table(figures, figures["trained_length"]))
    if len({figures["tokens"] for figures in results.values()}) > 1:
        print("The models' tokenizers differ: perplexities are per token and do not compare.")
    if options.json:
        write_figures(options.json, results)
    if options.picture:
        draw(results, options.picture)
        print(options.picture)


def _measure(folder: Path, options: argparse.Namespace, windows: Windows) -> dict[str, Any]:
    loaded = load(folder, options)
    decoder, config = loaded.decoder, loaded.config
    documents = [
        document for path in options.data for document in encode_file(path, loaded.tokenizer, options.field or "text")
    ]
    figures = perplexity_by_length(
        decoder.model, config, documents, options.lengths, windows, decoder.extension, decoder.chunk
    )
    kept = [d for d in documents if not windows.final or len(d) >= max(options.lengths)]
    return {
        **figures,
        "model": str(folder),
        "data": [str(path) for path in options.data],
        "tokens": sum(map(len, documents)),
        "documents": len(kept),
        "trained_length": loaded.trained_length,
        "extend": options.extend,
        **({"stride": windows.stride} if windows.stride else {"targets": TARGETS}),
    }


def table(figures: dict[str, Any], trained_length: int) -> str:
    """The figures as text, a line a length."""
    grown = figures.get("lengths_scope_length")
    lines = [f"{'length':>9}{'perplexity':>13}" + (f"{'scopes grown':>15}" if grown else "")]
    for length, value in figures["lengths"].items():
        mark = "  (trained)" if int(length) == trained_length else ""
        lines.append(f"{int(length):>9,}{value:>13.3f}" + (f"{grown[length]:>15.3f}" if grown else "") + mark)
    for length, values in figures.get("buckets", {}).items():
        lines.append(f"by position, {int(length):,} tokens: " + "  ".join(f"{value:.3f}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
