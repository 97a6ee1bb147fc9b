"""Perplexity by context length.

    python -m evals.perplexity MODEL_DIR --data FILE --lengths 1024 4096 --json F

The file is tokenised without special tokens and cut into non-overlapping windows of each length from its first token;
an incomplete last window is dropped. A window counts with its last 256 tokens, so that every target has at least
length − 256 tokens before it: the figure is exp of their mean negative log-likelihood (SCOPE 4.3).
Past the trained length, a model with scopes is measured as it was trained ("trained") and with scopes that grow with
the length ("length").
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from checkpoints.model_dir import load_model
from configs.load import ConfigError
from configs.schema import Scope
from data.tokenizer import load_tokenizer_dir
from model.build import ModelConfig, set_length
from model.llama import Llama
from parallel.device import default_device

TARGETS = 256
"""Tokens at the end of each window that count."""


def window_nll(model: Llama, tokens: torch.Tensor, length: int, windows: int = 0) -> tuple[float, int]:
    """Sum of the negative log-likelihoods over windows of `length`, and the number of tokens that counted.

    Args:
        model: set for this length.
        tokens: [n] ids.
        windows: at most this many; 0 takes all.
    """
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    rows = rows[:windows] if windows else rows
    device = next(model.parameters()).device
    total, count = 0.0, 0
    bar = tqdm(rows, desc=f"length {length:,}", unit="window", disable=not sys.stderr.isatty(), leave=False)
    with torch.no_grad():
        for row in bar:
            row = row.to(device)
            labels = row[1:].clone()
            labels[:-TARGETS] = -100
            total += float(model(row[None, :-1], labels=labels[None]))
            count += min(TARGETS, length - 1)
    return total, count


def perplexity_by_length(
    model: Llama, config: ModelConfig, tokens: torch.Tensor, lengths: Sequence[int], windows: int = 0
) -> dict[str, dict[str, float]]:
    """Perplexity at each length.

    Returns:
        {"lengths": {length: perplexity}}, as the model was trained; with scopes that can grow, and a length beyond the
        trained one, also {"lengths_scope_length": …} with scopes that grow.
    """
    for length in lengths:  # before hours are spent on the others
        if not 2 <= length <= len(tokens):
            raise ConfigError(f"length {length:,}: a window needs at least 2 tokens, and the data has {len(tokens):,}.")
    result = {"lengths": {str(n): _perplexity(model, config, tokens, n, windows) for n in lengths}}
    grown = _with_scope_max(config, "length")
    if grown is not None and any(n > config.trained_length for n in lengths):
        # Up to the trained length the scopes are the same.
        result["lengths_scope_length"] = {
            str(n): _perplexity(model, grown, tokens, n, windows)
            if n > config.trained_length
            else result["lengths"][str(n)]
            for n in lengths
        }
    set_length(model, config, config.trained_length)
    return result


def _perplexity(model: Llama, config: ModelConfig, tokens: torch.Tensor, length: int, windows: int) -> float:
    set_length(model, config, length)
    total, count = window_nll(model, tokens, length, windows)
    return math.exp(min(total / count, 700))


def _with_scope_max(config: ModelConfig, scope_max: Any) -> ModelConfig | None:
    """The config with another `scope_max`; None where no layer has scopes that it would change."""

    def changed(heads: Any) -> Any:
        return dataclasses.replace(heads, scope_max=scope_max) if isinstance(heads, Scope) else heads

    p = config.position
    rules = tuple(dataclasses.replace(rule, heads=changed(rule.heads)) for rule in p.rules)
    position = dataclasses.replace(p, heads=changed(p.heads), rules=rules)
    return None if position == p else dataclasses.replace(config, position=position)


def encode_file(path: Path, tokenizer: Any) -> torch.Tensor:
    """[n] ids of a text file, without special tokens."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); convert it first.") from None
    return torch.tensor(tokenizer.encode(text), dtype=torch.int64)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evals.perplexity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="window lengths in tokens")
    parser.add_argument("--windows", type=int, default=0, help="at most this many windows a length (default: all)")
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    options = parser.parse_args(arguments)
    device = options.device or default_device()
    if options.windows < 0:
        parser.error(f"--windows {options.windows} must be 0 (all) or more")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    try:
        model, config = load_model(options.model_dir, device=device, dtype=getattr(torch, options.dtype))
        tokens = encode_file(options.data, load_tokenizer_dir(options.model_dir))
        figures = perplexity_by_length(model, config, tokens, options.lengths, options.windows)
    except ValueError as error:
        sys.exit(str(error))
    print(table(figures, config.trained_length))
    if options.json:
        result = {**figures, "tokens": len(tokens), "trained_length": config.trained_length, "targets": TARGETS}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def table(figures: dict[str, dict[str, float]], trained_length: int) -> str:
    """The figures as text, a line a length."""
    grown = figures.get("lengths_scope_length")
    lines = [f"{'length':>9}{'perplexity':>13}" + (f"{'scopes grown':>15}" if grown else "")]
    for length, value in figures["lengths"].items():
        mark = "  (trained)" if int(length) == trained_length else ""
        lines.append(f"{int(length):>9,}{value:>13.3f}" + (f"{grown[length]:>15.3f}" if grown else "") + mark)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
