"""The files of a tokenizer's directory: their names, and what those beside tokenizer.json say."""

import json
from pathlib import Path
from typing import Any

from data.documents import DataError
from data.sentencepiece_model import BOS, EOS

FAST_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_COMPANION_FILES = (
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    "generation_config.json",
)
USUAL_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[BOS]", BOS)
USUAL_EOS = ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[EOS]", EOS)


def companions(directory: Path) -> dict[str, bytes]:
    """The files that may lie beside a tokenizer, by name."""
    return {name: (directory / name).read_bytes() for name in _COMPANION_FILES if (directory / name).is_file()}


def template_beside(companions: dict[str, bytes]) -> str | None:
    """The chat template that the files beside a tokenizer give; of several named ones, "default"."""
    if TEMPLATE_FILE in companions:
        return companions[TEMPLATE_FILE].decode()
    if CONFIG_FILE not in companions:
        return None
    template = parse_json(companions[CONFIG_FILE], Path(CONFIG_FILE)).get("chat_template")
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}
    return template.get("default") if isinstance(template, dict) else template


def special_id(
    name: str, settings: dict[str, Any], vocabulary: dict[str, int], usual: tuple[str, ...], path: Path
) -> int | None:
    """The id of "bos" or "eos": as the files beside tokenizer.json say, else the one token that has a usual name."""
    for file in (CONFIG_FILE, "special_tokens_map.json"):
        key = f"{name}_token"
        if key in settings.get(file, {}):
            token = settings[file][key]
            token = token["content"] if isinstance(token, dict) else token
            if token is None:
                return None
            if token not in vocabulary:
                raise DataError(f"{path.parent / file}: {key} is '{token}', which {path.name} does not have.")
            return vocabulary[token]
    ids = settings.get("generation_config.json", {}).get(f"{name}_token_id")
    if isinstance(ids, int):
        return ids
    found = [token for token in usual if token in vocabulary]
    if len(found) > 1:
        raise DataError(
            f"{path}: which token is {name}? It has {' and '.join(found)}. Name it in {path.parent / CONFIG_FILE}: "
            f'{{"{name}_token": "{found[0]}"}}.'
        )
    return vocabulary[found[0]] if found else None


def write_fast(directory: Path, fast: Any, kind: str, bos: str | None, eos: str | None) -> None:
    """Saves a `tokenizers.Tokenizer` for transformers, which then puts bos first as training does."""
    from tokenizers import AddedToken, processors

    directory.mkdir(parents=True, exist_ok=True)
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (bos, eos) if token])
    if bos:
        ids = [(bos, fast.token_to_id(bos))]
        fast.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", ids)
    fast.save(str(directory / FAST_FILE))
    write_json(directory / CONFIG_FILE, fast_config(bos, eos) | {"farsight_kind": kind})


def fast_config(bos: str | None, eos: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_json(name: str) -> bool:
    return name.endswith(".json")


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise DataError(f"{path}: bad JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: a JSON object was expected, found {type(value).__name__}")
    return value
