"""Texts from files, with errors that name the file and the line."""

import json
from pathlib import Path

import torch
from torch import Tensor

from configs.check import ConfigError
from data.tokenizer import Tokenizer


def read_texts(path: Path, field: str = "text") -> list[str]:
    """A .jsonl file's texts, one a line under `field`; any other file is one text.

    Raises:
        ConfigError: no such file, not UTF-8, or a line that has no such text.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"There is no file {path}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); convert it first.") from None
    if path.suffix != ".jsonl":
        return [text]
    texts = []
    # Not splitlines: inside a string, JSON allows other line separators than this one.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)[field]
        except (ValueError, KeyError, TypeError):
            value = None
        if not isinstance(value, str):
            raise ConfigError(f'{path}, line {number}: not an object with a "{field}" that is a text.')
        texts.append(value)
    return texts


def encode_file(path: Path, tokenizer: Tokenizer) -> list[Tensor]:
    """int64 ids [n] of each document of a file, without special tokens."""
    return [torch.tensor(tokenizer.encode(text), dtype=torch.int64) for text in read_texts(path)]
