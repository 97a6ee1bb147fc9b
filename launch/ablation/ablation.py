"""Runs an ablation: trains, merges and evaluates each experiment, and reports on all of them."""

import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from farsight.checkpoints.cards.model import read_history
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import load_config, parse_options
from farsight.configs.shipped import find_config
from farsight.configs.typed import to_toml
from farsight.errors import ConfigError
from farsight.files import write_text
from farsight.launch.ablation.evaluations import (
    HELD_OUT,
    Evaluation,
    evaluate,
    evaluation_command,
    result_file,
)
from farsight.launch.ablation.tables import BASE, Columns, Results, draw, markdown, text
from farsight.launch.children import ended, run_child, train_script
from farsight.outputs import write_json
from farsight.training.metrics_file import read_metrics

logger = logging.getLogger("farsight")


@dataclass(frozen=True)
class Experiment:
    """A fine-tuning run of the ablation; `options` are overrides from the command line."""

    label: str
    path: Path
    config: FinetuneConfig
    options: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def finished(self) -> bool:
        return (self.model / "config.json").is_file()

    def training(self) -> list[str]:
        """The command that trains the adapter."""
        config = ["--job.config_file", str(self.path), "--job.dump_folder", str(self.folder)]
        return [sys.executable, *train_script(), "finetune", *config, *self.options]

    def merging(self) -> list[str]:
        """The command that merges the adapter into its base."""
        merge = [sys.executable, "-m", "farsight", "merge"]
        return [*merge, str(self.folder / "adapter"), "--out", str(self.model)]


def read_experiments(paths: Sequence[Path], options: Sequence[str], out: Path) -> list[Experiment]:
    """Reads the experiments, sorted by label.

    Raises:
        ConfigError: settings that can't be used, duplicate labels, or different bases.
    """
    taken = {
        "dump_folder": "use --out, which has a folder for each experiment",
        "config_file": "name the configs without it",
    }
    for name in parse_options(options).get("job", {}).keys() & taken:
        raise ConfigError(f"--job.{name} would be the same for all experiments: {taken[name]}.")
    found: dict[str, Experiment] = {}
    for path in map(find_config, paths):
        label = path.stem.rpartition("_")[2].upper()
        if label in found:
            raise ConfigError(f"{path} and {found[label].path} would both be experiment {label}: rename one of them.")
        config = load_config(["--job.config_file", str(path), *options], FinetuneConfig)
        config.job.dump_folder = str(out / path.stem)
        found[label] = Experiment(label, path, config, tuple(options))
    bases = {experiment.config.base_model.path for experiment in found.values()}
    if len(bases) > 1:
        raise ConfigError(f"The experiments have different bases and can't be compared: {', '.join(sorted(bases))}.")
    return [found[label] for label in sorted(found)]


# ── Running ───────────────────────────────────────────────────────────────────────────────────────────


def train(experiment: Experiment) -> str | None:
    """Trains and merges an experiment, or continues where that stopped; returns a message if it failed."""
    settings = experiment.folder / "experiment.toml"
    if experiment.finished:
        logger.info(f"{experiment.label} is finished")
        if settings.is_file() and settings.read_text(encoding="utf-8") != to_toml(experiment.config):
            logger.warning(f"its settings have changed since; remove {experiment.folder} to train it again")
        return None
    logger.info(f"{experiment.label}: training ({experiment.path})")
    write_text(settings, to_toml(experiment.config))
    if status := run_child(experiment.training()):
        return f"training {experiment.label} {ended(status)}"
    if not experiment.finished and (status := run_child(experiment.merging())):
        return f"merging {experiment.label} {ended(status)}"
    return None


@dataclass(frozen=True)
class HeldOut:
    """Held-out losses of a run, in nats per token."""

    before: float
    """Before the first step."""
    kept: float
    """At the step whose adapter was kept and merged."""
    base_as: str
    """Type or quantisation of the base's weights; empty if the model before the first step was not the plain base."""


def held_out(experiment: Experiment) -> HeldOut:
    """Reads the held-out losses of a finished run.

    Raises:
        ConfigError: it did not validate.
    """
    run = read_history(experiment.model)[-1]
    measured = (experiment.folder / "metrics.jsonl").is_file()
    rows = read_metrics(experiment.folder) if measured else []
    losses = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    if not {0, run["steps"]} <= losses.keys():
        raise ConfigError(f"{experiment.folder} has no held-out losses: set validation.enable and data.held_out.")
    base_as = run["adapter"]["dtype"] if run["adapter"]["quantization"] == "none" else run["adapter"]["quantization"]
    if run["adapter"].get("garfa", {}).get("init") == "paper":  # alpha is 9.012 before the first step
        base_as = ""
    return HeldOut(losses[0], losses[run["steps"]], base_as)


@dataclass(frozen=True)
class Outcome:
    """The result of an ablation."""

    results: Results
    failures: list[str]
    note: str
    """How the base's held-out loss was measured; empty if it was not."""


def run(experiments: list[Experiment], evaluations: list[Evaluation], out: Path) -> Outcome:
    """Trains and evaluates everything; failures are collected.

    Raises:
        Stopped: a signal asked to stop.
    """
    results: Results = {BASE: {}, **{experiment.label: {} for experiment in experiments}}
    failures: list[str] = []
    note = ""
    models = {BASE: (Path(experiments[0].config.base_model.path), out / BASE)}
    for experiment in experiments:
        if failure := train(experiment):
            failures.append(failure)
            continue
        models[experiment.label] = experiment.model, experiment.folder / "evaluations"
        try:
            losses = held_out(experiment)
        except ConfigError as error:
            failures.append(str(error))
            continue
        results[experiment.label][HELD_OUT.name] = losses.kept
        if losses.base_as and HELD_OUT.name not in results[BASE]:
            results[BASE][HELD_OUT.name] = losses.before
            note = f"{HELD_OUT.name} of the base: before {experiment.label}'s first step, in {losses.base_as}"
    for evaluation in evaluations:
        for label, (model, folder) in models.items():
            if evaluation is HELD_OUT:
                continue
            try:
                results[label][evaluation.name] = evaluate(label, model, folder, evaluation)
            except ConfigError as error:
                failures.append(str(error))
    return Outcome(results, failures, note)


def report(outcome: Outcome, columns: Columns, out: Path, copy: Path | None) -> None:
    """Prints the tables, and writes tables, figures and a picture to `out`; `copy` gets the figures too."""
    for line in outcome.failures:
        logger.error(line)
    print(text(outcome.results, columns, outcome.note))
    write_text(out / "ablation.md", markdown(outcome.results, columns, outcome.note))
    for path in (out / "ablation.json", copy):
        write_json(path, asdict(outcome) | {"columns": columns})
    draw(outcome.results, columns, out / "ablation.png")
    print(f"{out}/ablation.md, ablation.json, ablation.png")


def commands(experiments: list[Experiment], evaluations: list[Evaluation], out: Path) -> str:
    """The commands that would run, one per line."""
    lines = []
    models = {BASE: (Path(experiments[0].config.base_model.path), out / BASE)}
    for experiment in experiments:
        models[experiment.label] = experiment.model, experiment.folder / "evaluations"
        if experiment.finished:
            lines.append(f"{experiment.label} is finished: {experiment.model}")
            continue
        lines += [shlex.join(experiment.training()), shlex.join(experiment.merging())]
    for evaluation in evaluations:
        if evaluation is not HELD_OUT:
            lines += [
                shlex.join(evaluation_command(evaluation, model, result_file(evaluation, folder)))
                for model, folder in models.values()
            ]
    return "\n".join(lines)
