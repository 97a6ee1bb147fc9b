"""Model directories: Hugging Face's layout (`config.json`, safetensors, tokenizer files) with `farsight.json` beside it."""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.cards.model import CARD, CONFIG, model_card
from farsight.checkpoints.checkpoint_tensors import parameter_shapes
from farsight.checkpoints.dcp import COMPLETE
from farsight.checkpoints.model_dir.families.known import FAMILIES, VISION
from farsight.checkpoints.model_dir.hf_config import MODEL_TYPE, MODELING, from_hf_config, tensor_names, to_hf_config
from farsight.checkpoints.model_dir.names import TensorNames
from farsight.checkpoints.model_dir.safetensors_files import Stored, kept_dtype, opened, write_tensors
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.files import inside
from farsight.json_files import fields_of, read_object
from farsight.model.build import ModelConfig
from farsight.new_folder import check_new, holds_only, new_folder
from farsight.progress import progress

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
ADAPTER_MARKER, ADAPTER_CONFIG, GARFA_FILE = "farsight_adapter.json", "adapter_config.json", "garfa.safetensors"
"""Files that mark an adapter directory; see `checkpoints/adapter/config.py`."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""The files that `Tokenizer.save` writes."""

logger = logging.getLogger("farsight")


def check_model_out(out: Path) -> None:
    """Raises early what `write_model_dir` would raise in the end; call it before long work.

    Raises:
        UserError: `out` exists and is not a model directory of ours, or somebody has added files to it.
    """
    check_new(out, _is_ours)


def _is_ours(folder: Path) -> bool:
    names = ("model*.safetensors", INDEX, f"{MODELING}.py", CARD, *TOKENIZER_FILES)
    return holds_only(folder, (CONFIG, "config.json"), names)


def write_model_dir(
    out: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor] | None = None,
    tokenizer_dir: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    history: Sequence[dict[str, Any]] = (),
    notes: str = "",
) -> None:
    """Writes a model directory with its model card, atomically; an older model directory of ours is replaced.

    Args:
        tensors: parameters by our names, in the order in which they are written.
        read: gives the values of `tensors` that are on the meta device; only one tensor is held at a time.
        tokenizer_dir: directory of the tokenizer to write beside the weights.
        dtype: dtype of the weights written; None keeps each tensor's own.
        shard_bytes: size limit of a file; only a single larger tensor exceeds it.
        history: the runs that trained the weights, from `read_history`.
        notes: Markdown to append to the card.

    Raises:
        ConfigError: weights that are not finite, or whose shape differs from that in `tensors`.
        UserError: as `check_model_out`.
    """
    with new_folder(out, _is_ours) as part:
        _write(part, out, config, tensors, read, tokenizer_dir, dtype, shard_bytes, history, notes)


