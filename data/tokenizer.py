"""Trains tokenizers, and shows how one splits a text: `farsight tokenizer`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farsight.cli import command, natural, new_parser, positive
from farsight.files import check_new_folder
from farsight.new_folder import new_folder
from farsight.outputs import add_json_option, write_json
from farsight.progress import progress
from farsight.remote import local

if TYPE_CHECKING:
    from farsight.configs import schema

_TRAIN_HELP = """\
Trains a sentencepiece BPE tokenizer that decodes every text exactly: characters without a piece of their own are spelled
in bytes, and spaces, tabs and line ends are kept, so it suits source code.

  farsight tokenizer train --vocab-size 2048 --out tokenizers/code
  farsight tokenizer train --vocab-size 32000 --out tokenizers/web --jsonl 'web/*.jsonl' --max-bytes 200000000

The directory then holds tokenizer.model for Farsight ([tokenizer] path = "tokenizers/code") and tokenizer.json for
transformers. The same text, size and seed give the same tokenizer.
"""

_SHOW_HELP = """\
Shows how a tokenizer splits a text: one line per token, with its id and text.

  farsight tokenizer show tokenizers/code --text 'def f(x):'
"""


@command
def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    write_json(options.json, options.run(options))


def _source(options: argparse.Namespace) -> schema.Source:
    """The source that the options name."""
    from farsight.configs import schema

    if options.text:
        return schema.TextSource(path=options.text)
    if options.jsonl:
        return schema.JsonlSource(path=options.jsonl, field=options.field or "text")
    if options.parquet:
        return schema.ParquetSource(path=options.parquet, field=options.field or "text")
    return schema.StdlibSource()


def _train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains a tokenizer and measures it on its own text."""
    from farsight.configs import schema
    from farsight.data.sample import sample_texts
    from farsight.data.tokenizers.tokenizer import train_sentencepiece

    if options.field and not (options.jsonl or options.parquet):
        options.error("--field goes with --jsonl or --parquet: other texts are whole files")
    check_new_folder(Path(options.out))
    source = _source(options)
    data = schema.Data(sources=(source,), seed=options.seed)
    start = time.perf_counter()
    texts = []
    with progress(desc="Reading", total=options.max_bytes, unit="B", unit_scale=True) as shown:
        for text in sample_texts(data, options.max_bytes):
            texts.append(text)
            shown.update(len(text.encode()))
    print(f"read {len(texts)} documents of {source.kind}; training {options.vocab_size} pieces …", flush=True)
    with new_folder(Path(options.out), lambda there: False) as part:
        tokenizer = train_sentencepiece(texts, options.vocab_size, part)
    seconds = time.perf_counter() - start
    size = sum(len(text.encode()) for text in texts)
    with progress(desc="Measuring", total=len(texts), unit="document", unit_scale=True) as shown:
        tokens = 0
        for text in texts:
            tokens += len(tokenizer.encode_array(text))
            shown.update()
    print(f"{options.out}: {tokenizer.vocab_size} ids, {size / tokens:.2f} bytes a token on its text, {seconds:.1f} s")
    return {
        "directory": options.out,
        "vocab_size": tokenizer.vocab_size,
        "bytes": size,
        "bytes_per_token": size / tokens,
        "seconds": seconds,
    }


def _show(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the tokens of a text."""
    from farsight.data.tokenizers.tokenizer import load_tokenizer_dir

    tokenizer = load_tokenizer_dir(local(options.directory, weights=False))
    tokens = [{"id": i, "text": tokenizer.decode([i])} for i in tokenizer.encode(options.text)]
    for token in tokens:
        print(f"{token['id']:>8}  {token['text']!r}")
    print(
        f"{len(tokens)} tokens for {len(options.text.encode())} bytes; {tokenizer.vocab_size} ids, "
        f"bos {tokenizer.bos_id}, eos {tokenizer.eos_id}"
    )
    return {"tokens": tokens, "vocab_size": tokenizer.vocab_size}


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = new_parser("farsight tokenizer", "Trains and shows tokenizers.")
    commands = parser.add_subparsers(required=True, metavar="train|show")

    train = commands.add_parser(
        "train", help="train a sentencepiece tokenizer", description=_TRAIN_HELP, formatter_class=raw
    )
    train.set_defaults(run=_train, error=train.error)
    train.add_argument(
        "--vocab-size", type=positive, default=2048, help="ids, 256 bytes and 3 special tokens included (2048)"
    )
    train.add_argument("--out", required=True, metavar="DIR", help="directory to write, which must be new or empty")
    source = train.add_mutually_exclusive_group()
    source.add_argument(
        "--source", choices=["stdlib"], default="stdlib", help="Python's standard library (the default)"
    )
    source.add_argument("--text", metavar="PATH", help="text files: a file, a directory or a glob")
    source.add_argument("--jsonl", metavar="PATH", help="JSON lines: a file or a glob")
    source.add_argument("--parquet", metavar="PATH", help="rows of Parquet files: a file or a glob")
    train.add_argument("--field", help="key of the text in --jsonl, column in --parquet (text)")
    train.add_argument("--max-bytes", type=positive, default=4_000_000, help="stop after this much text (4000000)")
    train.add_argument("--seed", type=natural, default=0, help="draws which documents are read (0)")
    add_json_option(train, "the measurements")

    show = commands.add_parser("show", help="show the tokens of a text", description=_SHOW_HELP, formatter_class=raw)
    show.set_defaults(run=_show)
    show.add_argument("directory", metavar="DIR", help="directory with a tokenizer")
    show.add_argument("--text", required=True, help="text to encode")
    add_json_option(show, "the tokens")
    return parser


if __name__ == "__main__":
    main()
