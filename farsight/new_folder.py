"""Writing output folders atomically, replacing an older one only if Farsight wrote it."""

import fcntl
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from farsight.errors import UserError
from farsight.files import check_replaceable

WRITING, REPLACED = ".farsight-writing", ".farsight-replaced"
"""Names inside an unfinished folder: a marker file that shows it is ours, and the folder that it replaces."""


@contextmanager
def new_folder(out: Path, is_ours: Callable[[Path], bool], resumed: str = "") -> Iterator[Path]:
    """Yields a temporary folder that replaces `out` on success and is removed after an error.

    Args:
        is_ours: whether an existing, non-empty folder may be replaced.
        resumed: what is written, if that can be gone on with: after an error or a kill the temporary folder stays, and the next
            writer of the same finds it as it was left.

    Raises:
        UserError: see `check_new`.
    """
    check_new(out, is_ours)
    part = _part(out)
    _clear_leftover(part, out, resumed)
    part.mkdir(parents=True, exist_ok=bool(resumed))
    with (part / WRITING).open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        mark.write(resumed)
        mark.flush()
        try:
            yield part
            check_replaceable(out, is_ours)  # again: writing may have taken hours
        except BaseException:
            if not resumed:
                shutil.rmtree(part, ignore_errors=True)
            raise
        # Renamed rather than deleted: a writer killed between the two renames leaves both versions complete.
        if out.is_dir():
            out.rename(part / REPLACED)
        try:
            part.rename(out)
        except OSError:
            _restore(part, out)
            raise
    shutil.rmtree(out / REPLACED, ignore_errors=True)
    (out / WRITING).unlink()


def _clear_leftover(part: Path, out: Path, resumed: str) -> None:
    """Removes what a killed writer left behind, after putting the folder it was about to replace back, unless it is resumed.

    Raises:
        UserError: the writer is still running.
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
    if not (resumed and (part / WRITING).is_file() and (part / WRITING).read_text() == resumed):
        shutil.rmtree(part)


def _restore(part: Path, out: Path) -> None:
    if (part / REPLACED).is_dir() and not out.exists():
        (part / REPLACED).rename(out)


def check_new(out: Path, is_ours: Callable[[Path], bool]) -> None:
    """Refuses what `new_folder` would refuse; long jobs call it first so that they fail early.

    Raises:
        UserError: `out`, or the temporary folder beside it, was not written by Farsight.
    """
    check_replaceable(out, is_ours)
    check_replaceable(_part(out), lambda part: (part / WRITING).is_file() or is_ours(part))


def holds_only(
    folder: Path, needed: Collection[str], names: Collection[str], results: Collection[str] = ("evals", "analysis")
) -> bool:
    """Whether a folder holds only files of a known kind, so that it can be replaced.

    Args:
        needed: files that it must have.
        names: patterns of other files that it may have.
        results: subfolders that may hold JSON results of our tools.
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
