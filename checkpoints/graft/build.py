"""Writes a graft: the first layers of one model in front of the remaining layers of another."""

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
from farsight.checkpoints.convert.dtypes import DTYPES
from farsight.checkpoints.graft.tokenizer import common_tokenizer
from farsight.checkpoints.intact.check import is_complete
from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.model_dir.api import check_tensors, is_adapter, read_config, tensor_dtypes, write_model_dir
from farsight.checkpoints.model_dir.safetensors_files import TensorReader
from farsight.errors import ConfigError
from farsight.files import check_new_folder
from farsight.json_files import fields_of, read_object
from farsight.model.build import ModelConfig
from farsight.model.graft import grafted_config, source, with_rope
from farsight.model.position.layers import layer_selection
from farsight.remote import shown


@dataclass(frozen=True)
class SourceModel:
    """One of the two models: a model directory or a checkpoint. Tensors are read on demand."""

    directory: Path
    config: ModelConfig
    dtypes: dict[str, torch.dtype]
    """Stored dtype of each tensor, by our names."""
    read: Callable[[str], Tensor]
    place: Callable[[str], str]
    """Sort key of tensors: in its order, each file is opened once."""
    close: Callable[[], None]


def open_model(directory: Path) -> SourceModel:
    """Opens a model directory or checkpoint; no weights are read yet.

    Raises:
        ConfigError: not a whole model, a quantised one, or a damaged checkpoint.
    """
    if is_adapter(directory):
        raise ConfigError(
            f"{directory} is an adapter, not a whole model: merge it (farsight merge {directory} --out OUT) and graft the result."
        )
    if is_complete(directory):
        config = read_config(directory)
        tensors = checkpoint_tensors(directory, config)
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return SourceModel(directory, config, dtypes, partial(read_tensor, directory, tensors), str, lambda: None)
    config = read_config(directory)
    path = directory / "config.json"
    if path.is_file() and (quantized := read_object(path).get("quantization_config")):
        with fields_of(path):
            method = quantized.get("quant_method", "an unnamed method")
        raise ConfigError(f"{directory} holds quantised weights ({method}); graft the model that they were made from.")
    files = check_tensors(directory, config)
    reader = TensorReader(files)
    return SourceModel(
        directory, config, tensor_dtypes(files), reader, lambda name: str(files[name].path), reader.close
    )


def graft(
    front: Path,
    back: Path,
    layers: int,
    out: Path,
    dtype: torch.dtype | None = None,
    untie: bool = False,
    rope: Path | None = None,
) -> tuple[ModelConfig, list[str]]:
    """Writes the graft's model directory.

    Args:
        layers: number of first layers that, with the embedding, come from the front model.
        dtype: dtype of the weights written; None keeps each tensor's own.
        untie: if both models have tied embeddings and these differ, write the back model's as the head.
        rope: a model whose RoPE all layers get; None leaves each layer its own.

    Returns:
        The graft's config, and remarks on differences between the two models.

    Raises:
        ConfigError: models that don't fit together, or weights that are not finite.
        UserError: `out` exists and is not an empty folder.
    """
    check_new_folder(out)
    models = {True: open_model(front), False: open_model(back)}
    configs = [models[of_front].config for of_front in (True, False)]
    if rope is not None:
        theirs = read_model_config(rope)
        configs = [with_rope(own, theirs) for own in configs]
    config = grafted_config(configs[0], configs[1], layers, partial(_same_embeddings, models), untie)
    tokenizer, remarks = common_tokenizer(front, back)
    if dtype is None:
        _refuse_other_dtypes(models[True], models[False])

    sources = {name: source(name, layers, models[False].config) for name in parameter_shapes(config)}
    order = sorted(sources, key=lambda name: (not sources[name][0], models[sources[name][0]].place(sources[name][1])))
    shapes = parameter_shapes(config)
    tensors = {
        name: torch.empty(shapes[name], dtype=models[sources[name][0]].dtypes[sources[name][1]], device="meta")
        for name in order
    }

    def read(name: str) -> Tensor:
        of_front, theirs = sources[name]
        return models[of_front].read(theirs)

    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is not None:
            tokenizer.save(folder)
        kept = None if tokenizer is None else Path(folder)
        said = parts(front, back, layers, config.architecture.n_layers, rope)
        history, notes = _history(front, back, said), _notes(front, back, layers, config, rope)
        write_model_dir(out, config, tensors, read, kept, dtype, history=history, notes=notes)
    for model in models.values():
        model.close()
    return config, remarks


# ── Compatibility ─────────────────────────────────────────────────────────────────────────────────────


def _same_embeddings(models: dict[bool, SourceModel]) -> bool:
    return torch.equal(*(model.read("tok_embeddings.weight") for model in models.values()))


def _refuse_other_dtypes(front: SourceModel, back: SourceModel) -> None:
    shared = [name for name in front.dtypes if name in back.dtypes]
    for name in shared:
        a, b = (str(model.dtypes[name]).removeprefix("torch.") for model in (front, back))
        if a != b:
            raise ConfigError(
                f"{name} is kept in {a} in {front.directory} and in {b} in {back.directory}: say with --dtype what to write "
                f"({', '.join(DTYPES)})."
            )


# ── Model card ────────────────────────────────────────────────────────────────────────────────────────


def parts(front: Path, back: Path, layers: int, n_layers: int, rope: Path | None = None, quote: str = "") -> str:
    """Says in words which model gives what; `quote` goes around the models' names."""
    first, other = (f"{quote}{shown(model)}{quote}" for model in (front, back))
    given = [f"layers {layer_selection(r)}" if r else "no layer" for r in (range(layers), range(layers, n_layers))]
    said = f"the embedding and {given[0]} of {first}; {given[1]}, the final norm and the output head of {other}"
    return said if rope is None else f"{said}; the RoPE of {quote}{shown(rope)}{quote} in all layers"


def _history(front: Path, back: Path, said: str) -> list[dict[str, Any]]:
    """The runs that trained either model, without duplicates, the front model's first."""
    history = [dict(entry) for entry in read_history(front)]
    history += [dict(entry) for entry in read_history(back) if entry not in history]
    if history:
        history[-1]["grafted"] = said
    return history


def _notes(front: Path, back: Path, layers: int, config: ModelConfig, rope: Path | None) -> str:
    said = parts(front, back, layers, config.architecture.n_layers, rope, quote="`")
    lines = [
        "\n## What it was grafted from\n",
        f"This model is {said}. It was not trained after that. Slices are Python's: 0:2 is layers 0 and 1.\n",
    ]
    for directory in (front, back):
        lines += [f"`{shown(directory)}`:\n", *training_table(read_history(directory))]
    return "\n".join(lines)
