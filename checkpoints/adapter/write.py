"""Writes adapter directories."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from farsight.checkpoints.adapter.config import FILES, FORMAT, layer_file_names
from farsight.checkpoints.adapter.peft import PeftNames
from farsight.checkpoints.cards.adapter import adapter_card, hub_name
from farsight.checkpoints.cards.model import CARD, adapter_entry
from farsight.checkpoints.model_dir.api import ADAPTER_CONFIG, ADAPTER_MARKER, TOKENIZER_FILES
from farsight.checkpoints.model_dir.hf_config import MODEL_TYPE
from farsight.checkpoints.model_dir.safetensors_files import refuse_non_finite
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.typed import to_dict
from farsight.data.instructions.chat import chat_template
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.model.adapt.layers import adapted
from farsight.model.adapt.lora import is_lora
from farsight.model.position.garfa import garfa_of_tensors
from farsight.new_folder import check_new, holds_only, new_folder


def check_adapter_out(out: Path) -> None:
    """Raises early what `write_adapter` would raise in the end; call it before long work.

    Raises:
        UserError: `out` exists and is not an adapter of ours, or somebody has added files to it.
    """
    check_new(out, _is_ours)


def _is_ours(folder: Path) -> bool:
    return holds_only(folder, (ADAPTER_MARKER,), (ADAPTER_CONFIG, *FILES.values(), CARD, *TOKENIZER_FILES))


def write_adapter(
    out: Path,
    config: FinetuneConfig,
    weights: Mapping[str, Tensor],
    base: dict[str, Any],
    history: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes an adapter directory with its card, atomically; an older adapter of ours is replaced.

    Args:
        weights: the trained parameters, whole tensors by our names.
        base: from `base_entry`, taken when the base's weights were read.
        history: the runs that trained the base's weights, then this one.

    Raises:
        ConfigError: weights that are not finite.
        UserError: as `check_adapter_out`.
    """
    with new_folder(out, _is_ours) as part:
        _write(part, out.resolve().name, config, weights, base, history)


def _write(
    part: Path,
    title: str,
    config: FinetuneConfig,
    weights: Mapping[str, Tensor],
    base: dict[str, Any],
    history: Sequence[dict[str, Any]],
) -> None:
    parts: dict[str, dict[str, Tensor]] = {"lora": {}, "garfa": {}, "layers": {}}
    names, layer_names = PeftNames(base["model_type"], config.architecture), layer_file_names(config.architecture)
    for name, tensor in weights.items():
        refuse_non_finite(name, tensor)
        if is_lora(name):
            parts["lora"][name] = tensor.contiguous()
        elif name.endswith("garfa.raw"):
            parts["garfa"][name.replace(".attention.", ".")] = tensor.float().contiguous()
        else:
            parts["layers"][layer_names.of(name)] = tensor.contiguous()
    parts["lora"] = names.join(parts["lora"])
    needs = [name for name, tensors in parts.items() if tensors]
    for name in needs:
        save_file(parts[name], part / FILES[name], metadata={"format": "pt"})
    if parts["lora"]:
        _write_peft_config(part, config, names, hub_name(base["path"]) or base["path"])

    marker = {
        "format": FORMAT,
        "needs": needs,
        "base": base,
        "architecture": to_dict(config.architecture),
        "position": to_dict(config.position),
        "trained_length": config.model_length,
        "adapter": adapter_entry(config),
        "training": list(history),
    }
    (part / ADAPTER_MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(config.tokenizer)
    tokenizer.save(part)
    chat_template(config.data, tokenizer).save(part)
    learned = garfa_of_tensors(weights, config.garfa.equation, config.garfa.queries)
    card = adapter_card(
        title, base["path"], base["model_type"] == MODEL_TYPE, adapter_entry(config), needs, learned, history
    )
    (part / CARD).write_text(card, encoding="utf-8")


def _write_peft_config(directory: Path, config: FinetuneConfig, names: PeftNames, base: str) -> None:
    from peft import LoraConfig

    lora = config.lora
    LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT declares int, but only divides it by the rank
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        **names.lora_config(lora, adapted(config).lora),
    ).save_pretrained(str(directory))
