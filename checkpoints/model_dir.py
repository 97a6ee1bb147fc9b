"""Model directories: `config.json`, safetensors, tokenizer files and `farsight.json`, as Hugging Face lays them out."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.hf_config import from_hf_config, to_hf_config
from checkpoints.names import from_hf_name, to_hf_name
from configs.load import ConfigError
from data.tokenizer import load_tokenizer_dir
from model.build import ModelConfig, build_model
from model.llama import Llama

CONFIG = "farsight.json"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def write_model_dir(
    out: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer_dir: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model directory; it appears whole or not at all.

    Args:
        tensors: (our parameter name, tensor) pairs, taken one at a time; no more than a shard is held.
        tokenizer_dir: files to copy beside the weights.
        dtype: of the weights written; None keeps each tensor's own.
    """
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    bos_id = eos_id = None
    if tokenizer_dir is not None:
        shutil.copytree(tokenizer_dir, part, dirs_exist_ok=True)
        tokenizer = load_tokenizer_dir(tokenizer_dir)
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id

    shards: list[dict[str, Tensor]] = [{}]
    files: list[list[str]] = []
    size = total = 0
    written = torch.float32

    def flush() -> None:
        save_file(shards[-1], part / f"shard-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(shards[-1]))
        shards[-1] = {}

    for name, tensor in tensors:
        tensor = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > shard_bytes:
            flush()
            size = 0
        shards[-1][to_hf_name(name)] = tensor
        size, total, written = size + nbytes, total + nbytes, tensor.dtype
    flush()

    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        weight_map = {key: names[i] for i, keys in enumerate(files) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for i, name in enumerate(names):
        (part / f"shard-{i}.safetensors").rename(part / name)
    values = to_hf_config(config, str(written).removeprefix("torch."), bos_id, eos_id)
    (part / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    config.save(part / CONFIG)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def read_model_config(directory: Path) -> ModelConfig:
    """A model directory's config: from `farsight.json`, or from a Llama-family `config.json` without one.

    Raises:
        ConfigError: no such directory, or a model that can't be built here.
    """
    if (directory / CONFIG).is_file():
        return ModelConfig.load(directory / CONFIG)
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} is not a model directory: it has no config.json.")
    return from_hf_config(json.loads(path.read_text(encoding="utf-8")))


def tensor_files(directory: Path) -> dict[str, Path]:
    """Our parameter name → the safetensors file that holds it.

    Raises:
        ConfigError: no safetensors, or tensors that a Llama of ours does not have.
    """
    files: dict[str, Path] = {}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{directory} holds no *.safetensors. Other weight formats (pickles) are not read.")
    index = directory / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = sorted({directory / file for file in weight_map.values()})
        if missing := [p.name for p in paths if not p.is_file()]:
            raise ConfigError(
                f"{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing."
            )
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  safe_open is not a dict
                if key.endswith("rotary_emb.inv_freq"):
                    continue  # older exports carry it; the config says the same
                name = from_hf_name(key)
                if name is None:
                    raise ConfigError(f"{path.name} holds {key}, which a Llama of this shape does not have.")
                files[name] = path
    return files


def check_tensors(directory: Path, config: ModelConfig) -> dict[str, Path]:
    """`tensor_files`, compared with what the config asks for.

    Raises:
        ConfigError: missing tensors, surplus ones, or other shapes, each named.
    """
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}
    files = tensor_files(directory)
    if config.architecture.tie_embeddings:
        files.pop("output.weight", None)  # a tied head is often written out all the same
    if missing := sorted(set(expected) - set(files)):
        raise ConfigError(f"{directory} lacks {len(missing)} tensors, among them {to_hf_name(missing[0])}.")
    if surplus := sorted(set(files) - set(expected)):
        raise ConfigError(f"{directory} holds {to_hf_name(surplus[0])}, which its config.json leaves no room for.")
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = from_hf_name(key)
                if name in files and (shape := tuple(file.get_slice(key).get_shape())) != expected[name]:
                    raise ConfigError(f"{path.name}: {key} has shape {shape}, config.json makes it {expected[name]}.")
    return files


def load_model(
    directory: Path,
    length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Llama, ModelConfig]:
    """Builds the model of a directory and reads its weights, one tensor at a time.

    Args:
        length: sequence length its positions are set for; the trained length when None.

    Returns:
        The model in evaluation mode, and its config.
    """
    config = read_model_config(directory)
    files = check_tensors(directory, config)
    with torch.device("meta"):
        model = build_model(config, length)
    for parameter in model.parameters():  # and not model.to(dtype): frequencies and slopes stay in fp32
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    if (name := from_hf_name(key)) in parameters:
                        parameters[name].copy_(file.get_tensor(key))
    model.set_position(model.positions, model.length)
    return model.eval(), config
