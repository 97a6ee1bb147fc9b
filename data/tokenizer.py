"""Tokenizers: bytes, sentencepiece, and Hugging Face's `tokenizer.json`, behind one small interface.

    python -m data.tokenizer train --vocab-size 2048 --out tokenizers/code
    python -m data.tokenizer show tokenizers/code --text "def f(x):"

`encode` never adds or recognises special tokens: where a document begins and ends is said by the packing, and no text
can forge it. `encode_rendered` does, for what a chat template wrote. A directory written by `save` is read back by `load_tokenizer_dir`, and by `transformers.AutoTokenizer`
(which does recognise special tokens in a text).
"""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from configs import schema
from data.documents import DataError
from data.encoded import Encoded, from_offsets, with_spans
from data.progress import progress
from data.sentencepiece_model import BOS, EOS, SPACE, keeps_text, to_fast_tokenizer, train_model
from data.tokenizer_files import (
    CONFIG_FILE,
    FAST_FILE,
    MODEL_FILE,
    TEMPLATE_FILE,
    USUAL_BOS,
    USUAL_EOS,
    companions,
    fast_config,
    is_json,
    parse_json,
    special_id,
    template_beside,
    write_fast,
    write_json,
)

_SLICE = 1 << 17
"""Characters of a long text that are encoded at once, about a tenth of a second's work."""
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
"""Tokenizers treat runs of whitespace together, so a text is cut at a line end that is none."""
_AROUND_CUT = 256
"""Characters on each side of a cut whose tokens must be the same with and without it."""
_CUTS_TRIED = 64


