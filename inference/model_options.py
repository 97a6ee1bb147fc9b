"""The options that say which model a tool reads and how, the same for all of them."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from farsight.checkpoints.load import load_model, read_model_config
from farsight.cli import add_device_option, positive
from farsight.configs.check import ConfigError
from farsight.configs.json_files import read_object
from farsight.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.inference.decoder import CHUNK, Decoder
from farsight.inference.extend import EXTENSIONS_HELP, parse_extension
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.parallel.device import default_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model directory, adapter or checkpoint, ready to read and write."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    trained_length: int
    """Tokens of the sequences in the last stage of training."""

    @property
    def end_tokens(self) -> set[int | None]:
        """What may end a text: the tokenizer's end token and those of generation_config.json, or of config.json without
        one, as in `transformers`.

        Raises:
            ConfigError: a file whose eos_token_id is no token's number.
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


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --device, --dtype, --extend and --chunk."""
    add_device_option(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: float32 on a CPU)")
    parser.add_argument("--extend", metavar="METHOD[:KEY=VALUE,…]", help=EXTENSIONS_HELP)
    parser.add_argument(
        "--chunk", type=positive, default=CHUNK, help="tokens of a prompt to read at once (%(default)s)"
    )


def load(path: Path, options: argparse.Namespace, divide: Callable[[Llama], None] | None = None) -> LoadedModel:
    """Loads what `path` names, as the options say.

    Args:
        divide: as `load_model` takes it.

    Raises:
        ConfigError: no model, no tokenizer, or an extension that does not fit the model.
    """
    device = torch.device(options.device or default_device())
    if device.type != "cpu" and device.index is None and "LOCAL_RANK" in os.environ:
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    dtype = DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    config = read_model_config(path)
    trained_length = config.trained_length
    extension = parse_extension(options.extend) if options.extend else None
    if extension is not None:
        config = extension.change(config)
    model, config = load_model(path, device=device, dtype=dtype, config=config, divide=divide)
    tokenizer = load_tokenizer_dir(find_tokenizer_dir(path) or path)
    return LoadedModel(path, Decoder(model, config, extension, options.chunk, str(path)), tokenizer, trained_length)
