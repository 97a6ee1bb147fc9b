"""What the first layers of a long-context model are worth in a short-context one, and the other way round (LASP paper, Figure 4).

    farsight graft-sweep --base SHORT --long LONG --data BOOKS.jsonl --lengths 1024 8192 --picture graft.png --json F
    farsight graft-sweep --base SHORT --long LONG --data FILE --lengths 4096 --depths 0 2 4 8 --passkey 20

Two models of one lineage are grafted at every depth l (Algorithm 1), in memory: B-Front has the embedding and layers 0 … l − 1 of
the base model and the other layers, norm and head of the long one; L-Front has them exchanged. Of each graft, and of both models
as they are, it gives the perplexity by length, as farsight perplexity measures it: the last 256 tokens of windows that lie side by
side. With --passkey N also the share of N passkeys that it finds, at depths spread evenly over the context (farsight needle).

farsight graft writes one such graft as a model directory. Models whose embedding is also their head are refused where
those differ, as there; --untie gives grafts both.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.analysis.graft_sweep.picture import draw
from farsight.checkpoints.graft.tokenizer import common_tokenizer
from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.model_dir.api import is_adapter
from farsight.cli import bounded, command, positive
from farsight.configs.load import ConfigError
from farsight.data.retrieval.tasks import parse_task
from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.evals.needle.measure import Grid, parse_depths
from farsight.evals.needle.measure import measure as find_needles
from farsight.evals.perplexity.measure import perplexity_by_length
from farsight.evals.windows import TARGETS, Windows
from farsight.files import write_text
from farsight.inference.decoder import Decoder
from farsight.inference.extend import Extension
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import add_model_options
from farsight.model.build import ModelConfig
from farsight.model.graft import grafted_config, grafted_model
from farsight.model.llama import Llama
from farsight.outputs import add_output_options, check_outputs
from farsight.progress import progress

MODES = {"B-Front": ("base", "long"), "L-Front": ("long", "base")}
"""Algorithm 1's: which model gives the front, and which the back."""


