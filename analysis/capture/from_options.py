"""Samples as a tool's command line asks for them: captured from a model directory, or read from a capture."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from farsight.analysis.capture.options import BUCKETS, HEADS, SEQUENCES, is_capture
from farsight.analysis.capture.samples import Samples, read_capture, read_manifest
from farsight.analysis.capture.sampling import CaptureSettings, capture
from farsight.analysis.sequences import sequences_from_options, text_settings
from farsight.errors import ConfigError
from farsight.inference.decoder import CHUNK
from farsight.inference.loading import load
from farsight.inference.model_options import READING, reading_options
from farsight.remote import shown

CAPTURE_DEFAULTS: dict[str, Any] = {
    "data": None, "length": None, "sequences": SEQUENCES, "heads": HEADS, "buckets": BUCKETS, "per_bucket": 1.0, "seed": 0,
    "bos": "no", "document_starts": False, "device": None, "dtype": None, "extend": None, "scope_max": None, "chunk": CHUNK,
    "quantization": None, "trust_remote_code": False,
}  # fmt: skip
"""Options that apply while capturing, with their defaults. Set for an existing capture, they would be ignored."""


def capture_from_options(path: Path, options: argparse.Namespace, folder: Path | None = None) -> Samples:
    """Captures the model directory `path` with the options of add_text_options, add_capture_options and add_model_options."""
    loaded = load(path, options)
    length = options.length or loaded.trained_length
    settings = CaptureSettings(length, options.buckets, options.per_bucket, options.heads, options.seed)
    tokens_SL = sequences_from_options(options, loaded.tokenizer, length)
    # Record the dtype in use, which may be the default.
    options.dtype = str(next(loaded.decoder.model.parameters()).dtype).removeprefix("torch.")
    about = {
        "data": str(options.data),
        **reading_options(options),
        "dtype": options.dtype,
        **text_settings(options),
    }
    return capture(loaded, tokens_SL, settings, folder, about)


def captured_or_capture(path: Path, options: argparse.Namespace, own: Collection[str] = ()) -> Samples:
    """Reads the capture at `path`, or captures the model directory there.

    Args:
        own: options that the calling tool itself uses, allowed with an existing capture too.

    Raises:
        ConfigError: neither of the two, or capture options given for an existing capture.
    """
    if is_capture(path):
        for name, default in CAPTURE_DEFAULTS.items():
            if name not in own and getattr(options, name) != default:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{path} is a capture, which fixes {option}: leave the option out, or capture again.")
        return read_capture(path)
    if options.data is None:
        raise ConfigError(f"{path} is not a capture; to capture the model there, add --data FILE.")
    return capture_from_options(path, options)


def settings_of(path: Path, options: argparse.Namespace, samples: Samples) -> dict[str, Any]:
    """The settings of a capture for a tool's JSON, with the same keys for a capture and for a model directory."""
    names = ("model", "data", *READING, "dtype", "per_bucket", "seed")
    if is_capture(path):
        manifest = read_manifest(path)
        found = {name: manifest.get(name) for name in names}
        found |= {name: manifest.get(name, False) for name in ("bos", "document_starts")}
    else:
        found = {name: shown(path) if name == "model" else getattr(options, name) for name in names}
        found |= text_settings(options)
    sequences = int(samples.sequences_T.max()) + 1 if len(samples.sequences_T) else 0
    return {
        **{name: str(value) if isinstance(value, Path) else value for name, value in found.items()},
        "length": samples.length,
        "buckets": samples.buckets,
        "sequences": sequences,
        "tokens": len(samples.positions_T),
    }
