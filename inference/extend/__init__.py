"""Training-free ways to read further than a model was trained: plug-ins of `evals.decoder.Decoder`.

An extension either changes the positions that a model is built with (`interpolation`), or it keeps and turns keys itself, layer
by layer (`remapped`). Each is a dataclass whose fields are its settings; `METHODS` lists them.
"""

import dataclasses
from typing import TYPE_CHECKING, Protocol

from farsight.configs.load import ConfigError, from_dict, parse_options
from farsight.errors import nearest
from farsight.inference.extend.adagrope import AdaGroPE
from farsight.inference.extend.chunk_llama import ChunkLlama
from farsight.inference.extend.gali import Gali
from farsight.inference.extend.interpolation import INTERPOLATIONS
from farsight.inference.extend.ripra import Ripra
from farsight.inference.extend.self_extend import SelfExtend

if TYPE_CHECKING:
    from farsight.inference.kv_cache import Batch, LayerCache
    from farsight.model.build import ModelConfig
    from farsight.model.llama import Llama


class Extension(Protocol):
    """A way to read further."""

    def change(self, config: "ModelConfig") -> "ModelConfig":
        """The config to build the model with.

        Raises:
            ConfigError: a model that it does not fit, and why.
        """
        ...

    def caches(self, model: "Llama", config: "ModelConfig", batch: "Batch") -> "dict[str, LayerCache] | None":
        """A cache for each layer, by the layer's number, which turns queries and keys itself; None leaves them to the model."""
        ...


METHODS: dict[str, type] = {
    **INTERPOLATIONS,
    **{method.name: method for method in (Ripra, SelfExtend, ChunkLlama, AdaGroPE, Gali)},
}


def _usage(method: type) -> str:
    """A method with its settings and their defaults."""
    settings = []
    for field in dataclasses.fields(method):
        default = "…" if field.default is dataclasses.MISSING else field.default
        settings.append(f"{field.name}={default:.3g}" if isinstance(default, float) else f"{field.name}={default}")
    return f"{method.name}:{','.join(settings)}"  # type: ignore[attr-defined]  # every method has a name


EXTENSIONS_HELP = (
    "read further than the model was trained, without training it (docs/inference/extensions.md); 0 is worked out from the lengths: "
    + "; ".join(_usage(method) for method in METHODS.values())
)


def parse_extension(text: str) -> Extension:
    """The extension that `--extend` names: METHOD, METHOD:KEY=VALUE,… or METHOD:VALUE for its first setting alone.

    Raises:
        ConfigError: a method or setting that is not there, or a value that does not fit.
    """
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise ConfigError(f"--extend {text}: there is no method {name!r}.{nearest(name, list(METHODS))}")
    method, items = METHODS[name], [item for item in rest.split(",") if item]
    fields = dataclasses.fields(method)
    if items and "=" not in items[0]:
        items[0] = f"{fields[0].name}={items[0]}"
    values = parse_options([f"--{item}" for item in items])
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"--extend {text}: set {field.name}, for example {name}:{field.name}=4.")
    return from_dict(method, values, f"--extend {name}")
