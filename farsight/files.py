"""Writing files and folders atomically, and never over files that Farsight did not write."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from farsight.errors import UserError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a name to write a file under, which becomes `path` at the end; if several nodes write it, the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    yield part
    part.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")


def prepare_file(path: Path) -> None:
    """Makes the parent folder of a file to be written later; long jobs call it first so that they fail early.

    Raises:
        UserError: the path is a folder, or can't be written.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: its folder can't be made: {error.strerror}.") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path}: {path.parent} is not writable.")


def check_new_folder(out: Path) -> None:
    """Refuses an output folder that is not empty.

    Raises:
        UserError: it is not empty, or there is a file of that name.
    """
    if out.is_dir():
        if any(out.iterdir()):
            raise UserError(f"{out} exists and is not empty; name a new folder, or remove it first.")
    elif out.exists() or out.is_symlink():
        raise UserError(f"{out} is a file; name a new folder.")


def check_replaceable(out: Path, is_ours: Callable[[Path], bool]) -> None:
    """Refuses to replace a folder that is not ours; long jobs call it first so that they fail early.

    Args:
        is_ours: whether an existing, non-empty folder may be replaced.

    Raises:
        UserError: `out` is a file, a link, or a folder that may not be replaced.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out} is in the way and was not written by Farsight; move it, or name another folder.")
    if out.is_dir() and any(out.iterdir()) and not is_ours(out):
        raise UserError(
            f"{out} holds files that Farsight did not write there, which would be lost; move them, or name another folder."
        )


def inside(folder: Path, name: str, place: str) -> Path:
    """Resolves a file name from an untrusted source, which must lie inside `folder`.

    Args:
        place: where the name was found, for the message.

    Raises:
        UserError: not a file name, an absolute path, or a path out of the folder.
    """
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        raise UserError(f"{place} names {name!r}, which is not a file name.")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{place} names {name!r}, which lies outside {folder}; such paths are not followed.")
    return folder / path
