"""Results of evaluations in a card's metadata, in the form of the Hugging Face Hub's model-index."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farsight.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TASK = "text-generation"
READING = ("extend", "scope_max", "quantization")
"""Settings of a result's JSON that change what a model computes."""


def eval_results(kind: str, figures: Mapping[str, Any]) -> "list[EvalResult]":
    """The hub's entries for a result of one of our tools; figures that are missing or not finite have none.

    Args:
        kind: "perplexity", "needle" or "harness".
        figures: the tool's JSON for one model.
    """
    from huggingface_hub import EvalResult

    settings = {name: figures[name] for name in READING if figures.get(name) is not None}
    found: list[EvalResult] = []

    def add(dataset: str, name: str, metric: str, value: Any, title: str, of_data: dict[str, Any], **own: Any) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            found.append(
                EvalResult(
                    task_type=TASK, dataset_type=dataset, dataset_name=name, dataset_args=of_data or None,
                    metric_type=metric, metric_value=value, metric_name=title, metric_args={**settings, **own} or None,
                )
            )  # fmt: skip

    match kind:
        case "perplexity":
            files = ", ".join(Path(name).name for name in figures.get("data", ())) or "text"
            for key, more in (("lengths", {}), ("lengths_scope_length", {"scope_max": "length"})):
                for length, value in figures.get(key, {}).items():
                    grown = ", scopes grown" * bool(more)
                    title = f"perplexity at {int(length):,} tokens{grown}"
                    add("text", files, "perplexity", value, title, {}, length=int(length), **more)
        case "needle":
            right, trials = defaultdict[int, float](float), defaultdict[int, int](int)
            for cell in figures["cells"]:
                right[cell["length"]] += cell["accuracy"] * cell["trials"]
                trials[cell["length"]] += cell["trials"]
            task = figures.get("task") or "needle"
            for length in sorted(trials):
                title = f"accuracy at {length:,} tokens"
                add(task, task, "accuracy", right[length] / trials[length], title, {}, length=length)
        case "harness":
            for task, result in figures["results"].items():
                metric = str(result.get("metric") or "score").partition(",")[0]
                shots = {} if result.get("shots") is None else {"num_few_shot": result["shots"]}
                add(task, task, metric, result["value"], f"{metric} of {task}", shots)
    return found


def with_metadata(
    card: str,
    name: str,
    results: "Sequence[EvalResult]" = (),
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """A card with more metadata; its text stays as it is.

    Args:
        card: the card's text.
        name: name of the model, for its results.
        results: replace those of the card, if there are any.
        license: the hub's name of a license, such as "apache-2.0".
        base_model: ORG/NAME of the model that an adapter belongs to.

    Raises:
        ConfigError: metadata that can't be read.
    """
    from huggingface_hub import ModelCard

    try:
        read = ModelCard(card)
    except Exception as error:  # of YAML, and of the library's own checks
        raise ConfigError(f"The card's metadata, between the lines of ---, can't be read: {error}.") from error
    data: Any = read.data
    if results:
        data.model_name, data.eval_results = name, list(results)
    if license is not None:
        data.license = license
    if base_model is not None:
        data.base_model = base_model
    return str(read)
