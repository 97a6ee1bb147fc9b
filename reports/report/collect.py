"""Collects the results that `farsight report` shows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.json_files import fields_of, read_object
from farsight.reports.report.sections import SECTIONS
from farsight.reports.results import Result, Source, collect_from
from farsight.training.runs import NamedModel

FOLDER = "evals"
"""Folder in a run or model with its results."""


def collect(models: Sequence[NamedModel], named: Sequence[Path]) -> list[Result]:
    """The results in the models' `evals` folders and in the named files; failing these, perplexities that a recipe measured itself.

    Raises:
        ConfigError: a file that cannot be read, or a named file without a result of these models.
    """
    results = collect_from(EVALS, models, named)
    for model in models:
        if not any(result.model is model and result.kind == "perplexity" for result in results):
            results += _recipe_summary(model)
    return results


def _kind(values: Mapping[str, Any]) -> str | None:
    return next((section.command for section in SECTIONS if section.is_result(values)), None)


_NAMES = [f"farsight {section.command}" for section in SECTIONS]
EVALS = Source(FOLDER, _kind, f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}")


def _recipe_summary(model: NamedModel) -> list[Result]:
    """Perplexities that a recipe measured after its last stage."""
    file = model.path / "summary.json"
    if not file.is_file() or not model.runs:
        return []
    stages = read_object(file).get("stages")
    with fields_of(file):
        last: dict[str, Any] = next((stage for stage in stages or () if stage["name"] == model.runs[-1].name), {})
        if not last.get("perplexity"):
            return []
        data, _, tokens = last["perplexity_of"]
        text = f"the first {tokens:,} tokens of {data}" if tokens else data
        values = {"lengths": last["perplexity"], "data": [text], "trained_length": last["seq_len"]}
        if "perplexity_scope_length" in last:
            values["lengths_scope_length"] = last["perplexity_scope_length"]
    return [Result(model, "perplexity", file, values)]
