"""Captures the queries and keys of a model's heads as attention compares them: after QK-norm and RoPE.

    farsight capture MODEL_DIR --data FILE --length 4096 --out captured/
    farsight geometry captured/
    farsight plasticity captured/

Works on any model directory, including those written by transformers, of models that Farsight builds and of most others (Phi-2,
MPT, DeepSeek; docs/inference/models.md lists them). farsight geometry and farsight plasticity also take a
model directly and capture it themselves; with a capture on disk, both read the same samples.

Each sequence is cut into --buckets of equal width, and each token is kept with probability --per-bucket / width. With the
default of 1, that is one token per bucket and sequence on average, so every range of positions has the same weight. --heads
query heads are drawn from the whole model; each comes with the key head of its group. In layers without RoPE, queries and keys
are captured as projected. For a head with a limited scope all keys are captured, although the head can only choose among
those within its scope. ALiBi acts on the scores, not on queries and keys; its slope is recorded with each head.

The output is capture.json and a number of .safetensors files, each with the samples of many sequences.
"""

from pathlib import Path

from farsight.analysis.capture.options import MANIFEST, SEQUENCES, add_capture_options
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, model_path, new_parser
from farsight.inference.model_options import add_model_options


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight capture", __doc__)
    add = parser.add_argument
    add("model", type=model_path, help="model directory, adapter or checkpoint")
    add_text_options(parser, SEQUENCES)
    add_capture_options(parser)
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder to write to, created if needed")
    add_model_options(parser, foreign=True)
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file; name a folder")
    if (options.out / MANIFEST).exists():
        parser.error(f"--out {options.out} holds a capture already; name another folder, or remove it")

    from farsight.analysis.capture.from_options import capture_from_options, settings_of

    samples = capture_from_options(options.model, options, options.out)
    settings = settings_of(options.out, options, samples)
    print(f"{len(samples)} heads, {settings['tokens']:,} tokens of {settings['sequences']:,} sequences: {options.out}")


if __name__ == "__main__":
    main()
