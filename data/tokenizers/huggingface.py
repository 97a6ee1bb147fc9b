"""Reads and writes `tokenizer.json`, and the files beside it."""

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from farsight.data.tokenizers.base import BOS, EOS, TEMPLATE_FILE, Encoded, Tokenizer
from farsight.errors import DataError
from farsight.json_files import read_object

FAST_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE, GENERATION_FILE = "special_tokens_map.json", "generation_config.json"
_JSON_BESIDE = (CONFIG_FILE, _MAP_FILE, "added_tokens.json", GENERATION_FILE)
_USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[BOS]", BOS),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[EOS]", EOS),
}
_MOST_UNUSED = 1 << 16
"""Unused ids that a vocabulary may have, beyond its own size."""
_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
"""Times by which each Unicode normalisation lengthens UTF-8 at most (unicode.org/faq/normalization.html)."""
_MADE_FROM = "farsight_made_from"
"""Key in tokenizer_config.json: maps the hash of a written tokenizer.json to the fingerprint of its original."""


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(self, path: str | Path):
        """`path`: tokenizer.json, with tokenizer_config.json and the like beside it where they exist."""
        path = Path(path)
        places = [path.parent / name for name in (*_JSON_BESIDE, TEMPLATE_FILE)]
        self._companions = {place.name: place.read_bytes() for place in places if place.is_file()}
        self._settings = {name: read_object(path.parent / name) for name in _JSON_BESIDE if name in self._companions}
        try:
            self._json = path.read_text(encoding="utf-8-sig")
            self._fast = _parse(self._json)
        except OSError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer.json that the tokenizers library can read: {error}") from error
        self._fast.encode_special_tokens = True
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = _vocab_size(vocabulary, path)
        self.bos_id, self.eos_id = (_special_id(name, self._settings, vocabulary, path) for name in ("bos", "eos"))
        content = json.loads(self._json)
        self.one_token_a_byte = _is_byte_level(content)
        self.growth = (1, 0) if self.one_token_a_byte else _growth(content)
        added = self._fast.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: i for i, token in added if token.special}
        for special in (self.bos_id, self.eos_id):
            if special is not None and (token := self._fast.id_to_token(special)) is not None:
                self.special_tokens[token] = special
        self.chat_template = template_in(path.parent)
        own = _hash(self._json)
        self.fingerprint = str(self._settings.get(CONFIG_FILE, {}).get(_MADE_FROM, {}).get(own, own))

    def _encode(self, text: str) -> list[int]:
        # `encode` would hold the GIL throughout and block the thread that launches kernels.
        return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        parts = [list(self._slices(text)) for text in texts]
        flat = [part for text in parts for part in text]
        encoded = iter(self._fast.encode_batch_fast(flat, add_special_tokens=False))
        return [np.concatenate([np.array(next(encoded).ids, dtype) for _ in text]) for text in parts]

    def _decode(self, ids: list[int]) -> str:
        return self._fast.decode(ids, skip_special_tokens=True)

    def save(self, directory: str | Path) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._companions.items():
            (directory / name).write_bytes(content)
        saved, settings = self._json, self._settings.get(CONFIG_FILE, {})
        bos, eos = self.special_token(self.bos_id), self.special_token(self.eos_id)
        if self.bos_id is not None and bos is not None and not self.begins_with_bos:
            # Training put bos before every document, but this tokenizer.json does not.
            content = json.loads(self._json)
            content["post_processor"] = _with_bos(content.get("post_processor"), bos, self.bos_id)
            saved = json.dumps(content, ensure_ascii=False)
            settings = settings | {_MADE_FROM: {_hash(saved): self.fingerprint}}
        (directory / FAST_FILE).write_text(saved, encoding="utf-8")
        if CONFIG_FILE not in self._companions or saved != self._json:
            write_config(directory, settings if CONFIG_FILE in self._companions else _fast_config(bos, eos) | settings)

    @property
    def begins_with_bos(self) -> bool:
        return self.bos_id is not None and self._fast.encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        encodings = self._reads_special.encode_batch(list(texts), add_special_tokens=False)
        return [_encoded(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def _reads_special(self) -> Any:
        """The same tokenizer, but recognising special tokens in a text."""
        from tokenizers import AddedToken

        fast = _parse(self._json)
        known = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
        fast.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in self.special_tokens if t not in known]
        )
        return fast

    @property
    def vocabulary(self) -> dict[int, str]:
        return {i: token for token, i in self._fast.get_vocab(with_added_tokens=True).items()}


def _parse(text: str) -> Any:
    """A `tokenizers.Tokenizer` that encodes texts whole."""
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_str(text)
    fast.no_truncation()
    fast.no_padding()
    return fast