class Tokenizer(ABC):
    """Text to ids and back."""

    vocab_size: int
    """Ids are 0 … vocab_size-1."""
    bos_id: int | None
    eos_id: int | None
    special_tokens: dict[str, int]
    """Ids of the special tokens, by their text."""
    chat_template: str | None = None
    """Jinja source of the tokenizer's own chat template."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens. Raises ValueError for text that is no valid Unicode."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens give none, and bytes that are no UTF-8 give U+FFFD."""

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Writes what `load_tokenizer_dir` needs into the directory, which is made if it is not there."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that is the same for equal tokenizers only."""

    @property
    @abstractmethod
    def vocabulary(self) -> dict[int, str]:
        """Each token as the tokenizer itself writes it, special ones among them, by id."""

    def encode_array(self, text: str) -> np.ndarray:
        """`encode`, as an int64 array. A long text is encoded slice by slice, and shows its progress."""
        if len(text) < 2 * _SLICE:
            return np.array(self.encode(text), dtype=np.int64)
        found: list[np.ndarray] = []
        with progress("Tokenising", len(text), " characters") as shown:
            for part in self._slices(text):
                found.append(np.array(self.encode(part), dtype=np.int64))
                tokens = sum(map(len, found))
                shown.set_postfix_str(f"{tokens / (time.time() - shown.start_t):,.0f} tokens/s", refresh=False)
                shown.update(len(part))
        return np.concatenate(found)

    def _slices(self, text: str) -> Iterator[str]:
        """Parts of a text whose tokens, one part after the other, are the text's."""
        begin = 0
        if self.most_tokens(1) is not None:  # others rewrite the text, and may put something before each part
            while len(text) - begin > 2 * _SLICE and (end := self._place_to_cut(text, begin + _SLICE)):
                yield text[begin:end]
                begin = end
        yield text[begin:]

    def _place_to_cut(self, text: str, start: int) -> int | None:
        """The first line end from `start` on at which the text may be cut without a change to its tokens."""
        for line_end in islice(_LINE_END.finditer(text, start), _CUTS_TRIED):
            cut = line_end.end()
            left, right = text[cut - _AROUND_CUT : cut], text[cut : cut + _AROUND_CUT]
            if self.encode(left + right) == self.encode(left) + self.encode(right):
                return cut
        return None

    def most_tokens(self, size: int) -> int | None:
        """The most tokens that a text of `size` UTF-8 bytes can have; None where there is no known bound."""
        return None

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of texts in which special tokens count as such, as `transformers` reads them.

        Raises `DataError` where it is not known which characters a token stands for.
        """
        return [self._encode_rendered(text) for text in texts]

    def _save_template(self, directory: Path) -> None:
        if self.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")

    @property
    def begins_with_bos(self) -> bool:
        """Whether `transformers` puts bos before a text of its own accord."""
        return self.bos_id is not None

    def special_token(self, token_id: int | None) -> str | None:
        """The text of a special token."""
        return next((token for token, i in self.special_tokens.items() if i == token_id), None)

    def _encode_rendered(self, text: str) -> Encoded:
        ids: list[int] = []
        sizes: list[int] = []  # in bytes
        parts = self._special.split(text) if self.special_tokens else [text]
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self.special_tokens[part])
                sizes.append(len(part.encode()))
            elif part:
                new = self.encode(part)
                ids += new
                sizes += self._byte_sizes(new)
        return with_spans(text, ids, sizes)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _byte_sizes(self, ids: list[int]) -> list[int]:
        """Bytes of the text that each token stands for; not asked of a tokenizer that has its own `encode_rendered`."""
        raise NotImplementedError


class BytesTokenizer(Tokenizer):
    """The bytes of the text in UTF-8, 256 for bos, 257 for eos. Lone surrogates survive too."""

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
        _check_ids(ids, self.vocab_size)
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

    def __init__(self, model: bytes):
        """`model`: the serialised model (the content of tokenizer.model)."""
        import sentencepiece

        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._keeps_text = keeps_text(model)
        # Sentencepiece writes a space as U+2581, so one that is in the text would come back as a space.
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
            raise ValueError(f"the text holds a lone surrogate and is no valid Unicode: {text[:40]!r}…") from error

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return self._processor.decode(list(ids))

    def save(self, directory: str | Path) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MODEL_FILE).write_bytes(self._model)
        if (fast := to_fast_tokenizer(self._model)) is not None:
            names = [None if i is None else self._processor.id_to_piece(i) for i in (self.bos_id, self.eos_id)]
            write_fast(directory, fast, "sentencepiece", *names)
        else:
            write_json(directory / CONFIG_FILE, {"farsight_kind": "sentencepiece"})
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
                "this tokenizer.model rewrites the text that it is given, so that its tokens can't be told apart by turn. "
                "Use the tokenizer.json of the same model."
            )
        return [self._piece_sizes[i] for i in ids]

    @cached_property
    def _piece_sizes(self) -> list[int]:
        """Bytes that each piece stands for."""
        processor, ids = self._processor, range(self.vocab_size)
        texts = [processor.id_to_piece(i).replace(SPACE, " ") for i in ids]
        return [1 if processor.is_byte(i) else len(text.encode()) for i, text in zip(ids, texts, strict=True)]


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(self, path: str | Path):
        """`path`: tokenizer.json, with tokenizer_config.json and the like beside it where they exist."""
        from tokenizers import Tokenizer as Fast

        path = Path(path)
        self._json = path.read_text(encoding="utf-8")
        self._companions = companions(path.parent)
        try:
            self._fast = Fast.from_str(self._json)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer.json that the tokenizers library can read: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        settings = {
            name: parse_json(raw, path.parent / name) for name, raw in self._companions.items() if is_json(name)
        }
        self.bos_id = special_id("bos", settings, vocabulary, USUAL_BOS, path)
        self.eos_id = special_id("eos", settings, vocabulary, USUAL_EOS, path)
        self._one_token_a_byte = _is_byte_level(json.loads(self._json))
        added = self._fast.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: i for i, token in added if token.special}
        for special in (self.bos_id, self.eos_id):
            if special is not None and (token := self._fast.id_to_token(special)) is not None:
                self.special_tokens[token] = special
        self.chat_template = template_beside(self._companions)

    def encode(self, text: str) -> list[int]:
        try:
            # `encode` holds Python's lock throughout, which would stop the thread that launches kernels.
            return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"the text holds a lone surrogate and is no valid Unicode: {text[:40]!r}…") from error

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: str | Path) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FAST_FILE).write_text(self._json, encoding="utf-8")
        for name, content in self._companions.items():
            (directory / name).write_bytes(content)
        if CONFIG_FILE not in self._companions:
            names = [None if i is None else self._fast.id_to_token(i) for i in (self.bos_id, self.eos_id)]
            write_json(directory / CONFIG_FILE, fast_config(*names))

    @property
    def begins_with_bos(self) -> bool:
        return self.bos_id is not None and self._fast.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        encodings = self._reads_special.encode_batch(list(texts), add_special_tokens=False)
        return [from_offsets(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def _reads_special(self) -> Any:
        """The same tokenizer, which takes special tokens in a text for what they are."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Fast

        fast = Fast.from_str(self._json)
        fast.no_truncation()
        fast.no_padding()
        known = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
        fast.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in self.special_tokens if t not in known]
        )
        return fast

    @property
    def fingerprint(self) -> str:
        return blake2b(self._json.encode(), digest_size=16).hexdigest()

    @property
    def vocabulary(self) -> dict[int, str]:
        return {i: token for token, i in self._fast.get_vocab(with_added_tokens=True).items()}

    def most_tokens(self, size: int) -> int | None:
        return size if self._one_token_a_byte else None


