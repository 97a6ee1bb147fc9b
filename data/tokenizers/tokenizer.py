"""Tokenizers: bytes, sentencepiece, and Hugging Face's `tokenizer.json`, behind one small interface.

    farsight tokenizer train --vocab-size 2048 --out tokenizers/code
    farsight tokenizer show tokenizers/code --text "def f(x):"

`load_tokenizer` loads what a config names, `load_tokenizer_dir` what a directory has.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from farsight.configs import schema
from farsight.data.tokenizers.base import BOS, EOS, Tokenizer
from farsight.data.tokenizers.huggingface import CONFIG_FILE, FAST_FILE, HuggingFaceTokenizer, template_in, write_fast
from farsight.data.tokenizers.sentencepiece import MODEL_FILE, SentencePieceTokenizer
from farsight.data.tokenizers.sentencepiece import train_sentencepiece as train_sentencepiece
from farsight.errors import DataError
from farsight.json_files import read_object
from farsight.remote import download_store, local
from farsight.stores import StorePath


def padding_id(tokenizer: Tokenizer) -> int:
    """The token that fills what stays empty in rows; nothing is trained on it, nor sees it."""
    return tokenizer.eos_id or 0


class BytesTokenizer(Tokenizer):
    """One id per UTF-8 byte, 256 for bos, 257 for eos. Lone surrogates are preserved too."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    fingerprint = "bytes"
    special_tokens = {BOS: 256, EOS: 257}  # noqa: RUF012  never changed

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_array(self, text: str) -> np.ndarray:
        return self.encode_arrays([text], np.dtype(np.int64))[0]

    def encode_between(self, text: str, least: int, most: int) -> np.ndarray | None:
        ids = self.encode_array(text)
        return ids if least <= len(ids) <= (most or len(ids)) else None

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(dtype) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        raw = bytes(i for i in ids if i < 256)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")

    def save(self, directory: str | Path) -> None:
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers

        fast = Fast(models.BPE({letter: byte for byte, letter in enumerate(_byte_letters())}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        write_fast(Path(directory), fast, "bytes", BOS, EOS)
        self._save_template(Path(directory))

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        return dict(enumerate([*_byte_letters(), *self.special_tokens]))

    def _byte_sizes(self, ids: list[int]) -> list[int]:
        return [1] * len(ids)


def load_tokenizer(config: schema.Tokenizer) -> Tokenizer:
    """Loads the tokenizer of a config's `[tokenizer]` section.

    Raises `DataError` if the path is empty or holds no tokenizer of that kind.
    """
    if config.kind == "bytes":
        return BytesTokenizer()
    if not config.path:
        raise DataError(
            'tokenizer.path is empty. Set it to a directory with tokenizer.json or tokenizer.model, set kind = "bytes", '
            "or train one: farsight tokenizer train --out DIRECTORY."
        )
    path = local(config.path, weights=False).expanduser()
    if not path.exists():
        raise DataError(
            f"tokenizer.path = {config.path}: no such file or directory. Set tokenizer.path to where it is, or to hf://ORG/NAME for "
            "that of a model of the Hugging Face Hub."
        )
    if config.kind == "auto":
        return load_tokenizer_dir(path) if path.is_dir() else _load_file(path)
    file = path / (MODEL_FILE if config.kind == "sentencepiece" else FAST_FILE) if path.is_dir() else path
    if not file.is_file():
        raise DataError(f'tokenizer.path = {config.path}: it has no {file.name}, which kind = "{config.kind}" needs.')
    return HuggingFaceTokenizer(file) if config.kind == "huggingface" else SentencePieceTokenizer(file)


def find_tokenizer_dir(start: Path) -> Path | None:
    """The directory with the tokenizer of a model directory or checkpoint: itself, its `tokenizer/`, or that of its run."""
    places = [start, start / "tokenizer"]
    if (start.parent.parent / "config.toml").is_file():  # a run folder
        places.append(start.parent.parent / "tokenizer")
    found = next((p for p in places if any((p / name).is_file() for name in (FAST_FILE, MODEL_FILE))), None)
    return download_store(found) if isinstance(found, StorePath) else found


def load_tokenizer_dir(path: str | Path) -> Tokenizer:
    """Loads the tokenizer in a directory: one saved by Farsight, else tokenizer.json or tokenizer.model, in this order."""
    path = Path(path)
    config = path / CONFIG_FILE
    # In a directory that Farsight saved, tokenizer.json may be there for other programs only.
    kind = read_object(config).get("farsight_kind") if config.is_file() else None
    if kind == "bytes":
        tokenizer = BytesTokenizer()
        tokenizer.chat_template = template_in(path)
        return tokenizer
    # transformers copies the key when it saves such a tokenizer, but not tokenizer.model.
    names = (MODEL_FILE, FAST_FILE) if kind == "sentencepiece" else (FAST_FILE, MODEL_FILE)
    if (file := next((path / name for name in names if (path / name).is_file()), None)) is None:
        raise DataError(f"{path}: no tokenizer in it; {' or '.join(names)} was looked for.")
    return _load_file(file)


def _load_file(path: Path) -> Tokenizer:
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def _byte_letters() -> list[str]:
    """The letters for bytes 0 … 255 in a byte-level tokenizer.json: the byte's own if it is visible, else the next beyond 255."""
    from tokenizers import pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(letter for letter in letters if ord(letter) > 255))
    return [chr(byte) if chr(byte) in letters else next(others) for byte in range(256)]
