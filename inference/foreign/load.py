"""Loads models that only transformers builds: safetensors alone, and no code from the directory unless the user asks for it."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from farsight.checkpoints.model_dir.api import model_type
from farsight.configs.finetuning import Base
from farsight.errors import ConfigError
from farsight.inference.extend import Extension
from farsight.inference.extend.fixed import FixedMethod
from farsight.inference.extend.ripra import Ripra
from farsight.inference.foreign.adapters import ADAPTERS
from farsight.inference.foreign.model import TOLERANCE, ForeignModel, relative_difference, unknown_attention
from farsight.inference.foreign.rows import ForeignDecoder
from farsight.model.adapt.quantized import keep_packing

REMAPPED = {
    "bloom": "ALiBi",
    "falcon": "RoPE or ALiBi",
    "gpt_neox": "partial RoPE",
    "mpt": "ALiBi",
    "phi": "partial RoPE",
    "stablelm": "partial RoPE",
    "starcoder2": "RoPE",
}
"""Model types whose positions an extension can replace: one RoPE for all layers, whose rotated dimensions come first and pair
with those half of them further, or ALiBi."""
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Kinds of RoPE that leave frequencies as they are while a sequence grows."""


def load_decoder(
    path: Path,
    device: torch.device,
    any_device: bool,
    dtype: torch.dtype,
    stored: Base | None,
    extension: Extension | None,
    chunk: int,
    trust_remote_code: bool,
) -> ForeignDecoder:
    """Loads a model directory of transformers for reading.

    Args:
        any_device: whether it may be spread over all accelerators of the machine; an extension keeps it on `device`.
        dtype: to compute in.
        stored: how linear layers are stored, if not in that dtype.

    Raises:
        ConfigError: a directory that transformers can't load, or an extension that does not know the model.
    """
    if not trust_remote_code:  # otherwise the directory's own class may run, which is known once it is loaded
        _check_attention(path)
    if extension is not None:
        check_extension(extension, path)
    spread = any_device and extension is None and device.type == "cuda" and torch.cuda.device_count() > 1
    model = load_weights(path, device, spread, dtype, stored, trust_remote_code)
    foreign = ForeignModel(model, str(path))
    if extension is not None:
        if foreign.config.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"{_named(extension)}: {path} has RoPE of type {foreign.config.rope_type!r}, which changes with the length itself."
            )
        extension.change(foreign.config)
        _check_positions(foreign, path, extension)
    return ForeignDecoder(foreign, foreign.config, extension, chunk, str(path))


def _check_attention(path: Path) -> None:
    """Refuses a model type whose attention can't be reached, before its weights are loaded."""
    kind = model_type(path)
    if kind not in CONFIG_MAPPING or kind in ADAPTERS:
        return
    config = CONFIG_MAPPING[kind]
    built: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None)
    # A type with several classes has a tuple of them; which one it is shows once it is loaded.
    if isinstance(built, type) and not built._can_set_attn_implementation():  # type: ignore[attr-defined]  # any model's
        raise ConfigError(unknown_attention(str(path), kind))


def check_extension(extension: Extension, path: Path) -> None:
    """Checks that an extension can replace the positions of the model in a directory.

    Raises:
        ConfigError: it cannot; names the method and the model type.
    """
    if not isinstance(extension, Ripra | FixedMethod):
        raise ConfigError(
            f"{_named(extension)}: this method changes frequencies of models that Farsight builds; for {model_type(path)!r} set "
            "rope_parameters in config.json, or use ripra, self_extend, chunk_llama, adagrope or gali."
        )
    if (kind := model_type(path)) not in REMAPPED:
        raise ConfigError(
            f"{_named(extension)}: how models of type {kind!r} apply positions is not known here; of those that only "
            f"transformers builds, it takes {', '.join(f'{name} ({positions})' for name, positions in REMAPPED.items())}."
        )


@torch.no_grad()
def _check_positions(foreign: ForeignModel, path: Path, extension: Extension) -> None:
    """Checks that true distances, applied as an extension applies positions, give the model's own logits."""
    tokens_L = torch.arange(4, device=foreign.device)
    plain = ForeignDecoder(foreign, foreign.config, Ripra(limit_ratio=1.0, relevance="off"))
    expected, found = foreign.hidden_states(tokens_L[None])[0], plain.hidden_states(tokens_L)
    if not relative_difference(expected, found) < TOLERANCE:
        raise ConfigError(
            f"{_named(extension)}: {path} of type {model_type(path)!r} applies positions in another way than is known here."
        )


def _named(extension: Extension) -> str:
    return f"--extend {getattr(extension, 'name', type(extension).__name__)}"


def load_weights(
    path: Path,
    device: torch.device,
    spread: bool,
    dtype: torch.dtype,
    stored: Base | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The model in a directory, in evaluation mode.

    Args:
        spread: place the layers on all accelerators.
        dtype, stored: as in `load_decoder`.

    Raises:
        ConfigError: no safetensors, weights that are missing or of another shape, or what transformers refuses.
    """
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{path} holds no *.safetensors. Other weight formats (pickles) are not read.")
    settings: dict[str, Any] = {"dtype": dtype}
    if stored is not None:
        settings["quantization_config"] = _quantization(stored, dtype)
    if device.type != "cpu" or stored is not None:  # accelerate then reads weights onto the devices one by one
        settings["device_map"] = "auto" if spread else {"": device}
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # a log would get every step of it
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what does not fit is said below, in a sentence
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **settings,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        hint = ""
        if "auto_map" in json.loads((path / "config.json").read_text(encoding="utf-8")) and not trust_remote_code:
            hint = " Its directory has code of its own: --trust-remote-code runs it."
        raise ConfigError(f"{path}: transformers can't load it ({_first_line(error)}).{hint}") from error
    finally:
        transformers_logging.set_verbosity(level)
    model, info = loaded
    for key, what in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has a tensor of another shape than its config's:"),
    ):
        if names := sorted(map(str, info.get(key) or ())):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"{path} {what} {names[0]}{more}, so it is not a whole model of type {model_type(path)!r}, which its config.json "
                "names."
            )
    keep_packing(model)
    return model.eval()


def _quantization(stored: Base, dtype: torch.dtype) -> Any:
    import bitsandbytes  # noqa: F401  names the extra if it is missing
    from transformers import BitsAndBytesConfig

    if stored.quantization == "int8":
        # It warns at every call that inputs are cast to fp16, which is how LLM.int8 works.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=stored.quantization,
        bnb_4bit_use_double_quant=stored.double_quantization,
        bnb_4bit_compute_dtype=dtype,
    )


def _first_line(error: Exception) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
