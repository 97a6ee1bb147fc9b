"""Grafts two models at several depths and measures each graft."""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.graft.tokenizer import common_tokenizer
from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.model_dir.api import is_adapter
from farsight.configs.schema import NoRotary, Rope
from farsight.data.retrieval.tasks import parse_task
from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError
from farsight.evals.needle.measure import Grid, parse_depths
from farsight.evals.needle.measure import measure as find_needles
from farsight.evals.perplexity.measure import perplexity_by_length
from farsight.evals.windows import TARGETS, Windows
from farsight.inference.decoder import Decoder
from farsight.inference.extend import Extension, parse_extension
from farsight.inference.extend.interpolation import Interpolation
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import reading_options
from farsight.json_files import finite_or_null
from farsight.model.build import ModelConfig
from farsight.model.graft import grafted_config, grafted_model, with_rope
from farsight.model.llama import Llama
from farsight.progress import progress
from farsight.remote import shown

MODES = {"B-Front": ("base", "long"), "L-Front": ("long", "base")}
"""Modes of Algorithm 1: the model that gives the front layers, and the one that gives the back."""


class Sweep:
    """Both models in memory, and the data to measure their grafts on.

    Args:
        models: "base" and "long".
        configs: the models' configs as in their directories, before any extension.
        extension: context extension, applied to each graft.
        grid: passkey prompts; None skips them.
        rope: "base" or "long", whose RoPE all layers of the grafts get; None leaves each layer its own.
    """

    def __init__(
        self,
        models: dict[str, LoadedModel],
        configs: dict[str, ModelConfig],
        documents: Sequence[Tensor],
        lengths: Sequence[int],
        windows: Windows,
        extension: Extension | None = None,
        grid: Grid | None = None,
        untie: bool = False,
        rope: str | None = None,
    ) -> None:
        self.models, self.configs, self.extension, self.untie = models, configs, extension, untie
        self.rope = None if rope is None else configs[rope]
        self.documents, self.lengths, self.windows, self.grid = documents, lengths, windows, grid

    def config(self, mode: str, depth: int) -> ModelConfig:
        """The config of a graft.

        Raises:
            ConfigError: models that can't be grafted.
        """
        front, back = MODES[mode]

        def same_embeddings() -> bool:
            return torch.equal(*(self._llama(name).get_parameter("tok_embeddings.weight") for name in (front, back)))

        configs = [
            self.configs[name] if self.rope is None else with_rope(self.configs[name], self.rope)
            for name in (front, back)
        ]
        config = grafted_config(configs[0], configs[1], depth, same_embeddings, self.untie)
        return config if self.extension is None else self.extension.change(config)

    def graft(self, mode: str, depth: int) -> dict[str, Any]:
        """The figures of a graft."""
        (front, back), config = MODES[mode], self.config(mode, depth)
        model = grafted_model(self._llama(front), self._llama(back), self.configs[back], config, depth)
        return {"depth": depth, **self._measured(model, config, self.models[front])}

    def plain(self, name: str) -> dict[str, Any]:
        """The figures of one of the two models, with its own RoPE or the grafts'."""
        loaded, own = self.models[name], self.configs[name]
        if self.rope is None or self.rope is own:
            return self._measured(loaded.decoder.model, loaded.config, loaded)
        config = with_rope(own, self.rope)
        if self.extension is not None:
            config = self.extension.change(config)
        model = grafted_model(self._llama(name), self._llama(name), own, config, 0)
        return self._measured(model, config, loaded)

    def _llama(self, name: str) -> Llama:
        return self.models[name].decoder.model

    def _measured(self, model: Llama, config: ModelConfig, like: LoadedModel) -> dict[str, Any]:
        chunk = like.decoder.chunk
        found = perplexity_by_length(model, config, self.documents, self.lengths, self.windows, self.extension, chunk)
        figures: dict[str, Any] = {
            key.replace("lengths", "perplexity"): finite_or_null(values) for key, values in found.items()
        }
        if self.grid is not None:
            decoder = Decoder(model, config, self.extension, chunk)
            asked = LoadedModel(like.path, decoder, like.tokenizer, config.trained_length)
            cells = find_needles(asked, self.grid)["cells"]
            figures["passkey"] = {
                str(length): sum(cell["accuracy"] for cell in cells if cell["length"] == length) / len(self.grid.depths)
                for length in self.grid.lengths
            }
        return figures


