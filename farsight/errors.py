"""Errors that are addressed to the person at the terminal."""


class UserError(ValueError):
    """Input that can't be used. The message names the place, its value, and what to do instead."""


class NonFiniteError(RuntimeError):
    """A loss, a gradient norm or weights that are infinite or NaN."""
