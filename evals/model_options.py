"""The options that say which model a tool reads and how, the same for all of them."""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.model_dir import load_model, read_model_config
from data.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from evals.decoder import CHUNK, Decoder
from evals.extensions import EXTENSIONS_HELP, parse_extension
from model.build import ModelConfig
from model.llama import Llama
from parallel.device import default_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


OUT_OF_MEMORY = "The device ran out of memory: read fewer tokens at once (--chunk 256), or fewer sequences together where there is --rows."


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
        """What may end a text: the tokenizer's end token, and those of a generation_config.json."""
        path = self.path / "generation_config.json"
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        return {self.tokenizer.eos_id, *(ends if isinstance(ends, list) else [ends])}

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config


def positive(text: str) -> int:
    """An option's whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --device, --dtype, --extend and --chunk."""
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
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
    return LoadedModel(path, Decoder(model, config, extension, options.chunk), tokenizer, trained_length)
