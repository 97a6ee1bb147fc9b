"""The corpus of the data benchmarks: the standard library's text, cut into documents as long as those of a web corpus."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from farsight.benchmarks.tokenizing import read_text, train
from farsight.data.tokenizers.huggingface import HuggingFaceTokenizer

MEDIAN_BYTES, SIGMA = 2000, 1.2
"""Log-normal lengths: a mean of 4.1 kB, about 1,000 tokens, as in SlimPajama."""


def lengths(count: int, median: float) -> np.ndarray:
    """Lengths of `count` documents, int64."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), SIGMA, count)
    return np.maximum(drawn, 16).astype(np.int64)


def documents(size: int) -> Iterator[str]:
    """Texts of `size` bytes in all."""
    text, at = read_text(size), 0
    for length in lengths(size // 100, MEDIAN_BYTES):
        if at >= len(text):
            return
        yield text[at : at + int(length)]
        at += int(length)


def write_corpus(folder: Path, megabytes: int) -> tuple[Path, list[str], HuggingFaceTokenizer]:
    """JSON lines below `folder`, their texts, and a byte-level BPE tokenizer of 8,192 pieces trained on their beginning."""
    texts = list(documents(megabytes * 10**6))
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts, train("".join(texts[:200]), folder)
