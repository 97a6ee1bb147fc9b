"""Queries and keys of a model's heads as attention compares them: normalised, turned by RoPE where a layer turns them.

    farsight capture MODEL_DIR --data FILE --length 4096 --out captured/
    farsight geometry captured/
    farsight plasticity captured/

Takes any model directory, one that transformers wrote too. farsight geometry and farsight plasticity capture by themselves when
they are given a model; captured once, both read the same samples.

Sequences are cut into --buckets of equal width, and every token is kept with probability --per-bucket / width: one of each
bucket and sequence in expectation, so that all positions count alike. Of all query heads, --heads are drawn, each with the
key head that it shares with its group. Layers without RoPE give what they project; of a head with a scope every key is
kept, though only those within it can form a pair that the head could choose from. What a head adds to its scores after
them (ALiBi) is noted as its slope.

Written are capture.json and .safetensors files of many sequences each.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from farsight.analysis.capture.recorder import Recorder, recording
from farsight.analysis.sequences import add_text_options, read_sequences
from farsight.cli import bounded, command, positive
from farsight.configs.load import ConfigError
from farsight.configs.schema import NoRotary
from farsight.files import write_text
from farsight.inference.decoder import CHUNK, Decoder
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import add_model_options
from farsight.model.build import ModelConfig
from farsight.model.position.layers import LayerPosition
from farsight.progress import progress

__all__ = ["Head", "Recorder", "Samples", "capture", "draw_heads", "draw_tokens", "read_capture", "recording"]

HEADS = 300
"""Query heads that are drawn (thesis, section 5.4.1)."""
BUCKETS = 16
"""8,192 tokens each at 131,072 (the same)."""
SEQUENCES = 500
MANIFEST = "capture.json"
CAPTURED: dict[str, Any] = {
    "data": None, "length": None, "sequences": SEQUENCES, "heads": HEADS, "buckets": BUCKETS, "per_bucket": 1.0, "seed": 0,
    "device": None, "dtype": None, "extend": None, "chunk": CHUNK,
}  # fmt: skip
"""Options, with their defaults, that can change nothing about what was captured."""
PART_BYTES = 64 * 2**20
"""Samples are held, and written, in parts of about this size: reading a head opens all of them."""


@dataclass(frozen=True)
class Head:
    """A query head with the key head that it compares itself to."""

    layer: int
    head: int
    """Of the layer's query heads, as the weights are laid out."""
    kv_head: int
    """head // (query heads / key heads): thesis, equation 4.1."""
    scope: int
    """Tokens it sees, itself included; the length or more is all of them."""
    rotates: bool
    """Whether RoPE turned it."""
    slope: float = 0.0
    """Of ALiBi: −slope · distance is added to q·k / √H."""

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


class Samples:
    """The captured tokens of all heads. Shapes: T sampled tokens, H head dim.

    Args:
        heads: query heads.
        length: tokens a sequence.
        buckets: into how many of equal width sequences were cut.
        parts: mappings of "q" [heads, t, H], "k" [key heads, t, H], "position" [t] and "sequence" [t], or files that hold
            one, of which a head's rows are read when it is asked for.
        key_rows: row of "k" that each head of `heads` has.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        length: int,
        buckets: int,
        parts: Sequence["Mapping[str, Tensor] | Path"],
        key_rows: Sequence[int],
    ) -> None:
        self.heads, self.length, self.buckets = tuple(heads), length, buckets
        self._parts = [safe_open(part, "pt") if isinstance(part, Path) else part for part in parts]  # mapped, not read
        self._key_rows = key_rows
        self.positions_T = self._all("position").long()
        """Of each token in its sequence, from 0."""
        self.sequences_T = self._all("sequence").long()
        """Number of the sequence that each token is of."""

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def bucket_width(self) -> float:
        return self.length / self.buckets

    @property
    def buckets_T(self) -> Tensor:
        """int64 [T]: the bucket of each token."""
        return self.positions_T * self.buckets // self.length

    def queries(self, number: int) -> Tensor:
        """fp64 [T, H] of the head of that number in `heads`."""
        return self._all("q", number).double()

    def keys(self, number: int) -> Tensor:
        """fp64 [T, H] of its key head."""
        return self._all("k", self._key_rows[number]).double()

    def _all(self, name: str, row: int | None = None) -> Tensor:
        return torch.cat([_read(part, name, row) for part in self._parts]).cpu()


def _read(part: Any, name: str, row: int | None) -> Tensor:
    if isinstance(part, Mapping):
        return part[name] if row is None else part[name][row]
    return part.get_tensor(name) if row is None else part.get_slice(name)[row]


def draw_heads(config: ModelConfig, length: int, most: int = HEADS, seed: int = 0) -> list[Head]:
    """`most` of the model's query heads, uniformly, in their order; all where it has no more.

    Args:
        length: tokens of the sequences, which scopes and slopes may depend on.
    """
    a = config.architecture
    every = range(a.n_layers * a.n_heads)
    layers = config.layers(length)
    drawn = sorted(random.Random(seed).sample(every, min(most, len(every))))
    return [describe_head(config, layers, *divmod(number, a.n_heads), length) for number in drawn]


def describe_head(config: ModelConfig, layers: Sequence[LayerPosition], layer: int, head: int, length: int) -> Head:
    """A query head of a model whose layers are these at this length."""
    a, position = config.architecture, layers[layer]
    return Head(
        layer=layer,
        head=head,
        kv_head=head // (a.n_heads // a.n_kv_heads),
        scope=min(position.scopes[head], length),
        rotates=not isinstance(position.rotary, NoRotary),
        slope=0.0 if position.alibi_slopes is None else position.alibi_slopes[head],
    )


def draw_tokens(length: int, buckets: int, per_bucket: float, sequence: int, seed: int = 0) -> Tensor:
    """Positions of a sequence that are kept, int64 [t]: each with probability per_bucket · buckets / length."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sequence)
    return torch.nonzero(torch.rand(length, generator=generator) < per_bucket * buckets / length)[:, 0]


