"""Grafts two models: the first layers of one in front of the other layers of the other (LASP paper, Algorithm 1).

    farsight graft --front BASE --back LONG --layers 4 --out OUT        # the paper's B-Front
    farsight graft --front LONG --back BASE --layers 4 --out OUT        # its L-Front

The front model gives the embedding and layers 0 to K − 1, the back model layers K to N − 1, the final norm and the output head:
with K = 0 every layer is the back model's, with K = N the front model's. Layers keep their positions: RoPE and its scaling,
LASP, scopes, windows, ALiBi, GARFA, NoPE. The models need the same shapes and the same vocabulary, as those have of which
one was trained on from the other.

Both may be model directories or checkpoints. Weights pass one at a time and are written as they are, bit for bit. OUT is a
model directory as other ones are; it appears whole or not at all. docs/analysis/graft.md says what becomes of tied embeddings,
scopes and trained lengths; farsight graft-sweep measures all depths without writing any.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.cards.model import read_history, training_table
from farsight.checkpoints.checkpoint_tensors import checkpoint_tensors, parameter_shapes, read_tensor
from farsight.checkpoints.convert import DTYPES
from farsight.checkpoints.intact import is_complete
from farsight.checkpoints.model_dir.api import (
    check_tensors,
    is_adapter,
    read_model_config,
    tensor_dtypes,
    write_model_dir,
)
from farsight.checkpoints.model_dir.safetensors_files import TensorReader
from farsight.cli import bounded, command
from farsight.configs.json_files import fields_of, read_object
from farsight.configs.load import ConfigError
from farsight.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.files import check_new_folder, prepare_file, write_text
from farsight.model.build import ModelConfig
from farsight.model.graft import grafted_config, source
from farsight.model.position.layers import describe, layer_selection


@dataclass(frozen=True)
class Stock:
    """One of the two models: a model directory or a checkpoint, whose tensors are read when they are asked for."""

    directory: Path
    config: ModelConfig
    dtypes: dict[str, torch.dtype]
    """That each tensor is kept in, by our name."""
    read: Callable[[str], Tensor]
    place: Callable[[str], str]
    """What to sort tensors by, so that each file is opened once."""
    close: Callable[[], None]


def open_stock(directory: Path) -> Stock:
    """Reads what there is, and no weights.

    Raises:
        ConfigError: no whole model, a quantised one, or a damaged checkpoint.
    """
    if is_adapter(directory):
        raise ConfigError(
            f"{directory} is an adapter, whose layers are its base's with something added: merge it, and graft what that "
            f"writes (farsight merge {directory} --out OUT)."
        )
    if is_complete(directory):
        config = read_model_config(directory)
        tensors = checkpoint_tensors(directory, config)
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return Stock(directory, config, dtypes, partial(read_tensor, directory, tensors), str, lambda: None)
    config = read_model_config(directory)
    path = directory / "config.json"
    if path.is_file() and (quantized := read_object(path).get("quantization_config")):
        with fields_of(path):
            method = quantized.get("quant_method", "an unnamed method")
        raise ConfigError(f"{directory} holds quantised weights ({method}); graft the model that they were made from.")
    files = check_tensors(directory, config)
    reader = TensorReader(files)
    return Stock(directory, config, tensor_dtypes(files), reader, lambda name: str(files[name]), reader.close)


def graft(
    front: Path, back: Path, layers: int, out: Path, dtype: torch.dtype | None = None, untie: bool = False
) -> tuple[ModelConfig, list[str]]:
    """Writes the graft's model directory.

    Args:
        layers: how many of its first layers, with the embedding, are the front model's.
        dtype: of the weights written; None keeps each tensor's own.
        untie: where both models are tied and their embeddings differ, write the back model's as the head.

    Returns:
        The graft's config, and remarks on what the two models do not have in common.

    Raises:
        ConfigError: models that do not fit, or weights that are not finite.
        UserError: `out` is there, and is not an empty folder.
    """
    check_new_folder(out)
    stocks = {True: open_stock(front), False: open_stock(back)}
    config = grafted_config(stocks[True].config, stocks[False].config, layers, partial(_same_embeddings, stocks), untie)
    tokenizer, remarks = common_tokenizer(front, back)
    if dtype is None:
        _refuse_other_dtypes(stocks[True], stocks[False])

    sources = {name: source(name, layers, stocks[False].config) for name in parameter_shapes(config)}
    order = sorted(sources, key=lambda name: (not sources[name][0], stocks[sources[name][0]].place(sources[name][1])))
    shapes = parameter_shapes(config)
    tensors = {
        name: torch.empty(shapes[name], dtype=stocks[sources[name][0]].dtypes[sources[name][1]], device="meta")
        for name in order
    }

    def read(name: str) -> Tensor:
        of_front, theirs = sources[name]
        return stocks[of_front].read(theirs)

    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is not None:
            tokenizer.save(folder)
        kept = None if tokenizer is None else Path(folder)
        history = _history(front, back, layers, config)
        write_model_dir(
            out, config, tensors, read, kept, dtype, history=history, notes=_notes(front, back, layers, config)
        )
    for stock in stocks.values():
        stock.close()
    return config, remarks


# ── Whether they fit ──────────────────────────────────────────────────────────────────────────────────


def _same_embeddings(stocks: dict[bool, Stock]) -> bool:
    return torch.equal(*(stock.read("tok_embeddings.weight") for stock in stocks.values()))


def _refuse_other_dtypes(front: Stock, back: Stock) -> None:
    shared = [name for name in front.dtypes if name in back.dtypes]
    for name in shared:
        a, b = (str(stock.dtypes[name]).removeprefix("torch.") for stock in (front, back))
        if a != b:
            raise ConfigError(
                f"{name} is kept in {a} in {front.directory} and in {b} in {back.directory}: say with --dtype what to write "
                f"({', '.join(DTYPES)})."
            )


def common_tokenizer(front: Path, back: Path) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer that both models were trained with, the front's where they have two; None where they have none.

    Special tokens may have other names, as reserved ones have that a later model gives a use.

    Returns:
        The tokenizer, and remarks on what differs.

    Raises:
        ConfigError: tokenizers whose vocabularies differ in more than that.
    """
    folders = [find_tokenizer_dir(directory) for directory in (front, back)]
    a, b = (None if folder is None else load_tokenizer_dir(folder) for folder in folders)
    if a is None or b is None:
        return a or b, []
    if a.fingerprint == b.fingerprint:
        return a, []
    unlike = {i: (a.vocabulary.get(i), b.vocabulary.get(i)) for i in a.vocabulary.keys() | b.vocabulary.keys()}
    unlike = {i: tokens for i, tokens in sorted(unlike.items()) if tokens[0] != tokens[1]}
    special = [{*tokenizer.special_tokens.values()} for tokenizer in (a, b)]
    ordinary = [
        i
        for i, tokens in unlike.items()
        if any(t is not None and i not in s for t, s in zip(tokens, special, strict=True))
    ]
    if ordinary:
        first, number = ordinary[0], len(ordinary)
        raise ConfigError(
            f"The models' vocabularies differ in {number:,} {'token' if number == 1 else 'tokens'}: token {first} is "
            f"{unlike[first][0]!r} in {front} and {unlike[first][1]!r} in {back}."
        )
    if not unlike:
        return a, [
            "The tokenizers have the same vocabulary and differ in something else; the front model's is written."
        ]
    names = ", ".join(f"{i} is {x!r} and {y!r}" for i, (x, y) in list(unlike.items())[:3])
    more = f", and {len(unlike) - 3} more" * (len(unlike) > 3)
    return a, [f"Special tokens differ ({names}{more}); the front model's are written."]


