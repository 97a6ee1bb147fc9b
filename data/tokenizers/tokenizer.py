"""Tokenizers: bytes, sentencepiece, and Hugging Face's `tokenizer.json`, behind one small interface.

    farsight tokenizer train --vocab-size 2048 --out tokenizers/code
    farsight tokenizer show tokenizers/code --text "def f(x):"

`encode` never adds or recognises special tokens: the packing marks where documents begin and end, and no text can forge
that. `encode_rendered` does recognise them, in the output of a chat template. A directory written by `save` can be read by
`load_tokenizer_dir` and by `transformers.AutoTokenizer` (which recognises special tokens in any text).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

from farsight.configs import schema
from farsight.data.tokenizers.base import Tokenizer, check_ids
from farsight.data.tokenizers.files import (
    CONFIG_FILE,
    FAST_FILE,
    MODEL_FILE,
    companions,
    parse_json,
    template_beside,
    write_fast,
    write_json,
)
from farsight.data.tokenizers.huggingface import HuggingFaceTokenizer
from farsight.data.tokenizers.sentencepiece import BOS, EOS, SPACE, keeps_text, to_fast_tokenizer, train_model
from farsight.errors import DataError

__all__ = [
    "BytesTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "find_tokenizer_dir",
    "load_tokenizer",
    "load_tokenizer_dir",
    "train_sentencepiece",
]


class BytesTokenizer(Tokenizer):
    """One id per UTF-8 byte, 256 for bos, 257 for eos. Lone surrogates are preserved too."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    fingerprint = "bytes"
    special_tokens = {BOS: 256, EOS: 257}  # noqa: RUF012  never changed

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocab_size)
        raw = bytes(i for i in ids if i < 256)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")

    def save(self, directory: str | Path) -> None:
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers

        letters = _byte_letters()
        fast = Fast(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        write_fast(Path(directory), fast, "bytes", BOS, EOS)
        self._save_template(Path(directory))

    @property
    def vocabulary(self) -> dict[int, str]:
        return {**dict(enumerate(_byte_letters())), **{i: token for token, i in self.special_tokens.items()}}

    def most_tokens(self, size: int) -> int:
        return size

    def _byte_sizes(self, ids: list[int]) -> list[int]:
        return [1] * len(ids)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model."""

    def __init__(self, model: bytes, companions: dict[str, bytes] | None = None):
        """`model`: content of tokenizer.model. `companions`: the files beside it, by name."""
        import sentencepiece

        self._model, self._companions = model, companions or {}
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._keeps_text = keeps_text(model)
        # Sentencepiece writes spaces as U+2581, so a U+2581 in the text would be decoded as a space.
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.eos_id = _id_or_none(self._processor.eos_id())
        ids = range(self.vocab_size)
        special = [i for i in ids if self._processor.is_control(i) or self._processor.is_unknown(i)]
        self.special_tokens = {self._processor.id_to_piece(i): i for i in special}

    def encode(self, text: str) -> list[int]:
        if not self._keeps_text or SPACE not in text:
            return self._encode(text)
        first, *rest = text.split(SPACE)
        ids = self._encode(first)
        for part in rest:
            ids += self._space_ids
            ids += self._encode(part)
        return ids

    def _encode(self, text: str) -> list[int]:
        try:
            return self._processor.encode(text)
        except RuntimeError as error:
            raise ValueError(f"the text holds a lone surrogate and is not valid Unicode: {text[:40]!r}…") from error

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocab_size)
        return self._processor.decode(list(ids))

    def save(self, directory: str | Path) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MODEL_FILE).write_bytes(self._model)
        names = [None if i is None else self._processor.id_to_piece(i) for i in (self.bos_id, self.eos_id)]
        if (fast := to_fast_tokenizer(self._model)) is not None:
            write_fast(directory, fast, "sentencepiece", *names)
        else:
            # transformers then builds the tokenizer from the model itself, with the settings of this file.
            own = parse_json(self._companions.get(CONFIG_FILE, b"{}"), Path(CONFIG_FILE))
            usual = {"tokenizer_class": "LlamaTokenizer", "bos_token": names[0], "eos_token": names[1], "legacy": False}
            ours = {"add_bos_token": self.bos_id is not None, "farsight_kind": "sentencepiece"}
            write_json(directory / CONFIG_FILE, usual | own | ours)
        self._save_template(directory)

    @property
    def fingerprint(self) -> str:
        return blake2b(self._model, digest_size=16).hexdigest()

    @property
    def vocabulary(self) -> dict[int, str]:
        return {i: self._processor.id_to_piece(i) for i in range(self.vocab_size)}

    def most_tokens(self, size: int) -> int | None:
        return size if self._keeps_text else None

    def _byte_sizes(self, ids: list[int]) -> list[int]:
        if not self._keeps_text:
            raise DataError(
                "this tokenizer.model rewrites its input, so its tokens can't be assigned to turns. "
                "Use the tokenizer.json of the same model."
            )
        return [self._piece_sizes[i] for i in ids]

    @cached_property
    def _piece_sizes(self) -> list[int]:
        """Bytes of text that each piece stands for."""
        processor, ids = self._processor, range(self.vocab_size)
        texts = [processor.id_to_piece(i).replace(SPACE, " ") for i in ids]
        return [1 if processor.is_byte(i) else len(text.encode()) for i, text in zip(ids, texts, strict=True)]


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
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError(
            f"tokenizer.path = {config.path}: no such file or directory. Download a model's tokenizer there "
            f"(`hf download ORG/NAME --include 'tokenizer*' --local-dir {config.path}`), or set tokenizer.path to where it is."
        )
    if config.kind == "auto":
        return load_tokenizer_dir(path) if path.is_dir() else _load_file(path)
    file = path / (MODEL_FILE if config.kind == "sentencepiece" else FAST_FILE) if path.is_dir() else path
    if not file.is_file():
        raise DataError(f'tokenizer.path = {config.path}: it has no {file.name}, which kind = "{config.kind}" needs.')
    return HuggingFaceTokenizer(file) if config.kind == "huggingface" else _load_sentencepiece(file)


def find_tokenizer_dir(start: Path) -> Path | None:
    """The directory with the tokenizer of a model directory or checkpoint: itself, its `tokenizer/`, or that of its run."""
    places = [start, start / "tokenizer"]
    if (start.parent.parent / "config.toml").is_file():  # a run folder
        places.append(start.parent.parent / "tokenizer")
    return next((p for p in places if any((p / name).is_file() for name in (FAST_FILE, MODEL_FILE))), None)


def load_tokenizer_dir(path: str | Path) -> Tokenizer:
    """Loads the tokenizer in a directory: one saved by Farsight, else tokenizer.json or tokenizer.model, in this order."""
    path = Path(path)
    config = path / CONFIG_FILE
    # In a directory that Farsight saved, tokenizer.json may be there for other programs only.
    kind = parse_json(config.read_bytes(), config).get("farsight_kind") if config.is_file() else None
    if kind == "bytes":
        tokenizer = BytesTokenizer()
        tokenizer.chat_template = template_beside(companions(path), path)
        return tokenizer
    names = (MODEL_FILE,) if kind == "sentencepiece" else (FAST_FILE, MODEL_FILE)
    for name in names:
        if (path / name).is_file():
            return _load_file(path / name)
    raise DataError(f"{path}: no tokenizer in it; {' or '.join(names)} was looked for.")


def train_sentencepiece(texts: Iterable[str], vocab_size: int, directory: str | Path) -> SentencePieceTokenizer:
    """Trains a sentencepiece BPE tokenizer that preserves every text, and saves it in the directory.

    The same texts in the same order give the same tokenizer. Raises `DataError` if the texts can't fill `vocab_size`.
    """
    tokenizer = SentencePieceTokenizer(train_model(texts, vocab_size))
    tokenizer.save(directory)
    return tokenizer


def _load_file(path: Path) -> Tokenizer:
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else _load_sentencepiece(path)


def _load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    model = path.read_bytes()
    if not model:
        raise DataError(f"{path} is empty. Copy the file again.")
    beside = companions(path.parent)
    try:
        tokenizer = SentencePieceTokenizer(model, beside)
    except RuntimeError as error:
        raise DataError(
            f"{path}: not a sentencepiece model. (The tokenizer.model that comes with Llama 3 is tiktoken's: use the "
            "tokenizer.json of its Hugging Face release.)"
        ) from error
    tokenizer.chat_template = template_beside(beside, path.parent)
    return tokenizer


def _byte_letters() -> list[str]:
    """The letters for bytes 0 … 255 in a byte-level tokenizer.json (GPT-2's table)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
