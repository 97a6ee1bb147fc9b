"""Adapter directories: what fine-tuning learned, stored separately from its base.

    adapter_config.json, adapter_model.safetensors   LoRA in PEFT's format, by Hugging Face's names: plain `peft` loads it
    garfa.safetensors                                w of each layer with GARFA, layers.N.garfa.raw
    layers.safetensors                               whole layers, where these were trained, by Hugging Face's names
    farsight_adapter.json                            the marker: the base, its fingerprint and quantisation, and which of these files are needed
    tokenizer files, README.md

`peft` knows nothing of GARFA and silently loads such an adapter without it, which gives another model. Farsight's marker lists
what belongs to the adapter, and a missing part is an error. Queries and keys need no permutation: RoPE rotates half-split
pairs, as in Hugging Face's models.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.adapter.peft import PeftNames
from farsight.checkpoints.cards.model import checked_history
from farsight.checkpoints.model_dir.api import ADAPTER_CONFIG, ADAPTER_MARKER, GARFA_FILE, check_tensors, read_config
from farsight.checkpoints.model_dir.families.known import FAMILIES, VISION
from farsight.checkpoints.model_dir.fingerprint import checksum, fingerprint
from farsight.checkpoints.model_dir.hf_config import MODEL_TYPE
from farsight.checkpoints.model_dir.names import BY_PLACEMENT, TensorNames
from farsight.checkpoints.model_dir.safetensors_files import Stored, read_tensors
from farsight.configs.finetuning import Base, GarfaTraining, Lora
from farsight.configs.schema import Architecture, Garfa, Position
from farsight.configs.typed import from_dict
from farsight.errors import ConfigError
from farsight.json_files import fields_of, read_object
from farsight.model.adapt.lora import ADAPTER, add_lora, is_lora, lora_layers
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from farsight.model.position.garfa import garfa_of_tensors
from farsight.remote import local, shown

FORMAT = 2
"""Version of the marker."""
LORA_FILE = "adapter_model.safetensors"
LAYERS_FILE = "layers.safetensors"
FILES = {"lora": LORA_FILE, "garfa": GARFA_FILE, "layers": LAYERS_FILE}
"""The parts of an adapter, and the file of each."""

logger = logging.getLogger("farsight")


@dataclass(frozen=True)
class Adapter:
    """An adapter directory. Tensors are read on first access."""

    directory: Path
    needs: tuple[str, ...]
    base: Base
    fingerprint: str
    """Fingerprint of the base's weights."""
    checksum: str | None
    """Checksum over all of the base's weights; None in adapters written by older versions."""
    base_position: Position
    """The positions of the base itself."""
    family: str
    """The family of transformers that the base's weights came from, as in `ModelConfig`."""
    model_type: str
    """The model type of the base's `config.json`, which decides the names in PEFT's file."""
    architecture: Architecture
    position: Position
    """Positions during training, without the learned factors."""
    trained_length: int
    lora: Lora | None
    garfa: dict[str, Any]
    """The run's GARFA settings (equation, queries, layers); empty without GARFA."""
    history: tuple[dict[str, Any], ...]

    def config(self, garfa: bool = True) -> ModelConfig:
        """The config of the model with its adapter, including the factors that GARFA learned.

        Args:
            garfa: False leaves out all of GARFA, including the base's own, which gives another model.
        """
        if not garfa:
            return self._model(replace(self.position, garfa=None))
        position = self.position
        if self.garfa:
            learned = garfa_of_tensors(self.garfa_tensors, self.garfa["equation"], self.garfa["queries"])
            assert learned is not None
            before = () if position.garfa is None else position.garfa.layers
            now = {entry.layer: entry for entry in (*before, *learned.layers)}
            layers = tuple(now[layer] for layer in sorted(now))
            position = replace(position, garfa=Garfa(learned.equation, learned.queries, layers))
        return self._model(position)

    def _model(self, position: Position) -> ModelConfig:
        return ModelConfig(self.architecture, position, self.trained_length, family=self.family)

    @cached_property
    def garfa_tensors(self) -> dict[str, Tensor]:
        """w by layer, fp32 [K]."""
        tensors = read_tensors(self.directory / GARFA_FILE)
        shapes = {f"layers.{layer}.garfa.raw": (self.architecture.n_kv_heads,) for layer in self.garfa["layers"]}
        _check_same(self.directory / GARFA_FILE, tensors, shapes)
        return tensors

    @cached_property
    def lora_model(self) -> Llama:
        """The model with its LoRA layers on the meta device: gives names, shapes and scalings."""
        with torch.device("meta"):
            model = build_model(self.config(garfa=False))
            if self.lora is not None:
                try:
                    add_lora(model, self.lora, layer_numbers(self.lora), self.base)
                except (ValueError, TypeError, AttributeError) as error:  # peft's own among them
                    path = self.directory / ADAPTER_MARKER
                    raise ConfigError(f"{path}: its LoRA settings can't be used: {error}.") from error
        return model

    @cached_property
    def lora_tensors(self) -> dict[str, Tensor]:
        """LoRA's weights by our names."""
        if self.lora is None:
            return {}
        shapes = {name: tuple(p.shape) for name, p in self.lora_model.named_parameters() if is_lora(name)}
        tensors, path = read_tensors(self.directory / LORA_FILE), self.directory / LORA_FILE
        names = PeftNames(self.model_type, self.architecture)
        expected = names.join({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
        _check_same(path, tensors, {name: tuple(tensor.shape) for name, tensor in expected.items()})
        return names.split(tensors, shapes, path)

    @cached_property
    def layer_tensors(self) -> dict[str, Tensor]:
        """Whole layers' weights by our names."""
        if "layers" not in self.needs:
            return {}
        path, known = self.directory / LAYERS_FILE, dict(self.lora_model.named_parameters())
        names = layer_file_names(self.architecture)
        tensors = {(names.parts(key) or (key,))[0]: tensor for key, tensor in read_tensors(path).items()}
        layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        whole = {n: tuple(p.shape) for n, p in known.items() if n.startswith("layers.") and n.split(".")[1] in layers}
        _check_same(path, tensors, whole)
        return tensors

    def scaling(self, linear: str) -> float:
        """The factor on B·A of a linear layer of the model (`layers.3.attention.wq`)."""
        return float(lora_layers(self.lora_model)[linear].scaling[ADAPTER])

    def base_files(self, base: Path | None = None, other_base: bool = False) -> dict[str, Stored]:
        """The place of each of the base's tensors, by our names.

        Args:
            base: the base's directory, instead of the one recorded in training.
            other_base: accept a base whose weights or positions differ from those in training.

        Raises:
            ConfigError: no such directory, a base of another shape, or another base.
        """
        directory = base or local(self.base.path)
        if not directory.is_dir():
            raise ConfigError(
                f"{self.directory} was trained on {directory}, which is not there. Restore the base, or merge the "
                f"adapter into a copy of it: farsight merge {self.directory} --base DIR --out OUT"
            )
        config = read_config(directory)
        if config.architecture != self.architecture:
            raise ConfigError(
                f"{directory} is not the base of {self.directory}: its architecture differs.\n  there: {config.architecture}\n"
                f"  adapter: {self.architecture}"
            )
        files = check_tensors(directory, config)
        same = fingerprint(files) == self.fingerprint
        if same and self.checksum is not None and not other_base:
            same = checksum(files) == self.checksum
        other = ["weights"] * (not same)
        other += ["positions"] * (config.position != self.base_position)
        if other and not other_base:
            raise ConfigError(
                f"{directory} is not the base that {self.directory} was trained on: its {' and '.join(other)} differ. "
                "Restore that base, or name its location. To merge the adapter into this one anyway: "
                f"farsight merge {self.directory} --base {directory} --other-base --out OUT"
            )
        if other:
            logger.warning(
                f"{directory} has other {' and '.join(other)} than the base that {self.directory} was trained on"
            )
        elif shown(directory.resolve()) != self.base.path:
            logger.warning(f"{self.directory} was trained on {self.base.path}; {directory} is used instead")
        return files


def read_adapter(directory: Path) -> Adapter:
    """Reads an adapter directory's marker; no tensors are read yet.

    Raises:
        ConfigError: no marker, a part that the marker lists and the directory lacks, or one that it does not list.
    """
    path = directory / ADAPTER_MARKER
    if not path.is_file():
        there = [name for name in (GARFA_FILE, LAYERS_FILE, ADAPTER_CONFIG) if (directory / name).is_file()]
        if not there:
            reason = f"it has no {ADAPTER_MARKER}" if directory.is_dir() else "there is no such folder"
            raise ConfigError(f"{directory} is not an adapter directory: {reason}.")
        raise ConfigError(
            f"{directory} has {', '.join(there)}, but {ADAPTER_MARKER} is missing, which says what belongs to the adapter "
            "and how its base was quantised: copy the whole directory again. (LoRA adapters that Farsight did not write are "
            "loaded by peft.)"
        )
    marker = read_object(path)
    if marker.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {marker.get('format')!r}; this version of Farsight reads {FORMAT}.")
    with fields_of(path):
        return _from_marker(directory, marker, path)


def _from_marker(directory: Path, marker: dict[str, Any], path: Path) -> Adapter:
    if not isinstance(marker["needs"], list) or not set(marker["needs"]) <= set(FILES):
        raise ConfigError(f"{path} needs {marker['needs']!r}; the parts of an adapter are {', '.join(FILES)}.")
    for name, file in FILES.items():
        if name in marker["needs"] and not (directory / file).is_file():
            raise ConfigError(f"{directory} lacks {file}: without it this is another model. Copy the directory again.")
        if name not in marker["needs"] and (directory / file).is_file():
            raise ConfigError(
                f"{directory} has {file}, which {ADAPTER_MARKER} does not name: it belongs to another adapter."
            )
    known = ("", MODEL_TYPE, *FAMILIES, *VISION)
    for name in ("family", "model_type"):
        if (value := marker["base"].get(name, "")) not in known:
            raise ConfigError(f"{path}: {name} = {value!r} of its base is none of {', '.join(known[1:])}.")
    entry = {**marker["adapter"]}
    for name in ("lora", "garfa"):
        if (name in marker["needs"]) != bool(entry.get(name)):
            raise ConfigError(f"{path}: its list of parts and its settings of {name} contradict each other.")
    lora, garfa = entry.pop("lora", None), entry.pop("garfa", {})
    adapter = Adapter(
        directory,
        tuple(marker["needs"]),
        from_dict(Base, {"path": marker["base"]["path"], **entry}, str(path)),
        marker["base"]["fingerprint"],
        marker["base"].get("checksum"),
        from_dict(Position, marker["base"]["position"], str(path)),
        marker["base"].get("family", ""),
        marker["base"].get("model_type", ""),
        from_dict(Architecture, marker["architecture"], str(path)),
        from_dict(Position, marker["position"], str(path)),
        marker["trained_length"],
        None if lora is None else from_dict(Lora, lora, str(path)),
        garfa,
        tuple(checked_history(marker["training"], path)),
    )
    ModelConfig(adapter.architecture, adapter.position, adapter.trained_length).checked(path)
    chosen = [] if adapter.lora is None else [adapter.lora.layers]
    chosen += [from_dict(GarfaTraining, garfa, f"{path}: garfa").layers] if garfa else []
    numbers = range(adapter.architecture.n_layers)
    for layers in chosen:
        if not layers or isinstance(layers, str) or any(layer not in numbers for layer in layers):
            raise ConfigError(f"{path} has layers = {layers!r}, and its base has layers 0 to {len(numbers) - 1}.")
    return adapter


def layer_file_names(architecture: Architecture) -> TensorNames:
    """The names in `layers.safetensors`, which no other program reads: nothing is fused there."""
    return TensorNames(BY_PLACEMENT[architecture.norm_placement])


def layer_numbers(lora: Lora) -> tuple[int, ...]:
    """LoRA's layers, which the marker stores as numbers."""
    assert not isinstance(lora.layers, str)
    return lora.layers


def _check_same(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ConfigError` for missing or surplus tensors, and for wrong shapes."""
    if missing := sorted(set(shapes) - set(tensors)):
        raise ConfigError(f"{path} lacks {len(missing)} tensors, among them {missing[0]}.")
    if surplus := sorted(set(tensors) - set(shapes)):
        raise ConfigError(f"{path} holds {surplus[0]}, which does not fit the adapter's settings.")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{path}: {name} has shape {tuple(tensors[name].shape)}, its settings require {shape}.")
