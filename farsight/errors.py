"""Errors whose message is meant for the user."""

import difflib
from collections.abc import Collection


class UserError(ValueError):
    """Input that can't be used. The message names the place, its value, and what to do instead."""


class ConfigError(UserError):
    """A configuration that cannot be used; the message names the option, its value and what to set instead."""


class DataError(UserError):
    """Unusable data or data settings. The message names the place and the remedy."""


class NonFiniteError(RuntimeError):
    """A loss, gradient norm or weights that are infinite or NaN."""


def nearest(name: str, known: Collection[str], say_known: bool = True) -> str:
    """Returns " Did you mean …?" with the known name closest to a mistyped one.

    If none is close, returns the list of known names, or "" if `say_known` is false.
    """
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if match:
        return f" Did you mean {match[0]!r}?"
    return f" Known: {', '.join(known)}." if say_known and known else ""


class SaveError(RuntimeError):
    """A checkpoint could not be written."""


class Interrupted(Exception):  # noqa: N818  a way for a run to end, not an error
    """A signal asked the run to stop, and its state has been saved."""
