"""Runs a model over sequences and collects the queries and keys of drawn heads at drawn tokens."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from farsight.analysis.capture.heads import Head, distinct_key_heads, draw_heads, key_rows
from farsight.analysis.capture.options import BUCKETS, HEADS, MANIFEST
from farsight.analysis.capture.recorder import Recorder
from farsight.analysis.capture.samples import Samples, read_capture
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from farsight.outputs import write_json
from farsight.progress import progress
from farsight.remote import shown

PART_BYTES = 64 * 2**20
"""Samples are held and written in parts of about this size, since reading one head opens every part."""


@dataclass(frozen=True)
class CaptureSettings:
    """Settings of a capture."""

    length: int
    buckets: int = BUCKETS
    per_bucket: float = 1.0
    heads: int = HEADS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.buckets < 2:
            raise ConfigError(f"--buckets {self.buckets}: set 2 or more.")
        if self.buckets > self.length:  # the least number is the tool's own
            raise ConfigError(f"--buckets {self.buckets}: set no more than the {self.length} tokens of a sequence.")
        if not 0 < self.per_bucket <= self.length / self.buckets:
            width = self.length / self.buckets
            raise ConfigError(
                f"--per-bucket {self.per_bucket:g}: a bucket has {width:g} tokens; set more than 0, and no more than that."
            )


def draw_tokens(length: int, buckets: int, per_bucket: float, sequence: int, seed: int = 0) -> Tensor:
    """Positions to keep of a sequence, int64 [t]: each with probability per_bucket · buckets / length."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sequence)
    return torch.nonzero(torch.rand(length, generator=generator) < per_bucket * buckets / length)[:, 0]


def captured_parts(
    decoder: Decoder, heads: Sequence[Head], tokens_SL: Tensor, buckets: int, per_bucket: float, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Reads the sequences and yields one part of `Samples` for each."""
    wanted = {str(head.layer) for head in heads}
    key_heads = distinct_key_heads(heads)
    device = next(decoder.model.parameters()).device
    for number, tokens_L in enumerate(tokens_SL):
        columns = draw_tokens(len(tokens_L), buckets, per_bucket, number, seed)
        here = columns.to(device)
        rows = decoder.start([len(tokens_L)])
        recorders = {
            name: Recorder(torch.zeros_like(here), here, rows.caches[name], along="tokens") for name in sorted(wanted)
        }
        rows.caches |= recorders
        for _ in rows.chunks(tokens_L[None].to(device)):
            pass
        # Layers may be on different devices.
        queries, keys = (
            {name: getattr(r, x).cpu() for name, r in recorders.items()} for x in ("queries_TNH", "keys_TKH")
        )
        yield {
            "q": torch.stack([queries[str(head.layer)][:, head.head] for head in heads]),
            "k": torch.stack([keys[str(layer)][:, kv_head] for layer, kv_head in key_heads]),
            "position": columns.to(torch.int32),
            "sequence": torch.full_like(columns, number, dtype=torch.int32),
        }


def joined_parts(parts: Iterable[dict[str, Tensor]], least_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Joins parts, in order, into parts of at least `least_bytes`; the last may be smaller."""
    held: list[dict[str, Tensor]] = []
    size = 0
    for part in parts:
        held.append(part)
        size += sum(x.nbytes for x in part.values())
        if size >= least_bytes:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.cat([part[name] for part in parts], dim=-2 if parts[0][name].dim() == 3 else 0) for name in parts[0]
    }


def capture(
    loaded: LoadedModel,
    tokens_SL: Tensor,
    settings: CaptureSettings,
    folder: Path | None = None,
    about: Mapping[str, Any] | None = None,
) -> Samples:
    """Captures a model's heads.

    Args:
        tokens_SL: sequences of `settings.length` tokens.
        folder: where to write the samples as they are captured; None keeps them in memory.
        about: additional entries for the folder's capture.json.

    Raises:
        ConfigError: an extension that rotates keys itself, so that there are no rotated keys to capture.
    """
    decoder, length = loaded.decoder, settings.length
    if decoder.rotates_own_keys:
        raise ConfigError(
            "--extend: this method rotates the keys again for every query, so there is no one key to capture; use a "
            "method that changes frequencies (linear, ntk, yarn, …)."
        )
    heads = draw_heads(decoder.config, length, settings.heads, settings.seed)
    found = captured_parts(decoder, heads, tokens_SL, settings.buckets, settings.per_bucket, settings.seed)
    samples = progress(found, total=len(tokens_SL), unit="sequence", desc="capture")
    if folder is None:
        return Samples(heads, length, settings.buckets, list(joined_parts(samples, PART_BYTES)), key_rows(heads))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    for part in joined_parts(samples, PART_BYTES):
        files.append(f"samples-{len(files):05}.safetensors")
        save_file(part, folder / files[-1])
    manifest = {
        "model": shown(loaded.path),
        **(about or {}),
        **dataclasses.asdict(settings),
        "sequences": len(tokens_SL),
        "files": files,
        "heads": [dataclasses.asdict(head) for head in heads],
    }
    write_json(folder / MANIFEST, manifest)  # last, so an unfinished folder is no capture
    return read_capture(folder)
