"""Gives the trackers of a recipe's finished stage the summary, as a table and as figures, and the loss curves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.configs.load import build_config, read_toml
from farsight.configs.schema import JobConfig
from farsight.training.trackers.trackers import open_trackers


def track_summary(stage: Path, root: Path) -> None:
    """Gives the trackers of a finished stage the recipe's summary and loss curves up to there, once.

    Args:
        stage: its run folder.
        root: the recipe's, with `summary.json` and `loss.png`.
    """
    config: JobConfig = build_config(read_toml(stage / "config.toml"))
    if not config.metrics.trackers:
        return
    try:
        (stage / ".tracked").open("x").close()  # on one of several nodes, and not again for a stage that is skipped
    except OSError:  # it exists, or the disk is full
        return
    entries = json.loads((root / "summary.json").read_text(encoding="utf-8"))["stages"]
    step, own = config.training.steps, entries[-1]
    trackers = open_trackers(config, step, {})
    figures = {
        f"{kind}.{length}": value
        for kind in ("perplexity", "perplexity_last")
        for length, value in own.get(kind, {}).items()
    }
    trackers.log("summary", step, figures)
    trackers.table(step, "stages", *summary_rows(entries))
    trackers.picture(step, root / "loss.png")
    trackers.close(finished=True)


def summary_rows(entries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of a table of stages: steps, last losses, speed, and perplexity at each length."""
    lengths = sorted({int(length) for entry in entries for length in entry["perplexity"]})
    columns = ["stage", "steps", "train loss", "val loss", "tokens/s", *(f"perplexity at {n}" for n in lengths)]
    rows = []
    for e in entries:
        losses = [values[-1] if values else "" for values in (e["train_loss"], e["val_loss"])]
        perplexities = [e["perplexity"].get(str(length), "") for length in lengths]
        rows.append([e["name"], e["steps"], *losses, round(e["tokens_per_second"]), *perplexities])
    return columns, rows