def load_tokenizer(config: schema.Tokenizer) -> Tokenizer:
    """The tokenizer of a `[tokenizer]` section.

    Raises `DataError` when the path is empty or does not hold one of that kind.
    """
    if config.kind == "bytes":
        return BytesTokenizer()
    if not config.path:
        raise DataError(
            'tokenizer.path is empty. Set it to a directory with tokenizer.json or tokenizer.model, set kind = "bytes", '
            "or train one: python -m data.tokenizer train --out DIRECTORY."
        )
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError(f"tokenizer.path = {config.path}: no such file or directory.")
    if config.kind == "auto":
        return load_tokenizer_dir(path) if path.is_dir() else _load_file(path)
    file = path / (MODEL_FILE if config.kind == "sentencepiece" else FAST_FILE) if path.is_dir() else path
    if not file.is_file():
        raise DataError(f'tokenizer.path = {config.path}: it has no {file.name}, which kind = "{config.kind}" needs.')
    return HuggingFaceTokenizer(file) if config.kind == "huggingface" else _load_sentencepiece(file)


def find_tokenizer_dir(start: Path) -> Path | None:
    """Where the tokenizer of a model directory or checkpoint lies: in it, in its `tokenizer/`, or in its run's."""
    places = [start, start / "tokenizer"]
    if (start.parent.parent / "config.toml").is_file():  # a run folder
        places.append(start.parent.parent / "tokenizer")
    return next((p for p in places if any((p / name).is_file() for name in (FAST_FILE, MODEL_FILE))), None)


def load_tokenizer_dir(path: str | Path) -> Tokenizer:
    """The tokenizer in a directory: one saved here, or any with tokenizer.json or tokenizer.model (in this order)."""
    path = Path(path)
    config = path / CONFIG_FILE
    # A directory saved here may hold tokenizer.json for other programs' sake only.
    kind = parse_json(config.read_bytes(), config).get("farsight_kind") if config.is_file() else None
    if kind == "bytes":
        tokenizer = BytesTokenizer()
        tokenizer.chat_template = template_beside(companions(path))
        return tokenizer
    names = (MODEL_FILE,) if kind == "sentencepiece" else (FAST_FILE, MODEL_FILE)
    for name in names:
        if (path / name).is_file():
            return _load_file(path / name)
    raise DataError(f"{path}: no tokenizer in it; {' or '.join(names)} was looked for.")


def train_sentencepiece(texts: Iterable[str], vocab_size: int, directory: str | Path) -> SentencePieceTokenizer:
    """Trains a sentencepiece BPE tokenizer that keeps every text as it is, and saves it.

    The same texts in the same order give the same tokenizer. Raises `DataError` when the texts can't fill `vocab_size`.
    """
    tokenizer = SentencePieceTokenizer(train_model(texts, vocab_size))
    tokenizer.save(directory)
    return tokenizer


def _load_file(path: Path) -> Tokenizer:
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else _load_sentencepiece(path)


def _load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    try:
        tokenizer = SentencePieceTokenizer(path.read_bytes())
    except RuntimeError as error:
        raise DataError(
            f"{path}: not a sentencepiece model. (The tokenizer.model that comes with Llama 3 is tiktoken's: use the "
            "tokenizer.json of its Hugging Face release.)"
        ) from error
    tokenizer.chat_template = template_beside(companions(path.parent))
    return tokenizer


def _is_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Whether every token stands for at least one byte of the text: BPE on bytes, and nothing rewrites the text."""
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    on_bytes = any(step.get("type") == "ByteLevel" and not step.get("add_prefix_space") for step in steps)
    return tokenizer["model"].get("type") == "BPE" and tokenizer.get("normalizer") is None and on_bytes


def _byte_letters() -> list[str]:
    """The letters that stand for bytes 0 … 255 in a byte-level tokenizer.json (GPT-2's table)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {vocab_size}")


if __name__ == "__main__":
    from data.tokenizer_cli import main

    main()
