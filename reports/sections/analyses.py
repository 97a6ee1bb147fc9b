"""The commands that look inside a model, a section each."""

from collections.abc import Callable, Sequence

from markupsafe import Markup

from farsight.configs.schema import NoRotary
from farsight.reports.results import Result
from farsight.reports.sections.layers import (
    show_grafts,
    show_layer_probes,
    show_layers,
    show_order_awareness,
    show_probes,
)
from farsight.reports.sections.plasticity import show_geometry, show_plasticity
from farsight.reports.tools import Tool
from farsight.training.runs import NamedModel


def _tool(
    command: str,
    heading: str,
    show: Callable[[Sequence[Result]], list[Markup]],
    *options: str,
    fits: Callable[[NamedModel], bool] = lambda _: True,
    models: int = 1,
) -> Tool:
    """A command that writes its module's name into its results; if it takes one model, --measure runs it with its options."""
    return Tool(
        command,
        heading,
        lambda values: values.get("tool") == f"analysis.{command.replace('-', '_')}",
        show,
        (lambda texts, _: ["--data", texts[0], *options]) if models == 1 else None,
        measured=models == 1,
        fits=fits,
        folder="analysis",
    )


def _rotates(model: NamedModel) -> bool:
    return any(not isinstance(layer.rotary, NoRotary) for layer in model.config.layers())


ANALYSES = (
    _tool("plasticity", "Plasticity", show_plasticity),
    _tool("geometry", "Geometry of queries and keys", show_geometry),
    _tool("layers", "Layer sensitivity", show_layers),
    _tool("layer-probes", "One layer disturbed", show_layer_probes, "--probe", "mask", fits=_rotates),
    _tool("probes", "Position probes", show_probes),
    _tool("order-awareness", "Order awareness", show_order_awareness),
    _tool("graft-sweep", "Grafts", show_grafts, models=2),
)
