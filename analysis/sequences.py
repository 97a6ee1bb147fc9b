"""The text that a model is analysed on: equally long token sequences from a file's documents, and the options for them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    parser.add_argument(
        "--bos",
        choices=("auto", "yes", "no"),
        default="no",
        help="begin each sequence with the start token, which counts in its length (auto: if the tokenizer does so in "
        "transformers; default: no)",
    )
    parser.add_argument(
        "--document-starts",
        action="store_true",
        help="read one sequence of each document, its first L tokens, and none that begins in the middle of one",
    )
    if seed:
        parser.add_argument("--seed", type=natural, default=0, help="random seed (%(default)s)")


def sequences_from_options(options: argparse.Namespace, tokenizer: Tokenizer, length: int) -> Tensor:
    """The sequences that the options of add_text_options ask for: int64 [S, L]. Sets options.bos to whether they begin with bos.

    Raises:
        ConfigError: as read_sequences, or bos wanted of a tokenizer that has none.
    """
    options.bos = {"auto": tokenizer.begins_with_bos, "yes": True, "no": False}[options.bos]
    return read_sequences(
        options.data, tokenizer, length, options.sequences, bos=options.bos, document_starts=options.document_starts
    )


def text_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that say where sequences_from_options began its sequences, for a tool's JSON."""
    return {"bos": options.bos, "document_starts": options.document_starts}


def read_sequences(
    path: Path, tokenizer: Tokenizer, length: int, most: int, *, bos: bool = False, document_starts: bool = False
) -> Tensor:
    """Consecutive spans of `length` tokens from a file's documents: int64 [S, L] with 1 ≤ S ≤ `most`.

    Documents take turns, so that a few long ones don't supply every span. The rest of a document, shorter than a span, is
    dropped.

    Args:
        bos: each span begins with the start token, and has one token less of its document.
        document_starts: only each document's first span.

    Raises:
        ConfigError: no such file, no document that long, or no start token.
    """
    if bos and tokenizer.bos_id is None:
        raise ConfigError("--bos yes: the model's tokenizer has no start token; leave --bos out.")
    if length <= bos:
        raise ConfigError(f"--length {length} leaves no token after the start token; set 2 or more.")
    import torch
    import torch.nn.functional as F

    from farsight.data.texts import encode_file

    documents = encode_file(path, tokenizer)
    own = length - bos
    spans = [list(document[: len(document) // own * own].view(-1, own)) for document in documents]
    if document_starts:
        spans = [of_one[:1] for of_one in spans]
    rounds = max((len(of_one) for of_one in spans), default=0)
    if not rounds:
        longest = max(map(len, documents), default=0)
        raise ConfigError(
            f"{path}: its longest document has {longest:,} tokens, so it gives no sequence of {length:,}; set --length "
            f"{longest + bos} or less, or give it longer documents."
        )
    taken = [of_one[turn] for turn in range(rounds) for of_one in spans if turn < len(of_one)]
    tokens_SL = torch.stack(taken[:most])
    return F.pad(tokens_SL, (1, 0), value=tokenizer.bos_id) if bos else tokens_SL
