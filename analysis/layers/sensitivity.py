"""Sensitivity of layers: how strongly each distinguishes a correct text from a nearly identical wrong one (GARFA, section 3.1).

Shapes: L tokens, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farsight.data.texts import read_texts
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.generate.completions import encode_prompt
from farsight.progress import progress

OWN_PAIRS = Path(__file__).parent / "minimal_pairs.jsonl"
"""Five pairs each of code, knowledge and mathematics, written for Farsight: the paper shows only two of its fifteen."""


@dataclass(frozen=True)
class Pair:
    """A correct text, and a minimally different one that is wrong."""

    domain: str
    correct: str
    wrong: str


def read_pairs(path: Path) -> list[Pair]:
    """Reads a .jsonl file with one {"domain", "correct", "wrong"} per line.

    Raises:
        ConfigError: no such file, or a field that is not text, is empty, or equals the other; the message names the line.
    """
    if path.suffix != ".jsonl":
        raise ConfigError(f'--pairs {path}: give a .jsonl file with one {{"domain", "correct", "wrong"}} per line.')
    pairs = [Pair(*texts) for texts in zip(*(read_texts(path, f) for f in ("domain", "correct", "wrong")), strict=True)]
    if not pairs:
        raise ConfigError(f"--pairs {path} contains no pairs.")
    lines = [n for n, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1) if line.strip()]
    for number, pair in zip(lines, pairs, strict=True):
        empty = next((name for name in ("correct", "wrong") if not getattr(pair, name)), None)
        if empty is not None:
            raise ConfigError(f'{path}, line {number}: "{empty}" is empty.')
        if pair.correct == pair.wrong:
            raise ConfigError(f'{path}, line {number}: "wrong" is the same text as "correct".')
    return pairs


def sensitivity(decoder: Decoder, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """delta of each layer, averaged within each domain: the inner mean of equation 4; `over_domains` is the outer one."""
    found: dict[str, list[Tensor]] = {}
    for pair in progress(pairs, unit="pair", desc="delta"):
        right, wrong = (
            layer_means(decoder, torch.tensor(encode_prompt(tokenizer, text))) for text in (pair.correct, pair.wrong)
        )
        found.setdefault(pair.domain, []).append(1 - F.cosine_similarity(right, wrong, dim=-1))
    return {domain: torch.stack(deltas).mean(0).tolist() for domain, deltas in found.items()}


def over_domains(by_domain: dict[str, list[float]]) -> list[float]:
    """delta of each layer, averaged over domains: equation 4."""
    return [fmean(of_layer) for of_layer in zip(*by_domain.values(), strict=True)]


def layer_means(decoder: Decoder, tokens_L: Tensor) -> Tensor:
    """The sequence's mean hidden state after each layer: fp64 [layers, D].

    That is the block's output, with the residuals added; for the last layer, before the model's final norm. It is in fp64
    because deltas can be as small as the rounding error of 1 − cosine in fp32.
    """
    blocks = list(decoder.model.layers.values())
    sums = torch.zeros(len(blocks), decoder.config.architecture.dim, dtype=torch.float64)

    def add(layer: int, _: nn.Module, __: tuple[Tensor, ...], h_BLD: Tensor) -> None:
        sums[layer] += h_BLD[0].cpu().double().sum(0)

    handles = [block.register_forward_hook(partial(add, layer)) for layer, block in enumerate(blocks)]
    try:
        decoder.hidden_states(tokens_L.to(next(decoder.model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return sums / len(tokens_L)