def captured_parts(
    decoder: Decoder, heads: Sequence[Head], tokens_SL: Tensor, buckets: int, per_bucket: float, seed: int
) -> Iterator[dict[str, Tensor]]:
    """What `Samples` is made of, a part a sequence."""
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
        queries, keys = ({name: getattr(r, x) for name, r in recorders.items()} for x in ("queries_TNH", "keys_TKH"))
        yield {
            "q": torch.stack([queries[str(head.layer)][:, head.head] for head in heads]).cpu(),
            "k": torch.stack([keys[str(layer)][:, kv_head] for layer, kv_head in key_heads]).cpu(),
            "position": columns.to(torch.int32),
            "sequence": torch.full_like(columns, number, dtype=torch.int32),
        }


def joined_parts(parts: Iterable[dict[str, Tensor]], least_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The same tokens in fewer parts, each of `least_bytes` but the last."""
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


def distinct_key_heads(heads: Sequence[Head]) -> list[tuple[int, int]]:
    """Layer and number of the key heads that these query heads use, each once: the rows of "k"."""
    return list(dict.fromkeys((head.layer, head.kv_head) for head in heads))


def key_rows(heads: Sequence[Head]) -> list[int]:
    """Row of "k" of each head."""
    row = {key_head: number for number, key_head in enumerate(distinct_key_heads(heads))}
    return [row[head.layer, head.kv_head] for head in heads]


@dataclass(frozen=True)
class CaptureSettings:
    """How much is captured, and which of it."""

    length: int
    buckets: int = BUCKETS
    per_bucket: float = 1.0
    heads: int = HEADS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.buckets <= self.length:
            raise ConfigError(f"--buckets {self.buckets}: set from 2 to the {self.length} tokens of a sequence.")
        if not 0 < self.per_bucket <= self.length / self.buckets:
            width = self.length / self.buckets
            raise ConfigError(
                f"--per-bucket {self.per_bucket:g}: a bucket has {width:g} tokens; set more than 0, and no more than that."
            )


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
        folder: where to write them as they come; None holds them in memory.
        about: what more to say in the folder's capture.json.

    Raises:
        ConfigError: an extension that turns keys itself, so that there are no turned ones to capture.
    """
    decoder, length = loaded.decoder, settings.length
    if decoder.turns_own_keys:
        raise ConfigError(
            "--extend: this method turns keys anew for every query, so there are none to capture; methods that change "
            "frequencies (linear, ntk, yarn, …) have them."
        )
    heads = draw_heads(decoder.config, length, settings.heads, settings.seed)
    found = captured_parts(decoder, heads, tokens_SL, settings.buckets, settings.per_bucket, settings.seed)
    shown = progress(found, total=len(tokens_SL), unit="sequence", desc="capture")
    if folder is None:
        return Samples(heads, length, settings.buckets, list(joined_parts(shown, PART_BYTES)), key_rows(heads))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    for part in joined_parts(shown, PART_BYTES):
        files.append(f"samples-{len(files):05}.safetensors")
        save_file(part, folder / files[-1])
    manifest = {
        "model": str(loaded.path),
        **(about or {}),
        **dataclasses.asdict(settings),
        "sequences": len(tokens_SL),
        "files": files,
        "heads": [dataclasses.asdict(head) for head in heads],
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")  # last: without it there is no capture
    return read_capture(folder)


def read_capture(folder: Path) -> Samples:
    """What farsight capture wrote.

    Raises:
        ConfigError: no capture, or one that is not whole.
    """
    manifest = read_manifest(folder)
    files = [folder / name for name in manifest["files"]]
    absent = next((file for file in files if not file.is_file()), None)
    if absent is not None:
        raise ConfigError(f"{absent} is missing: capture again.")
    heads = [Head(**head) for head in manifest["heads"]]
    return Samples(heads, manifest["length"], manifest["buckets"], files, key_rows(heads))


def read_manifest(folder: Path) -> dict[str, Any]:
    """capture.json: the model's path, the settings, the heads."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {MANIFEST}: name a folder that farsight capture wrote.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): capture again.") from None


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    """Adds --heads, --buckets and --per-bucket."""
    parser.add_argument("--heads", type=positive, default=HEADS, help="query heads to draw (%(default)s)")
    parser.add_argument("--buckets", type=positive, default=BUCKETS, help="of equal width, in a sequence (%(default)s)")
    parser.add_argument(
        "--per-bucket",
        type=bounded(float, above=0),
        default=1.0,
        metavar="X",
        help="tokens kept of each, in expectation (%(default)g)",
    )


def capture_from_options(path: Path, options: argparse.Namespace, folder: Path | None = None) -> Samples:
    """Captures the model directory `path` as add_text_options, add_capture_options and add_model_options say."""
    loaded = load(path, options)
    length = options.length or loaded.trained_length
    settings = CaptureSettings(length, options.buckets, options.per_bucket, options.heads, options.seed)
    tokens_SL = read_sequences(options.data, loaded.tokenizer, length, options.sequences)
    options.dtype = str(next(loaded.decoder.model.parameters()).dtype).removeprefix("torch.")  # as it was chosen
    about = {"data": str(options.data), "extend": options.extend, "dtype": options.dtype}
    return capture(loaded, tokens_SL, settings, folder, about)


def captured_or_capture(path: Path, options: argparse.Namespace, own: Collection[str] = ()) -> Samples:
    """A folder's samples, or those of a model directory.

    Args:
        own: options that mean something to the tool whatever was captured.

    Raises:
        ConfigError: neither, or options of a capture that was made already.
    """
    if (path / MANIFEST).is_file():
        for name, default in CAPTURED.items():
            if name not in own and getattr(options, name) != default:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{path} is a capture, in which {option} is settled: leave it out, or capture again.")
        return read_capture(path)
    if options.data is None:
        raise ConfigError(f"{path} is no capture; to capture the model there, add --data FILE.")
    return capture_from_options(path, options)


def settings_of(path: Path, options: argparse.Namespace, samples: Samples) -> dict[str, Any]:
    """What was captured, for a tool's JSON: the same keys whether `path` is a capture or a model directory."""
    names = ("model", "data", "extend", "dtype", "per_bucket", "seed")
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        found = {name: manifest.get(name) for name in names}
    else:
        found = {name: str(path) if name == "model" else getattr(options, name) for name in names}
    sequences = int(samples.sequences_T.max()) + 1 if len(samples.sequences_T) else 0
    return {
        **{name: str(value) if isinstance(value, Path) else value for name, value in found.items()},
        "length": samples.length,
        "buckets": samples.buckets,
        "sequences": sequences,
        "tokens": len(samples.positions_T),
    }


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="farsight capture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model directory, adapter or checkpoint")
    add_text_options(parser, SEQUENCES)
    add_capture_options(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="where to write; made where it is not"
    )
    add_model_options(parser)
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("the following arguments are required: --data")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file; name a folder")
    if (options.out / MANIFEST).exists():
        parser.error(f"--out {options.out} holds a capture already; name another folder, or remove it")
    samples = capture_from_options(options.model, options, options.out)
    what = settings_of(options.out, options, samples)
    print(f"{len(samples)} heads, {what['tokens']:,} tokens of {what['sequences']:,} sequences: {options.out}")


if __name__ == "__main__":
    main()
