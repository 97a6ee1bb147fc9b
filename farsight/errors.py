"""Errors that are addressed to the person at the terminal."""


class UserError(ValueError):
    """Input that can't be used. The message names the place, its value, and what to do instead."""