class Sweep:
    """Both models in memory, and what their grafts are measured on.

    Args:
        models: "base" and "long".
        configs: theirs, as their directories have them.
        extension: reads further than models were trained; it is applied to each graft anew.
        grid: questions for passkeys; None asks none.
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
    ) -> None:
        self.models, self.configs, self.extension, self.untie = models, configs, extension, untie
        self.documents, self.lengths, self.windows, self.grid = documents, lengths, windows, grid

    def config(self, mode: str, depth: int) -> ModelConfig:
        """Of a graft.

        Raises:
            ConfigError: models that can't be grafted.
        """
        front, back = MODES[mode]

        def same_embeddings() -> bool:
            return torch.equal(*(self._llama(name).get_parameter("tok_embeddings.weight") for name in (front, back)))

        config = grafted_config(self.configs[front], self.configs[back], depth, same_embeddings, self.untie)
        return config if self.extension is None else self.extension.change(config)

    def graft(self, mode: str, depth: int) -> dict[str, Any]:
        """Figures of a graft."""
        (front, back), config = MODES[mode], self.config(mode, depth)
        model = grafted_model(self._llama(front), self._llama(back), self.configs[back], config, depth)
        return {"depth": depth, **self._measured(model, config, self.models[front])}

    def plain(self, name: str) -> dict[str, Any]:
        """Figures of one of the models as it is."""
        loaded = self.models[name]
        return self._measured(loaded.decoder.model, loaded.config, loaded)

    def _llama(self, name: str) -> Llama:
        return self.models[name].decoder.model

    def _measured(self, model: Llama, config: ModelConfig, like: LoadedModel) -> dict[str, Any]:
        chunk = like.decoder.chunk
        found = perplexity_by_length(model, config, self.documents, self.lengths, self.windows, self.extension, chunk)
        figures: dict[str, Any] = {
            key.replace("lengths", "perplexity"): {length: _finite(value) for length, value in values.items()}
            for key, values in found.items()
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


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


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


def table(figures: dict[str, Any]) -> str:
    """A line for each graft and model, a column for each length."""
    columns = [(key, length) for key in ("perplexity", "passkey") for length in figures["plain"]["base"].get(key, ())]
    lines = [f"{'':>8}{'depth':>6}" + "".join(f"{_heading(key, length):>16}" for key, length in columns)]
    rows = [("base", "", figures["plain"]["base"]), ("long", "", figures["plain"]["long"])]
    rows += [(mode, row["depth"], row) for mode, found in figures["modes"].items() for row in found]
    for name, depth, row in rows:
        cells = [_cell(row[key][length]) for key, length in columns]
        lines.append(f"{name:>8}{depth:>6}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _heading(key: str, length: str) -> str:
    return f"{'ppl' if key == 'perplexity' else key} {int(length):,}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@command
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight graft-sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, metavar="SHORT", help="the short-context model")
    parser.add_argument(
        "--long", type=Path, required=True, metavar="LONG", help="the model trained further on long ones"
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 text, or .jsonl")
    parser.add_argument("--lengths", type=positive, nargs="+", required=True, metavar="L", help="windows in tokens")
    parser.add_argument(
        "--depths",
        type=bounded(int, least=0),
        nargs="+",
        metavar="l",
        help="layers in front (default: 0 to all of them)",
    )
    parser.add_argument(
        "--windows", type=bounded(int, least=0), default=0, help="at most this many windows a length (default: all)"
    )
    parser.add_argument("--untie", action="store_true", help="where tied embeddings differ, give grafts both")
    parser.add_argument("--passkey", type=positive, metavar="N", help="also look for N passkeys a length")
    parser.add_argument(
        "--passkey-length", type=positive, nargs="+", metavar="L", help="in tokens (default: those of --lengths)"
    )
    parser.add_argument("--seed", type=bounded(int, least=0), default=0, help="makes up the passkeys (%(default)s)")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.passkey_length and not options.passkey:
        parser.error("--passkey-length needs --passkey N, how many to look for")
    check_outputs(parser, options)
    figures = _figures(options)
    print(table(figures))
    if options.json:
        write_text(options.json, json.dumps(figures, indent=2) + "\n")
    if options.picture:
        draw(figures, options.picture)
        print(options.picture)


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    folders = {"base": options.base, "long": options.long}
    for folder in folders.values():
        if is_adapter(folder):
            raise ConfigError(f"{folder} is an adapter: merge it first (farsight merge {folder} --out OUT).")
    configs = {name: read_model_config(folder) for name, folder in folders.items()}
    tokenizer, remarks = common_tokenizer(*folders.values())
    print(*remarks, sep="\n", end="\n" * bool(remarks))
    models = {name: load(folder, options) for name, folder in folders.items()}
    documents = _documents(options.data, tokenizer or models["base"].tokenizer)
    lengths = sorted(set(options.lengths))
    grid = None
    if options.passkey:
        asked = tuple(sorted(set(options.passkey_length or lengths)))
        grid = Grid(parse_task("passkey"), asked, parse_depths([str(options.passkey)]), trials=1, seed=options.seed)
    extension = models["base"].decoder.extension
    sweep = Sweep(models, configs, documents, lengths, Windows(options.windows), extension, grid, options.untie)
    n_layers = configs["base"].architecture.n_layers
    depths = sorted(set(options.depths)) if options.depths else list(range(n_layers + 1))
    found = run(sweep, depths)
    return {
        "tool": "analysis.graft_sweep",
        "model": str(options.long),
        "base": str(options.base),
        "long": str(options.long),
        "data": [str(path) for path in options.data],
        "lengths": lengths,
        "windows": options.windows,
        "targets": TARGETS,
        "tokens": sum(map(len, documents)),
        "depths": depths,
        "n_layers": n_layers,
        "trained_length": {name: config.trained_length for name, config in configs.items()},
        "untie": options.untie,
        "extend": options.extend,
        "passkey": options.passkey,
        "passkey_length": None if grid is None else list(grid.lengths),
        "seed": options.seed,
        **found,
    }


def _documents(paths: Sequence[Path], tokenizer: Tokenizer) -> list[Tensor]:
    return [document for path in paths for document in encode_file(path, tokenizer)]


if __name__ == "__main__":
    main()
