"""Recipes trained at several depths, and where each model's layers know positions: SCOPE's Figures 5 and 14.

    farsight depth-sweep configs/recipes/nano_scope.toml configs/recipes/nano_rope.toml --depths 2 4 8 16 --out runs/depths --nproc 8
    farsight depth-sweep configs/recipes/probe_scope.toml configs/recipes/probe_rope.toml --depths 2 4 8 --out runs/depths
    farsight depth-sweep … --dry-run

For each recipe and depth a recipe of its own is written to --out and run by farsight recipe, which skips what is finished and goes on
where it stopped. Then each model's layers are probed (farsight probes) on --data, or on the held-out documents of its own run, and two
pictures are drawn: the probes' error by layer, and the final loss and the best layer's error by depth. Options of the form
--section.key value go to every run.
"""

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.analysis.probes.position_probe import ProbeSettings
from farsight.analysis.probes.probes import probe_model
from farsight.analysis.sequences import add_text_options, read_sequences
from farsight.cli import command, positive
from farsight.configs.load import ConfigError, parse_options
from farsight.files import write_text
from farsight.inference.loading import load
from farsight.inference.model_options import add_model_options
from farsight.launch.evaluations import run_child
from farsight.launch.recipe import load_recipe
from farsight.launch.summary import run_summary
from farsight.outputs import add_output_options, check_outputs, model_style

logger = logging.getLogger("farsight")
SEQUENCES = 100


@dataclass(frozen=True)
class Point:
    """One training of the sweep."""

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
        """Writes its recipe: the given one with the depth and the run's name and folder laid over it."""
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
        """What trains it."""
        many = ["--nproc", str(processes)] if processes else []
        return [sys.executable, "-m", "farsight", "recipe", str(self.file), *many, *rest]


def sweep(points: Sequence[Point], processes: int | None, rest: Sequence[str]) -> None:
    """Trains what is not trained yet, one after the other.

    Raises:
        ConfigError: a run that failed.
    """
    for number, point in enumerate(points):
        logger.info(f"{number + 1} of {len(points)}: {point.recipe.stem}, {point.depth} layers")
        status = run_child(point.command(processes, rest))
        if status:
            raise ConfigError(f"{point.name} ended with status {status}; the same command goes on where it stopped.")


def measure(point: Point, rest: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """{"recipe", "depth", "model", "loss", "error", "guess", "layers"}: of a trained model; the loss is the held-out one, where there is one."""
    stage = load_recipe(point.file, parse_options(list(rest)))[1][-1]
    training = stage.config.training
    summary = run_summary(stage.name, stage.folder, training.seq_len, training.steps)
    loaded = load(stage.model_dir, options)
    length = options.length or loaded.trained_length
    held_out = point.root / "held_out.txt"
    if options.data is None and not held_out.is_file():
        raise ConfigError(f"{held_out} is not there, since the recipe measures no perplexity: name a text with --data.")
    tokens_SL = read_sequences(options.data or held_out, loaded.tokenizer, length, options.sequences)
    found = probe_model(loaded, tokens_SL, ProbeSettings(length=length, epochs=options.epochs, seed=options.seed))
    return {
        "recipe": point.recipe.stem,
        "depth": point.depth,
        "model": str(stage.model_dir),
        "loss": summary["val_loss"][-1] if summary["val_loss"] else summary["train_loss"][-1],
        "error": min(layer["error"] for layer in found["layers"]),
        "guess": found["guess"],
        "layers": found["layers"],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line a model, with the layer that knows positions best."""
    lines = [f"{'recipe':<24} {'layers':>6} {'loss':>8} {'error':>8} {'in layer':>9} {'guess':>7}"]
    for row in results:
        best = min(row["layers"], key=lambda layer: layer["error"])["layer"]
        lines.append(
            f"{row['recipe']:<24} {row['depth']:>6} {row['loss']:>8.4f} {row['error']:>8.1f} {best:>9} {row['guess']:>7.1f}"
        )
    lines.append("error: mean distance of a probe's answer from a token's position, in tokens, of the best layer")
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a panel a recipe with a line a depth (Figure 5), and loss and error by depth (Figure 14)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    recipes = list(dict.fromkeys(row["recipe"] for row in results))
    depths = sorted({row["depth"] for row in results})
    columns = len(recipes) + 2
    figure, panels = plt.subplots(1, columns, figsize=(3.7 * columns, 3.8), layout="constrained", squeeze=False)
    colours = plt.get_cmap("viridis")
    highest = max(layer["error"] for row in results for layer in row["layers"])
    for axes, recipe in zip(panels[0], recipes, strict=False):
        for row in (row for row in results if row["recipe"] == recipe):
            shade = colours(0.9 * depths.index(row["depth"]) / max(1, len(depths) - 1))
            places = [layer["layer"] for layer in row["layers"]]
            errors = [layer["error"] for layer in row["layers"]]
            axes.plot(places, errors, marker="o", markersize=3, color=shade, label=f"{row['depth']} layers")
        axes.set(title=recipe, xlabel="layer (−1: embedding)", ylim=(0, 1.05 * highest))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("position error in tokens")
    for axes, key, said in ((panels[0, -2], "loss", "final loss"), (panels[0, -1], "error", "error of the best layer")):
        for number, recipe in enumerate(recipes):
            rows = sorted((row["depth"], row[key]) for row in results if row["recipe"] == recipe)
            axes.plot(*zip(*rows, strict=True), label=recipe, **model_style(number))
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.set(xlabel="layers", title=said)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight depth-sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", type=Path, nargs="+", metavar="RECIPE")
    parser.add_argument("--depths", type=positive, nargs="+", required=True, metavar="N", help="numbers of layers")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where recipes and runs go")
    parser.add_argument("--nproc", type=positive, help="processes on this machine, as farsight recipe takes them")
    parser.add_argument("--dry-run", action="store_true", help="write the recipes and print the commands, run nothing")
    parser.add_argument("--epochs", type=positive, default=ProbeSettings.epochs, help="of the probes (%(default)s)")
    add_text_options(parser, SEQUENCES)
    add_model_options(parser)
    add_output_options(parser)
    options, rest = parser.parse_known_args(arguments)
    check_outputs(parser, options)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    points = [Point(recipe, depth, options.out) for recipe in options.recipes for depth in sorted(set(options.depths))]
    if len({point.name for point in points}) < len(points):
        parser.error("two of the recipes have files of the same name; their runs would share a folder")
    for point in points:
        point.write()
        # What does not fit is refused before the first of them trains.
        for stage in load_recipe(point.file, parse_options(rest))[1]:
            if (layers := stage.config.architecture.n_layers) != point.depth:
                raise ConfigError(
                    f"{point.file}, stage {stage.name}: {layers} layers where the sweep sets {point.depth}; leave "
                    "architecture.n_layers to --depths."
                )
    if options.dry_run:
        print("\n".join(shlex.join(point.command(options.nproc, rest)) for point in points))
        return
    sweep(points, options.nproc, rest)
    results = [measure(point, rest, options) for point in points]
    print(table(results))
    if options.json:
        figures = {
            "tool": "analysis.depth_sweep",
            "model": None,
            **{name: getattr(options, name) for name in ("depths", "length", "sequences", "epochs", "seed", "extend")},
            "models": results,
        }
        write_text(options.json, json.dumps(figures, indent=2) + "\n")
    if options.picture:
        draw(results, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
