"""The options of farsight capture, also offered by the tools that capture by themselves."""

import argparse
from pathlib import Path

from farsight.cli import above_zero, model_path, positive

HEADS = 300
"""Query heads to draw (plasticity thesis, section 5.4.1)."""
BUCKETS = 16
"""Buckets per sequence: 8,192 tokens each at a length of 131,072 (same section)."""
SEQUENCES = 500
MANIFEST = "capture.json"


def add_models_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the models to measure, and --checkpoints."""
    parser.add_argument(
        "models",
        type=model_path,
        nargs="+",
        metavar="MODEL",
        help="model directory, adapter, checkpoint or capture; or run folder, to measure each of its checkpoints; several "
        "models, or several runs, are shown side by side",
    )
    parser.add_argument(
        "--checkpoints", action="store_true", help="the models are checkpoints of one training, named in its order"
    )


def check_models(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with a usage error for a model that is no folder, or that must be captured and --data is missing."""
    for path in options.models:
        if not path.is_dir():
            parser.error(f"{path} is not a folder; name a model directory, a checkpoint, a capture or a run folder")
        if not is_capture(path) and options.data is None:
            parser.error(f"{path} is not a capture; to capture the model there, add --data FILE")


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
