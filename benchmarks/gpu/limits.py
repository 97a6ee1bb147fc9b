"""Seconds of a part of `python -m benchmarks.gpu`, from its start."""

START = 420
"""After this time it starts no more rows."""
RUN = 470
"""By this time a run of train.py that it has started is ended."""
PART = 480
"""After this time it is stopped."""
