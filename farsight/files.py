"""Files and folders that are written whole or not at all, and never over what somebody else wrote."""

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from farsight.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all; of several nodes that write the same text, the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def prepare_file(path: Path) -> None:
    """Makes the folder of a file that will be written, and refuses one that could not be; long work calls it before it starts.

    Raises:
        UserError: it is a folder, or lies where nothing can be written.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: its folder can't be made: {error.strerror}.") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path}: nothing can be written into {path.parent}.")


def check_new_folder(out: Path) -> None:
    """Refuses a folder to write that already holds something.

    Raises:
        UserError: it does, or there is a file of that name.
    """
    if out.is_dir():
        if any(out.iterdir()):
            raise UserError(f"{out} exists and is not empty; name a new folder, or remove it first.")
    elif out.exists() or out.is_symlink():
        raise UserError(f"{out} is a file; name a new folder.")


def check_replaceable(out: Path, is_ours: Callable[[Path], bool]) -> None:
    """Refuses to replace what is not ours; long work calls it before it starts.

    Raises:
        UserError: `out` is a file, a link, or a folder that holds something else.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out} is in the way and was not written by Farsight; move it, or name another folder.")
    if out.is_dir() and any(out.iterdir()) and not is_ours(out):
        raise UserError(
            f"{out} holds files that Farsight did not write there, and they would be lost; move them, or name another folder."
        )


def inside(folder: Path, name: str, place: str) -> Path:
    """The file that a name from outside means, which has to lie in `folder` itself or below.

    Args:
        place: what names it, for the message.

    Raises:
        UserError: an absolute path, or one that leads out of the folder.
    """
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        raise UserError(f"{place} names {name!r}, which is no file name.")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{place} names {name!r}, which lies outside {folder}: such a path is not followed.")
    return folder / path
