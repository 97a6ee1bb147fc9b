"""The report's section on perplexity, by context length and by position."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from farsight.evals.windows import Windows
from farsight.reports.charts import Axis, Mark, Series, length_axis, line_chart, short_tokens
from farsight.reports.page import figure, folded, heading, legend, line_figure, note, table, warning
from farsight.reports.results import Result, labelled, names
from farsight.reports.tools import Tool, is_number

GROWN = "lengths_scope_length"


def perplexity_text(value: float) -> str:
    return f"{value:,.3f}" if abs(value) < 1e6 else f"{value:.4g}"


PERPLEXITY_AXIS = Axis("perplexity", "auto", say=perplexity_text)


def show(results: Sequence[Result]) -> list[Markup]:
    """Perplexity by context length, and by position where it was measured."""
    lines = []
    for result, name, number in labelled(results):
        for key, more in (("lengths", ""), (GROWN, ", scopes grown")):
            points = [(float(length), value) for length, value in result.values.get(key, {}).items()]
            if points:
                lines.append(Series(name + more, sorted(points), number, dashed=key == GROWN))
    trained = sorted({result.values.get("trained_length", result.model.config.trained_length) for result in results})
    x = length_axis([*(int(at) for line in lines for at, _ in line.points), *trained])
    if len(trained) == 1:
        x = replace(x, say=lambda length: f"{length:,.0f}" + " (trained)" * (length == trained[0]))
    dashed = "Dashed: with scopes grown with the length." * any(line.dashed for line in lines)
    captions = f"Dotted: the trained length. {dashed}", "Perplexity by context length."
    return [
        note(
            "exp of the mean negative log-likelihood: of the last 256 tokens in each window of a length or, with sliding windows, of "
            "every token once. Lower is better. `evals.perplexity` says how windows are cut."
        ),
        _comparable(results),
        line_figure(lines, x, PERPLEXITY_AXIS, captions, [Mark(t, "trained") for t in trained]),
        *_by_position(results),
    ]


def _comparable(results: Sequence[Result]) -> Markup:
    """A warning where results are for different texts or different tokenizations, otherwise a note that names the text."""
    texts: dict[str, list[str]] = {}
    for result, name in zip(results, names(results), strict=True):
        texts.setdefault(", ".join(result.values.get("data", ["unrecorded text"])), []).append(name)
    if len(texts) > 1:
        said = "; ".join(f"{', '.join(who)} on {text}" for text, who in texts.items())
        return warning(f"Measured on different texts, so these curves cannot be compared: {said}.")
    if len({tokens for result in results if (tokens := result.values.get("tokens")) is not None}) > 1:
        return warning(
            "The text has different numbers of tokens: tokenizers differ, so perplexities per token cannot be compared."
        )
    return note(f"Text: {next(iter(texts))}.")


@dataclass(frozen=True)
class PositionCurve:
    """Perplexity by position in windows of one length."""

    name: str
    number: int
    grown: bool
    length: int
    edges: tuple[int, ...]
    """Edges of the parts: part i has the targets with edges[i] to edges[i + 1] − 1 tokens before them."""
    values: tuple[float, ...]

    @property
    def parts(self) -> list[str]:
        """Numbers of tokens before those of each part: "1" or "12–30"."""
        spans = [(first, end - 1) for first, end in itertools.pairwise(self.edges)]
        return [f"{first:,}" if first == last else f"{first:,}–{last:,}" for first, last in spans]

    @property
    def middles(self) -> list[float]:
        return [math.sqrt(first * (end - 1)) for first, end in itertools.pairwise(self.edges)]


def _position_curves(results: Sequence[Result], key: str) -> list[PositionCurve]:
    """Curves for the key "buckets", parts of equal size, or "log_buckets", parts of equal ratio."""
    curves = []
    for result, name, number in labelled(results):
        for grown in (False, True):
            for text, measured in result.values.get(key + "_scope_length" * grown, {}).items():
                length = int(text)
                values = measured["perplexity"] if isinstance(measured, dict) else measured
                edges = measured["edges"] if isinstance(measured, dict) else Windows(buckets=len(values)).edges(length)
                said = name + ", scopes grown" * grown
                curves.append(PositionCurve(said, number, grown, length, tuple(edges), tuple(values)))
    return curves


def _by_position(results: Sequence[Result]) -> list[Markup]:
    """Curves of the longest windows, and tables of all."""
    even, ratio = (_position_curves(results, key) for key in ("buckets", "log_buckets"))
    if not even:
        return []
    drawn = ratio or even
    longest = {curve.name: max(c.length for c in drawn if c.name == curve.name) for curve in drawn}
    drawn = [curve for curve in drawn if curve.length == longest[curve.name]]
    lines = [
        Series(f"{c.name}, {c.length:,} tokens", list(zip(c.middles, c.values, strict=True)), c.number, c.grown)
        for c in drawn
    ]
    says = {
        (line.name, middle): part
        for line, c in zip(lines, drawn, strict=True)
        for middle, part in zip(c.middles, c.parts, strict=True)
    }
    chart = line_chart(
        lines,
        Axis("tokens before the predicted one", "log", text=short_tokens, base=2),
        PERPLEXITY_AXIS,
        more=lambda line, middle: f"\nmean of {says[line.name, middle]}",
    )
    first, *others = _position_tables([*drawn, *(curve for curve in [*ratio, *even] if curve not in drawn)])
    more = [folded("Other lengths and parts", *others)] if others else []
    caption = "All tokens of a window, by the number of tokens before them. The longest windows of each result."
    return [heading("By position"), legend(lines), figure(chart, caption, first), *more]


def _position_tables(curves: Sequence[PositionCurve]) -> list[Markup]:
    """A table for each set of curves with the same parts, one column for each curve."""
    groups: dict[tuple[int, ...], list[PositionCurve]] = {}
    for curve in curves:
        groups.setdefault(curve.edges, []).append(curve)
    return [
        table(
            ["tokens before", *(curve.name for curve in group)],
            [[part, *(perplexity_text(c.values[i]) for c in group)] for i, part in enumerate(group[0].parts)],
            f"Perplexity by position in windows of {group[0].length:,} tokens.",
        )
        for group in groups.values()
    ]


def _is_perplexity(values: Mapping[str, Any]) -> bool:
    match values:
        case {"lengths": dict(lengths)} if lengths:
            return all(length.isdecimal() and is_number(value) for length, value in lengths.items())
    return False


PERPLEXITY = Tool(
    command="perplexity",
    heading="Perplexity",
    is_result=_is_perplexity,
    show=show,
    arguments=lambda texts, lengths: ["--data", *texts, "--lengths", *lengths, "--buckets", "8"],
    measured=True,
)
