"""Logging of a run to stderr."""

import logging
import os
import sys
import warnings


def start_logging() -> None:
    """Logs plain lines from rank 0 and warnings from every rank, without torchtitan's remarks about itself."""
    rank = os.environ.get("RANK", "0")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == "0" else f"[rank {rank}] %(message)s"))
    handler.addFilter(lambda record: record.name != "root" or not record.getMessage().startswith(ENGINE_REMARKS))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO if rank == "0" else logging.WARNING)
    # PEFT imports torchao, which warns about parts that this machine can't load, and torch warns that some are outdated.
    # bitsandbytes looks for a CPU kernel in Hugging Face's package `kernels`, and warns where there is none.
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    warnings.filterwarnings(
        "ignore", message=r"DTensor (random operators|manual_seed\(\)) may not have complete support"
    )
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


# Beginnings of torchtitan's log lines to leave out.
ENGINE_REMARKS = (
    "[GC]", "Peak flops undefined", "Peak FLOPS used", "Error running lspci", "Starting job", "ENV[", "Checkpoint",
    "Destroying the purge thread", "Saving the checkpoint", "Saving a full checkpoint", "Finished saving",
    "CPU memory usage", "CPU capacity", "Building farsight", "Synchronizing and adjusting timeout",
    "Mixed precision training", "generated new font", "Building device mesh", "Successfully created meshes",
    "Trainer is initialized", "PP rank", "Using pipeline schedule", "Pipeline Parallel loss is not visible",
    "\x1b[31mPipeline Parallel loss",
)  # fmt: skip
