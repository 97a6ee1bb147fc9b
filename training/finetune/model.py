"""The model of fine-tuning: a base with adapters.

`with_base` completes the config from the base, `build_adapted` builds the model, and `BaseWeights` fills its weights.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farsight import process
from farsight.checkpoints.adapter.peft import PeftNames
from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.model_dir.api import check_tensors, model_type
from farsight.checkpoints.model_dir.safetensors_files import TensorReader
from farsight.configs.check_finetuning import check_base
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import load_config
from farsight.configs.schema import Architecture
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir
from farsight.errors import ConfigError
from farsight.model.adapt.garfa import train_garfa
from farsight.model.adapt.layers import adapted
from farsight.model.adapt.lora import add_lora, initial_lora, is_lora
from farsight.model.adapt.quantized import dequantize, fill, is_quantized, quantize_linears, unpack_parameters
from farsight.model.build import ModelConfig, build_model
from farsight.model.flops import Adapters
from farsight.model.llama import Llama, copy_whole, unwrapped
from farsight.progress import progress
from farsight.remote import local, shown
from farsight.training.finetune.base import take_base
from farsight.training.optimizers.build import GARFA, trained_parameters
from farsight.training.start import lasp_warning, names_theta

logger = logging.getLogger("farsight")

# ── Config ────────────────────────────────────────────────────────────────────────────────────────────


def load_finetune_config(arguments: Sequence[str]) -> FinetuneConfig:
    """Reads the config file and options, and completes them from the base's directory.

    Raises:
        ConfigError: the settings or the base can't be used.
    """
    return with_base(load_config(arguments, FinetuneConfig), names_theta(arguments))


def with_base(config: FinetuneConfig, theta_named: bool = True) -> FinetuneConfig:
    """Fills in the base's shapes, positions, trained length and tokenizer.

    Args:
        theta_named: whether position.rotary.theta was set explicitly; if not, it is the base's even under new positions.

    Raises:
        ConfigError: the base is not a model directory, or settings contradict it.
    """
    if not config.base_model.path:
        raise ConfigError("base_model.path is empty: set it to the model directory to fine-tune.")
    directory = local(config.base_model.path).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"base_model.path = {config.base_model.path!r} does not exist. Name a directory with config.json and *.safetensors: the "
            "model/ of a run (`make quickstart` makes runs/quickstart/context-2048/model), or a model of the Hugging Face Hub "
            "(hf://ORG/NAME)."
        )
    base = read_model_config(directory)
    if config.architecture not in (Architecture(), base.architecture):
        pairs = {
            f.name: [getattr(a, f.name) for a in (config.architecture, base.architecture)]
            for f in fields(base.architecture)
        }
        unlike = [
            f"{name} is {ours!r} here and {theirs!r} there" for name, (ours, theirs) in pairs.items() if ours != theirs
        ]
        flavor = f"model.flavor = {config.model.flavor!r} and any " if config.model.flavor else ""
        raise ConfigError(
            f"The settings do not match the base {directory}: {'; '.join(unlike)}. Leave out {flavor}[architecture], and the "
            "base's shapes are taken."
        )
    own_positions = config.position is not None
    take_base(config, base, theta_named)
    if own_positions and (warning := lasp_warning(config, base, str(directory))) and process.ranks().rank == 0:
        logger.warning(warning)
    if not config.tokenizer.path and config.tokenizer.kind == "auto":
        found = find_tokenizer_dir(directory)
        if found is None:
            raise ConfigError(f"{directory} has no tokenizer files: name them in tokenizer.path.")
        config.tokenizer = replace(config.tokenizer, path=shown(found))
    check_base(config, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    layers = adapted(config)  # refuses layers that do not exist
    # Refuses patterns that match nothing, and settings that PEFT's file of this base can't hold.
    PeftNames(model_type(directory), base.architecture).lora_config(config.lora, layers.lora)
    return config


# ── Model ─────────────────────────────────────────────────────────────────────────────────────────────


def build_adapted(config: FinetuneConfig) -> Llama:
    """Builds the base with its adapters on the meta device; `init_weights` then reads the base.

    Trained parameters, those of adapters and of `training.layers`, are fp32. All others are in `base_model.dtype` or quantised.

    Raises:
        ConfigError: LoRA or GARFA can't be added to a layer.
    """
    layers = adapted(config)
    model = build_model(ModelConfig.from_job(config))
    quantize_linears(model, config.base_model)
    model.requires_grad_(False)
    if layers.lora:
        try:
            add_lora(model, config.lora, layers.lora, config.base_model)
        except ValueError as error:
            raise ConfigError(f"lora: {error}") from error
    unpack_parameters(model)
    for number in layers.whole:
        for parameter in model.layers[str(number)].parameters():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    if layers.garfa:
        try:
            train_garfa(model, layers.garfa, config.garfa.init, config.garfa.equation, config.garfa.queries)
        except ValueError as error:
            raise ConfigError(f"garfa.layers: {error}") from error
    model.fill_parameter = BaseWeights(model, config)
    model.register_state_dict_post_hook(_trained_alone)
    return model


def _trained_alone(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Removes the base from a state dict, including the non-parameters that bitsandbytes' layers add."""
    trained = {prefix + name for name in trained_parameters(model)}
    for name in [*state]:
        if unwrapped(name) not in trained:
            del state[name]


