"""The text that a model is analysed on: equally long token sequences from a file's documents, and the options for them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from farsight.cli import natural, positive
from farsight.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from farsight.data.tokenizers.tokenizer import Tokenizer


def add_text_options(parser: argparse.ArgumentParser, sequences: int, seed: bool = True, optional: str = "") -> None:
    """Adds --data, --length, --sequences and, for tools that draw random numbers, --seed.

    Args:
        optional: why --data may be left out, for the help text; without a reason it is required.
    """
    parser.add_argument(
        "--data",
        type=Path,
        required=not optional,
        metavar="FILE",
        help='.jsonl of {"text": …}, or a text file' + (optional and f" ({optional})"),
    )
    parser.add_argument(
        "--length", type=positive, metavar="L", help="tokens per sequence (default: the trained length)"
    )
    parser.add_argument(
        "--sequences", type=positive, default=sequences, metavar="N", help="sequences to read, at most (%(default)s)"
    )
    if seed:
        parser.add_argument("--seed", type=natural, default=0, help="random seed (%(default)s)")


def read_sequences(path: Path, tokenizer: Tokenizer, length: int, most: int) -> Tensor:
    """Consecutive spans of `length` tokens from a file's documents: int64 [S, L] with 1 ≤ S ≤ `most`.

    Documents take turns, so that a few long ones don't supply every span. The rest of a document, shorter than a span, is
    dropped.

    Raises:
        ConfigError: no such file, or no document that long.
    """
    import torch

    from farsight.data.texts import encode_file

    documents = encode_file(path, tokenizer)
    spans = [list(document[: len(document) // length * length].view(-1, length)) for document in documents]
    rounds = max((len(of_one) for of_one in spans), default=0)
    if not rounds:
        longest = max(map(len, documents), default=0)
        raise ConfigError(
            f"{path}: its longest document has {longest:,} tokens, so it gives no sequence of {length:,}; set --length "
            f"{longest} or less, or give it longer documents."
        )
    taken = [of_one[turn] for turn in range(rounds) for of_one in spans if turn < len(of_one)]
    return torch.stack(taken[:most])
