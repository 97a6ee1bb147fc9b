"""Trains recipes at several depths and probes which of each model's layers encode position (SCOPE, Figures 5 and 14).

    farsight depth-sweep nano_scope nano_rope --depths 2 4 8 16 --out runs/depths --nproc 8
    farsight depth-sweep probe_scope probe_rope --depths 2 4 8 --out runs/depths
    farsight depth-sweep … --dry-run

For each recipe and depth, a recipe is written to --out and run by farsight recipe, which skips finished stages and continues
interrupted ones. Then each model's layers are probed (farsight probes) on --data, or on held-out documents of its own run.
--picture shows the probes' error by layer, and the final loss and the best layer's error by depth. Options of the form
--section.key value apply to every run.
"""

import logging
import shlex
import sys
from pathlib import Path

from farsight.analysis.probes.settings import ProbeSettings
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, new_parser, positive
from farsight.configs.load import parse_options
from farsight.configs.shipped import find_config
from farsight.errors import ConfigError
from farsight.inference.model_options import add_model_options, reading_options
from farsight.outputs import add_output_options, write_json, write_picture

SEQUENCES = 100


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight depth-sweep", __doc__)
    add = parser.add_argument
    add("recipes", type=Path, nargs="+", metavar="RECIPE")
    add("--depths", type=positive, nargs="+", required=True, metavar="N", help="numbers of layers")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for recipes and runs")
    add("--nproc", type=positive, help="processes on this machine, as for farsight recipe")
    add("--tiny", action="store_true", help="train the recipes' small forms")
    add("--dry-run", action="store_true", help="write the recipes and print the commands, but run nothing")
    add(
        "--epochs",
        type=positive,
        default=ProbeSettings.epochs,
        help="training epochs of the probes (default: %(default)s)",
    )
    add_text_options(parser, SEQUENCES, optional="default: the held-out text that the recipe measures perplexity on")
    add_model_options(parser)
    add_output_options(parser)
    options, rest = parser.parse_known_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    from farsight.launch.depth_sweep.depth_sweep import Point, draw, measure, sweep, table
    from farsight.training.stages import load_recipe

    if options.tiny:
        rest += ["--tiny", "--recipe.folder", str(options.out)]  # which [tiny] would set
    recipes = [find_config(recipe) for recipe in options.recipes]
    points = [Point(recipe, depth, options.out) for recipe in recipes for depth in sorted(set(options.depths))]
    if len({point.name for point in points}) < len(points):
        parser.error("two of the recipe files have the same name; their runs would share a folder")
    for point in points:
        point.write()
        # Refuse bad settings before the first one trains.
        for stage in load_recipe(point.file, parse_options(rest))[1]:
            if (layers := stage.config.architecture.n_layers) != point.depth:
                raise ConfigError(
                    f"{point.file}, stage {stage.name}: {layers} layers, but the sweep sets {point.depth}; leave "
                    "architecture.n_layers to --depths."
                )
    if options.dry_run:
        print("\n".join(shlex.join(point.command(options.nproc, rest)) for point in points))
        return
    sweep(points, options.nproc, rest)
    results = [measure(point, rest, options) for point in points]
    print(table(results))
    figures = {
        "tool": "analysis.depth_sweep",
        "model": None,
        **{name: getattr(options, name) for name in ("depths", "length", "sequences", "epochs", "seed")},
        **reading_options(options),
        "models": results,
    }
    write_json(options.json, figures)
    write_picture(options.picture, draw, results)


if __name__ == "__main__":
    sys.exit(main())