class BaseWeights:
    """Fills an adapted model's parameters one by one: the base's from its directory, quantised if the layer is, and the
    adapters' with their initial values."""

    def __init__(self, model: Llama, config: FinetuneConfig) -> None:
        self.model, self.config = model, config
        directory = local(config.base_model.path).expanduser()
        self.read = TensorReader(check_tensors(directory, read_model_config(directory)))
        self.modules: dict[str, nn.Module] = {}

    def __call__(self, name: str, parameter: nn.Parameter) -> None:
        seed, base = self.config.debug.seed or 0, self.config.base_model
        if not self.modules:  # only now: recomputation and compilation have wrapped them
            self.modules = {unwrapped(f"{path}."): module for path, module in self.model.named_modules()}
            total = sum(1 for _ in self.model.parameters())
            self.bar = progress(total=total, desc="load base", unit="tensor")
        if is_lora(name):
            beside = name.partition(".lora_")[0] + ".weight"
            weight = dequantize(self.read(beside).to(parameter.device), base) if "magnitude" in name else None
            copy_whole(parameter, initial_lora(name, tuple(parameter.shape), seed, weight).to(parameter.device))
        elif name.endswith(GARFA):
            self.model.init_parameter(name, parameter)
        else:
            module = self.modules[name.rpartition(".")[0] + "."]
            weight = self.read(name.replace(".base_layer.", "."))
            if is_quantized(module) and name.endswith(".weight"):
                fill(module, weight, base)
            else:
                copy_whole(parameter, weight.to(parameter.device))
        self.bar.update()
        if self.bar.n >= self.bar.total:
            self.bar.close()
            self.read.close()


class TrainedWeights:
    """The trained parameters, as the state that a checkpoint saves; the base stays in its own directory."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: parameter.detach() for name, parameter in trained_parameters(self.model).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: the tensors were loaded in place."""


def adapters_of(config: FinetuneConfig, model: nn.Module) -> Adapters:
    """The model's adapters as the FLOP count needs them."""
    matrices = sum(p.numel() for name, p in trained_parameters(model).items() if is_lora(name))
    return Adapters(adapted(config).lowest, matrices)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name, unsharded and on the CPU; empty on all ranks but 0. Every rank has to call it."""
    weights = {}
    for name, parameter in trained_parameters(model).items():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if os.environ.get("RANK", "0") == "0":
            weights[name] = whole.cpu()
    return weights
