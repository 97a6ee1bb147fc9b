"""Trains recipes at several depths and probes each model's layers (SCOPE, Figures 5 and 14)."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.analysis.probes.measure import probe_model
from farsight.analysis.probes.settings import ProbeSettings
from farsight.analysis.sequences import sequences_from_options, text_settings
from farsight.configs.load import parse_options
from farsight.errors import ConfigError
from farsight.files import write_text
from farsight.inference.loading import load
from farsight.launch.children import run_child
from farsight.launch.recipe.held_out import held_out_file
from farsight.plots import length_ticks, line_style, picture, shades, whole_numbers
from farsight.training.metrics_file import run_summary
from farsight.training.stages import load_recipe

logger = logging.getLogger("farsight")


@dataclass(frozen=True)
class Point:
    """One training run of the sweep: a recipe at a depth."""

    recipe: Path
    depth: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.recipe.stem}_{self.depth}"

    @property
    def file(self) -> Path:
        return self.out / f"{self.name}.toml"

    @property
    def root(self) -> Path:
        """The recipe's run folder."""
        return self.out / self.name

    def write(self) -> None:
        """Writes the recipe to run: the given one with this depth, run name and folder."""
        lines = [
            f"# {self.recipe} with {self.depth} layers.",
            f"base = {json.dumps(os.path.relpath(self.recipe, self.out))}",
            "[recipe]",
            f"name = {json.dumps(self.name)}",
            f"folder = {json.dumps(str(self.out))}",
            "[architecture]",
            f"n_layers = {self.depth}",
        ]
        write_text(self.file, "\n".join(lines) + "\n")

    def command(self, processes: int | None, rest: Sequence[str]) -> list[str]:
        """The command that trains it."""
        many = ["--nproc", str(processes)] if processes else []
        return [sys.executable, "-m", "farsight", "recipe", str(self.file), *many, *rest]


def sweep(points: Sequence[Point], processes: int | None, rest: Sequence[str]) -> None:
    """Trains the points that are not finished, one after the other.

    Raises:
        ConfigError: a run failed.
        Stopped: a signal asked to stop.
    """
    for number, point in enumerate(points):
        logger.info(f"{number + 1} of {len(points)}: {point.recipe.stem}, {point.depth} layers")
        status = run_child(point.command(processes, rest))
        if status:
            raise ConfigError(f"{point.name} ended with status {status}; the same command continues where it stopped.")


def measure(point: Point, rest: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Probes a trained model.

    Returns:
        recipe: name of the recipe.
        depth: number of layers.
        model: path of the model directory.
        loss: final held-out loss, or training loss if there is none, in nats.
        error: mean position error of the best layer, in tokens.
        guess: error of guessing, in tokens.
        layers: results of each layer, from `probe_model`.

    Raises:
        ConfigError: there is no text to probe on.
    """
    stage = load_recipe(point.file, parse_options(list(rest)))[1][-1]
    training = stage.config.training
    summary = run_summary(stage.name, stage.folder, training.seq_len, training.steps)
    loaded = load(stage.model_dir, options)
    length = options.length or loaded.trained_length
    data = options.data or held_out_file(stage.folder)
    if data is None:
        raise ConfigError(
            f"{stage.folder} has no held-out documents, as the recipe measures no perplexity: name a text with --data."
        )
    text = argparse.Namespace(**{**vars(options), "data": data})
    tokens_SL = sequences_from_options(text, loaded.tokenizer, length)
    found = probe_model(loaded, tokens_SL, ProbeSettings(length=length, epochs=options.epochs, seed=options.seed))
    return {
        "recipe": point.recipe.stem,
        "depth": point.depth,
        "model": str(stage.model_dir),
        **text_settings(text),
        "loss": summary["val_loss"][-1] if summary["val_loss"] else summary["train_loss"][-1],
        "error": min(layer["error"] for layer in found["layers"]),
        "guess": found["guess"],
        "layers": found["layers"],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """A table with one line per model, and the layer whose probe has the smallest error."""
    lines = [f"{'recipe':<24} {'layers':>6} {'loss':>8} {'error':>8} {'in layer':>9} {'guess':>7}"]
    for row in results:
        best = min(row["layers"], key=lambda layer: layer["error"])["layer"]
        lines.append(
            f"{row['recipe']:<24} {row['depth']:>6} {row['loss']:>8.4f} {row['error']:>8.1f} {best:>9} {row['guess']:>7.1f}"
        )
    lines.append("error: mean distance between the probed and the true position, in tokens, in the best layer")
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF).

    There is a panel per recipe with a line per depth (SCOPE, Figure 5), and panels of loss and error by depth (Figure 14).
    """
    recipes = list(dict.fromkeys(row["recipe"] for row in results))
    depths = sorted({row["depth"] for row in results})
    columns = len(recipes) + 2
    highest = max(layer["error"] for row in results for layer in row["layers"])
    with picture(path, 3.7 * columns, 3.8) as figure:
        panels = figure.subplots(1, columns)
        for axes, recipe in zip(panels, recipes, strict=False):
            for row in (row for row in results if row["recipe"] == recipe):
                shade = shades(len(depths))[depths.index(row["depth"])]
                places = [layer["layer"] for layer in row["layers"]]
                errors = [layer["error"] for layer in row["layers"]]
                axes.plot(places, errors, "o-", markersize=3, color=shade, label=f"{row['depth']} layers")
            axes.set(title=recipe, xlabel="layer (−1: embedding)", ylim=(0, 1.05 * highest))
            whole_numbers(axes.xaxis)
        panels[0].set_ylabel("position error in tokens")
        for axes, key, said in ((panels[-2], "loss", "final loss"), (panels[-1], "error", "error of the best layer")):
            for number, recipe in enumerate(recipes):
                rows = sorted((row["depth"], row[key]) for row in results if row["recipe"] == recipe)
                axes.plot(*zip(*rows, strict=True), label=recipe, **line_style(number))
            length_ticks(axes, depths)
            axes.set(xlabel="layers", title=said)
        for axes in panels:
            axes.legend()
