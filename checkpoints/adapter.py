"""Adapter directories: what fine-tuning learned, beside the base that it was learned beside.

    adapter_config.json, adapter_model.safetensors   LoRA in PEFT's format, by Hugging Face's names: plain `peft` loads it
    garfa.safetensors                                w of each layer that GARFA is on, layers.N.garfa.raw
    layers.safetensors                               whole layers, where these were trained, by Hugging Face's names
    farsight_adapter.json                            the base and its fingerprint, how it is kept, and which of these files are needed
    tokenizer files, README.md

`peft` knows nothing of GARFA and loads such an adapter without a word: that is another model. Here the marker says what has to
be there, and what is missing is an error. Queries and keys need no permutation: RoPE turns half-split pairs, as there.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from farsight.checkpoints.cards.adapter import adapter_card
from farsight.checkpoints.cards.model import CARD, adapter_entry, checked_history
from farsight.checkpoints.model_dir.api import (
    ADAPTER_CONFIG,
    ADAPTER_MARKER,
    GARFA_FILE,
    TOKENIZER_FILES,
    check_tensors,
    read_model_config,
)
from farsight.checkpoints.model_dir.fingerprint import checksum, fingerprint
from farsight.checkpoints.model_dir.hf_config import uniform_rotary
from farsight.checkpoints.model_dir.names import from_hf_name, to_hf_name, to_peft_name
from farsight.checkpoints.model_dir.safetensors_files import TensorReader, read_tensors, refuse_non_finite
from farsight.configs.finetuning import Base, FinetuneConfig, GarfaTraining, Lora
from farsight.configs.json_files import fields_of, read_object
from farsight.configs.load import ConfigError, from_dict, to_dict
from farsight.configs.schema import Architecture, Garfa, Position
from farsight.data.instructions.chat import chat_template
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.model.adapt.layers import adapted
from farsight.model.adapt.lora import ADAPTER, add_lora, as_pattern, by_linear, hf_linear, is_lora, lora_layers
from farsight.model.adapt.quantized import fill, is_quantized, quantize_linears, unpack_parameters
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from farsight.model.position.garfa import garfa_of_tensors
from farsight.new_folder import check_new, holds_only, new_folder
from farsight.progress import progress

FORMAT = 2
"""Version of the marker."""
LORA_FILE = "adapter_model.safetensors"
LAYERS_FILE = "layers.safetensors"
FILES = {"lora": LORA_FILE, "garfa": GARFA_FILE, "layers": LAYERS_FILE}
"""What an adapter may consist of."""

_DTYPES: dict[torch.dtype, Literal["bfloat16", "float32"]] = {
    torch.bfloat16: "bfloat16", torch.float32: "float32",
}  # fmt: skip

logger = logging.getLogger("farsight")


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────


def check_adapter_out(out: Path) -> None:
    """Refuses a place that `write_adapter` would refuse; long work calls it before it starts.

    Raises:
        UserError: what is there is no adapter of ours, or somebody has added files to it.
    """
    check_new(out, _is_ours)


def _is_ours(folder: Path) -> bool:
    return holds_only(folder, (ADAPTER_MARKER,), (ADAPTER_CONFIG, *FILES.values(), CARD, *TOKENIZER_FILES))


def write_adapter(
    out: Path,
    config: FinetuneConfig,
    weights: Mapping[str, Tensor],
    base: dict[str, Any],
    history: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes an adapter directory with its card; it appears whole or not at all, in place of an older one of ours.

    Args:
        weights: what was trained, whole tensors by our names.
        base: from `base_entry`, as the base was when its weights were read.
        history: the runs that trained the base's weights, and this one.

    Raises:
        ConfigError: weights that are not finite.
        UserError: as `check_adapter_out`.
    """
    with new_folder(out, _is_ours) as part:
        _write(part, out.resolve().name, config, weights, base, history)


