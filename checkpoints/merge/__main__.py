"""Merges an adapter into its base: a model directory that needs no adapter.

    farsight merge runs/my_finetune/adapter --out merged
    farsight merge runs/my_finetune/adapter --out merged --drop-garfa --data text.txt --json merge.json

LoRA was trained on the base as training kept it, possibly quantised. By default ("dequantized") it is added to the weights after
quantisation and dequantisation, which gives the model that was trained; "original" adds it to the base's own weights, which
differ from these. GARFA's learned factors go into config.json, and the directory carries its own modelling file; --drop-garfa
leaves GARFA out, for programs that don't support it, and reports the effect.

One weight is in memory at a time. Afterwards the merged model is compared with the adapter on its base, on a few sequences.
"""

from pathlib import Path
from typing import Any

from farsight.cli import add_device_option, command, model_path, new_parser
from farsight.files import check_new_folder
from farsight.outputs import add_json_option, write_json
from farsight.remote import shown

DTYPES = ("float32", "bfloat16")


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight merge", __doc__)
    add = parser.add_argument
    add("adapter", type=model_path, help="adapter directory of a fine-tuning run")
    add("--out", type=Path, required=True, help="model directory to write")
    add("--base", type=model_path, metavar="DIR", help="the base's directory (default: as the adapter says)")
    add("--other-base", action="store_true", help="accept a base that the adapter was not trained on")
    add(
        "--into",
        choices=["dequantized", "original"],
        default="dequantized",
        help="weights that LoRA is added to: as training kept them, or the base's own",
    )
    add("--dtype", choices=DTYPES, help="of the weights written (default: that of the training)")
    add("--drop-garfa", action="store_true", help="leave out GARFA, including the base's own: gives another model")
    add("--data", type=Path, metavar="FILE", help="text to compare on (default: the standard library)")
    add("--no-check", action="store_true", help="do not compare")
    add_device_option(parser)
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.no_check and (options.data or options.drop_garfa):
        parser.error("--no-check can't be combined with --data or --drop-garfa, which report a comparison")
    check_new_folder(options.out)

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
        "adapter": shown(options.adapter), "out": str(options.out), "into": options.into,
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
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
