"""Perplexity by context length.

    python -m evals.perplexity MODEL_DIR --data FILE --lengths 1024 4096 --json F
    torchrun --nproc_per_node 8 -m evals.perplexity MODEL_DIR OTHER_DIR --data BOOKS.jsonl --lengths 4096 131072 \\
        --documents --picture perplexity.png

A document is a line of a .jsonl file (its "text"), or any other file whole. Documents are tokenised without special tokens and cut
into non-overlapping windows of each length from their first token; an incomplete last window is dropped. A window counts
with its last 256 tokens, so that every target has at least length − 256 tokens before it: the figure is exp of their mean
negative log-likelihood. With --documents, documents shorter than the longest length are left out and of each other one the
same final 256 tokens are predicted from contexts of each length (SCOPE 4.3).
--buckets N also gives the perplexity of all of a window's tokens by their position in it.
--rope KIND:FACTOR scales the RoPE of a model that was trained without scaling, as the baseline for longer contexts.
Past the trained length, a model with scopes is measured as it was trained ("trained") and with scopes that grow with
the length ("length").
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from checkpoints.model_dir import load_model, read_model_config
from configs.load import ConfigError
from configs.schema import DynamicNtkRope, LinearRope, NoRotary, NtkRope, Rope, Rotary, Scope, YarnRope
from data.tokenizer import load_tokenizer_dir
from model.build import ModelConfig, set_length
from model.llama import Llama
from parallel.device import default_device

TARGETS = 256
"""Tokens at the end of each window that count."""

SCALINGS = ("linear", "ntk", "dynamic", "yarn")
"""Kinds of RoPE that `--rope` takes."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """Which windows of the documents are measured, and how.

    The work is shared by `world` processes, of which this is number `rank`; all of them get all figures.
    """

    limit: int = 0
    """At most this many a length; 0 takes all."""
    final: bool = False
    """Only the last window of each document that is as long as the longest length."""
    buckets: int = 0
    """Also by position, in this many parts of equal size; 0 leaves that out."""
    rank: int = 0
    world: int = 1

    def of(self, documents: Sequence[Tensor], length: int) -> list[Tensor]:
        """[length] ids each."""
        if self.final:
            rows = [document[-length:] for document in documents]
        else:
            rows = [
                row for document in documents for row in document[: len(document) // length * length].view(-1, length)
            ]
        return rows[: self.limit] if self.limit else rows


def window_nll(model: Llama, rows: Sequence[Tensor], windows: Windows = Windows()) -> tuple[Tensor, Tensor]:
    """Sums of the negative log-likelihoods of windows of one length, and the numbers of tokens that counted.

    Args:
        model: set for this length.
        rows: the windows, [length] ids each.

    Returns:
        Two fp64 [1 + buckets]: the last 256 tokens of each window, then all tokens by their position.
    """
    length, device = len(rows[0]), next(model.parameters()).device
    # The token at p predicts the one at p + 1.
    parts = [(max(0, length - 1 - TARGETS), length - 1)]
    edges = [round(i * (length - 1) / windows.buckets) for i in range(windows.buckets + 1)] if windows.buckets else []
    parts += itertools.pairwise(edges)
    sums = torch.zeros(2, len(parts), dtype=torch.float64)
    mine = rows[windows.rank :: windows.world]
    bar = tqdm(
        mine, desc=f"length {length:,}", unit="window", leave=False, disable=windows.rank > 0 or not sys.stderr.isatty()
    )
    with torch.no_grad():
        for row in bar:
            ids = row.to(device)[None]
            h_BLD = model.hidden_states(ids[:, :-1])
            for i, (start, stop) in enumerate(parts):
                sums[0, i] += float(model.head(h_BLD[:, start:stop], ids[:, start + 1 : stop + 1]))
                sums[1, i] += stop - start
    if windows.world > 1:
        dist.all_reduce(sums)
    return sums[0], sums[1]


def perplexity_by_length(
    model: Llama,
    config: ModelConfig,
    documents: Sequence[Tensor],
    lengths: Sequence[int],
    windows: Windows = Windows(),
) -> dict[str, dict[str, Any]]:
    """Perplexity at each length.

    Args:
        documents: [n] ids each.

    Returns:
        {"lengths": {length: perplexity}}, as the model was trained; with scopes that can grow, and a length beyond the
        trained one, also {"lengths_scope_length": …} with scopes that grow. With buckets, {"buckets": {length: [perplexity
        of each bucket]}}, as trained.
    """
    longest = max((len(document) for document in documents), default=0)
    for length in lengths:  # before hours are spent on the others
        if not 2 <= length <= longest:
            raise ConfigError(
                f"length {length:,}: a window needs at least 2 tokens, and the longest document has {longest:,}."
            )
        if windows.buckets >= length:
            raise ConfigError(f"--buckets {windows.buckets}: a window of {length:,} has {length - 1:,} targets.")
    if windows.final:
        documents = [document for document in documents if len(document) >= max(lengths)]
    grown = _with_scope_max(config, "length")
    result: dict[str, dict[str, Any]] = {"lengths": {}, "buckets": {}, "lengths_scope_length": {}}
    for length in lengths:
        rows = windows.of(documents, length)
        set_length(model, config, length)
        values = _perplexities(*window_nll(model, rows, windows))
        result["lengths"][str(length)], result["buckets"][str(length)] = values[0], values[1:]
        if grown is not None and length > config.trained_length:
            set_length(model, grown, length)
            values = _perplexities(*window_nll(model, rows, dataclasses.replace(windows, buckets=0)))
        # Up to the trained length the scopes are the same.
        result["lengths_scope_length"][str(length)] = values[0]
    set_length(model, config, config.trained_length)
    if grown is None or max(lengths) <= config.trained_length:
        del result["lengths_scope_length"]
    if not windows.buckets:
        del result["buckets"]
    return result


def _perplexities(sums: Tensor, counts: Tensor) -> list[float]:
    return [math.exp(min(mean, 700)) for mean in (sums / counts).tolist()]


def _with_scope_max(config: ModelConfig, scope_max: Any) -> ModelConfig | None:
    """The config with another `scope_max`; None where no layer has scopes that it would change."""

    def changed(heads: Any) -> Any:
        return dataclasses.replace(heads, scope_max=scope_max) if isinstance(heads, Scope) else heads

    p = config.position
    rules = tuple(dataclasses.replace(rule, heads=changed(rule.heads)) for rule in p.rules)
    position = dataclasses.replace(p, heads=changed(p.heads), rules=rules)
    return None if position == p else dataclasses.replace(config, position=position)


def with_scaled_rope(config: ModelConfig, scaling: str) -> ModelConfig:
    """The config with the RoPE of all layers that rotate scaled, as `--rope` names it: "yarn:4".

    YaRN's and dynamic NTK's original length is the trained one.

    Raises:
        ConfigError: a scaling that is none, or a model whose RoPE is scaled already or that has none.
    """
    kind, _, text = scaling.partition(":")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if kind not in SCALINGS or not 1 <= factor < math.inf:
        raise ConfigError(f"--rope {scaling}: write KIND:FACTOR, KIND one of {', '.join(SCALINGS)}, e.g. yarn:4.")
    p = config.position
    if p.lasp is not None:
        raise ConfigError(f"--rope {scaling}: the model has LASP, which sets each layer's scale itself.")

    def scaled(rotary: Rotary) -> Rotary:
        match rotary:
            case NoRotary():
                return rotary
            case Rope(theta=theta):
                original = config.trained_length
                choices: dict[str, Rotary] = {
                    "linear": LinearRope(theta=theta, factor=factor),
                    "ntk": NtkRope(theta=theta, factor=factor),
                    "dynamic": DynamicNtkRope(theta=theta, factor=factor, original_length=original),
                    "yarn": YarnRope(theta=theta, factor=factor, original_length=original),
                }
                return choices[kind]
        raise ConfigError(f"--rope {scaling}: the model's RoPE is scaled already ({rotary.kind}).")

    rules = tuple(
        dataclasses.replace(rule, rotary=scaled(rule.rotary)) if rule.rotary is not None else rule for rule in p.rules
    )
    position = dataclasses.replace(p, rotary=scaled(p.rotary), rules=rules)
    if position == p:
        raise ConfigError(f"--rope {scaling}: no layer of the model rotates.")
    return dataclasses.replace(config, position=position)


def encode_file(path: Path, tokenizer: Any) -> list[Tensor]:
    """Ids of each document of a file, without special tokens."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); convert it first.") from None
    texts = [text]
    if path.suffix == ".jsonl":
        texts = []
        # Not splitlines: inside a string, JSON allows other line separators than this one.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                texts.append(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f'{path}, line {number}: not an object with a "text".') from None
    return [torch.tensor(tokenizer.encode(text), dtype=torch.int64) for text in texts]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evals.perplexity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 text, or .jsonl")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="window lengths in tokens")
    parser.add_argument("--windows", type=int, default=0, help="at most this many windows a length (default: all)")
    parser.add_argument("--documents", action="store_true", help="the same final 256 tokens of every long document")
    parser.add_argument("--buckets", type=int, default=0, metavar="N", help="also by position, in N equal parts")
    parser.add_argument("--rope", metavar="KIND:FACTOR", help=f"scale plain RoPE; kinds: {', '.join(SCALINGS)}")
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    parser.add_argument("--picture", type=Path, metavar="F", help="draw the figures (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    for name in ("windows", "buckets"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} {getattr(options, name)} must be 0 or more")
    for name in ("json", "picture"):
        path = getattr(options, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name} {path}: there is no folder {path.parent}")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(options.device or default_device())
    if world > 1:
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo")  # a few sums, on the CPU
    try:
        windows = Windows(options.windows, options.documents, options.buckets, rank, world)
        results = {str(folder): _measure(folder, options, windows, device) for folder in options.model_dir}
    except ValueError as error:
        sys.exit(str(error))
    finally:
        if world > 1:
            dist.destroy_process_group()
    if rank:
        return
    for folder, figures in results.items():
        if len(results) > 1:
            print(folder)
        print(table(figures, figures["trained_length"]))
    if len({figures["tokens"] for figures in results.values()}) > 1:
        print("The models' tokenizers differ: perplexities are per token and do not compare.")
    if options.json:
        content = results if len(results) > 1 else next(iter(results.values()))
        content = {"models": content} if len(results) > 1 else content
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw(results, options.picture)
        print(options.picture)


