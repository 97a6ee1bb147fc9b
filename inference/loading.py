"""Loads the model that a command's options describe (`inference.model_options`)."""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.api import is_adapter, is_foreign, model_type
from farsight.configs.finetuning import Base
from farsight.data.instructions.chat import ChatTemplate
from farsight.data.instructions.conversations import UnusableRow
from farsight.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.extend import parse_extension
from farsight.inference.scope_growth import with_scope_max
from farsight.json_files import read_object
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.parallel.device import default_device
from farsight.remote import local


@dataclass(frozen=True)
class LoadedModel:
    """A model directory, adapter or checkpoint, loaded with its tokenizer and ready to read and write text."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    trained_length: int
    """Sequence length of the last training stage, in tokens."""
    scope_max: str | None = None
    """The growth of scopes that was asked for; None leaves the model's own."""

    @property
    def generation_settings(self) -> tuple[Path | None, dict[str, Any]]:
        """generation_config.json or, without that file, config.json, as in `transformers`: its path and content. An adapter
        without these files has its base's."""
        folders = [self.path, find_tokenizer_dir(self.path) or self.path]
        if is_adapter(self.path):
            folders.append(local(read_adapter(self.path).base.path))
        paths = (folder / name for name in ("generation_config.json", "config.json") for folder in folders)
        path = next((path for path in paths if path.is_file()), None)
        return path, {} if path is None else read_object(path)

    @property
    def end_tokens(self) -> set[int | None]:
        """Tokens that end a text: the tokenizer's end token and those that `generation_settings` lists.

        Raises:
            ConfigError: a file whose eos_token_id is not a token's number.
        """
        path, settings = self.generation_settings
        given = settings.get("eos_token_id")
        ends = given if isinstance(given, list) else [given]
        if any(end is not None and type(end) is not int for end in ends):
            raise ConfigError(
                f"{path} has eos_token_id {given!r}; it must be the number of a token, or a list of them."
            )
        return {self.tokenizer.eos_id, *ends}

    def end_tokens_of_chat(self, template: ChatTemplate) -> set[int | None]:
        """`end_tokens`, and the token that ends an assistant's turn in a chat template.

        Raises:
            ConfigError: as `end_tokens`, or a template that takes no question with its answer.
        """
        try:
            return self.end_tokens | {template.turn_end()}
        except UnusableRow as error:
            raise ConfigError(
                f"--chat: {template.name} of {self.path} takes no question with its answer ({error}); leave --chat out."
            ) from error

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config


def load(
    path: Path,
    options: argparse.Namespace,
    divide: Callable[[Llama], None] | None = None,
    training: tuple[ModelConfig, Iterator[tuple[str, Tensor]]] | None = None,
) -> LoadedModel:
    """Loads the model at `path` as the options say.

    Args:
        options: those of `add_model_options`, which say whether models that only transformers builds are taken too;
            `quantization`, if the command has it, is a base's in fine-tuning.
        divide: passed to `load_model`.
        training: the config and the parameters of a model that trains, by our names; `path` is then its checkpoint's, which need
            not exist: only the tokenizer is read, that of the run.

    Raises:
        ConfigError: no model, no tokenizer, or an extension or growth of scopes that does not fit the model.
    """
    if training is None and hasattr(options, "trust_remote_code") and is_foreign(path):
        return _load_foreign(path, options, divide is not None)
    device = _device(options)
    dtype, stored = _numbers(options, device)
    if stored is not None and divide is not None:
        raise ConfigError("--quantization keeps a model in one process: leave it out, or run without torchrun.")
    config, tensors = training or (read_model_config(path), None)
    trained_length = config.trained_length
    if options.scope_max is not None:
        if with_scope_max(config, "trained") == with_scope_max(config, "length"):
            raise ConfigError(f"--scope-max {options.scope_max}: no head of {path} has a scope; leave --scope-max out.")
        config = with_scope_max(config, options.scope_max)
    extension = parse_extension(options.extend) if options.extend else None
    if extension is not None:
        config = extension.change(config)
    model, config = load_model(
        path, device=device, dtype=dtype, config=config, divide=divide, stored=stored, tensors=tensors
    )
    tokenizer = load_tokenizer_dir(find_tokenizer_dir(path) or path)
    decoder = Decoder(model, config, extension, options.chunk, str(path))
    return LoadedModel(path, decoder, tokenizer, trained_length, options.scope_max)


def _device(options: argparse.Namespace) -> torch.device:
    """The device to load on; under torchrun, that of the process."""
    device = torch.device(options.device or default_device())
    if device.type != "cpu" and device.index is None and "LOCAL_RANK" in os.environ:
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    return device


def _numbers(options: argparse.Namespace, device: torch.device) -> tuple[torch.dtype, Base | None]:
    """The dtype to compute in, and how the blocks' linear layers are stored if not in it."""
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    quantization = getattr(options, "quantization", None)
    if quantization is None:
        return dtype, None
    if dtype == torch.float16:
        raise ConfigError("--quantization needs --dtype float32 or bfloat16, not float16.")
    return dtype, Base(quantization=quantization, dtype="float32" if dtype == torch.float32 else "bfloat16")


def _load_foreign(path: Path, options: argparse.Namespace, divided: bool) -> LoadedModel:
    """Loads a model that only transformers builds."""
    if divided:
        raise ConfigError(
            f"{path} has model_type {model_type(path)!r}, which only transformers builds, and can't be divided over "
            "processes: run one. Without --device, it is spread over all GPUs."
        )
    if options.scope_max is not None:
        raise ConfigError(f"--scope-max {options.scope_max}: no head of {path} has a scope; leave --scope-max out.")
    from farsight.inference.foreign.load import load_decoder  # imports transformers

    extension = parse_extension(options.extend) if options.extend else None
    tokenizer, device = load_tokenizer_dir(path), _device(options)
    # Under torchrun each process has a device of its own.
    any_device = options.device is None and "LOCAL_RANK" not in os.environ
    dtype, stored = _numbers(options, device)
    decoder = load_decoder(path, device, any_device, dtype, stored, extension, options.chunk, options.trust_remote_code)
    return LoadedModel(path, decoder, tokenizer, decoder.config.trained_length, None)
