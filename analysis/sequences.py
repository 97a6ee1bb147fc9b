"""The texts that a model is looked into with: spans of a file's documents, of one length, and the options that name them."""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from farsight.cli import bounded, positive
from farsight.configs.check import ConfigError
from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import Tokenizer


def add_text_options(parser: argparse.ArgumentParser, sequences: int, seed: bool = True) -> None:
    """Adds --data, --length, --sequences and, for tools that draw something, --seed."""
    parser.add_argument("--data", type=Path, metavar="FILE", help='.jsonl of {"text": …}, or a text file')
    parser.add_argument("--length", type=positive, metavar="L", help="tokens a sequence (default: the trained length)")
    parser.add_argument(
        "--sequences", type=positive, default=sequences, metavar="N", help="at most so many of them (%(default)s)"
    )
    if seed:
        parser.add_argument("--seed", type=bounded(int, least=0), default=0, help="of all that is drawn (%(default)s)")


def read_sequences(path: Path, tokenizer: Tokenizer, length: int, most: int) -> Tensor:
    """Spans of `length` tokens that lie side by side in the documents of a file: int64 [S, L] with 1 ≤ S ≤ `most`.

    Documents take turns, so that a few long ones do not make up all of them; what is left at a document's end is dropped.

    Raises:
        ConfigError: no file, or no document that is so long.
    """
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
