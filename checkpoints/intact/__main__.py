"""Checks that a checkpoint is intact: every file is there, at its size, with the bytes that were saved.

    farsight intact runs/my_run/checkpoint/step-1000 [MORE …]

Every file is compared with its checksum in `checksums.json`. Checkpoints of earlier versions have none: when a run starts
from one, only its file sizes are checked, while this command checks the CRC-32 of its tensors too.
"""

import sys

from farsight.cli import command, new_parser
from farsight.errors import UserError
from farsight.stores import path_of


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("farsight intact", __doc__)
    parser.add_argument("checkpoints", type=path_of, nargs="+", help="step-N folders")
    checkpoints = parser.parse_args(arguments).checkpoints

    from farsight.checkpoints.intact.check import every_fault

    damaged = False
    for checkpoint in checkpoints:
        if not checkpoint.is_dir():
            raise UserError(
                f"{checkpoint} is not a folder; name a checkpoint, such as runs/my_run/checkpoint/step-1000."
            )
        try:
            found = every_fault(checkpoint)
        except (OSError, MemoryError) as error:
            raise UserError(f"{checkpoint} can't be read ({error!r}).") from error
        damaged |= bool(found)
        for line in found or ["whole"]:
            print(f"{checkpoint}: {line}")
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main())