def _write(
    part: Path,
    out: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor] | None,
    tokenizer_dir: Path | None,
    dtype: torch.dtype | None,
    shard_bytes: int,
    history: Sequence[dict[str, Any]],
    notes: str,
) -> None:
    bos_id = eos_id = None
    if tokenizer_dir is not None:
        tokenizer = load_tokenizer_dir(tokenizer_dir)
        tokenizer.save(part)
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id

    read = read or tensors.__getitem__
    ours = {name: tensor.to(device="meta", dtype=dtype) for name, tensor in tensors.items()}
    written = next(reversed(ours.values())).dtype
    hf_config = to_hf_config(config, str(written).removeprefix("torch."), bos_id, eos_id)
    names = tensor_names(hf_config)
    stored = {theirs: _joined([ours[part] for part in names.parts(theirs)]) for theirs in map(names.of, ours)}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        weight_map = {name: file for file, inside in zip(files, shards, strict=True) for name in inside}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def values(theirs: str) -> Tensor:
        parts = names.parts(theirs)
        if len(parts) == 1:
            return read(parts[0])
        whole = torch.empty_like(stored[theirs], device="cpu")
        for rows, name in zip(whole.split([ours[name].shape[0] for name in parts]), parts, strict=True):
            rows.copy_(_of_shape(name, read(name), rows.shape).detach())
        return whole

    with progress(total=sum(sizes.values()), unit="B", unit_scale=True, desc="write") as bar:
        for file, inside_file in zip(files, shards, strict=True):
            write_tensors(part / file, {name: stored[name] for name in inside_file}, values, bar.update)
    if hf_config["model_type"] == MODEL_TYPE:
        shutil.copy(Path(__file__).with_name(f"{MODELING}.py"), part)
    (part / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
    config.save(part / CONFIG, training=list(history))
    tokenizer_file = (part / "tokenizer.json").is_file()
    card = model_card(out.resolve().name, config, hf_config, history, tokenizer_file)
    (part / CARD).write_text(card + notes, encoding="utf-8")


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensor [sum of rows, ...] on the meta device that some parameters are the rows of."""
    first = parts[0]
    return first if len(parts) == 1 else first.new_empty(sum(p.shape[0] for p in parts), *first.shape[1:])


def _of_shape(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    if value.shape != shape:
        raise ConfigError(f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)}.")
    return value


def read_config(directory: Path) -> ModelConfig:
    """The config of a model directory or checkpoint: `farsight.json`, or a known family's `config.json` where there is none.

    `checkpoints.load.read_model_config` takes adapter directories too.

    Raises:
        ConfigError: no such directory, an adapter, or a model that can't be built here.
    """
    _refuse_adapter(directory)
    if (directory / CONFIG).is_file():
        return ModelConfig.load(directory / CONFIG)
    path = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a model directory: there is no such folder. hf://ORG/NAME names a model of the Hugging Face Hub."
        )
    if not path.is_file():
        inner = _model_within(directory)
        hint = f" Did you mean {inner}?" if inner is not None else ""
        raise ConfigError(f"{directory} is not a model directory: it has no config.json.{hint}")
    return from_hf_config(read_object(path), path)


def model_type(directory: Path) -> str:
    """The model type in a directory's `config.json`; empty if there is none.

    Raises:
        ConfigError: a damaged file.
    """
    path = directory / "config.json"
    found = read_object(path).get("model_type") if path.is_file() else None
    return found if isinstance(found, str) else ""


def is_foreign(directory: Path) -> bool:
    """True for the directory of a model that Farsight does not build, and that transformers may know."""
    found = "" if (directory / CONFIG).is_file() else model_type(directory)
    return found not in ("", MODEL_TYPE, *FAMILIES, *VISION)


def _model_within(folder: Path) -> Path | None:
    """The model, adapter or newest checkpoint of a run folder, or of the latest stage in a recipe's folder."""
    for pattern in (
        "model/config.json",
        f"adapter/{ADAPTER_MARKER}",
        f"checkpoint/step-*/{COMPLETE}",
        f"step-*/{COMPLETE}",
    ):
        for found in (folder.glob(pattern), folder.glob(f"*/{pattern}")):
            if newest := max(found, key=lambda path: path.stat().st_mtime, default=None):
                return newest.parent
    return None


def is_adapter(directory: Path) -> bool:
    """Whether the directory holds an adapter rather than a whole model."""
    names = (ADAPTER_MARKER, ADAPTER_CONFIG, GARFA_FILE)
    return not (directory / "config.json").is_file() and any((directory / name).is_file() for name in names)


def _refuse_adapter(directory: Path) -> None:
    if is_adapter(directory):
        raise ConfigError(
            f"{directory} is an adapter, not a whole model: farsight merge {directory} --out OUT makes one."
        )


def directory_names(directory: Path) -> TensorNames:
    """The names of the tensors of a model directory, which its `config.json` decides.

    Raises:
        ConfigError: no `config.json`, or one that holds something else.
    """
    path = directory / "config.json"
    with fields_of(path):
        return tensor_names(read_object(path))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory.

    Raises:
        ConfigError: an adapter, no safetensors, or a damaged index.
    """
    _refuse_adapter(directory)
    paths, index = sorted(directory.glob("*.safetensors")), directory / INDEX
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no weight_map, which says in which file each tensor is. Copy it again.")
        # Links to other places are fine, as in the hub's cache; names that lead out of the directory are refused.
        named = dict.fromkeys(inside(directory, file, f"{index}, weight_map,") for file in weight_map.values())
        paths = sorted(named)
        if missing := [p.name for p in paths if not p.is_file()]:
            raise ConfigError(
                f"{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing."
            )
    if not paths and (directory / COMPLETE).is_file():
        raise ConfigError(
            f"{directory} is a checkpoint already, not a model directory: a run can start from it (checkpoint.initial_load_path), and "
            f"`farsight convert to-hf {directory} OUT` makes a model directory."
        )
    if not paths:
        raise ConfigError(f"{directory} holds no *.safetensors. Other weight formats (pickles) are not read.")
    return paths


def tensor_dtypes(files: Mapping[str, Stored]) -> dict[str, torch.dtype]:
    """The stored dtype of each tensor.

    Args:
        files: from `check_tensors`.
    """
    dtypes = {}
    for path in sorted({stored.path for stored in files.values()}):
        with opened(path) as file:
            for name in (name for name in files if files[name].path == path):
                dtypes[name] = kept_dtype(file, files[name].key, path)
    return dtypes


def check_tensors(directory: Path, config: ModelConfig) -> dict[str, Stored]:
    """The place of each parameter of a model directory, checked against the config. Only file headers are read, no weights.

    Raises:
        ConfigError: as `weight_files`; and naming a missing, unknown or surplus tensor, a wrong shape, or a dtype that is
            not one of weights.
    """
    paths, names = weight_files(directory), directory_names(directory)
    expected = {name: tuple(shape) for name, shape in parameter_shapes(config).items()}
    files: dict[str, Stored] = {}
    left_out = 0
    for path in paths:
        with opened(path) as file:
            for key in file.keys():  # noqa: SIM118  safe_open is not a dict
                # In older exports, where the config implies it; and the static cache of a model that had generated before
                # transformers 4 saved it.
                if key.endswith("rotary_emb.inv_freq") or key.startswith("_cache."):
                    continue
                if names.ignores(key):
                    left_out += 1
                    continue
                parts = names.parts(key)
                if not parts:
                    kind = model_type(directory)
                    raise ConfigError(f"{path.name} holds {key}, which a {kind} model does not have.")
                if parts == ("output.weight",) and config.architecture.tie_embeddings:
                    continue  # a tied head is often stored as well
                if parts[0] not in expected:
                    raise ConfigError(f"{directory} holds {key}, which does not fit its config.json.")
                shapes = [expected[part] for part in parts]
                whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
                if (shape := tuple(file.get_slice(key).get_shape())) != whole:
                    raise ConfigError(f"{path}: {key} has shape {shape}, config.json requires {whole}.")
                kept_dtype(file, key, path)
                ends = list(accumulate(shape[0] for shape in shapes))
                for part, own, end in zip(parts, shapes, ends, strict=True):
                    files[part] = Stored(path, key, None if len(parts) == 1 else (end - own[0], end))
    if missing := sorted(set(expected) - set(files)):
        raise ConfigError(f"{directory} lacks {len(missing)} tensors, among them {names.of(missing[0])}.")
    if left_out:
        logger.info(
            f"{directory}: {left_out} tensors of its vision model are left out; the language model is opened alone"
        )
    return files
