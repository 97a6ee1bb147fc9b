"""The table at the top of a page, with the most important figures of each model in a column."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.inference.model_options import READING
from farsight.json_files import or_nan
from farsight.model.build import count_parameters
from farsight.reports.page import small, table
from farsight.reports.results import Result, of_kind
from farsight.reports.sections.cost import ModelCost, bytes_text, percent
from farsight.reports.sections.perplexity import perplexity_text
from farsight.reports.sections.plasticity import figure_text, mean_bias
from farsight.reports.sections.training import named, stages, trained_tokens
from farsight.reports.tools import Tool
from farsight.training.runs import NamedModel

PASSKEY = "passkey"
"""The task of farsight needle that models are compared by."""


@dataclass(frozen=True)
class Row:
    """A figure that one tool measures."""

    kind: str
    """The tool's kind of results."""
    title: str
    text: Callable[[Sequence[Mapping[str, Any]], NamedModel], str | None]
    """A model's figure, from its results of the kind, of which there is at least one; None if they have none that compares."""
    caption: str = ""


def glance(
    models: Sequence[NamedModel], results: Sequence[Result], costs: Sequence[ModelCost], tools: Collection[Tool]
) -> Markup:
    """The most important figures, one column for each model.

    Args:
        tools: those that have rows without any result, too.
    """
    longest = costs[0].costs[-1].length
    kept = {tool.kind for tool in tools} | {result.kind for result in results}
    rows = [row for row in ROWS if row.kind in kept]
    titles = ["parameters", "trained length", "trained on", "held-out loss", f"KV cache at {longest:,}"]
    columns = []
    for model in models:
        tokens, losses = trained_tokens(model), [stage["val_loss"] for stage in stages(model) if stage["val_loss"]]
        cost = next(c.costs[-1] for c in costs if c.model is model)
        own = [[r.values for r in of_kind(results, row.kind) if r.model is model] for row in rows]
        columns.append([
            f"{count_parameters(model.config):,}",
            f"{model.config.trained_length:,}",
            "–" if tokens is None else f"{tokens:,}",
            f"{losses[-1][-1]:.3f}" if losses else "–",
            small(bytes_text(cost.cache_bytes), percent(cost.cache_bytes / cost.dense_cache_bytes)),
            *((found and row.text(found, model)) or "–" for row, found in zip(rows, own, strict=True)),
        ])  # fmt: skip
    said = [
        "Lengths and training in tokens.",
        "Cache: for one sequence in bfloat16, with its share of a dense one.",
        *(row.caption for row in rows if row.caption),
        "–: not measured or not recorded.",
    ]
    body = zip([*titles, *(row.title for row in rows)], *columns, strict=True)
    return table(["", *map(named, models)], body, " ".join(said))


def _perplexity(found: Sequence[Mapping[str, Any]], model: NamedModel) -> str | None:
    lengths = next((values["lengths"] for values in _plain(found)), None)
    if not lengths:
        return None
    nearest = min(lengths, key=lambda length: abs(int(length) - model.config.trained_length))
    return f"{perplexity_text(lengths[nearest])} at {int(nearest):,}"


def _needles(found: Sequence[Mapping[str, Any]], model: NamedModel) -> str | None:
    tasks = [(values.get("task", PASSKEY), values["mean"]) for values in _plain(found)]
    if not tasks:
        return None
    task, mean = min(tasks, key=lambda one: one[0] != PASSKEY)
    return f"{100 * mean:.1f} %" + f" ({task})" * (task != PASSKEY)


def _plain(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Results that compare with other models': read as trained, with weights as stored, and not in sliding windows."""
    return [values for values in found if not any(map(values.get, (*READING, "stride")))]


def _first(
    key: str, text: Callable[[Mapping[str, Any]], str]
) -> Callable[[Sequence[Mapping[str, Any]], NamedModel], str | None]:
    """A figure of the first of a model's results that has the key: those of a run's checkpoints lack figures of the model."""
    return lambda found, model: next((text(values) for values in found if key in values), None)


ROWS = (
    Row(
        "perplexity",
        "perplexity",
        _perplexity,
        "Perplexity at the trained length, or at the nearest one measured, without --extend and sliding windows.",
    ),
    Row(
        "needle",
        "needles",
        _needles,
        "Needles: the mean over all cells, of the passkey task unless another is named, without --extend.",
    ),
    Row(
        "plasticity",
        "plasticity",
        _first("ap_overall", lambda values: figure_text(values["ap_overall"])),
        "Plasticity: the mean over positions, and what it loses from the first fifth of the context to the last "
        f"(target: below {TARGET_DROP:.2f}).",
    ),
    Row("plasticity", "drop", _first("ap_drop", lambda values: figure_text(values["ap_drop"]))),
    Row(
        "geometry",
        "bias × context",
        _first("heads", lambda values: figure_text(mean_bias(values["heads"]), 2)),
        "Bias: what keys gain in score over a whole context.",
    ),
    Row(
        "layers",
        "δ with |ρ|",
        _first("spearman_absolute", lambda values: figure_text(values["spearman_absolute"])),
        "δ with |ρ|: rank correlation of the layers' sensitivity with their RoPE's influence.",
    ),
    Row(
        "probes",
        "position error",
        _first("layers", lambda values: f"{min(or_nan(layer['error']) for layer in values['layers']):.1f}"),
        "Position error: of the best layer's probe, in tokens.",
    ),
    Row("order_awareness", "order horizon", _first("horizon", lambda values: f"{values['horizon']:,}")),
)