def _measure(folder: Path, options: argparse.Namespace, windows: Windows, device: torch.device) -> dict[str, Any]:
    config = read_model_config(folder)
    if options.rope:
        config = with_scaled_rope(config, options.rope)
    model, _ = load_model(folder, device=device, dtype=getattr(torch, options.dtype), config=config)
    tokenizer = load_tokenizer_dir(folder)
    documents = [document for path in options.data for document in encode_file(path, tokenizer)]
    figures = perplexity_by_length(model, config, documents, options.lengths, windows)
    kept = [d for d in documents if not windows.final or len(d) >= max(options.lengths)]
    return {
        **figures,
        "tokens": sum(map(len, documents)),
        "documents": len(kept),
        "trained_length": config.trained_length,
        "targets": TARGETS,
    }


def table(figures: dict[str, Any], trained_length: int) -> str:
    """The figures as text, a line a length."""
    grown = figures.get("lengths_scope_length")
    lines = [f"{'length':>9}{'perplexity':>13}" + (f"{'scopes grown':>15}" if grown else "")]
    for length, value in figures["lengths"].items():
        mark = "  (trained)" if int(length) == trained_length else ""
        lines.append(f"{int(length):>9,}{value:>13.3f}" + (f"{grown[length]:>15.3f}" if grown else "") + mark)
    for length, values in figures.get("buckets", {}).items():
        lines.append(f"by position, {int(length):,} tokens: " + "  ".join(f"{value:.3f}" for value in values))
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity over context length, a line a model; by position beside it where it was asked for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if len(results) > 1:  # what the paths have in common tells nothing
        common = os.path.commonpath([os.path.abspath(folder) for folder in results])
        results = {os.path.relpath(folder, common).removesuffix("/model"): f for folder, f in results.items()}
    by_position = any("buckets" in figures for figures in results.values())
    figure, panels = plt.subplots(
        1, 1 + by_position, figsize=(6 + 6 * by_position, 4.5), layout="constrained", squeeze=False
    )
    axes = panels[0, 0]
    for number, (folder, figures) in enumerate(results.items()):
        for key, line, note in (("lengths", "o-", ""), ("lengths_scope_length", "s--", ", scopes grown")):
            if key in figures:
                lengths = [int(length) for length in figures[key]]
                axes.plot(lengths, figures[key].values(), line, color=f"C{number}", label=folder + note)
        axes.axvline(figures["trained_length"], color=f"C{number}", linestyle=":", linewidth=1)
        if by_position:
            length, values = list(figures["buckets"].items())[-1]
            middles = [(i + 0.5) * int(length) / len(values) for i in range(len(values))]
            panels[0, 1].plot(middles, values, "o-", color=f"C{number}", label=f"{folder}, {int(length):,} tokens")
    lengths = sorted({int(length) for figures in results.values() for length in figures["lengths"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set(
        xlabel="context length in tokens (dotted: trained)", ylabel="perplexity", title="last 256 tokens of a window"
    )
    if by_position:
        panels[0, 1].set(xlabel="position in the window", ylabel="perplexity", title="all tokens of a window")
    for panel in panels[0]:
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
