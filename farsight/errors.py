"""Errors that are addressed to the person at the terminal."""

import difflib
from collections.abc import Collection


class UserError(ValueError):
    """Input that can't be used. The message names the place, its value, and what to do instead."""


class NonFiniteError(RuntimeError):
    """A loss, a gradient norm or weights that are infinite or NaN."""


def nearest(name: str, known: Collection[str], say_known: bool = True) -> str:
    """Returns " Did you mean …?" with the known name most like a mistyped one, or else the known names."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if match:
        return f" Did you mean {match[0]!r}?"
    return f" Known: {', '.join(known)}." if say_known and known else ""


class SaveError(RuntimeError):
    """A checkpoint could not be written."""


class Interrupted(Exception):  # noqa: N818  it is how a run may end, and no error
    """A signal asked the run to stop, and its state is saved."""
