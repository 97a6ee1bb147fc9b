"""Model directories: `config.json`, safetensors, tokenizer files and `farsight.json`, as Hugging Face lays them out."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.cards.model import CARD, CONFIG, model_card
from farsight.checkpoints.checkpoint_tensors import checkpoint_tensors, parameter_shapes, read_tensor
from farsight.checkpoints.intact import COMPLETE, is_complete
from farsight.checkpoints.model_dir.hf_config import MODEL_TYPE, MODELING, from_hf_config, to_hf_config
from farsight.checkpoints.model_dir.names import from_hf_name, to_hf_name
from farsight.checkpoints.model_dir.safetensors_files import TensorReader, kept_dtype, opened, write_tensors
from farsight.configs.json_files import read_object
from farsight.configs.load import ConfigError
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.files import inside
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama, copy_whole
from farsight.new_folder import check_new, holds_only, new_folder
from farsight.progress import progress

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
ADAPTER_MARKER, ADAPTER_CONFIG, GARFA_FILE = "farsight_adapter.json", "adapter_config.json", "garfa.safetensors"
"""Files that tell an adapter's directory: `checkpoints/adapter.py`."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What `Tokenizer.save` writes."""


def check_model_out(out: Path) -> None:
    """Refuses a place that `write_model_dir` would refuse; long work calls it before it starts.

    Raises:
        UserError: what is there is no model directory of ours, or somebody has added files to it.
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
    """Writes a model directory with its model card; it appears whole or not at all, in place of an older one of ours.

    Args:
        tensors: parameters by our names, in the order they are written.
        read: where `tensors` are on the meta device, gives their values, one after the other: no more than one tensor
            is held.
        tokenizer_dir: whose tokenizer goes beside the weights.
        dtype: of the weights written; None keeps each tensor's own.
        shard_bytes: a file grows no larger, unless one tensor is.
        history: the runs that trained the weights, from `read_history`.
        notes: Markdown to end the card with.

    Raises:
        ConfigError: weights that are not finite, or of another shape than `tensors` say.
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
    tensors = {name: tensor.to(device="meta", dtype=dtype) for name, tensor in tensors.items()}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        weight_map = {to_hf_name(name): file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    with progress(total=sum(sizes.values()), unit="B", unit_scale=True, desc="write") as bar:
        for file, names in zip(files, shards, strict=True):
            write_tensors(part / file, {n: tensors[n] for n in names}, read, bar.update)

    written = next(reversed(tensors.values())).dtype
    hf_config = to_hf_config(config, str(written).removeprefix("torch."), bos_id, eos_id)
    if hf_config["model_type"] == MODEL_TYPE:
        shutil.copy(Path(__file__).with_name(f"{MODELING}.py"), part)
    (part / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
    config.save(part / CONFIG, training=list(history))
    tokenizer_file = (part / "tokenizer.json").is_file()
    card = model_card(out.resolve().name, config, hf_config, history, tokenizer_file)
    (part / CARD).write_text(card + notes, encoding="utf-8")


def read_model_config(directory: Path) -> ModelConfig:
    """A model directory's or checkpoint's config: from `farsight.json`, or from a Llama-family `config.json` without one; or an adapter's.

    Raises:
        ConfigError: no such directory, or a model that can't be built here.
    """
    if is_adapter(directory):
        from farsight.checkpoints.adapter import read_adapter

        return read_adapter(directory).config()
    if (directory / CONFIG).is_file():
        return ModelConfig.load(directory / CONFIG)
    path = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a model directory: there is no such folder.")
    if not path.is_file():
        inner = _model_within(directory)
        hint = f" Did you mean {inner}?" if inner is not None else ""
        raise ConfigError(f"{directory} is not a model directory: it has no config.json.{hint}")
    return from_hf_config(read_object(path), path)


def _model_within(folder: Path) -> Path | None:
    """What a run folder, or the latest stage in a recipe's, has left: its model, its adapter, or its newest checkpoint."""
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
    """Whether it holds what fine-tuning learned beside a base, and not a whole model."""
    names = (ADAPTER_MARKER, ADAPTER_CONFIG, GARFA_FILE)
    return not (directory / "config.json").is_file() and any((directory / name).is_file() for name in names)


def tensor_files(directory: Path) -> dict[str, Path]:
    """Our parameter name → the safetensors file that holds it.

    Raises:
        ConfigError: no safetensors, a damaged file, or tensors that a Llama of ours does not have.
    """
    files: dict[str, Path] = {}
    if is_adapter(directory):
        raise ConfigError(
            f"{directory} is an adapter and no whole model: farsight merge {directory} --out OUT makes one."
        )
    paths, index = sorted(directory.glob("*.safetensors")), directory / INDEX
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no weight_map, which says in which file each tensor is. Copy it again.")
        # A cache of the hub holds links to files elsewhere; names that lead elsewhere are another matter.
        named = dict.fromkeys(inside(directory, file, f"{index}, weight_map,") for file in weight_map.values())
        paths = sorted(named)
        if missing := [p.name for p in paths if not p.is_file()]:
            raise ConfigError(
                f"{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing."
            )
    if not paths:
        raise ConfigError(f"{directory} holds no *.safetensors. Other weight formats (pickles) are not read.")
    for path in paths:
        with opened(path) as file:
            for key in file.keys():  # noqa: SIM118  safe_open is not a dict
                if key.endswith("rotary_emb.inv_freq"):
                    continue  # older exports carry it; the config says the same
                name = from_hf_name(key)
                if name is None:
                    raise ConfigError(f"{path.name} holds {key}, which a Llama of this shape does not have.")
                files[name] = path
    return files


def tensor_dtypes(files: Mapping[str, Path]) -> dict[str, torch.dtype]:
    """The dtype that each tensor is kept in.

    Args:
        files: from `check_tensors`.
    """
    dtypes = {}
    for path in sorted(set(files.values())):
        with opened(path) as file:
            for name in (name for name in files if files[name] == path):
                dtypes[name] = kept_dtype(file, to_hf_name(name), path)
    return dtypes


def check_tensors(directory: Path, config: ModelConfig) -> dict[str, Path]:
    """`tensor_files`, compared with what the config asks for. No weights are read, and no memory is taken for them.

    Raises:
        ConfigError: missing tensors, surplus ones, other shapes, or dtypes that no weights have, each named.
    """
    expected = {name: tuple(shape) for name, shape in parameter_shapes(config).items()}
    files = tensor_files(directory)
    if config.architecture.tie_embeddings:
        files.pop("output.weight", None)  # a tied head is often written out all the same
    if missing := sorted(set(expected) - set(files)):
        raise ConfigError(f"{directory} lacks {len(missing)} tensors, among them {to_hf_name(missing[0])}.")
    if surplus := sorted(set(files) - set(expected)):
        raise ConfigError(f"{directory} holds {to_hf_name(surplus[0])}, which its config.json leaves no room for.")
    for path in sorted(set(files.values())):
        with opened(path) as file:
            for key in file.keys():  # noqa: SIM118
                name = from_hf_name(key)
                if name not in files:
                    continue
                if (shape := tuple(file.get_slice(key).get_shape())) != expected[name]:
                    raise ConfigError(f"{path}: {key} has shape {shape}, config.json makes it {expected[name]}.")
                kept_dtype(file, key, path)
    return files


def load_model(
    directory: Path,
    length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: ModelConfig | None = None,
    divide: Callable[[Llama], None] | None = None,
) -> tuple[Llama, ModelConfig]:
    """Builds the model of a directory, a checkpoint's, or an adapter's on its base, and reads its weights, one tensor at a
    time.

    Args:
        length: sequence length its positions are set for; the trained length when None.
        config: in place of the directory's own, to see the weights through other positions.
        divide: gives parameters over to several ranks, on the meta device; each rank reads its own part.

    Returns:
        The model in evaluation mode, and its config.

    Raises:
        ConfigError: as `read_model_config` and `saved_tensors`; nothing is allocated before files and config agree.
    """
    if is_adapter(directory):
        from farsight.checkpoints.adapter import load_adapter

        if divide is not None:
            raise ConfigError(f"{directory} is an adapter; merge it first, to divide its model over several processes.")
        return load_adapter(directory, device=device, dtype=dtype, length=length, config=config)
    config = config or read_model_config(directory)
    tensors = saved_tensors(directory, config)
    with torch.device("meta"):
        model = build_model(config, length)
    if divide is not None:
        divide(model)
    for parameter in model.parameters():  # and not model.to(dtype): frequencies and slopes stay in fp32
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in progress(tensors, total=len(parameters), desc="load", unit="tensor"):
            copy_whole(parameters[name], tensor)
    model.set_position(model.positions, model.length)
    return model.eval(), config


def saved_tensors(directory: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model directory or a checkpoint, by our names, one after the other.

    Raises:
        ConfigError: as `check_tensors`, or `checkpoint_tensors`.
    """
    if is_complete(directory):
        tensors = checkpoint_tensors(directory, config)
        return ((name, read_tensor(directory, tensors, name)) for name in tensors)
    return _read_in_order(check_tensors(directory, config))


def _read_in_order(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by our names, one file after the other."""
    read = TensorReader(files)
    for name in sorted(files, key=lambda name: files[name]):
        yield name, read(name)
    read.close()