def _write(
    part: Path,
    title: str,
    config: FinetuneConfig,
    weights: Mapping[str, Tensor],
    base: dict[str, Any],
    history: Sequence[dict[str, Any]],
) -> None:
    parts: dict[str, dict[str, Tensor]] = {"lora": {}, "garfa": {}, "layers": {}}
    for name, tensor in weights.items():
        refuse_non_finite(name, tensor)
        if is_lora(name):
            parts["lora"][to_peft_name(name)] = tensor.contiguous()
        elif name.endswith("garfa.raw"):
            parts["garfa"][name.replace(".attention.", ".")] = tensor.float().contiguous()
        else:
            parts["layers"][to_hf_name(name)] = tensor.contiguous()
    needs = [name for name, tensors in parts.items() if tensors]
    for name in needs:
        save_file(parts[name], part / FILES[name], metadata={"format": "pt"})
    if parts["lora"]:
        _write_peft_config(part, config, base["path"])

    marker = {
        "format": FORMAT,
        "needs": needs,
        "base": base,
        "architecture": to_dict(config.architecture),
        "position": to_dict(config.position),
        "trained_length": config.model_length,
        "adapter": adapter_entry(config),
        "training": list(history),
    }
    (part / ADAPTER_MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(config.tokenizer)
    tokenizer.save(part)
    chat_template(config.data, tokenizer).save(part)
    learned = garfa_of_tensors(weights, config.garfa.equation, config.garfa.queries)
    own_type = uniform_rotary(from_dict(Position, base["position"], "the base's position")) is None
    card = adapter_card(title, base["path"], own_type, adapter_entry(config), needs, learned, history)
    (part / CARD).write_text(card, encoding="utf-8")


def _write_peft_config(directory: Path, config: FinetuneConfig, base: str) -> None:
    from peft import LoraConfig

    lora, layers = config.lora, adapted(config).lora
    LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float does
        lora_dropout=lora.dropout,
        target_modules=sorted(lora.modules),
        layers_to_transform=list(layers),
        layers_pattern="layers",
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        rank_pattern=as_pattern(by_linear(lora.rank_pattern, lora, layers), hf_linear),
        alpha_pattern=as_pattern(by_linear(lora.alpha_pattern, lora, layers), hf_linear),
    ).save_pretrained(str(directory))


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Adapter:
    """What a directory says of its adapter. Tensors are read when they are asked for."""

    directory: Path
    needs: tuple[str, ...]
    base: Base
    fingerprint: str
    """Of the base's weights."""
    checksum: str | None
    """Checksum over all of the base's weights; None in adapters written by older versions."""
    base_position: Position
    """The base's own."""
    architecture: Architecture
    position: Position
    """Of the training, without what was learned."""
    trained_length: int
    lora: Lora | None
    garfa: dict[str, Any]
    """Of the run: equation, queries, layers; empty without."""
    history: tuple[dict[str, Any], ...]

    def config(self, garfa: bool = True) -> ModelConfig:
        """The model's, with the factors that GARFA learned.

        Args:
            garfa: False leaves out all of GARFA, the base's own too, which makes it another model.
        """
        if not garfa:
            return ModelConfig(self.architecture, replace(self.position, garfa=None), self.trained_length)
        position = self.position
        if self.garfa:
            learned = garfa_of_tensors(self.garfa_tensors, self.garfa["equation"], self.garfa["queries"])
            assert learned is not None
            before = () if position.garfa is None else position.garfa.layers
            now = {entry.layer: entry for entry in (*before, *learned.layers)}
            layers = tuple(now[layer] for layer in sorted(now))
            position = replace(position, garfa=Garfa(learned.equation, learned.queries, layers))
        return ModelConfig(self.architecture, position, self.trained_length)

    @cached_property
    def garfa_tensors(self) -> dict[str, Tensor]:
        """w by layer, fp32 [K]."""
        tensors = read_tensors(self.directory / GARFA_FILE)
        shapes = {f"layers.{layer}.garfa.raw": (self.architecture.n_kv_heads,) for layer in self.garfa["layers"]}
        _check_same(self.directory / GARFA_FILE, tensors, shapes)
        return tensors

    @cached_property
    def lora_model(self) -> Llama:
        """The model with its adapters on the meta device, which tells names, shapes and scalings."""
        with torch.device("meta"):
            model = build_model(self.config(garfa=False))
            if self.lora is not None:
                try:
                    add_lora(model, self.lora, _numbers(self.lora), self.base)
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
        _check_same(path, tensors, {to_peft_name(name): shape for name, shape in shapes.items()})
        return {name: tensors[to_peft_name(name)] for name in shapes}

    @cached_property
    def layer_tensors(self) -> dict[str, Tensor]:
        """Whole layers' weights by our names."""
        if "layers" not in self.needs:
            return {}
        path, known = self.directory / LAYERS_FILE, dict(self.lora_model.named_parameters())
        tensors = {from_hf_name(key) or key: tensor for key, tensor in read_tensors(path).items()}
        layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        whole = {n: tuple(p.shape) for n, p in known.items() if n.startswith("layers.") and n.split(".")[1] in layers}
        _check_same(path, tensors, whole)
        return tensors

    def scaling(self, linear: str) -> float:
        """What multiplies B·A beside a linear layer of the model (`layers.3.attention.wq`)."""
        return float(lora_layers(self.lora_model)[linear].scaling[ADAPTER])

    def base_files(self, base: Path | None = None, other_base: bool = False) -> dict[str, Path]:
        """The base's tensors by our names; `base` in place of the directory that the adapter was trained beside.

        Args:
            other_base: take one of other weights or positions than it was trained beside, too.

        Raises:
            ConfigError: no such directory, a base of another shape, or another base.
        """
        directory = base or Path(self.base.path)
        if not directory.is_dir():
            raise ConfigError(
                f"{self.directory} was trained beside {directory}, which is not there. Put the base back, or merge the "
                f"adapter into a copy of it: farsight merge {self.directory} --base DIR --out OUT"
            )
        config = read_model_config(directory)
        if config.architecture != self.architecture:
            raise ConfigError(
                f"{directory} is another base than that of {self.directory}:\n  there: {config.architecture}\n"
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
                f"{directory} is not the base that {self.directory} was trained beside: its {' and '.join(other)} are others. "
                "Put that one back, or name where it lies. To merge the adapter into this one all the same: "
                f"farsight merge {self.directory} --base {directory} --other-base --out OUT"
            )
        if other:
            logger.warning(f"{directory} has other {' and '.join(other)} than what {self.directory} was trained beside")
        elif directory.resolve() != Path(self.base.path):
            logger.warning(f"{self.directory} was trained beside {self.base.path}; {directory} is used in its place")
        return files


