"""Broken and malicious model directories, adapters and checkpoints."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from farsight.benchmarks.faults.settings import TRAIN
from farsight.benchmarks.faults.workshop import EXECUTED, Case
from farsight.checkpoints.checksums import MANIFEST, sums_of, write_manifest
from farsight.commands import GROUPS

CONFIG_JSON = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"

MODEL_TOOLS = (
    "generate {it} --prompt x --new-tokens 2",
    "perplexity {it} --data {text} --lengths 16 --windows 2",
    "needle {it} --lengths 200 --depths 1 --trials 1",
    "ripra {it} --data {text} --length 32",
    "harness {it} --tasks piqa --data piqa={piqa} --limit 2",
    "loft {it} --prompts {prompts} --out {here}/out.jsonl",
    "report {it} --out {here}/r.html",
    "convert from-hf {it} {here}/out",
    "graft --front {it} --back {dense} --layers 1 --out {here}/out",
    "merge {adapter} --base {it} --out {here}/out",
    "push {it} org/model --dry-run",
    "capture {it} --data {text} --length 32 --sequences 2 --out {here}/out",
    "geometry {it} --data {text} --length 32 --sequences 2",
    "plasticity {it} --data {text} --length 32 --sequences 2",
    "layers {it} --data {text} --length 32 --sequences 2",
    "layer-probes {it} --data {text} --length 32 --sequences 2 --probe mask",
    "probes {it} --data {text} --length 32 --sequences 4",
    "order-awareness {it} --data {text} --length 32 --sequences 2",
    "graft-sweep --base {it} --long {dense} --data {text} --lengths 32",
    "positions {it}",
    "inside {it} --out {here}/r.html",
    TRAIN + " --checkpoint.initial_load_path {it}",
    "train.py finetune --job.config_file {finetune} --base_model.path {it} --job.dump_folder {here}/new",
)
"""Every command that opens a model directory."""
WITHOUT_WEIGHTS = {"positions", "report", "inside"}
"""Commands that open no weights, so that broken ones do not stop them."""

CHECKPOINT_TOOLS = (
    "intact {it}",
    "convert to-hf {it} {here}/out",
    *(tool for tool in MODEL_TOOLS if tool.startswith(("generate", "perplexity", "needle", "ripra", "harness"))),
    *(tool for tool in MODEL_TOOLS if tool.split()[0] in GROUPS["look inside"].keys() - WITHOUT_WEIGHTS),
    TRAIN + " --checkpoint.initial_load_path {it}",
)
"""Every command that opens a checkpoint."""

Spoil = Callable[[Path], None]
"""A function that breaks something in a folder."""


def _json(file: str, change: Callable[[dict], object]) -> Spoil:
    """Rewrites a JSON file with what `change` returns, or with the object that it changed in place."""

    def spoil(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        changed = change(value)
        (folder / file).write_text(json.dumps(value if changed is None else changed))

    return spoil


def _write(file: str, content: str | bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def _index(file: object) -> Spoil:
    """An index that maps every tensor to `file`."""

    def spoil(folder: Path) -> None:
        size = int.from_bytes((folder / WEIGHTS).read_bytes()[:8], "little")
        names = json.loads((folder / WEIGHTS).read_bytes()[8 : 8 + size])
        stolen = folder.parent / "stolen.safetensors"
        (folder / WEIGHTS).rename(stolen)
        target = str(stolen) if file == "absolute" else file
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, target)}))

    return spoil


def _cut(file: str, keep: float) -> Spoil:
    def spoil(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(len(content) * keep)])

    return spoil


def _offsets(folder: Path) -> None:
    """Tensors that lie beyond the end of the file."""
    content = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    header[first]["data_offsets"] = [0, 10**12]
    encoded = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + size :])


def _pickled_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Command(_marker(folder))))


def _own_code(folder: Path) -> None:
    """A modelling file, named in auto_map, that leaves a mark when it is imported."""
    code = f"open({str(_marker(folder))!r}, 'w')\n"
    for name in ("modeling_farsight.py", "tokenization_x.py"):
        (folder / name).write_text(code + "class X: pass\n")
    _json(
        "config.json",
        lambda c: c.update(auto_map=dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_farsight.X")),
    )(folder)
    _json("tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["tokenization_x.X", None]}))(folder)


class _Command:
    """Unpickled, it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def _marker(path: Path) -> Path:
    """The file by which a case sees that something was executed."""
    return next(p for p in (path, *path.parents) if p.parent.name == "cases") / EXECUTED


def metadata_that_runs(folder: Path) -> None:
    """`.metadata` that runs a command when it is unpickled."""
    (folder / ".metadata").write_bytes(pickle.dumps(_Command(_marker(folder))))


def metadata_that_imports(folder: Path) -> None:
    """`.metadata` that names a harmless function which does not belong in it."""
    (folder / ".metadata").write_bytes(b"cbuiltins\nprint\n(S'hello'\ntR.")


