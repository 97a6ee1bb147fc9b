"""Loads the model that a command's options describe (`inference.model_options`)."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.api import is_foreign, model_type
from farsight.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.extend import parse_extension
from farsight.inference.model_options import QUANTIZED
from farsight.json_files import read_object
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.parallel.device import default_device


@dataclass(frozen=True)
class LoadedModel:
    """A model directory, adapter or checkpoint, loaded with its tokenizer and ready to read and write text."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    trained_length: int
    """Sequence length of the last training stage, in tokens."""

    @property
    def end_tokens(self) -> set[int | None]:
        """Tokens that end a text: the tokenizer's end token and those of generation_config.json or, without that file, of
        config.json, as in `transformers`.

        Raises:
            ConfigError: a file whose eos_token_id is not a token's number.
        """
        folders = (self.path, find_tokenizer_dir(self.path) or self.path)
        paths = (folder / name for name in ("generation_config.json", "config.json") for folder in folders)
        path = next((path for path in paths if path.is_file()), None)
        given = None if path is None else read_object(path).get("eos_token_id")
        ends = given if isinstance(given, list) else [given]
        if any(end is not None and type(end) is not int for end in ends):
            raise ConfigError(
                f"{path} has eos_token_id {given!r}; it must be the number of a token, or a list of them."
            )
        return {self.tokenizer.eos_id, *ends}

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config


def load(path: Path, options: argparse.Namespace, divide: Callable[[Llama], None] | None = None) -> LoadedModel:
    """Loads the model at `path` as the options say.

    Args:
        options: those of `add_model_options`, which say whether models that only transformers builds are taken too.
        divide: passed to `load_model`.

    Raises:
        ConfigError: no model, no tokenizer, or an extension that does not fit the model.
    """
    if is_foreign(path):
        return _load_foreign(path, options, divide is not None)
    if options.dtype in QUANTIZED:
        raise ConfigError(
            f"--dtype {options.dtype}: {path} is a model that Farsight builds itself, in float32, bfloat16 or float16."
        )
    device = _device(options)
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    config = read_model_config(path)
    trained_length = config.trained_length
    extension = parse_extension(options.extend) if options.extend else None
    if extension is not None:
        config = extension.change(config)
    model, config = load_model(path, device=device, dtype=dtype, config=config, divide=divide)
    tokenizer = load_tokenizer_dir(find_tokenizer_dir(path) or path)
    return LoadedModel(path, Decoder(model, config, extension, options.chunk, str(path)), tokenizer, trained_length)


def _device(options: argparse.Namespace) -> torch.device:
    """The device to load on; under torchrun, that of the process."""
    device = torch.device(options.device or default_device())
    if device.type != "cpu" and device.index is None and "LOCAL_RANK" in os.environ:
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    return device


def _load_foreign(path: Path, options: argparse.Namespace, divided: bool) -> LoadedModel:
    """Loads a model that only transformers builds."""
    if not hasattr(options, "trust_remote_code"):
        raise ConfigError(
            f"{path} has model_type {model_type(path)!r}, which only transformers builds; this command changes layers of "
            "models that Farsight builds. farsight capture, geometry, plasticity, probes, generate, needle, perplexity and "
            "ripra take it."
        )
    if divided:
        raise ConfigError(
            f"{path} has model_type {model_type(path)!r}, which only transformers builds, and can't be divided over "
            "processes: run one. Without --device, it is spread over all GPUs."
        )
    from farsight.inference.foreign.load import load_decoder  # imports transformers

    extension = parse_extension(options.extend) if options.extend else None
    tokenizer = load_tokenizer_dir(path)
    # Under torchrun each process has a device of its own.
    any_device = options.device is None and "LOCAL_RANK" not in os.environ
    decoder = load_decoder(
        path,
        _device(options),
        any_device,
        options.dtype,
        extension,
        options.chunk,
        options.trust_remote_code,
    )
    return LoadedModel(path, decoder, tokenizer, decoder.config.trained_length)
