"""Folders that appear whole or not at all, in place of an older one of ours or of nothing."""

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from farsight.errors import UserError
from farsight.files import check_replaceable

WRITING, REPLACED = ".farsight-writing", ".farsight-replaced"
"""A file that tells a folder which a writer did not finish from somebody else's, and in it the folder that it replaces."""


@contextmanager
def new_folder(out: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out` at the end; after an error it is removed.

    Args:
        is_ours: whether an existing, non-empty folder is one that may be replaced.

    Raises:
        UserError: as `check_new`.
    """
    check_new(out, is_ours)
    part = _part(out)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    (part / WRITING).touch()
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    check_replaceable(out, is_ours)  # once more, after what may have been hours
    # Renamed, and not deleted: a writer that is killed here leaves no half of a folder, which nobody could tell for ours.
    if out.is_dir():
        out.rename(part / REPLACED)
    part.rename(out)
    shutil.rmtree(out / REPLACED, ignore_errors=True)
    (out / WRITING).unlink()


def check_new(out: Path, is_ours: Callable[[Path], bool]) -> None:
    """Refuses what `new_folder` would refuse; long work calls it before it starts.

    Raises:
        UserError: `out`, or the folder beside it that is written first, is somebody else's.
    """
    check_replaceable(out, is_ours)
    check_replaceable(_part(out), lambda part: (part / WRITING).is_file() or is_ours(part))


def holds_only(
    folder: Path, needed: Collection[str], names: Collection[str], results: Collection[str] = ("evals", "analysis")
) -> bool:
    """Whether a folder is of a known kind, with nothing in it that somebody added.

    Args:
        needed: files that it must have.
        names: patterns of files that it may have, with those.
        results: folders of JSON files that our tools wrote about it, which go with it.
    """
    if not all((folder / name).is_file() for name in needed):
        return False
    for path in folder.iterdir():
        if path.name == REPLACED:
            known = (folder / WRITING).is_file()
        elif path.is_dir() and path.name in results:
            known = all(file.is_file() and file.suffix == ".json" for file in path.iterdir())
        else:
            known = path.is_file() and any(path.match(name) for name in (*needed, *names, WRITING))
        if not known:
            return False
    return True


def _part(out: Path) -> Path:
    if not out.name:  # `.` or `/`
        raise UserError(f"{out} can't be replaced as a whole; name a new folder.")
    return out.with_name(out.name + ".part")
