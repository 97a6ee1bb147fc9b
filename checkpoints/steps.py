"""The `step-N` folders of a run: finds complete ones, and deletes only what Farsight's saves left."""

import logging
import re
from pathlib import Path

from farsight.checkpoints.checksums import MANIFEST
from farsight.checkpoints.dcp import COMPLETE, UNFINISHED
from farsight.checkpoints.intact.check import is_complete
from farsight.stores import StorePath, delete_tree

logger = logging.getLogger("farsight")

OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|checksums\.json|farsight\.json")
"""The files of a save, finished or not. A folder with any other file is never deleted."""


def step_folders(folder: Path) -> dict[int, Path]:
    """The checkpoint folders, complete or not, by step, in order; `step-6-hf` or a file `step-7` don't count.

    Raises:
        OSError: the folder can't be read now.
    """
    names = ((path, re.fullmatch(r"step-(0|[1-9]\d*)", path.name)) for path in folder.glob("step-*"))
    return dict(sorted((int(match[1]), path) for path, match in names if match and path.is_dir()))


def complete_steps(folder: Path) -> list[int]:
    """The steps with a complete checkpoint, in order.

    Raises:
        OSError: the folder can't be read now.
    """
    return [step for step, path in step_folders(folder).items() if is_complete(path)]


def holds_only_ours(step: Path) -> bool:
    """Whether a step folder holds only files of a save; logs what else it holds."""
    if step.is_symlink():
        logger.warning(f"{step} is not deleted: it is a link.")
        return False
    others = sorted(path.name for path in step.iterdir() if not OURS.fullmatch(path.name) or not path.is_file())
    if others:
        names = ", ".join(others[:5]) + ", …" * (len(others) > 5)
        logger.warning(f"{step} is not deleted: Farsight did not write all that is in it ({names}).")
    return not others


def discard_incomplete(folder: Path) -> None:
    """Removes the remains of interrupted saves, and the folder itself if it is then empty.

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
    if isinstance(folder, StorePath):
        if uploads := folder.abort_uploads():
            logger.info(f"{folder}: {uploads} unfinished upload{'s' * (uploads > 1)} of an interrupted save discarded.")
    elif folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def retire(step: Path) -> None:
    """Marks a complete checkpoint as unfinished, atomically; its files can then be deleted slowly.

    Raises:
        OSError: it can't be changed, and is still complete.
    """
    (step / COMPLETE).rename(step / UNFINISHED)
    (step / MANIFEST).unlink(missing_ok=True)


def delete(step: Path) -> None:
    """Deletes an unfinished checkpoint. If killed meanwhile, the rest looks like an interrupted save.

    Raises:
        OSError: it can't be deleted.
    """
    (step / MANIFEST).unlink(missing_ok=True)
    delete_tree(step)


def set_aside(checkpoint: Path) -> Path:
    """Renames step-N to damaged-N, or damaged-N.2 and so on, which is not taken for a checkpoint."""
    number, kept = 1, checkpoint.with_name(checkpoint.name.replace("step", "damaged"))
    while kept.exists():
        number += 1
        kept = kept.with_name(f"{kept.name.split('.')[0]}.{number}")
    return checkpoint.rename(kept)


def earlier_set_aside(folder: Path) -> list[str]:
    """The names of checkpoints that were renamed, by `set_aside` or by hand.

    Raises:
        OSError: the folder can't be read now.
    """
    if not folder.is_dir():
        return []
    steps = {*step_folders(folder).values()}
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and path not in steps and (path.name.startswith("damaged-") or is_complete(path))
    )
