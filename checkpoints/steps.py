"""The `step-N` folders of a run: which are complete, and deleting what a save of ours left, and nothing else."""

import logging
import re
import shutil
from pathlib import Path

from farsight.checkpoints.checksums import MANIFEST
from farsight.checkpoints.dcp import COMPLETE, UNFINISHED
from farsight.checkpoints.intact.check import is_complete

logger = logging.getLogger("farsight")

OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|checksums\.json|farsight\.json")
"""The files that a save leaves, finished or not. A folder with any others is never deleted."""


def step_folders(folder: Path) -> dict[int, Path]:
    """The checkpoint folders, complete or not, by step, in order; `step-6-hf` or a file `step-7` is none.

    Raises:
        OSError: that can't be told now.
    """
    names = ((path, re.fullmatch(r"step-(0|[1-9]\d*)", path.name)) for path in folder.glob("step-*"))
    return dict(sorted((int(match[1]), path) for path, match in names if match and path.is_dir()))


def complete_steps(folder: Path) -> list[int]:
    """The steps with a complete checkpoint, in order.

    Raises:
        OSError: that can't be told now.
    """
    return [step for step, path in step_folders(folder).items() if is_complete(path)]


def holds_only_ours(step: Path) -> bool:
    """Whether a step folder holds nothing but what a save leaves; a log line says what else it holds."""
    if step.is_symlink():
        logger.warning(f"{step} is not deleted: it is a link.")
        return False
    others = sorted(path.name for path in step.iterdir() if not OURS.fullmatch(path.name) or not path.is_file())
    if others:
        names = ", ".join(others[:5]) + ", …" * (len(others) > 5)
        logger.warning(f"{step} is not deleted: Farsight did not write all that is in it ({names}).")
    return not others


def discard_incomplete(folder: Path) -> None:
    """Removes what interrupted saves left, and the folder itself if nothing else is in it.

    Raises:
        OSError: something can't be removed.
    """
    for step in step_folders(folder).values():
        if is_complete(step):
            continue
        if (step / MANIFEST).exists() and not (step / UNFINISHED).exists():
            kept = set_aside(step)
            logger.warning(f"{step} was saved to its end and has lost {COMPLETE} since. It is kept as {kept.name}.")
        elif holds_only_ours(step):
            delete(step)
            logger.info(f"{step} is removed: its save was interrupted.")
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def retire(step: Path) -> None:
    """Makes a complete checkpoint an unfinished one, at once; the rest can then be deleted slowly.

    Raises:
        OSError: it can't be changed, and is still complete.
    """
    (step / COMPLETE).rename(step / UNFINISHED)
    (step / MANIFEST).unlink(missing_ok=True)


def delete(step: Path) -> None:
    """Deletes an unfinished checkpoint. What a kill leaves of it looks like an interrupted save.

    Raises:
        OSError: it can't be deleted.
    """
    (step / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(step)


def set_aside(checkpoint: Path) -> Path:
    """Renames step-N to damaged-N, or to damaged-N.2 and so on, a name that torchtitan takes for no checkpoint."""
    number, kept = 1, checkpoint.with_name(checkpoint.name.replace("step", "damaged"))
    while kept.exists():
        number += 1
        kept = kept.with_name(f"{kept.name.split('.')[0]}.{number}")
    return checkpoint.rename(kept)


def set_aside_before(folder: Path) -> list[str]:
    """The names of checkpoints that were renamed: by `set_aside`, or by hand.

    Raises:
        OSError: that can't be told now.
    """
    if not folder.is_dir():
        return []
    steps = {*step_folders(folder).values()}
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and path not in steps and (path.name.startswith("damaged-") or is_complete(path))
    )
