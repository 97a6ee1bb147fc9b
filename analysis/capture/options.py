"""The options of farsight capture, also offered by the tools that capture by themselves."""

import argparse
from pathlib import Path

from farsight.cli import above_zero, positive

HEADS = 300
"""Query heads to draw (plasticity thesis, section 5.4.1)."""
BUCKETS = 16
"""Buckets per sequence: 8,192 tokens each at a length of 131,072 (same section)."""
SEQUENCES = 500
MANIFEST = "capture.json"


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    """Adds --heads, --buckets and --per-bucket."""
    parser.add_argument("--heads", type=positive, default=HEADS, help="query heads to draw (%(default)s)")
    parser.add_argument(
        "--buckets", type=positive, default=BUCKETS, help="buckets of equal width per sequence (%(default)s)"
    )
    parser.add_argument(
        "--per-bucket",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="tokens to keep per bucket, on average (%(default)g)",
    )


def is_capture(folder: Path) -> bool:
    """Whether farsight capture wrote this folder."""
    return (folder / MANIFEST).is_file()
