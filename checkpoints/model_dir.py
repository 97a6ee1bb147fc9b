"""Model directories: `config.json`, safetensors, tokenizer files and `farsight.json`, as Hugging Face lays them out."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from checkpoints.card import CARD, CONFIG, model_card
from checkpoints.checkpoint_tensors import checkpoint_tensors, parameter_shapes, read_tensor
from checkpoints.hf_config import MODEL_TYPE, MODELING, from_hf_config, to_hf_config
from checkpoints.intact import is_complete
from checkpoints.names import from_hf_name, to_hf_name
from configs.load import ConfigError
from data.tokenizer import load_tokenizer_dir
from model.build import ModelConfig, build_model
from model.llama import Llama, copy_whole

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
ADAPTER_MARKER, ADAPTER_CONFIG, GARFA_FILE = "farsight_adapter.json", "adapter_config.json", "garfa.safetensors"
"""Files that tell an adapter's directory: `checkpoints/adapter.py`."""


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
    """Writes a model directory with its model card; it appears whole or not at all.

    Args:
        tensors: parameters by our names, in the order they are written.
        read: where `tensors` are on the meta device, gives their values, one after the other: no more than one tensor
            is held.
        tokenizer_dir: files to copy beside the weights.
        dtype: of the weights written; None keeps each tensor's own.
        shard_bytes: a file grows no larger, unless one tensor is.
        history: the runs that trained the weights, from `read_history`.
        notes: Markdown to end the card with.
    """
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    bos_id = eos_id = None
    if tokenizer_dir is not None:
        shutil.copytree(tokenizer_dir, part, dirs_exist_ok=True)
        tokenizer = load_tokenizer_dir(tokenizer_dir)
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
    with tqdm(
        total=sum(sizes.values()), unit="B", unit_scale=True, desc="write", disable=not sys.stderr.isatty(), leave=False
    ) as bar:
        for file, names in zip(files, shards, strict=True):
            _write_safetensors(part / file, {n: tensors[n] for n in names}, read, bar.update)

    written = next(reversed(tensors.values())).dtype
    hf_config = to_hf_config(config, str(written).removeprefix("torch."), bos_id, eos_id)
    if hf_config["model_type"] == MODEL_TYPE:
        shutil.copy(Path(__file__).with_name(f"{MODELING}.py"), part)
    (part / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
    config.save(part / CONFIG, training=list(history))
    tokenizer_file = (part / "tokenizer.json").is_file()
    card = model_card(out.resolve().name, config, hf_config, history, tokenizer_file)
    (part / CARD).write_text(card + notes, encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
}  # fmt: skip


def _write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], progress: Callable[[int], Any]
) -> None:
    """One safetensors file, a tensor at a time: safetensors' own `save_file` takes them all at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[to_hf_name(name)] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    encoded = json.dumps(header).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # the format wants the data aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors.items():
            value = read(name).detach().to(device="cpu", dtype=tensor.dtype).contiguous()
            if value.shape != tensor.shape:
                raise ConfigError(f"{name} has shape {tuple(value.shape)}, expected {tuple(tensor.shape)}.")
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
            progress(value.nbytes)


def read_model_config(directory: Path) -> ModelConfig:
    """A model directory's or checkpoint's config: from `farsight.json`, or from a Llama-family `config.json` without one; or an adapter's.

    Raises:
        ConfigError: no such directory, or a model that can't be built here.
    """
    if is_adapter(directory):
        from checkpoints.adapter import read_adapter

        return read_adapter(directory).config()
    if (directory / CONFIG).is_file():
        return ModelConfig.load(directory / CONFIG)
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} is not a model directory: it has no config.json.")
    return from_hf_config(json.loads(path.read_text(encoding="utf-8")))


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
            f"{directory} is an adapter and no whole model: python -m checkpoints.merge {directory} --out OUT makes one."
        )
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
        with _open_safetensors(path) as file:
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

    Raises:
        ConfigError: one that no weights of ours have, as those of quantised models.
    """
    known = {name: dtype for dtype, name in _SAFETENSORS_DTYPES.items()}
    dtypes = {}
    for path in sorted(set(files.values())):
        with _open_safetensors(path) as file:
            for name in (name for name in files if files[name] == path):
                kept = file.get_slice(to_hf_name(name)).get_dtype()
                if kept not in known:
                    raise ConfigError(
                        f"{path} keeps {to_hf_name(name)} as {kept}; weights are read as {', '.join(known)}."
                    )
                dtypes[name] = known[kept]
    return dtypes


def _open_safetensors(path: Path) -> Any:
    """`safe_open`, whose own error of a damaged file does not name it."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({path.stat().st_size:,} bytes): {error}. Copy it again.") from None


def check_tensors(directory: Path, config: ModelConfig) -> dict[str, Path]:
    """`tensor_files`, compared with what the config asks for.

    Raises:
        ConfigError: missing tensors, surplus ones, or other shapes, each named.
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
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = from_hf_name(key)
                if name in files and (shape := tuple(file.get_slice(key).get_shape())) != expected[name]:
                    raise ConfigError(f"{path.name}: {key} has shape {shape}, config.json makes it {expected[name]}.")
    return files


class TensorReader:
    """Reads a model directory's tensors by our names, with one file open at a time.

    Args:
        files: from `check_tensors`.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self._path: Path | None = None
        self._file: Any = None

    def __call__(self, name: str) -> Tensor:
        if self.files[name] != self._path:
            self.close()
            self._path = self.files[name]
            self._file = safe_open(self._path, framework="pt").__enter__()
        return self._file.get_tensor(to_hf_name(name))

    def close(self) -> None:
        """Lets the open file go, and with it the pages that were read."""
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._path = self._file = None


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
    """
    if is_adapter(directory):
        from checkpoints.adapter import load_adapter

        if divide is not None:
            raise ConfigError(f"{directory} is an adapter; merge it first, to divide its model over several processes.")
        return load_adapter(directory, device=device, dtype=dtype, length=length, config=config)
    config = config or read_model_config(directory)
    with torch.device("meta"):
        model = build_model(config, length)
    if divide is not None:
        divide(model)
    for parameter in model.parameters():  # and not model.to(dtype): frequencies and slopes stay in fp32
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in saved_tensors(directory, config):
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
        for name in tensors:
            yield name, read_tensor(directory, tensors, name)
        return
    files = check_tensors(directory, config)
    read = TensorReader(files)
    for name in sorted(parameter_shapes(config), key=lambda name: files[name]):
        yield name, read(name)
    read.close()
