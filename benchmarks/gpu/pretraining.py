"""Trains a 1B-shaped model on one GPU, dense and with SCOPE's heads: tokens/s, MFU and peak memory, beside the plan's.

    python -m benchmarks.gpu.pretraining --length 8192 --json F

Each run is `train.py`'s own, on Llama 3.2 1B's shape with random weights and the bytes of the standard library, one document a
row. MFU counts the FLOPs of the pairs that heads see, and no recomputation.
"""

import sys
from functools import partial

from farsight.benchmarks.gpu.part import Rows, add_length_option, part_parser
from farsight.benchmarks.gpu.runs import MODELS, PRETRAINING, measured_beside_plan, pretraining_options
from farsight.cli import command


@command
def main(argv: list[str] | None = None) -> int:
    parser = part_parser("pretraining", __doc__)
    add_length_option(parser)
    options = parser.parse_args(argv)
    rows = Rows(options, "pretraining")
    T = 128 if rows.small else options.length
    for name, scope in MODELS[rows.small :]:
        settings = pretraining_options(T, scope, rows.small, steps=16 if rows.small else 8)
        measure = partial(measured_beside_plan, rows, PRETRAINING, settings)
        if (found := rows.attempt(f"{name}, T = {T:,}", measure)) is not None:
            recomputes = settings["activation_checkpoint.mode"] != "none"
            rows.add(model=settings["model.flavor"], heads=name, T=T, recomputes=recomputes, **found)
    return rows.end()


if __name__ == "__main__":
    sys.exit(main())