def read_adapter(directory: Path) -> Adapter:
    """Reads what an adapter directory says of itself.

    Raises:
        ConfigError: no marker, a part that the marker needs and that is missing, or one that it does not know.
    """
    path = directory / ADAPTER_MARKER
    if not path.is_file():
        there = [name for name in (GARFA_FILE, LAYERS_FILE, ADAPTER_CONFIG) if (directory / name).is_file()]
        if not there:
            raise ConfigError(f"{directory} is no adapter directory: it has no {ADAPTER_MARKER}.")
        raise ConfigError(
            f"{directory} has {', '.join(there)}, but {ADAPTER_MARKER} is missing, which says what belongs to the adapter "
            "and how its base was kept: copy the whole directory again. (An adapter of LoRA alone that Farsight did not "
            "write is loaded by peft.)"
        )
    marker = read_object(path)
    if marker.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {marker.get('format')!r}; this version of Farsight reads {FORMAT}.")
    with fields_of(path):
        return _from_marker(directory, marker, path)


def _from_marker(directory: Path, marker: dict[str, Any], path: Path) -> Adapter:
    if not isinstance(marker["needs"], list) or not set(marker["needs"]) <= set(FILES):
        raise ConfigError(f"{path} needs {marker['needs']!r}; what an adapter may consist of is {', '.join(FILES)}.")
    for name, file in FILES.items():
        if name in marker["needs"] and not (directory / file).is_file():
            raise ConfigError(f"{directory} lacks {file}: without it this is another model. Copy the directory again.")
        if name not in marker["needs"] and (directory / file).is_file():
            raise ConfigError(
                f"{directory} has {file}, which {ADAPTER_MARKER} does not name: it is of another adapter."
            )
    entry = {**marker["adapter"]}
    for name in ("lora", "garfa"):
        if (name in marker["needs"]) != bool(entry.get(name)):
            raise ConfigError(f"{path}: what it needs and the settings of {name} that it has contradict each other.")
    lora, garfa = entry.pop("lora", None), entry.pop("garfa", {})
    adapter = Adapter(
        directory,
        tuple(marker["needs"]),
        from_dict(Base, {"path": marker["base"]["path"], **entry}, str(path)),
        marker["base"]["fingerprint"],
        marker["base"].get("checksum"),
        from_dict(Position, marker["base"]["position"], str(path)),
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


def load_adapter(
    directory: Path,
    base: Path | None = None,
    device: torch.device | str = "cpu",
    garfa: bool = True,
    dtype: torch.dtype | None = None,
    length: int | None = None,
    config: ModelConfig | None = None,
    other_base: bool = False,
) -> tuple[Llama, ModelConfig]:
    """Builds the base as the adapter was trained beside it, quantised or not, and puts the adapter on.

    Args:
        base: its directory, in place of the one that it was trained beside.
        garfa: False leaves out GARFA, the base's own too.
        dtype: of what is computed; None takes that of the training. Weights are rounded as there before they are quantised;
            those that are read back from 4 bits are rounded to this one, so that fp32 does not give bf16's numbers.
        length: sequence length its positions are set for; the trained length when None.
        config: in place of the adapter's own, to see the weights through other positions.
        other_base: as in `Adapter.base_files`.

    Returns:
        The model in evaluation mode, and its config.

    Raises:
        ConfigError: as `read_adapter`, and for a base or tensors that do not fit.
    """
    adapter = read_adapter(directory)
    own = adapter.lora_tensors | adapter.layer_tensors
    config, read = config or adapter.config(garfa), TensorReader(adapter.base_files(base, other_base))
    trained = getattr(torch, adapter.base.dtype)
    kept = adapter.base if dtype is None else replace(adapter.base, dtype=_DTYPES[dtype])
    with torch.device("meta"):
        model = build_model(config, length)
        quantize_linears(model, kept)
        if adapter.lora is not None:
            add_lora(model, adapter.lora, _numbers(adapter.lora), kept)
        unpack_parameters(model)
    modules = dict(model.named_modules())
    model.to_empty(device=device)
    parameters = {name.replace(".base_layer.", "."): (name, p) for name, p in model.named_parameters()}
    order = sorted(parameters, key=lambda name: str(read.files.get(name, "")))  # one file of the base after the other
    with torch.no_grad():
        for plain in progress(order, desc="load", unit="tensor"):
            name, parameter = parameters[plain]
            module = modules[name.rpartition(".")[0]]
            if plain in own:
                parameter.copy_(own[plain])
            elif is_quantized(module):
                # As in training: int8 takes what the base holds, 4 bits take it rounded.
                weight = read(plain)
                fill(module, weight if kept.quantization == "int8" else weight.to(trained), kept)
            else:
                parameter.copy_(read(plain).to(trained))
    read.close()
    for layer in lora_layers(model).values():
        # LoRA's weights stay in fp32, and there is no autocast here: its inputs are raised to theirs, its outputs cast back.
        layer.cast_input_dtype_enabled = True
    model.set_position(model.positions, model.length)
    return model.eval().requires_grad_(False), config


def _numbers(lora: Lora) -> tuple[int, ...]:
    """The layers, which the marker gives as numbers."""
    assert not isinstance(lora.layers, str)
    return lora.layers


def _check_same(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses missing and surplus tensors, and other shapes."""
    if missing := sorted(set(shapes) - set(tensors)):
        raise ConfigError(f"{path} lacks {len(missing)} tensors, among them {missing[0]}.")
    if surplus := sorted(set(tensors) - set(shapes)):
        raise ConfigError(f"{path} holds {surplus[0]}, which the adapter's settings leave no room for.")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{path}: {name} has shape {tuple(tensors[name].shape)}, its settings make it {shape}.")
