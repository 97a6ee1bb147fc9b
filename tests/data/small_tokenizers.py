"""Tokenizers that are trained in a test."""

from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from farsight.data.tokenizers.base import Tokenizer
from farsight.data.tokenizers.tokenizer import HuggingFaceTokenizer, train_sentencepiece

KINDS = ("sentencepiece", "huggingface")


def small_tokenizer(kind: str, texts: list[str], folder: Path) -> Tokenizer:
    """A tokenizer of 300 ids, trained on some texts."""
    if kind == "sentencepiece":
        return train_sentencepiece(texts, 300, folder / "tokenizer")
    fast = ByteLevelBPETokenizer()
    fast.train_from_iterator(texts, 300)
    fast.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder / "tokenizer.json")
