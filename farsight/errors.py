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


FEW = 3
"""Most names to suggest at once."""


def nearest(name: str, known: Collection[str], say_known: bool = True) -> str:
    """Returns " Did you mean …?" with the known names that contain a mistyped one, if they are few, or else the one closest to it.

    If none is close, returns the list of known names, or "" if `say_known` is false.
    """
    longer = [one for one in known if name.lower() in one.lower()]
    if match := longer if 0 < len(longer) <= FEW else difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return f" Did you mean {' or '.join(map(repr, match))}?"
    return f" Known: {', '.join(known)}." if say_known and known else ""


class SaveError(RuntimeError):
    """A checkpoint could not be written."""


class Interrupted(Exception):  # noqa: N818  a way for a run to end, not an error
    """A signal asked the run to stop, and its state has been saved."""


class GateError(RuntimeError):
    """A figure of an evaluation met the condition that stops the run; its state has been saved."""
