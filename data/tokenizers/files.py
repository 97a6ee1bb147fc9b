"""The files of a tokenizer's directory: their names, and reading and writing those beside tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from farsight.data.tokenizers.sentencepiece import BOS, EOS
from farsight.errors import DataError

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
    """Contents of the known files beside a tokenizer, by name."""
    return {name: (directory / name).read_bytes() for name in _COMPANION_FILES if (directory / name).is_file()}


def template_beside(companions: dict[str, bytes], directory: Path) -> str | None:
    """The chat template in the files beside a tokenizer, or None; of several named templates, "default".

    Raises `DataError` for a template that is not text.
    """
    if TEMPLATE_FILE in companions:
        try:
            return companions[TEMPLATE_FILE].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{directory / TEMPLATE_FILE}: not UTF-8 ({error}). Copy the file again.") from error
    if CONFIG_FILE not in companions:
        return None
    place = directory / CONFIG_FILE
    template = parse_json(companions[CONFIG_FILE], place).get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(named, dict) and {"name", "template"} <= named.keys() for named in template):
            raise DataError(f'{place}: chat_template is a list, but not of {{"name": …, "template": …}}.')
        template = {str(named["name"]): named["template"] for named in template}
    template = template.get("default") if isinstance(template, dict) else template
    if template is not None and not isinstance(template, str):
        raise DataError(f"{place}: chat_template is {type(template).__name__}, not a text.")
    return template


def special_id(
    name: str, settings: dict[str, Any], vocabulary: dict[str, int], usual: tuple[str, ...], path: Path
) -> int | None:
    """The id of "bos" or "eos": from the files beside tokenizer.json, otherwise the one token with a usual name."""
    for file in (CONFIG_FILE, "special_tokens_map.json"):
        key = f"{name}_token"
        if key in settings.get(file, {}):
            token = settings[file][key]
            token = token.get("content", token) if isinstance(token, dict) else token
            if token is None:
                return None
            if not isinstance(token, str) or token not in vocabulary:
                raise DataError(f"{path.parent / file}: {key} is '{token}', which {path.name} does not have.")
            return vocabulary[token]
    token_id = settings.get("generation_config.json", {}).get(f"{name}_token_id")
    if isinstance(token_id, int):
        if isinstance(token_id, bool) or not 0 <= token_id <= max(vocabulary.values()):
            raise DataError(
                f"{path.parent / 'generation_config.json'}: {name}_token_id is {token_id}, which {path.name} does not have."
            )
        return token_id
    found = [token for token in usual if token in vocabulary]
    if len(found) > 1:
        raise DataError(
            f"{path}: which token is {name}? It has {' and '.join(found)}. Name it in {path.parent / CONFIG_FILE}: "
            f'{{"{name}_token": "{found[0]}"}}.'
        )
    return vocabulary[found[0]] if found else None


def with_bos(post_processor: dict[str, Any] | None, bos: str, bos_id: int) -> dict[str, Any]:
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
    write_json(directory / CONFIG_FILE, fast_config(bos, eos) | {"farsight_kind": kind})


def fast_config(bos: str | None, eos: str | None) -> dict[str, Any]:
    """tokenizer_config.json for a tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes one of the directory's JSON files."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_json(name: str) -> bool:
    """Whether a companion file is parsed as JSON."""
    return name.endswith(".json")


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises `DataError`, naming `path`, for anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: bad JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: a JSON object was expected, found {type(value).__name__}")
    return value