def run(sweep: Sweep, depths: Sequence[int]) -> dict[str, Any]:
    """{"modes": {mode: a list of {"depth", "perplexity", …}}, "plain": {"base": {"perplexity", …}, "long": …}}.

    Raises:
        ConfigError: models that can't be grafted at one of the depths, before anything is measured.
    """
    for mode in MODES:
        for depth in depths:
            sweep.config(mode, depth)
    modes: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with progress(total=2 + 2 * len(depths), unit="model", desc="grafts") as bar:
        plain = {}
        for name in sweep.models:
            plain[name] = sweep.plain(name)
            bar.update()
        for mode, figures in modes.items():
            for depth in depths:
                figures.append(sweep.graft(mode, depth))
                bar.update()
    return {"modes": modes, "plain": plain}


def measure_models(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the models that the command line names, and of their grafts."""
    folders = {"base": options.base, "long": options.long}
    for folder in folders.values():
        if is_adapter(folder):
            raise ConfigError(f"{folder} is an adapter: merge it first (farsight merge {folder} --out OUT).")
    configs = {name: read_model_config(folder) for name, folder in folders.items()}
    tokenizer, remarks = common_tokenizer(*folders.values())
    print(*remarks, sep="\n", end="\n" * bool(remarks))
    extension = parse_extension(options.extend) if options.extend else None
    one = copy.copy(options)
    if isinstance(extension, Interpolation) and _scaled(configs["long"]):
        if options.rope == "long":
            raise ConfigError(
                f"--extend {options.extend} does nothing here: --rope long gives all layers the scaled RoPE of {options.long}."
            )
        print(f"{options.long} has scaled RoPE: --extend {options.extend} scales the layers of {options.base} alone.")
        configs["base"], extension, one.extend = extension.change(configs["base"]), None, None
    models = {name: load(folder, options if name == "base" else one) for name, folder in folders.items()}
    documents = _documents(options.data, tokenizer or models["base"].tokenizer)
    lengths = sorted(set(options.lengths))
    grid = None
    if options.passkey:
        asked = tuple(sorted(set(options.passkey_length or lengths)))
        grid = Grid(parse_task("passkey"), asked, parse_depths([str(options.passkey)]), trials=1, seed=options.seed)
    windows = Windows(options.windows)
    sweep = Sweep(models, configs, documents, lengths, windows, extension, grid, options.untie, options.rope)
    n_layers = configs["base"].architecture.n_layers
    depths = sorted(set(options.depths)) if options.depths else list(range(n_layers + 1))
    if depths[-1] > n_layers:
        raise ConfigError(f"--depths {depths[-1]}: the models have {n_layers} layers; set 0 to {n_layers}.")
    found = run(sweep, depths)
    return {
        "tool": "analysis.graft_sweep",
        "model": shown(options.long),
        "base": shown(options.base),
        "long": shown(options.long),
        "data": [str(path) for path in options.data],
        "lengths": lengths,
        "windows": options.windows,
        "targets": TARGETS,
        "tokens": sum(map(len, documents)),
        "depths": depths,
        "n_layers": n_layers,
        "trained_length": {name: config.trained_length for name, config in configs.items()},
        "untie": options.untie,
        **reading_options(options),
        "rope": options.rope,
        "passkey": options.passkey,
        "passkey_length": None if grid is None else list(grid.lengths),
        "seed": options.seed,
        **found,
    }


def _scaled(config: ModelConfig) -> bool:
    """True if a layer has RoPE that an interpolation refuses to scale again."""
    return any(not isinstance(layer.rotary, NoRotary | Rope) for layer in config.layers())


def _documents(paths: Sequence[Path], tokenizer: Tokenizer) -> list[Tensor]:
    return [document for path in paths for document in encode_file(path, tokenizer)]
