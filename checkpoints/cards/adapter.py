"""The card (README.md) of an adapter directory: its parts, its base, and how to load or merge it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.checkpoints.cards.model import heading, lora_size, markdown_table, training_table
from farsight.configs.schema import Garfa
from farsight.model.position.garfa import alphas
from farsight.model.position.layers import layer_selection


def adapter_card(
    name: str,
    base: str,
    own_type: bool,
    entry: dict[str, Any],
    needs: Sequence[str],
    garfa: Garfa | None,
    history: Sequence[dict[str, Any]],
) -> str:
    """The card's text.

    Args:
        name: name of the adapter.
        base: the base's directory.
        own_type: whether the base comes with Farsight's modelling file.
        entry: from `cards.model.adapter_entry`.
        needs: the adapter's parts: "lora", "garfa", "layers".
        garfa: the learned GARFA factors.
        history: the runs that trained the base's weights, and the adapter's.
    """
    repository = hub_name(base)
    base = repository or _folder_name(base)
    lines = heading(name, "peft", needs, repository)
    if garfa is not None:
        lines.append(
            "**`peft` loads only a part of this adapter, without a warning.** `garfa.safetensors` holds factors on the RoPE base "
            "of key/value heads; without them this is not the model that was trained. Load it with Farsight, or merge it: a "
            "merged model keeps them.\n"
        )
    elif "layers" in needs:
        lines.append("`layers.safetensors` replaces whole layers of the base; `peft` does not read it. Merge it.\n")
    lines += [
        "## What it is\n",
        # Hubs refuse a base_model in the metadata that is a directory.
        f"Trained on top of `{base}`, which was kept in {_kept(entry)}."
        + " On a hub, add the name of the base's repository to this file's first lines, as `base_model`."
        * (not repository)
        + "\n",
        *_parts(entry, needs),
    ]
    if garfa is not None:
        lines += _alphas(garfa)
    lines += ["## How it was trained\n", *training_table(history), "## How to load it\n"]
    lines += [
        "All of it, with Farsight:\n",
        "```python",
        "from pathlib import Path\n",
        "from farsight.checkpoints.adapter.load import load_adapter\n",
        'model, config = load_adapter(Path("."))  # this directory; base=Path(…) if the base has moved',
        "```\n",
    ]
    if "lora" in needs:
        quantized = entry["quantization"] != "none"
        # As Python literals: a path may contain quotes.
        options = f'{json.dumps(base)}, dtype="{entry["dtype"]}"' + ", trust_remote_code=True" * own_type
        lines += [
            f"LoRA{' alone, without GARFA,' * (garfa is not None)} with `peft`"
            f"{', on the base quantised as in training: on any other, logits differ' * quantized}:\n",
            "```python",
            "from peft import PeftModel",
            f"from transformers import AutoModelForCausalLM{', BitsAndBytesConfig' * quantized}\n",
            *[f"kept = BitsAndBytesConfig({_bits_and_bytes(entry)})"] * quantized,
            "# The base: its directory, or its name on a hub",
            f"base = AutoModelForCausalLM.from_pretrained({options}{', quantization_config=kept' * quantized})",
            'model = PeftModel.from_pretrained(base, ".")',
            "```\n",
        ]
    lines += [
        "Merged into a model directory, which `transformers` loads:\n",
        "```",
        "farsight merge . --out ../merged",
        "```",
    ]
    return "\n".join(lines) + "\n"


def hub_name(base: str) -> str | None:
    """ORG/NAME of a base that is a place on the hub, hf://ORG/NAME, or lies in a hub's cache; None for any other path."""
    found = re.match(r"hf://([^/]+)/([^/@]+)", base) or re.search(r"/models--(.+?)--([^/]+)/snapshots/[^/]+$", base)
    return "/".join(found.groups()) if found else None


def _folder_name(base: str) -> str:
    """A base's name on other machines: that of its folder; a run's `model` has the run's name."""
    path = Path(base)
    return (path.parent if path.name == "model" else path).name


def _kept(entry: dict[str, Any]) -> str:
    """The precision of the base during training."""
    if entry["quantization"] == "none":
        return entry["dtype"]
    doubled = " with double quantisation" * (entry["double_quantization"] and entry["quantization"] != "int8")
    return f"{entry['quantization']}{doubled}, computed in {entry['dtype']}"


def _bits_and_bytes(entry: dict[str, Any]) -> str:
    """The arguments of transformers' `BitsAndBytesConfig` that keep the base as in training."""
    if entry["quantization"] == "int8":
        return "load_in_8bit=True"
    return (
        f'load_in_4bit=True, bnb_4bit_quant_type="{entry["quantization"]}", '
        f'bnb_4bit_use_double_quant={entry["double_quantization"]}, bnb_4bit_compute_dtype="{entry["dtype"]}"'
    )


def _parts(entry: dict[str, Any], needs: Sequence[str]) -> list[str]:
    lines = []
    if lora := entry.get("lora"):
        where = f"{', '.join(lora['modules'])} of layers {layer_selection(lora['layers'])}"
        lines.append(f"{lora_size(lora)}, on {where}: `adapter_model.safetensors`.")
    if garfa := entry.get("garfa"):
        lines.append(f"GARFA on layers {layer_selection(garfa['layers'])}: `garfa.safetensors`.")
    if "layers" in needs:
        lines.append("Whole layers: `layers.safetensors`.")
    return [*lines, ""]


def _alphas(garfa: Garfa) -> list[str]:
    """A table of the learned factors."""
    by_layer = alphas(garfa)
    header = ["layer", *(f"head {head}" for head in range(len(next(iter(by_layer.values())))))]
    base = "its square root multiplies" if garfa.equation == 14 else "it multiplies"
    turned = "keys and queries" if garfa.queries else "keys"
    return [
        f"alpha of each key/value head ({base} the RoPE base of {turned}; 1 changes nothing):\n",
        *markdown_table([header, *([str(layer), *(f"{a:.4f}" for a in row)] for layer, row in by_layer.items())]),
    ]
