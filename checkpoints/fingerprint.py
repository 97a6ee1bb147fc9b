"""Which weights a base has, in short: an adapter belongs to those that it was trained beside, wherever they lie."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from checkpoints.model_dir import check_tensors, read_model_config
from checkpoints.names import to_hf_name
from configs.load import to_dict

ROWS = 4
"""So many of each matrix are looked at, spread evenly: other training changes all of them."""


def base_entry(directory: Path) -> dict[str, Any]:
    """What an adapter says of its base: where it lies, its own positions and its weights' fingerprint.

    Raises:
        ConfigError: no model directory, or tensors that do not fit its config.
    """
    config = read_model_config(directory)
    return {
        "path": str(directory.resolve()),
        "position": to_dict(config.position),
        "fingerprint": fingerprint(check_tensors(directory, config)),
    }


def fingerprint(files: Mapping[str, Path]) -> str:
    """A hash of the tensors' names, types, shapes and some of their rows; the same however files divide them.

    A few MB of a model of 8 B parameters are read.

    Args:
        files: from `check_tensors`.
    """
    each: dict[str, str] = {}
    for path in {*files.values()}:
        with safe_open(path, framework="pt") as file:
            for name in (name for name in files if files[name] == path):
                tensor = file.get_slice(to_hf_name(name))
                shape = tensor.get_shape()
                digest = hashlib.blake2b(f"{name} {tensor.get_dtype()} {shape}".encode(), digest_size=16)
                rows = torch.linspace(0, shape[0] - 1, ROWS).long().tolist() if len(shape) == 2 else [slice(None)]
                for row in rows:
                    digest.update(tensor[row].contiguous().view(torch.uint8).numpy().data)
                each[name] = digest.hexdigest()
    return hashlib.blake2b("".join(each[name] for name in sorted(each)).encode(), digest_size=16).hexdigest()