# ── What the card says ────────────────────────────────────────────────────────────────────────────────


def parts(front: str | Path, back: str | Path, layers: int, n_layers: int) -> str:
    """Which model gives what, in words."""
    given = [f"layers {layer_selection(r)}" if r else "no layer" for r in (range(layers), range(layers, n_layers))]
    return f"the embedding and {given[0]} of {front}; {given[1]}, the final norm and the output head of {back}"


def _history(front: Path, back: Path, layers: int, config: ModelConfig) -> list[dict[str, Any]]:
    """The runs that trained the weights of either, each once, the front model's first."""
    history = [dict(entry) for entry in read_history(front)]
    history += [dict(entry) for entry in read_history(back) if entry not in history]
    if history:
        history[-1]["grafted"] = parts(front, back, layers, config.architecture.n_layers)
    return history


def _notes(front: Path, back: Path, layers: int, config: ModelConfig) -> str:
    lines = [
        "\n## What it was grafted from\n",
        f"This model is {parts(f'`{front}`', f'`{back}`', layers, config.architecture.n_layers)}. It was not trained after "
        "that. Slices are Python's: 0:2 is layers 0 and 1.\n",
    ]
    for directory in (front, back):
        lines += [f"`{directory}`:\n", *training_table(read_history(directory))]
    return "\n".join(lines)


@command
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight graft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--front", type=Path, required=True, metavar="A", help="model of the embedding and the first layers"
    )
    parser.add_argument(
        "--back", type=Path, required=True, metavar="B", help="model of the other layers, norm and head"
    )
    parser.add_argument(
        "--layers",
        type=bounded(int, least=0),
        required=True,
        metavar="K",
        help="how many layers A gives: 0 to all of them",
    )
    parser.add_argument("--out", type=Path, required=True, help="model directory to write; must not exist")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights written (default: theirs, where they have the same)"
    )
    parser.add_argument(
        "--untie", action="store_true", help="where tied embeddings differ, write B's as a head of its own"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write what was done here too")
    options = parser.parse_args(arguments)
    if options.json:
        prepare_file(options.json)
    config, remarks = graft(
        options.front, options.back, options.layers, options.out, DTYPES.get(options.dtype), options.untie
    )
    n_layers = config.architecture.n_layers
    said = parts(options.front, options.back, options.layers, n_layers)
    print(describe(config.layers()), f"{said[0].upper()}{said[1:]}.", *remarks, options.out, sep="\n")
    if options.json:
        figures = {
            "tool": "checkpoints.graft", "model": str(options.out), "front": str(options.front), "back": str(options.back),
            "layers": options.layers, "n_layers": n_layers, "trained_length": config.trained_length,
            "tied": config.architecture.tie_embeddings, "remarks": remarks,
        }  # fmt: skip
        write_text(options.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