def _encoded(ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
    """Spans of tokens from the library's offsets, which may leave out the whitespace before a token."""
    spans = np.array(offsets, dtype=np.int32).reshape(-1, 2)
    ends = np.maximum.accumulate(spans[:, 1])
    begins = np.minimum(spans[:, 0], np.concatenate([[0], ends[:-1]]).astype(np.int32))
    return Encoded(np.array(ids, dtype=np.int32), begins, ends)


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


def _growth(tokenizer: dict[str, Any]) -> tuple[int, int] | None:
    """`Tokenizer.growth` of BPE that normalises characters and adds or marks spaces, as Qwen's and Llama 2's do; None for others."""
    model, a_byte, more = tokenizer["model"], 1, 0
    if model.get("type") != "BPE":
        return None
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] in _GROWTH:
            a_byte, more = a_byte * _GROWTH[step["type"]], more * _GROWTH[step["type"]]
        elif step["type"] == "Prepend":
            more += sum(1 if letter in model["vocab"] else len(letter.encode()) for letter in step["prepend"])
        elif not (
            step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] in model["vocab"]
        ):
            return None
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not {step["type"] for step in steps} <= {"ByteLevel", "Split", "Digits"}:
        return None
    # A space is added to each part that the steps before have split off, unless there are none.
    adds = [number for number, step in enumerate(steps) if step.get("add_prefix_space")]
    more += len(adds)
    # What is added is added after every added token in a text too.
    short = any(len(token["content"].encode()) <= more for token in tokenizer.get("added_tokens") or ())
    return None if any(adds) or (more and short) else (a_byte, more)


def _steps(steps: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """A step, or those of a sequence."""
    return steps.get(name, [steps]) if steps else []


def template_in(directory: Path) -> str | None:
    """The chat template in the files beside a tokenizer, or None; of several named templates, "default".

    Raises `DataError` for a template that is not text.
    """
    file, config = directory / TEMPLATE_FILE, directory / CONFIG_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 ({error}). Copy the file again.") from error
    template = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):
        if not all(isinstance(named, dict) and {"name", "template"} <= named.keys() for named in template):
            raise DataError(f'{config}: chat_template is a list, but not of {{"name": …, "template": …}}.')
        template = {str(named["name"]): named["template"] for named in template}
    template = template.get("default") if isinstance(template, dict) else template
    if template is not None and not isinstance(template, str):
        raise DataError(f"{config}: chat_template is {type(template).__name__}, not a text.")
    return template


def _special_id(name: str, settings: dict[str, Any], vocabulary: dict[str, int], path: Path) -> int | None:
    """The id of "bos" or "eos": from the files beside tokenizer.json, otherwise the one token with a usual name."""
    for file in (CONFIG_FILE, _MAP_FILE):
        key = f"{name}_token"
        if key in settings.get(file, {}):
            token = settings[file][key]
            token = token.get("content", token) if isinstance(token, dict) else token
            if token is None:
                return None
            if not isinstance(token, str) or token not in vocabulary:
                raise DataError(f"{path.parent / file}: {key} is '{token}', which {path.name} does not have.")
            return vocabulary[token]
    token_id = settings.get(GENERATION_FILE, {}).get(f"{name}_token_id")
    if isinstance(token_id, int):
        if isinstance(token_id, bool) or not 0 <= token_id <= max(vocabulary.values()):
            raise DataError(
                f"{path.parent / GENERATION_FILE}: {name}_token_id is {token_id}, which {path.name} does not have."
            )
        return token_id
    found = [token for token in _USUAL[name] if token in vocabulary]
    if len(found) > 1:
        raise DataError(
            f"{path}: which token is {name}? It has {' and '.join(found)}. Name it in {path.parent / CONFIG_FILE}: "
            f'{{"{name}_token": "{found[0]}"}}.'
        )
    return vocabulary[found[0]] if found else None


def _with_bos(post_processor: dict[str, Any] | None, bos: str, bos_id: int) -> dict[str, Any]:
    """A tokenizer.json's post-processor, extended to put bos before each text."""
    steps: list[dict[str, Any]] = [] if post_processor is None else [post_processor]
    if steps and steps[0]["type"] == "Sequence":
        steps = list(steps[0]["processors"])
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:
        first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        template = {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}
        steps.append(template)
    for form in ("single", "pair"):
        template[form] = [{"SpecialToken": {"id": bos, "type_id": 0}}, *template[form]]
    template["special_tokens"][bos] = {"id": bos, "ids": [bos_id], "tokens": [bos]}
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}


def write_fast(directory: Path, fast: Any, kind: str, bos: str | None, eos: str | None) -> None:
    """Saves a `tokenizers.Tokenizer` so that transformers loads it and puts bos first, as training does."""
    from tokenizers import AddedToken, processors

    directory.mkdir(parents=True, exist_ok=True)
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (bos, eos) if token])
    if bos:
        ids = [(bos, fast.token_to_id(bos))]
        fast.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", ids)
    (directory / FAST_FILE).write_text(
        fast.to_str(pretty=True), encoding="utf-8"
    )  # its own `save` raises bare Exceptions
    write_config(directory, _fast_config(bos, eos) | {"farsight_kind": kind})


def _fast_config(bos: str | None, eos: str | None) -> dict[str, Any]:
    """tokenizer_config.json for a tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }


def write_config(directory: Path, settings: dict[str, Any]) -> None:
    """Writes tokenizer_config.json."""
    (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
