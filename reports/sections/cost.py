"""The report's section on the cost of serving: calculated from configs, and measured by `farsight generate`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from farsight.inference.decoder import Usage
from farsight.inference.scope_growth import with_growing_scopes
from farsight.reports.charts import Axis, Series, length_axis, line_chart
from farsight.reports.page import figure, heading, legend, note, small, table
from farsight.reports.results import Result, names
from farsight.reports.serving_cost import ServingCost, serving_costs
from farsight.reports.tools import Tool, is_number
from farsight.training.runs import NamedModel

DEFAULT_LENGTHS = tuple(1024 << power for power in range(8))
"""1k to 128k."""


@dataclass(frozen=True)
class ModelCost:
    """A model's cost by length, with its scopes as trained or grown with the sequence."""

    model: NamedModel
    grown: bool
    costs: tuple[ServingCost, ...]

    @property
    def name(self) -> str:
        return self.model.name + ", scopes grown" * self.grown


def model_costs(models: Sequence[NamedModel], lengths: Sequence[int]) -> list[ModelCost]:
    """Each model's cost, and a second one with grown scopes where that differs at one of the lengths."""
    found = []
    for model in models:
        found.append(ModelCost(model, False, tuple(serving_costs(model.config, lengths))))
        grown = with_growing_scopes(model.config)
        if grown is not None and max(lengths) > model.config.trained_length:
            found.append(ModelCost(model, True, tuple(serving_costs(grown, lengths))))
    return found


def cost_parts(costs: Sequence[ModelCost]) -> list[Markup]:
    """Cache and prefill by context length."""
    return [
        note(
            "Calculated from each model's config, for one sequence. Past the trained length, scopes stay as trained or grow with the "
            "sequence (`scope_max`); where both are possible, both are shown."
        ),
        heading("KV cache"),
        *_figure(
            costs,
            "Cache",
            Axis("bytes", "log", text=bytes_text, say=bytes_text, base=2),
            lambda c: (c.cache_bytes, c.dense_cache_bytes),
            lambda c: f"{c.cache_bytes:,} of {c.dense_cache_bytes:,} bytes",
            "Bytes that farsight generate allocates, in bfloat16: each key/value head keeps what the widest scope among its query "
            "heads can see. Grey: a cache in which every head keeps every token.",
        ),
        heading("Attention of a prefill"),
        *_figure(
            costs,
            "Attention",
            Axis("FLOPs", "log", text=flops_text, say=flops_text),
            lambda c: (c.attention_flops, c.dense_attention_flops),
            lambda c: f"{c.pairs:,} of {c.dense_pairs:,} query-key pairs",
            "FLOPs of scores and values: 4 × head dimension for each query-key pair that a head sees, in all layers. Grey: "
            "dense causal attention.",
        ),
        heading("Whole prefill"),
        _prefill_table(costs),
    ]


def _figure(
    costs: Sequence[ModelCost],
    what: str,
    y: Axis,
    of: Callable[[ServingCost], tuple[int, int]],
    exactly: Callable[[ServingCost], str],
    caption: str,
) -> list[Markup]:
    """A legend, and a chart of one figure over context length, beside dense attention's, with its table."""
    dense = _dense(costs, of)
    references = [Series(name, points, None, dashed=True) for name, points in dense.items()]
    lines = [
        Series(c.name, [(cost.length, of(cost)[0]) for cost in c.costs], c.model.number, dashed=c.grown) for c in costs
    ]
    exact = {(c.name, cost.length): f"\n{exactly(cost)}" for c in costs for cost in c.costs}
    lengths = [cost.length for cost in costs[0].costs]

    column = dense if len(dense) == 1 else {}
    rows = [
        [
            f"{length:,}",
            *(y.text(points[number][1]) for points in column.values()),
            *(small(y.text(own), percent(own / dense)) for own, dense in (of(c.costs[number]) for c in costs)),
        ]
        for number, length in enumerate(lengths)
    ]
    figures = table(
        ["tokens", *column, *(c.name for c in costs)], rows, f"{what} by context length, and its share of dense."
    )
    return [
        legend([dataclasses.replace(references[0], name="dense"), *lines]),
        figure(
            line_chart(
                references + lines, length_axis(lengths), y, (), lambda *at: exact.get((at[0].name, int(at[1])), "")
            ),
            caption,
            figures,
        ),
    ]


def _dense(
    costs: Sequence[ModelCost], of: Callable[[ServingCost], tuple[int, int]]
) -> dict[str, list[tuple[float, float]]]:
    """The figure with dense attention for each model's shape, or a single line if all agree."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for c in costs:
        if not c.grown:
            groups.setdefault(tuple(of(cost)[1] for cost in c.costs), []).append(c.model.name)
    lengths = [cost.length for cost in costs[0].costs]
    return {
        "dense" if len(groups) == 1 else f"dense, as {', '.join(group)}": list(zip(lengths, values, strict=True))
        for values, group in groups.items()
    }


def _prefill_table(costs: Sequence[ModelCost]) -> Markup:
    rows = [
        [
            f"{at[0].length:,}",
            *(small(flops_text(cost.attention_flops + cost.linear_flops), percent(cost.prefill_share)) for cost in at),
        ]
        for at in zip(*(c.costs for c in costs), strict=True)
    ]
    return table(
        ["tokens", *(c.name for c in costs)],
        rows,
        "FLOPs of attention and of the layers' linear parts together, with their share of the FLOPs with dense attention.",
    )


def _measured(generated: Sequence[Result]) -> list[Markup]:
    """The cost of `farsight generate` runs."""
    rows = []
    for result, name in zip(generated, names(generated), strict=True):
        u = result.values["usage"]
        read, wrote = (
            f"{u[tokens] / u[seconds]:,.1f}" if u[seconds] else "–"
            for tokens, seconds in (("tokens_read", "seconds_reading"), ("tokens_written", "seconds_writing"))
        )
        dense = u["dense_cache_bytes"]
        cache = small(bytes_text(u["cache_bytes"]), percent(u["cache_bytes"] / dense) if dense else "")
        rows.append([name, f"{u['tokens_read']:,}", read, f"{u['tokens_written']:,}", wrote, cache])
    caption = (
        "Measured by farsight generate: tokens of all prompts and completions, and the cache of the largest batch with its share "
        "of a dense one."
    )
    header = ["run", "tokens read", "a second", "tokens written", "a second", "cache"]
    return [heading("Measured"), table(header, rows, caption)]


def percent(share: float) -> str:
    """A percentage with at least three digits: 100.0 %, 16.2 %, 0.604 %."""
    return f"{100 * share:.1f} %" if share >= 0.1 else f"{100 * share:#.3g} %"


def bytes_text(number: float) -> str:
    return _with_unit(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def flops_text(number: float) -> str:
    return _with_unit(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def _with_unit(number: float, step: int, units: Sequence[str]) -> str:
    """A number in the largest fitting unit, with three digits, or four if they are whole."""
    power = 0
    while number >= step and power < len(units) - 1:
        number, power = number / step, power + 1
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return f"{digits} {units[power]}"


def _is_generate(values: Mapping[str, Any]) -> bool:
    match values:
        case {"usage": dict(usage)}:
            return all(is_number(usage.get(field.name)) for field in dataclasses.fields(Usage))
    return False


GENERATE = Tool(
    command="generate",
    heading="Cost",
    is_result=_is_generate,
    show=_measured,
    arguments=lambda texts, _: ["--prompt-file", texts[0]],
)
