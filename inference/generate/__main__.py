"""Generates text with a model.

    farsight generate MODEL_DIR --prompt "def main("
    farsight generate runs/X/checkpoint/step-1000 --prompts FILE.jsonl --json F --temperature 0.8 --top-p 0.95
    torchrun --nproc_per_node 4 -m farsight generate MODEL_DIR --prompt-file BOOK.txt     # a model too large for one GPU

Takes model directories of every kind, adapters and checkpoints. A prompt is read in chunks; each key/value head keeps only
what the widest scope among its query heads can still see, and the bytes of the cache are printed beside those of one that
keeps everything. Prompts of a batch may differ in length: each row comes out as it would alone.
"""

from pathlib import Path

from farsight.cli import bounded, command, model_path, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_json_option


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight generate", __doc__)
    add = parser.add_argument
    add("model_dir", type=model_path, help="model directory, adapter, or step-N folder of a checkpoint")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="a text file as one prompt; - reads standard input"
    )
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help='.jsonl, one "prompt" a line')
    add("--chat", action="store_true", help="a prompt is a user's message: use the chat template")
    add("--new-tokens", type=positive, default=128, help="most tokens to write (%(default)s)")
    add("--temperature", type=bounded(float, least=0), default=0.0, help="0 (default) takes the most likely token")
    add(
        "--top-p",
        type=bounded(float, above=0, most=1),
        default=1.0,
        help="draw from the likeliest tokens whose probabilities sum to this (1: all)",
    )
    add("--seed", type=bounded(int, least=0, most=2**62), default=0, help="prompt n draws from seed + n (%(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop when this is written")
    add("--rows", type=positive, default=8, help="prompts read together (%(default)s)")
    add_json_option(parser, "completions and figures")
    add_model_options(parser, foreign=True)
    options = parser.parse_args(arguments)
    if options.top_p < 1 and not options.temperature:
        parser.error("--top-p goes with a --temperature above 0, such as 0.8: at 0 the most likely token is taken")

    from farsight.inference.generate.run import run

    run(options)


if __name__ == "__main__":
    main()