def metadata_with_more(folder: Path) -> None:
    """The checkpoint's own `.metadata` with a command hidden in it."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _Command(_marker(folder))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def metadata_that_leads_out(folder: Path) -> None:
    """`.metadata` whose tensors lie in another folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stolen = folder.parent / "stolen"
    shutil.copytree(folder, stolen)
    for index, place in list(metadata.storage_data.items()):
        metadata.storage_data[index] = type(place)(f"../stolen/{place.relative_path}", place.offset, place.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def shard_that_runs(folder: Path) -> None:
    """A command instead of an object in a shard, such as the step."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.startswith("train_state"))
    place, saved = metadata.storage_data[index], io.BytesIO()
    torch.save(_Command(_marker(folder)), saved)
    with (folder / place.relative_path).open("ab") as shard:
        offset = shard.tell()
        shard.write(saved.getvalue())
    metadata.storage_data[index] = type(place)(place.relative_path, offset, len(saved.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _forged(spoil: Spoil) -> Spoil:
    """Writes checksums that match the spoiled files, as an attacker would."""

    def forge(folder: Path) -> None:
        spoil(folder)
        (folder / MANIFEST).unlink()
        (folder / ".spoil").unlink(missing_ok=True)
        write_manifest(folder, {path.name: sums_of(path) for path in sorted(folder.iterdir()) if path.is_file()})

    return forge


HUGE_HEADER = (10 * 2**30).to_bytes(8, "little") + b'{"a": ' + b" " * 1000

MODELS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "config.json that is []": (_write(CONFIG_JSON, "[]"), ("config.json",)),
    "config.json that is no JSON": (_write(CONFIG_JSON, "{"), ("config.json",)),
    "config.json in UTF-16": (_write(CONFIG_JSON, "{}".encode("utf-16")), ("config.json",)),
    "config.json nested 100,000 deep": (_write(CONFIG_JSON, "[" * 100_000), ("config.json",)),
    "config.json without sizes": (_json(CONFIG_JSON, lambda c: {"model_type": "llama"}), ("config.json", "hidden_size")),
    "config.json of no model_type": (_json(CONFIG_JSON, lambda c: {}), ("config.json", "model_type")),
    "config.json of another family": (_json(CONFIG_JSON, lambda c: c.update(model_type="bert")), ("config.json", "bert")),
    "a negative size": (_json(CONFIG_JSON, lambda c: c.update(hidden_size=-32)), ("config.json",)),
    "a size that is text": (_json(CONFIG_JSON, lambda c: c.update(hidden_size="wide")), ("config.json",)),
    "a size of 10^30": (_json(CONFIG_JSON, lambda c: c.update(hidden_size=10**30)), ("config.json",)),
    "no heads": (_json(CONFIG_JSON, lambda c: c.update(num_attention_heads=0)), ("config.json",)),
    "a million layers": (_json(CONFIG_JSON, lambda c: c.update(num_hidden_layers=10**6)), ("config.json",)),
    "a RoPE base of infinity": (
        _json(CONFIG_JSON, lambda c: c.update(rope_theta=1e999, rope_parameters={"rope_type": "default", "rope_theta": 1e999})),
        ("config.json",),
    ),
    "weights of 0 bytes": (_write(WEIGHTS, b""), (WEIGHTS,)),
    "weights cut short": (_cut(WEIGHTS, 0.7), (WEIGHTS,)),
    "weights of a 10 GB header": (_write(WEIGHTS, HUGE_HEADER), (WEIGHTS,)),
    "weights beyond their file": (_offsets, (WEIGHTS,)),
    "weights as a pickle": (_pickled_weights, ("safetensors",)),
    "an index that leads out": (_index("../stolen.safetensors"), (INDEX, "stolen")),
    "an index with an absolute path": (_index("absolute"), (INDEX, "stolen")),
    "an index of numbers": (_index(3), (INDEX,)),
    "an index that is []": (_write(INDEX, "[]"), (INDEX,)),
    "an index that is {}": (_write(INDEX, "{}"), (INDEX,)),
    "an index whose map is a list": (_write(INDEX, '{"weight_map": []}'), (INDEX,)),
}  # fmt: skip
OURS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "farsight.json that is []": (_write("farsight.json", "[]"), ("farsight.json",)),
    "farsight.json that is {}": (_write("farsight.json", "{}"), ("farsight.json",)),
    "farsight.json that is no JSON": (_write("farsight.json", "{"), ("farsight.json",)),
    "farsight.json without a model": (_write("farsight.json", '{"format": 1}'), ("farsight.json",)),
    "farsight.json of a later format": (_json("farsight.json", lambda c: c.update(format=99)), ("farsight.json", "99")),
    "farsight.json of NaN": (
        _json("farsight.json", lambda c: c["model"]["position"]["rotary"].update(theta=float("nan"))), ("farsight.json",),
    ),
    "farsight.json of huge sizes": (
        _json("farsight.json", lambda c: c["model"]["architecture"].update(dim=10**12)), ("farsight.json",),
    ),
}  # fmt: skip
ATTACKS = (
    "an index that leads out",
    "an index with an absolute path",
    "weights of a 10 GB header",
    "weights as a pickle",
)
"""Tried on every command that opens a model directory."""
FORGED: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "a command in .metadata": (metadata_that_runs, (".metadata", "system")),
    "a function in .metadata": (metadata_that_imports, (".metadata", "print")),
    "a command hidden in .metadata": (metadata_with_more, (".metadata", "system")),
    "a .metadata that leads out": (metadata_that_leads_out, (".metadata", "stolen")),
}
"""Attacks whose checksums are right; tried on every command that opens a checkpoint."""
WHOLE = (
    TRAIN + " --position.heads.kind dense --checkpoint.initial_load_path {it} --checkpoint.no_initial_load_model_only"
)
"""Loads more of a checkpoint than its weights."""
CHECKPOINTS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "another .metadata": (metadata_with_more, (".metadata",)),
    "a .metadata of 0 bytes": (_write(".metadata", b""), (".metadata",)),
    "a .metadata cut short": (_cut(".metadata", 0.5), (".metadata",)),
    "checksums that are []": (_write("checksums.json", "[]"), ("checksums.json",)),
    "checksums that are gone": (lambda folder: (folder / "checksums.json").unlink(), ("checksums.json",)),
    "checksums of other files": (_write("checksums.json", '{"files": {"../x": {}}}'), ("checksums.json",)),
    **{name: (spoil, says[:1]) for name, (spoil, says) in OURS.items()},
}
ADAPTERS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "LoRA cut short": (_cut("adapter_model.safetensors", 0.6), ("adapter_model.safetensors",)),
    "LoRA of a 10 GB header": (_write("adapter_model.safetensors", HUGE_HEADER), ("adapter_model.safetensors",)),
    "GARFA of 0 bytes": (_write("garfa.safetensors", b""), ("garfa.safetensors",)),
    "a marker that is []": (_write("farsight_adapter.json", "[]"), ("farsight_adapter.json",)),
    "a marker that is {}": (_write("farsight_adapter.json", "{}"), ("farsight_adapter.json",)),
    "a marker that is no JSON": (_write("farsight_adapter.json", "{"), ("farsight_adapter.json",)),
    "a marker without needs": (_json("farsight_adapter.json", lambda c: c.pop("needs") and None), ("farsight_adapter.json",)),
    "a base that is gone": (
        _json("farsight_adapter.json", lambda c: c["base"].update(path="/nowhere/base")), ("/nowhere/base",),
    ),
    "needs of other files": (
        _json("farsight_adapter.json", lambda c: c.update(needs=["../x"])), ("farsight_adapter.json",),
    ),
    "a rank of 10^9": (
        _json("farsight_adapter.json", lambda c: c["adapter"]["lora"].update(rank=10**9)), ("adapter",),
    ),
    "layers that are not there": (
        _json("farsight_adapter.json", lambda c: c["adapter"]["lora"].update(layers=[99])), ("99",),
    ),
}  # fmt: skip
ADAPTER_TOOLS = (
    "merge {it} --out {here}/out",
    "generate {it} --prompt x --new-tokens 2",
    "capture {it} --data {text} --length 32 --sequences 2 --out {here}/out",
)


def _case(name: str, tool: str, kind: str, spoil: Spoil, says: tuple[str, ...], status: int = 2) -> Case:
    """Cases of `kind`, the part of the workshop that is copied and spoiled."""
    files = {f"{kind}/.spoil": lambda path: (spoil(path.parent), None)[1]}
    return Case(f"{name}: {tool.split()[0]}", tool.replace("{it}", f"{{{kind}}}"), says, files, (kind,), status)


def _status(tool: str) -> int:
    """`farsight intact` reports a damaged checkpoint by its exit status."""
    return 1 if tool.startswith("intact ") else 2


def cases() -> list[Case]:
    found = []
    for name, (spoil, says) in MODELS.items():
        tools = (
            [t for t in MODEL_TOOLS if not t.startswith(tuple(WITHOUT_WEIGHTS))] if name in ATTACKS else MODEL_TOOLS[:2]
        )
        found += [_case(name, tool, "dense_plain", spoil, says) for tool in tools]
    found += [_case(name, tool, "model", *entry) for name, entry in OURS.items() for tool in MODEL_TOOLS[:2]]
    found += [_case("code of its own", tool, "model", _own_code, (), 0) for tool in MODEL_TOOLS[:3]]
    for name, (spoil, says) in FORGED.items():
        for tool in CHECKPOINT_TOOLS:
            found.append(_case(f"forged: {name}", tool, "checkpoint", _forged(spoil), says, _status(tool)))
    says = (".distcp", "system")
    found.append(_case("forged: a command in a shard", WHOLE, "checkpoint", _forged(shard_that_runs), says))
    for name, entry in CHECKPOINTS.items():
        found += [_case(name, tool, "checkpoint", *entry, _status(tool)) for tool in CHECKPOINT_TOOLS[:3]]
    found += [_case(name, tool, "adapter", *entry) for name, entry in ADAPTERS.items() for tool in ADAPTER_TOOLS]
    return found
