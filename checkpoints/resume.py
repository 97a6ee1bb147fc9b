"""Checks which settings changed when a run resumes, and refuses changes that must not happen."""

import dataclasses
import json
import logging
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farsight.checkpoints.cards.model import CONFIG, adapter_entry, read_history
from farsight.checkpoints.dcp import load
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.former import current
from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_dict
from farsight.data.read_ahead import ORDER_KEY
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig, trained_layers
from farsight.model.position.layers import select_layers

logger = logging.getLogger("farsight")

_NUMBERS = re.compile(
    r"optimizer\.(?!kind$|implementation$).*|lr_scheduler\..*|garfa\.(lr|weight_decay|warmup_ratio|min_lr_factor)"
)
"""Options of the optimizer and its schedule. The optimizer's kind is checked separately; its implementation only affects speed."""


def refuse_another_model(saved: ModelConfig, ours: ModelConfig, where: str, fix: str) -> None:
    """Refuses other shapes of weights, and another assignment of scopes to heads.

    Args:
        fix: what to do about other shapes, as a sentence.
    """
    theirs = dataclasses.replace(saved.architecture, depth_init=ours.architecture.depth_init)
    if changed := _changed(_flat(to_dict(theirs), "architecture"), _flat(to_dict(ours.architecture), "architecture")):
        raise ConfigError("\n  ".join([f"{where} holds another architecture:", *changed]) + f"\n{fix}")
    layouts = [getattr(c.position.heads, "layout", None) for c in (saved, ours)]
    if None not in layouts and layouts[0] != layouts[1]:
        raise ConfigError(
            f"{where} was trained with position.heads.layout = {layouts[0]!r}, here it is {layouts[1]!r}: "
            "the heads would change places. Set it back."
        )


def take_its_settings(start: Path | str) -> str:
    """The fix for a run whose config describes another model than the one it starts from."""
    return (
        f"`farsight positions {start} --toml theirs.toml` writes the settings of that model: name theirs.toml as `base` in the "
        "config, and leave [model], [architecture] and [position] out of it."
    )


def refuse_other_layers(checkpoint: Path, config: JobConfig, base: dict[str, str] | None) -> None:
    """Refuses to train layers, adapters or a base that the checkpoint's optimizer state does not belong to.

    Args:
        base: in fine-tuning, the base's fingerprint and checksum by their names in the history, where earlier versions have no
            checksum.
    """
    entry = (read_history(checkpoint) or [{}])[-1]
    if isinstance(config, FinetuneConfig) and entry.get("adapter") != (now := adapter_entry(config)):
        changed = _changed(_flat(entry.get("adapter") or {}), _flat(now))
        raise ConfigError(
            "\n  ".join([f"{checkpoint} holds other adapters:", *changed])
            + "\nSet them back, or start a new run (job.dump_folder)."
        )
    if base is not None and {name: entry.get(name, "") for name in base} not in (base, base | {"base_checksum": ""}):
        assert isinstance(config, FinetuneConfig)  # only fine-tuning has a base
        raise ConfigError(
            f"{checkpoint} was trained on {entry.get('start')}, and base_model.path = {config.base_model.path!r} "
            "holds other weights: set it back, or start a new run (job.dump_folder)."
        )
    before = entry.get("layers", "all")
    ours, n_layers = trained_layers(config), config.architecture.n_layers
    if before != "all" and not (ours is not None and {*ours} <= select_layers(before, n_layers)):
        raise ConfigError(
            f"{checkpoint} only holds optimizer state of layers {before}, and training.layers = "
            f"{config.training.layers!r} asks for others: set it to {before!r}, or start a new run from the "
            "model directory."
        )


def refuse_other_optimizer(checkpoint: Path, config: JobConfig) -> dict[str, Any]:
    """Refuses another kind of optimizer: the saved moments would mean something else.

    Returns:
        The settings that the checkpoint was saved under, as nested dicts; empty if it does not record them.
    """
    try:
        job = tomllib.loads(json.loads((checkpoint / CONFIG).read_text(encoding="utf-8")).get("job", ""))
    except ValueError as error:
        raise ConfigError(f"{checkpoint / CONFIG}: the job's settings can't be read ({error}).") from error
    if job.get("optimizer", {}).get("name") == "AdamW8bit":
        raise ConfigError(
            f"{checkpoint} was saved by an earlier version with bitsandbytes' AdamW8bit, whose state torchao's can't read. "
            f"Start {_another_run(checkpoint, config)}."
        )
    job = current(job)
    theirs, ours = job.get("optimizer", {}).get("kind", config.optimizer.kind), config.optimizer.kind
    if theirs != ours:
        raise ConfigError(
            f"{checkpoint} was saved with optimizer.kind = {theirs!r}, here it is {ours!r}, for which its moments mean "
            f"something else. Set it back, or start {_another_run(checkpoint, config)}."
        )
    return job


def refuse_other_settings(checkpoint: Path, config: JobConfig, saved: ModelConfig) -> None:
    """Refuses changed positions and optimizer settings unless `checkpoint.accept_changes` allows them.

    Args:
        saved: the model's config in the checkpoint.
    """
    compared = {"position": (_flat(to_dict(saved.position), "position"), _flat(to_dict(config.position), "position"))}
    if isinstance(config, FinetuneConfig):  # in pre-training it is training.seq_len, which the order of data covers
        for side, length in zip(compared["position"], (saved.trained_length, config.model_length), strict=True):
            side["trained_length"] = length
    if job := refuse_other_optimizer(checkpoint, config):
        # Settings that an earlier version did not save had their defaults.
        theirs = _numbers(to_dict(type(config)())) | _numbers(job)
        compared["optimizer"] = theirs, _numbers(to_dict(config))
    for kind, (theirs, ours) in compared.items():
        if not (changed := _changed(theirs, ours)):
            continue
        if kind in config.checkpoint.accept_changes:
            logger.warning(f"resuming from {checkpoint} with other settings, as accepted: {'; '.join(changed)}")
            continue
        why = "the weights would compute another function" if kind == "position" else "the run would train differently"
        raise ConfigError(
            f"{checkpoint} was saved under other settings, and {why}:\n  "
            + "\n  ".join(changed)
            + f'\nSet them back; or accept them for this run with checkpoint.accept_changes = ["{kind}"]; or start '
            f"{_another_run(checkpoint, config)}."
        )


def saved_order(checkpoint: Path) -> dict[str, Any]:
    """The order of data that a checkpoint was saved under; the data loader's `check_order` compares it with its own."""
    saved = {"dataloader": {ORDER_KEY: ""}}
    load(saved, checkpoint)
    return json.loads(saved["dataloader"][ORDER_KEY])


def _another_run(checkpoint: Path, config: JobConfig) -> str:
    if isinstance(config, FinetuneConfig):
        return "a new run (job.dump_folder)"
    return f'a new run from its weights (checkpoint.initial_load_path = "{checkpoint}", and another job.dump_folder)'


def _numbers(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _flat(job).items() if _NUMBERS.fullmatch(name)}


def _changed(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Describes the settings that differ, with both values."""
    return [
        f"{name} = {_shown(theirs, name)} there, {_shown(ours, name)} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}; tables in lists are keyed by index."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        of_tables = isinstance(value, list) and any(isinstance(item, dict) for item in value)
        items = dict(enumerate(value)) if of_tables else value
        flat |= _flat(items, name) if isinstance(items, dict) else {name: value}
    return flat


def _shown(flat: Mapping[str, Any], name: str) -> str:
    return repr(flat[name]) if name in flat else "not set"
