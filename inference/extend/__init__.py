"""Training-free context extension: plug-ins of `inference.decoder.Decoder` that read further than a model was trained.

An extension either changes the positions that a model is built with (`interpolation`), or keeps and rotates keys itself, layer
by layer (`remapped`). Each is a dataclass whose fields are its settings. `METHODS` lists them, and
`inference.model_options.EXTENSIONS` repeats their settings for --help.
"""

import dataclasses
from typing import TYPE_CHECKING, Protocol

from farsight.configs.load import parse_options
from farsight.configs.typed import from_dict
from farsight.errors import ConfigError, nearest
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
    """A context extension."""

    def change(self, config: "ModelConfig") -> "ModelConfig":
        """Returns the config to build the model with.

        Raises:
            ConfigError: the extension does not fit the model.
        """
        ...

    def caches(self, model: "Llama", config: "ModelConfig", batch: "Batch") -> "dict[str, LayerCache] | None":
        """Caches that rotate queries and keys themselves, by layer number; None leaves caching to the model."""
        ...


METHODS: dict[str, type] = {
    **INTERPOLATIONS,
    **{method.name: method for method in (Ripra, SelfExtend, ChunkLlama, AdaGroPE, Gali)},
}


def parse_extension(text: str) -> Extension:
    """The extension that `--extend` names: METHOD, METHOD:KEY=VALUE,… or METHOD:VALUE for the first setting.

    Raises:
        ConfigError: an unknown method or setting, or an invalid value.
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
