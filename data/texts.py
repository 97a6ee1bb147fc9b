"""Texts from files, with errors that name the file and the line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.data.compressed import COMPRESSED, DAMAGE, open_unpacked
from farsight.data.sources.rows import is_utf16
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError
from farsight.progress import progress


def read_texts(path: Path, field: str = "text") -> list[str]:
    """The texts of a file: `field` of each line of a .jsonl, the column `field` of a .parquet; any other file is one text.

    Files that also end with .gz, .bz2, .xz or .zst are decompressed. Evaluations and analyses read their --data with it.

    Raises:
        ConfigError: no such file, not UTF-8, damaged, or a line or row without such a text.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file." if path.exists() else f"There is no file {path}.")
    kind = _kind(path)
    if kind == ".parquet":
        if kind != path.suffix:
            raise ConfigError(f"{path}: Parquet compresses its own columns; decompress the file.")
        return list(_column(path, field))
    text = _decode(path, _read(path))
    return list(_lines(path, text, field)) if kind == ".jsonl" else [text]


def has_fields(path: Path) -> bool:
    """Whether a file holds records with fields (JSON lines, Parquet) rather than one plain text."""
    return _kind(path) in (".jsonl", ".parquet")


def _kind(path: Path) -> str:
    """A file's suffix, not counting that of its compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def encode_file(path: Path, tokenizer: Tokenizer, field: str = "text") -> list[Tensor]:
    """Token ids, int64 [n], of each document of a file, without special tokens; the tools feed them to a model."""
    texts = read_texts(path, field)
    found = []
    with progress(
        desc=f"Tokenising {path.name}", total=sum(map(len, texts)), unit="character", unit_scale=True
    ) as shown:
        for text in texts:
            found.append(torch.from_numpy(tokenizer.encode_array(text)))
            shown.update(len(text))
    return found


def _read(path: Path) -> bytes:
    with open_unpacked(path) as (file, _):
        try:
            return file.read()
        except DAMAGE as error:
            raise _damaged(path, error) from error


def _decode(path: Path, raw: bytes) -> str:
    if is_utf16(raw):
        raise ConfigError(f"{path} is UTF-16, not UTF-8: convert it first (iconv -f UTF-16 -t UTF-8 '{path}').")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); convert it first.") from None


def _lines(path: Path, text: str, field: str) -> Iterator[str]:
    # Not splitlines: JSON strings may contain other line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and isinstance(value.get(field), str):
            yield value[field]
            continue
        if text.lstrip().startswith("["):
            raise ConfigError(f"{path} is a JSON array: write one element per line (jq -c '.[]' '{path}' does so).")
        if isinstance(value, dict) and field in value:
            raise _not_a_text(f"{path}, line {number}", field, value[field])
        there = f"; it has {', '.join(value) or 'none'}" if isinstance(value, dict) else ""
        raise ConfigError(f'{path}, line {number}: not an object whose "{field}" is a text{there}.')


def _column(path: Path, field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise ConfigError(f"{path}: no column '{field}'; it has {', '.join(names)}.")
            values = file.read([field]).column(field).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise _not_a_text(f"{path}, row {number}", field, value)
        yield value


def _not_a_text(place: str, field: str, value: Any) -> ConfigError:
    return ConfigError(f'{place}: "{field}" is {"null" if value is None else type(value).__name__}, not a text.')


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} can't be read ({error}): its content is not what its name says, or it is damaged.")
