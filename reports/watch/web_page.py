"""The page of runs that train, which browsers load again and again."""

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from farsight.reports.charts import Axis, Series, line_chart
from farsight.reports.page import facts, figure, note, page, section, table, warning
from farsight.reports.watch.figures import about, figures
from farsight.reports.watch.run import METRICS, Run

MOST_POINTS = 500
"""Most points in a loss curve; in a longer one, logged steps are averaged."""
MOST_EVALUATIONS = 20
"""Most rows of a table of evaluations."""


class WebPage:
    """The page; charts of runs with nothing new are kept.

    Args:
        made_by: the command line, shown on the page.
    """

    def __init__(self, made_by: str) -> None:
        self.made_by = made_by
        self._charts: dict[Path, tuple[int, Markup]] = {}

    def text(self, runs: Sequence[Run], now: float, interval: float | None) -> str:
        """The whole file.

        Args:
            now: Unix seconds.
            interval: seconds after which it is written again; None if it stays as it is.
        """
        often = f" Read again every {interval:g} s." if interval else ""
        return page(
            "Training runs" if len(runs) != 1 else runs[0].name,
            f"{len(runs)} {'runs' if len(runs) != 1 else 'run'}.{often}",
            [section("Overview", _overview(runs, now)), *(self._run(run, now) for run in runs)],
            self.made_by,
            [run.folder / METRICS for run in runs],
            refresh=math.ceil(interval) if interval else None,
        )

    def _run(self, run: Run, now: float) -> Markup:
        kind, words = run.state(now)
        sentence = str(run.end.get("sentence", ""))
        parts = [note(sentence)] if kind == "stopped" else []
        if kind in ("failed", "silent", "unreadable"):
            parts = [warning(f"{words}: {sentence}" if sentence else f"{words}.")]
        known = {"folder": str(run.folder), "run": about(run), "state": words, **figures(run, now)}
        beside = facts({name: text for name, text in known.items() if text})
        if not run.losses and not run.validations:
            return section(run.name, *parts, beside)
        version, chart = self._charts.get(run.folder, (-1, Markup()))
        if version != run.version:
            chart = _losses(run)
            self._charts[run.folder] = run.version, chart
        together = -(-len(run.losses) // MOST_POINTS)
        caption = "Thin: training, at logged steps. With markers: validation."
        caption += f" Each point of the thin line is the mean of {together} logged steps or fewer." * (together > 1)
        evaluations = [_evaluations(run)] if run.evaluations else []
        return section(run.name, *parts, figure(chart, caption, beside, *evaluations))


def _overview(runs: Sequence[Run], now: float) -> Markup:
    columns = ("loss", "validation", "tokens/s", "MFU", "memory", "left")
    rows = []
    for run in runs:
        known = figures(run, now)
        if run.validations:
            known["validation"] = f"{run.validations[-1][1]:.4f}"
        bar = Markup('<progress value="{}" max="{}"></progress>').format(run.reached, run.steps) if run.steps else ""
        step = Markup("{}{}").format(known.get("step", "–"), bar)
        name = Markup("{}<br><small>{}</small>").format(run.name, run.state(now)[1])
        rows.append([name, step, *(known.get(column, "–") for column in columns)])
    return table(["run", "step", *columns], rows, "The newest figures of each run; losses in nats per token.")


def _losses(run: Run) -> Markup:
    lines = [
        Series("training", run.curve(MOST_POINTS), 0, markers=False, thin=True),
        Series("validation", run.validations, 0),
    ]
    axes = Axis("step", "whole"), Axis("loss, nats per token", "auto", say="{:.4f}".format)
    return line_chart([line for line in lines if line.points], *axes)


def _evaluations(run: Run) -> Markup:
    """The last evaluations, a step in a row and a figure in a column."""
    rows: dict[float, dict[str, str]] = {}
    for measured in run.evaluations.values():
        for step, values in measured:
            rows.setdefault(step, {}).update({figure: f"{value:.4g}" for figure, value in values.items()})
    columns = list(dict.fromkeys(column for values in rows.values() for column in values))
    steps = sorted(rows)[-MOST_EVALUATIONS:]
    caption = "Evaluations on the way." + f" The last {MOST_EVALUATIONS} of {len(rows)}." * (len(rows) > len(steps))
    cells = [[f"{step:,.0f}", *(rows[step].get(column, "–") for column in columns)] for step in steps]
    return table(["step", *columns], cells, caption)
