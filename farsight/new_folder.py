"""Folders that appear whole or not at all, in place of an older one of ours or of nothing."""

import fcntl
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
    _clear_leftover(part, out)
    part.mkdir(parents=True)
    with (part / WRITING).open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        try:
            yield part
            check_replaceable(out, is_ours)  # once more, after what may have been hours
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        # Renamed, and not deleted: a writer that is killed between the two leaves both versions, and no half of one.
        if out.is_dir():
            out.rename(part / REPLACED)
        try:
            part.rename(out)
        except OSError:
            _restore(part, out)
            raise
    shutil.rmtree(out / REPLACED, ignore_errors=True)
    (out / WRITING).unlink()


def _clear_leftover(part: Path, out: Path) -> None:
    """Removes what a writer left that was killed; what it was about to replace goes back first.

    Raises:
        UserError: it is still writing.
    """
    if not part.exists():
        return
    if (part / WRITING).is_file():
        with (part / WRITING).open() as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{out} is being written by another process; wait for it, or name another folder."
                ) from None
    _restore(part, out)
    shutil.rmtree(part)


def _restore(part: Path, out: Path) -> None:
    if (part / REPLACED).is_dir() and not out.exists():
        (part / REPLACED).rename(out)


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
