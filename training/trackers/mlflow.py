"""MLflow: the server that MLFLOW_TRACKING_URI names, or else a file store in the run folder."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from farsight.training.trackers.tracker import TrackedRun, Tracker, flat, keep_id, markdown, read_ids

logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # a line for each of its retries

MOST_METRICS, MOST_PARAMETERS = 500, 100
"""In one request to a server, which takes no more parameters than that."""
LONGEST = 6000
"""Characters of a parameter's value."""


class Mlflow(Tracker):
    """A run of MLflow; those of a recipe's stages are children of one run.

    Parameters are the config's options. MLflow refuses to change them: a run that goes on keeps those of its first start, and its
    artifact `config.toml` has the present ones.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.client = MlflowClient()
        kept = self._there(run.kept_id("mlflow"))
        self.resumed, self.id = kept is not None, kept or self._create(run)
        keep_id(run.folder, "mlflow", self.id)
        if kept:
            self.client.update_run(kept, "RUNNING")
        else:
            options = [Param(name, str(value)[:LONGEST]) for name, value in flat({**run.config, **run.facts}).items()]
            for first in range(0, len(options), MOST_PARAMETERS):
                self.client.log_batch(self.id, params=options[first : first + MOST_PARAMETERS])
        self.client.log_text(self.id, run.toml, "config.toml")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        for first in range(0, len(metrics), MOST_METRICS):
            self.client.log_batch(self.id, metrics=metrics[first : first + MOST_METRICS])

    def picture(self, step: int, path: Path) -> None:
        self.client.log_artifact(self.id, str(path))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.client.log_text(self.id, markdown(columns, rows), f"{name}.md")

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")

    def _there(self, own: str | None) -> str | None:
        """A run's id, if this server or store has it."""
        try:
            return own and self.client.get_run(own).info.run_id
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _create(self, run: TrackedRun) -> str:
        name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "farsight"
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        tags = {"mlflow.source.git.commit": run.facts["git"]["commit"]} if "git" in run.facts else {}
        if run.group:
            parent = self._there(read_ids(run.home).get("mlflow"))
            if not parent:
                parent = self.client.create_run(experiment, run_name=run.group).info.run_id
                self.client.set_terminated(parent)
                keep_id(run.home, "mlflow", parent)
            tags["mlflow.parentRunId"] = parent
        return self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
