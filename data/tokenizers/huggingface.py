"""Reads and writes `tokenizer.json`."""

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from farsight.data.tokenizers.base import Tokenizer, check_ids
from farsight.data.tokenizers.encoded import Encoded, from_offsets
from farsight.data.tokenizers.files import (
    CONFIG_FILE,
    FAST_FILE,
    USUAL_BOS,
    USUAL_EOS,
    companions,
    fast_config,
    is_json,
    parse_json,
    special_id,
    template_beside,
    with_bos,
    write_json,
)
from farsight.errors import DataError

_MOST_UNUSED = 1 << 16
"""Unused ids that a vocabulary may have, beyond its own size."""
_MADE_FROM = "farsight_made_from"
"""Key in tokenizer_config.json: maps the hash of a written tokenizer.json to the fingerprint of its original."""


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(self, path: str | Path):
        """`path`: tokenizer.json, with tokenizer_config.json and the like beside it where they exist."""
        from tokenizers import Tokenizer as Fast

        path = Path(path)
        self._companions = companions(path.parent)
        try:
            self._json = path.read_text(encoding="utf-8-sig")
            self._fast = Fast.from_str(self._json)
        except OSError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer.json that the tokenizers library can read: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = _vocab_size(vocabulary, path)
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
        self.chat_template = template_beside(self._companions, path.parent)
        own = _hash(self._json)
        self._fingerprint = str(settings.get(CONFIG_FILE, {}).get(_MADE_FROM, {}).get(own, own))

    def encode(self, text: str) -> list[int]:
        try:
            # `encode` would hold the GIL throughout and block the thread that launches kernels.
            return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"the text holds a lone surrogate and is not valid Unicode: {text[:40]!r}…") from error

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocab_size)
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: str | Path) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._companions.items():
            (directory / name).write_bytes(content)
        saved, config = self._json, self._companions.get(CONFIG_FILE)
        settings = {} if config is None else parse_json(config, Path(CONFIG_FILE))
        bos = self.special_token(self.bos_id)
        if self.bos_id is not None and bos is not None and not self.begins_with_bos:
            # Training put bos before every document, but this tokenizer.json does not.
            content = json.loads(self._json)
            content["post_processor"] = with_bos(content.get("post_processor"), bos, self.bos_id)
            saved = json.dumps(content, ensure_ascii=False)
            settings[_MADE_FROM] = {_hash(saved): self.fingerprint}
        (directory / FAST_FILE).write_text(saved, encoding="utf-8")
        if config is None:
            names = [None if i is None else self._fast.id_to_token(i) for i in (self.bos_id, self.eos_id)]
            settings = fast_config(*names) | settings
        if config is None or saved != self._json:
            write_json(directory / CONFIG_FILE, settings)

    @property
    def begins_with_bos(self) -> bool:
        return self.bos_id is not None and self._fast.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        encodings = self._reads_special.encode_batch(list(texts), add_special_tokens=False)
        return [from_offsets(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def _reads_special(self) -> Any:
        """The same tokenizer, but recognising special tokens in a text."""
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
        return self._fingerprint

    @property
    def vocabulary(self) -> dict[int, str]:
        return {i: token for token, i in self._fast.get_vocab(with_added_tokens=True).items()}

    def most_tokens(self, size: int) -> int | None:
        return size if self._one_token_a_byte else None


def _vocab_size(vocabulary: dict[str, int], path: Path) -> int:
    """One more than the largest id. Raises `DataError` if that is implausibly large."""
    if not vocabulary:
        raise DataError(f"{path}: its vocabulary is empty. Copy the file again.")
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest > _MOST_UNUSED + 2 * len(vocabulary):
        raise DataError(
            f"{path}: the token {token!r} has id {largest:,}, in a vocabulary of {len(vocabulary):,}. Copy the file again."
        )
    return largest + 1


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _is_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Whether every token stands for at least one byte of text: byte-level BPE, and nothing rewrites the text."""
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    on_bytes = any(step.get("type") == "ByteLevel" and not step.get("add_prefix_space") for step in steps)
    return tokenizer["model"].get("type") == "BPE" and tokenizer.get("normalizer") is None and on_bytes
