"""Speed, start-up and safety of reading and preparing data, beside other ways to do the same; and how rows are packed and padded.

    python -m benchmarks.data [prepare loading start-up kills packing padding] [--json F]       # --help: all options

Speeds are medians of calls that take turns in one process, after a check that their tokens are equal. The corpus is made of this
Python's standard library, the tokenizer is byte-level BPE trained on it. For "packing" and "padding" there is
none: see `packing.py` and `padding.py`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from farsight.benchmarks.data.kills import kills
from farsight.benchmarks.data.packing import packing
from farsight.benchmarks.data.padding import padding
from farsight.benchmarks.data.speed import loading, preparing
from farsight.benchmarks.data.start_up import start_up
from farsight.cli import command, new_parser, positive
from farsight.outputs import add_json_option, write_json

PARTS: dict[str, Callable[[Path, int, int], Iterator[dict[str, Any]]]] = {
    "prepare": preparing,
    "loading": loading,
    "start-up": start_up,
    "kills": kills,
    "packing": packing,
    "padding": padding,
}


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.data", __doc__)
    add = parser.add_argument
    add("parts", nargs="*", choices=[*PARTS, []], help="which (default: all)")
    add("--megabytes", type=positive, default=20, help="size of the corpus (default: %(default)s)")
    add("--rounds", type=positive, default=5, help="turns of each call (default: %(default)s)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    rows = []
    for name in options.parts or PARTS:
        with TemporaryDirectory() as folder:
            for row in PARTS[name](Path(folder), options.megabytes, options.rounds):
                print(json.dumps(row), flush=True)
                rows.append(row)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
