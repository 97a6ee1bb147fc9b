"""Logging of a run to stderr."""

import logging
import os
import sys
import warnings

from farsight.library_warnings import silence_expected_warnings


def start_logging() -> None:
    """Logs plain lines from rank 0 and warnings from every rank."""
    rank = os.environ.get("RANK", "0")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == "0" else f"[rank {rank}] %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("farsight").setLevel(logging.INFO if rank == "0" else logging.WARNING)
    silence_expected_warnings()
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    warnings.filterwarnings(
        "ignore", message=r"DTensor (random operators|manual_seed\(\)) may not have complete support"
    )
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
