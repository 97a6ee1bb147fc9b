"""Runs an ablation: fine-tunes each config, evaluates the untuned base and every result, and prints how they compare.

    farsight ablation configs/finetune/ablation_*.toml --evaluations configs/finetune/evaluations/paper.toml
    farsight ablation configs/finetune/ablation_*.toml --tiny --out runs/tiny_ablation --dry-run

An experiment is named by the end of its file's name: ablation_a.toml is A. Each has a folder in --out, with its run, the merged
model in model/ and what was measured. What is finished is not done again; an interrupted run goes on from its checkpoint. A run
or an evaluation that fails is named and the others go on; the exit status is then 1. Options of the form --section.key value
change all experiments.

Every run measures its held-out loss itself: before its first step that is the base's as quantised, unless garfa.init = "paper"
has changed it. --evaluations names a TOML file with others, each a command that writes a JSON file; of the base they are given
the directory, which is not quantised:

    [[evaluations]]
    name = "perplexity, 1,024 tokens"
    command = "farsight perplexity {model} --data books.txt --lengths 1024 --json {json}"
    value = "lengths.1024"          # where in the file the figure is
    better = "lower"                # "higher" is the default
    percent = false                 # true: a share of 1, shown in percent and counted in the mean
"""

import sys

from farsight import process

if __name__ == "__main__":
    process.begin(process.BETWEEN_STEPS)

import argparse
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from farsight.checkpoints.cards.model import read_history
from farsight.cli import command
from farsight.configs.check import ConfigError
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import find_config, load_config, parse_options, to_toml
from farsight.files import prepare_file, write_text
from farsight.launch.ablation_tables import BASE, Columns, Results, draw, markdown, text
from farsight.launch.evaluations import (
    HELD_OUT,
    Evaluation,
    Stopped,
    ended,
    evaluate,
    evaluation_command,
    read_evaluations,
    result_file,
    run_child,
)
from farsight.launch.summary import read_metrics

logger = logging.getLogger("farsight")

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Experiment:
    """A fine-tuning run of the ablation."""

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
        config = ["--job.config_file", str(self.path), "--job.dump_folder", str(self.folder)]
        return [sys.executable, str(ROOT / "train.py"), "finetune", *config, *self.options]

    def merging(self) -> list[str]:
        merge = [sys.executable, "-m", "farsight", "merge"]
        return [*merge, str(self.folder / "adapter"), "--out", str(self.model)]


def read_experiments(paths: Sequence[Path], options: Sequence[str], out: Path) -> list[Experiment]:
    """The experiments, by label.

    Raises:
        ConfigError: settings that can't be used, labels that are not distinct, or different bases.
    """
    taken = {"dump_folder": "--out has a folder for each experiment", "config_file": "name the configs without it"}
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
        raise ConfigError(f"The experiments have different bases, which do not compare: {', '.join(sorted(bases))}.")
    return [found[label] for label in sorted(found)]


# ── Running ───────────────────────────────────────────────────────────────────────────────────────────


def train(experiment: Experiment) -> str | None:
    """Trains and merges, or goes on where that stopped; returns what failed."""
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
    """Of a run: its held-out losses, and what it says of the base."""

    before: float
    """Before the first step."""
    kept: float
    """At the step whose adapter was kept, which is in the merged model."""
    base_as: str
    """How the base's weights were kept; empty where the model before the first step was another than the base."""


def held_out(experiment: Experiment) -> HeldOut:
    """What a finished run has measured itself.

    Raises:
        ConfigError: it has not validated.
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
    """Of an ablation."""

    results: Results
    failures: list[str]
    note: str
    """How the base's held-out loss was measured; empty where it was not."""


def run(experiments: list[Experiment], evaluations: list[Evaluation], out: Path) -> Outcome:
    """Trains and measures everything."""
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


@command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="farsight ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("configs", type=Path, nargs="+", help="TOML files of `train.py finetune`")
    parser.add_argument("--tiny", action="store_true", help="the configs' small form: the quickstart's model, 40 steps")
    parser.add_argument("--evaluations", type=Path, metavar="FILE", help="TOML file with [[evaluations]]")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    parser.add_argument("--dry-run", action="store_true", help="check the configs and print the commands, run nothing")
    options, rest = parser.parse_known_args(arguments)
    rest += ["--tiny"] * options.tiny
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(message)s", level=logging.INFO)
    experiments = read_experiments(options.configs, rest, options.out)
    evaluations = read_evaluations(options.evaluations)
    if options.json:
        prepare_file(options.json)
    if options.dry_run:
        print(commands(experiments, evaluations, options.out))
        return 0
    try:
        outcome = run(experiments, evaluations, options.out)
    except Stopped:
        logger.error("stopped; the same command goes on from here")
        return process.EXIT_INTERRUPTED
    report(outcome, {e.name: (e.better, e.percent) for e in evaluations}, options.out, options.json)
    return 1 if outcome.failures else 0


def report(outcome: Outcome, columns: Columns, out: Path, copy: Path | None) -> None:
    """Prints the tables, and writes them, the figures and the picture."""
    for line in outcome.failures:
        logger.error(line)
    print(text(outcome.results, columns, outcome.note))
    write_text(out / "ablation.md", markdown(outcome.results, columns, outcome.note))
    content = json.dumps(asdict(outcome) | {"columns": columns}, indent=2) + "\n"
    for path in [out / "ablation.json", *([copy] if copy else [])]:
        write_text(path, content)
    draw(outcome.results, columns, out / "ablation.png")
    print(f"{out}/ablation.md, ablation.json, ablation.png")


def commands(experiments: list[Experiment], evaluations: list[Evaluation], out: Path) -> str:
    """What would be run, a line each."""
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


if __name__ == "__main__":
    sys.exit(main())
