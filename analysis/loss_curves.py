"""Losses of runs over the tokens that they were trained on, beside each other: SCOPE's Figure 15 and its kind.

    farsight loss-curves runs/nano_nope runs/nano_uniform_alibi runs/nano_alibi runs/nano_scope --picture F --json F

Takes run folders and recipes' folders, whose stages are joined, also of runs that are still going. Lines are training losses, each
point the mean of --smooth logged steps; markers are the means over held-out documents.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from farsight.cli import command, positive
from farsight.configs.load import ConfigError
from farsight.outputs import add_output_options, check_outputs, model_style, write_figures
from farsight.training.metrics_file import loss_points
from farsight.training.runs import ReportedModel, find_models


def read_losses(model: ReportedModel) -> dict[str, Any]:
    """{"name", "training", "held_out", "stages"}: points of tokens and loss, and the tokens after which stages end.

    Raises:
        ConfigError: no run that has logged a step.
    """
    if not model.runs:
        raise ConfigError(f"{model.path} is no run folder: it has no metrics.jsonl with a logged step.")
    training: list[tuple[float, float]] = []
    held_out: list[tuple[float, float]] = []
    ends: list[float] = []
    for run in model.runs:
        points, validations = loss_points(run.folder, ends[-1] if ends else 0.0)
        training, held_out = training + points, held_out + validations
        ends.append(points[-1][0])
    return {"name": model.name, "training": training, "held_out": held_out, "stages": ends}


def smoothed(points: Sequence[tuple[float, float]], together: int) -> list[tuple[float, float]]:
    """Means of so many points each; the last may be of fewer."""
    groups = [points[start : start + together] for start in range(0, len(points), together)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


def table(curves: Sequence[dict[str, Any]]) -> str:
    """The losses at the end of each run."""
    width = max(len(curve["name"]) for curve in curves)
    lines = [f"{'run':<{width}} {'tokens':>14} {'training':>10} {'held out':>10}"]
    for curve in curves:
        last = fmean(loss for _, loss in curve["training"][-max(1, len(curve["training"]) // 5) :])
        held_out = f"{curve['held_out'][-1][1]:.4f}" if curve["held_out"] else "–"
        lines.append(f"{curve['name']:<{width}} {curve['training'][-1][0]:>14,.0f} {last:>10.4f} {held_out:>10}")
    lines.append("training: mean of the last fifth of the logged steps")
    return "\n".join(lines)


def draw(curves: Sequence[dict[str, Any]], path: Path, smooth: int) -> None:
    """Writes the picture (PNG, SVG or PDF): the whole training, and its second half closer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (whole, later) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    half = max(curve["training"][-1][0] for curve in curves) / 2
    for number, curve in enumerate(curves):
        style = model_style(number)
        line = {"color": style["color"], "linewidth": 1.3}
        for axes, start in ((whole, 0.0), (later, half)):
            points = [point for point in smoothed(curve["training"], smooth) if point[0] >= start]
            marks = [point for point in curve["held_out"] if point[0] >= start]
            if points:
                axes.plot(*zip(*points, strict=True), **line, label=curve["name"])
            if marks:
                axes.plot(*zip(*marks, strict=True), style["marker"], color=style["color"], markersize=5)
    for axes, title in ((whole, "whole training"), (later, "second half")):
        axes.set(xlabel="tokens", ylabel="loss, nats per token", title=title)
        axes.grid(alpha=0.3)
        for end in sorted({end for curve in curves for end in curve["stages"][:-1]}):
            axes.axvline(end, color="grey", linewidth=0.8, linestyle=":")
    later.set_xlim(left=half)
    whole.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight loss-curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--smooth", type=positive, default=5, metavar="N", help="logged steps a point (%(default)s)")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    curves = [read_losses(model) for model in find_models(options.runs)]
    print(table(curves))
    if options.json:
        of_each = {
            str(run): {"tool": "analysis.loss_curves", "model": str(run), **curve}
            for run, curve in zip(options.runs, curves, strict=True)
        }
        write_figures(options.json, of_each)
    if options.picture:
        draw(curves, options.picture, options.smooth)
        print(options.picture)


if __name__ == "__main__":
    main()
