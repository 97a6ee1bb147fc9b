"""Merges an adapter into its base: a model directory that needs no adapter.

    farsight merge runs/my_finetune/adapter --out merged
    farsight merge runs/my_finetune/adapter --out merged --drop-garfa --data text.txt --json merge.json

LoRA was trained on the base as training kept it, possibly quantised. By default ("dequantized") it is added to the weights after
quantisation and dequantisation, which gives the model that was trained; "original" adds it to the base's own weights, which
differ from these. GARFA's learned factors go into config.json, and the directory carries its own modelling file; --drop-garfa
leaves GARFA out, for programs that don't support it, and reports the effect.

One weight is in memory at a time. Afterwards the merged model is compared with the adapter on its base, on a few sequences.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from farsight.cli import add_device_option, command
from farsight.files import check_new_folder, prepare_file, write_text

DTYPES = ("float32", "bfloat16")


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", type=Path, help="adapter directory of a fine-tuning run")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the base's directory (default: as the adapter says)")
    parser.add_argument("--other-base", action="store_true", help="accept a base that the adapter was not trained on")
    parser.add_argument(
        "--into",
        choices=["dequantized", "original"],
        default="dequantized",
        help="weights that LoRA is added to: as training kept them, or the base's own",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights written (default: that of the training)")
    parser.add_argument(
        "--drop-garfa", action="store_true", help="leave out GARFA, including the base's own: gives another model"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to compare on (default: the standard library)")
    parser.add_argument("--no-check", action="store_true", help="do not compare")
    add_device_option(parser)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    options = parser.parse_args(arguments)
    if options.no_check and (options.data or options.drop_garfa):
        parser.error("--no-check can't be combined with --data or --drop-garfa, which report a comparison")
    check_new_folder(options.out)
    if options.json:
        prepare_file(options.json)

    import torch

    from farsight.checkpoints.cards.model import CARD
    from farsight.checkpoints.merge.build import merge_adapter
    from farsight.checkpoints.merge.compare import compare, report
    from farsight.data.texts import read_texts
    from farsight.parallel.device import default_device

    device = options.device or default_device()
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.data is not None:
        read_texts(options.data)  # fails early, before the weights are read
    figures: dict[str, Any] = {
        "adapter": str(options.adapter), "out": str(options.out), "into": options.into,
        "garfa": "dropped" if options.drop_garfa else "kept",
    }  # fmt: skip
    merge_adapter(
        options.adapter, options.out, options.base, options.into, dtype, options.drop_garfa, device, options.other_base,
    )  # fmt: skip
    if not options.no_check:
        figures |= compare(
            options.adapter, options.out, options.base, options.data, options.drop_garfa, device, options.other_base
        )
    said = report(figures)
    if said:
        with (options.out / CARD).open("a", encoding="utf-8") as card:
            card.write("\n## What merging changed\n\n" + "\n\n".join(said) + "\n")
    print(*said, options.out, sep="\n")
    if options.json:
        write_text(options.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
