"""Gathers documents of given lengths from the data of a config, for `farsight perplexity --documents` and other evaluations.

    farsight corpus long100 --tokenizer MODEL_DIR --out long100.jsonl
    farsight corpus configs/X.toml --out documents.jsonl --count 50 --min-tokens 32768 --max-tokens 65536
    farsight corpus scope_llama3_8b --stage adapt-128k --tokenizer assets/llama3 --out held_out.jsonl

CONFIG is a config or a recipe, whose data is read. The shipped `long100` names SCOPE's (section 4.3): Proof-Pile and
GovReport, whose 100 documents of 64k to 128k tokens are what the lengths and the count default to. Of data that models are
trained on, only held-out documents are taken; with data.held_out = 0, all are. Sources are mixed by their weights, and
--min-tokens and --max-tokens stand in for their length filters. Each source is read at most once, and a text is taken once.
The same data, seed, tokenizer and options give the same file. Options of the form --section.key value change the config
(--data.seed 1).

A line of the file has "text", "tokens" (without bos and eos), "source", and "document": its file and line, or row.
"""

import argparse
import dataclasses
import logging
from itertools import islice
from pathlib import Path

from farsight.cli import command, natural, new_parser, positive
from farsight.outputs import output_file


def _jsonl_file(text: str) -> Path:
    # Readers tell JSON lines from one plain text by the name.
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text} must end with .jsonl")
    return output_file(text)


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight corpus", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("config", type=Path, help="TOML file or a shipped one's name: a config, or a recipe with [[stages]]")
    add("--stage", help="the stage of a recipe whose data is read (default: the last)")
    add("--out", type=_jsonl_file, required=True, metavar="FILE", help="the .jsonl file to write")
    add("--count", type=positive, default=100, metavar="N", help="how many documents (100)")
    add("--min-tokens", type=natural, default=65536, help="shortest document (65536)")
    add("--max-tokens", type=natural, default=131072, help="longest document (131072); 0 is no limit")
    add("--tokenizer", type=Path, metavar="DIR", help="directory whose tokenizer counts (default: the config's)")
    options, rest = parser.parse_known_args(arguments)
    if 0 < options.max_tokens < options.min_tokens:
        parser.error(
            f"--min-tokens {options.min_tokens} is more than --max-tokens {options.max_tokens}: lower it, or raise --max-tokens"
        )
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    from farsight.data.sample import sample_documents, write_samples
    from farsight.data.sources.documents import Split
    from farsight.data.tokenizers.tokenizer import find_tokenizer_dir, load_tokenizer, load_tokenizer_dir
    from farsight.errors import DataError
    from farsight.remote import local
    from farsight.training.stages import read_job

    config = read_job(options.config, rest, options.stage)
    if options.tokenizer:
        folder = local(options.tokenizer, weights=False)
        tokenizer = load_tokenizer_dir(find_tokenizer_dir(folder) or folder)
    else:
        tokenizer = load_tokenizer(config.tokenizer)
    filters = {"min_tokens": options.min_tokens, "max_tokens": options.max_tokens}
    data = dataclasses.replace(
        config.data, sources=tuple(dataclasses.replace(source, **filters) for source in config.data.sources)
    )
    split: Split = "validation" if data.held_out else "train"
    samples = list(islice(sample_documents(data, tokenizer, split), options.count))
    lengths = (
        f"{options.min_tokens:,} to {options.max_tokens:,}" if options.max_tokens else f"{options.min_tokens:,} or more"
    )
    if not samples:
        of = f" that is held out (data.held_out = {data.held_out})" if data.held_out else ""
        raise DataError(
            f"{options.config}: no source has a document of {lengths} tokens{of}. Widen the lengths, or add data."
        )
    write_samples(options.out, samples)
    short = len(samples) < options.count
    print(
        f"{options.out}: {len(samples):,} documents of {lengths} tokens, {sum(s.tokens for s in samples):,} in all"
        + f"; {options.count:,} were asked for, but the sources have no more" * short
    )


if __name__ == "__main__":
    main()
