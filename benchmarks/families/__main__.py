"""Families of models compared with transformers: the largest difference of each in logits, gradients, generation and more.

    python -m benchmarks.families [--family gemma3] [--json F]

Each family has a tiny random model, made by its class of transformers and saved as a directory, which we open. Differences of
logits are absolute (their standard deviation is 1.5), those of gradients relative to the largest value of each tensor, those
of greedy generation numbers of tokens. The quantised step is a step of LoRA on a base in 4 bits, against peft and bitsandbytes;
TP 2 is a training step and decoding with the model divided over two ranks.
Ends with an error if a difference is larger than rounding makes it.
"""

import sys
import tempfile
from pathlib import Path

from farsight.cli import command, new_parser
from farsight.outputs import add_json_option, write_json


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.families", __doc__)
    parser.add_argument(
        "--family", action="append", metavar="NAME", help="only this one; may be repeated (default: all)"
    )
    add_json_option(parser)
    options = parser.parse_args(arguments)

    from farsight.benchmarks.families.cells import CELLS, TOLERANCES
    from farsight.benchmarks.families.models import FAMILIES
    from farsight.progress import progress

    names = options.family or [*FAMILIES]
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--family {unknown[0]}: known are {', '.join(FAMILIES)}")
    table: dict[str, dict[str, float]] = {name: {} for name in names}
    for name, cell in progress([(name, cell) for name in names for cell in CELLS], desc="families", unit="cell"):
        with tempfile.TemporaryDirectory() as folder:
            table[name][cell] = CELLS[cell](name, Path(folder))
    columns = [max(len(cell), 8) for cell in CELLS]
    print(" ".join(["family".ljust(14), *(cell.rjust(width) for cell, width in zip(CELLS, columns, strict=True))]))
    for name, row in table.items():
        print(
            " ".join(
                [name.ljust(14), *(f"{row[cell]:.1e}".rjust(width) for cell, width in zip(CELLS, columns, strict=True))]
            )
        )
    write_json(options.json, {"differences": table, "tolerances": TOLERANCES})
    if large := [
        f"{name}: {cell}" for name, row in table.items() for cell in CELLS if not row[cell] <= TOLERANCES[cell]
    ]:
        sys.exit(f"Larger than rounding: {', '.join(large)}.")


if __name__ == "__main__":
    main()
