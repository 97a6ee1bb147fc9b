"""Starts training under PyTorch's torchrun, and ends with a line that says which rank ended the run, and why.

    farsight torchrun --standalone --nproc_per_node 8 train.py --job.config_file configs/X.toml
    farsight torchrun --nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 train.py …

Options are torchrun's own (`torchrun --help` lists them); in place of `train.py` an installed package has `-m farsight.train`.
The exit status is that of the rank that failed first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farsight import process
from farsight.cli import command, refuse
from farsight.process import EXIT_INTERRUPTED, Note, read_note

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


@command
def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in ([], ["-h"], ["--help"]):
        print(f"usage: farsight torchrun [torchrun's options] train.py …\n\n{__doc__}")
        return 0
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    options = parse_args(given)
    if options.max_restarts:
        # In the store that all starts share by default, ranks would find the addresses of those before them, and not meet.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # ranks' failures are reported below
    with tempfile.TemporaryDirectory(prefix="farsight-ranks-") as folder:
        options.log_dir = options.log_dir or folder
        for number in process.TO_STOP:
            signal.signal(number, signal.SIG_DFL)
        process.hand_over()
        begin = time.time()
        try:
            torchrun(options)
        except SignalException as error:
            # A --log_dir of the user's may hold notes of earlier runs, and ranks that were started again left one each time.
            found = map(read_note, Path(options.log_dir).rglob("error.json"))
            notes = [note for note in found if note is not None and note.time >= begin]
            last = {note.rank: note for note in sorted(notes, key=lambda note: note.time)}
            return _say_first([*last.values()]) if last else 128 + error.sigval
        except ChildFailedError as error:
            return _say_first([_ended(*item) for item in error.failures.items()])
        except (DistError, RendezvousError) as error:
            first = str(error).strip().partition("\n")[0]
            refuse(f"the ranks can't meet: {first} (another program may use the port, or a machine is unreachable)")
    return 0


def _ended(rank: int, failure: ProcessFailure) -> Note:
    """How a rank ended, from its own note if it left one."""
    note = read_note(Path(failure.error_file))
    return note or Note(rank, failure.exitcode, "", failure.exitcode == -signal.SIGTERM, failure.timestamp)


def _say_first(ended: list[Note]) -> int:
    """Reports why the run ended, and returns the exit status: the first failure that no other rank caused."""
    # torchrun stops all ranks once one has failed.
    first = min(ended, key=lambda note: (note.follows, note.status == EXIT_INTERRUPTED, note.time))
    if first.status == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED  # rank 0 has reported it
    if first.status < 0:
        cause = process.killed_by(-first.status)
    else:
        cause = f"ended with status {first.status}{first.sentence and ': '}{first.sentence}"
    print(f"rank {first.rank} {cause}", file=sys.stderr, flush=True)
    return first.status if first.status > 0 else 128 - first.status


if __name__ == "__main__":
    process.begin(what="torchrun")
    sys.exit(main())
