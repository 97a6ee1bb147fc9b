"""Damaged, hostile or foreign model directories and adapters end with status 2 and a sentence that names the file."""

import json
import shutil
import struct
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from farsight.checkpoints import resume
from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.adapter.write import check_adapter_out, write_adapter
from farsight.checkpoints.cards.model import adapter_entry
from farsight.checkpoints.checkpoint_tensors import parameter_shapes
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir import fingerprint
from farsight.checkpoints.model_dir.api import check_model_out, write_model_dir
from farsight.checkpoints.model_dir.fingerprint import base_entry
from farsight.checkpoints.model_dir.names import TensorNames
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import Position
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import ConfigError, UserError
from farsight.inference.generate import __main__ as generate
from farsight.model.build import ModelConfig
from tests.checkpoints.test_adapter import trained_adapter
from tests.finetuned import ARCHITECTURE, finetune_config, write_base
from tests.running import ROOT

INDEX = "model.safetensors.index.json"
SHARDS = 60_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A base in several files with a tokenizer, and an adapter with all parts."""
    folder = tmp_path_factory.mktemp("whole")
    write_base(folder / "base", shard_bytes=SHARDS)
    BytesTokenizer().save(folder / "base")
    trained_adapter(folder / "adapter", folder / "base")
    return folder


@pytest.fixture
def base(whole, tmp_path):
    return Path(shutil.copytree(whole / "base", tmp_path / "base"))


@pytest.fixture
def adapter(whole, tmp_path):
    return Path(shutil.copytree(whole / "adapter", tmp_path / "adapter"))


def refused(directory: Path, *names: str) -> None:
    """Asserts that `farsight generate` ends with status 2 and a sentence that contains these names."""
    with pytest.raises(SystemExit) as stopped:
        generate.main([str(directory), "--prompt", "x", "--new-tokens", "2", "--device", "cpu"])
    assert stopped.value.code == 2, stopped.value
    for name in names:
        assert name in str(stopped.value), stopped.value


# ── config.json, farsight.json, the index ─────────────────────────────────────────────────────────────

NO_OBJECTS = {
    "a list": b"[]", "null": b"null", "a number": b"3", "half": b'{"format": 1, "mod', "no text": b"\xff\xfe\x00", "nothing": b"",
    "deep": b"[" * 100_000, "digits": b'{"format": ' + b"9" * 10_000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS.keys())
@pytest.mark.parametrize("name", ["farsight.json", "config.json", INDEX])
def test_files_that_hold_no_json_object(base, name, content):
    if name == "config.json":
        (base / "farsight.json").unlink()
    (base / name).write_bytes(content)
    refused(base, str(base / name))


@pytest.mark.parametrize(
    "values",
    [
        {}, {"format": 1}, {"format": 1, "model": []}, {"format": 1, "model": {}}, {"format": 1, "model": {"architecture": {}}},
        {"format": 1, "model": {"architecture": {"n_layers": "4"}, "position": {}, "trained_length": 64}},
        {"format": 1, "model": {"architecture": {"n_layers": 10**30}, "position": {}, "trained_length": 64}},
        {"format": 1, "model": {"architecture": {"dim": -4}, "position": {}, "trained_length": 64}},
        {"format": 1, "model": {"architecture": {"n_kv_heads": 0}, "position": {}, "trained_length": 64}},
        {"format": 1, "model": {"architecture": {}, "position": {}, "trained_length": 0}},
        {"format": 1, "model": {"architecture": {}, "position": 3, "trained_length": 64}},
    ],
)  # fmt: skip
def test_farsight_json_of_other_shapes(base, values):
    (base / "farsight.json").write_text(json.dumps(values))
    refused(base, str(base / "farsight.json"))


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim")


@pytest.mark.parametrize("value", [0, -1, 1e30, 10**30, "4", None, [], True, float("nan")])
@pytest.mark.parametrize("name", [*SIZES, "max_position_embeddings"])
def test_sizes_that_no_model_has(base, name, value):
    """Enormous ones too: `check_tensors` builds parameters on the meta device, without memory."""
    (base / "farsight.json").unlink()
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**values, name: value}))
    if name == "head_dim" and value is None:
        assert read_model_config(base).architecture.head_dim == 16  # dim / n_heads
    else:
        refused(base, str(base / "config.json"))


def test_large_shapes_are_compared_with_the_files_before_memory_is_taken(base, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    (base / "farsight.json").unlink()
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**values, "hidden_size": 2**20, "intermediate_size": 2**24}))
    refused(base, "has shape", "config.json requires")


@pytest.mark.parametrize(
    "rope",
    [
        3, [1], "x", {"rope_type": "spiral"}, {"rope_type": [1]}, {"rope_theta": "x"}, {"rope_theta": -1.0}, {"rope_theta": 0},
        {"rope_theta": float("inf")}, {"rope_type": "linear", "factor": float("nan")}, {"rope_type": "yarn", "factor": 0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, {"factors": 3},
        {"rope_type": "longrope", "short_factor": ["x"]}, {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": {}},
    ],
)  # fmt: skip
def test_rope_settings_of_other_shapes(base, rope):
    (base / "farsight.json").unlink()
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**values, "rope_parameters": rope, "rope_scaling": None}))
    with pytest.raises(ConfigError):
        load_model(base)


@pytest.mark.parametrize(
    "index",
    [
        {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}}, {"weight_map": {"a": ""}}, {"weight_map": {"a": None}},
        {"weight_map": {"a": "../other/model.safetensors"}}, {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "sub/../../x.safetensors"}}, {"weight_map": {"a": "a\\b"}}, {"weight_map": {"a": "no.safetensors"}},
    ],
)  # fmt: skip
def test_an_index_that_is_none_or_leads_elsewhere(base, index):
    (base.parent / "other").mkdir()
    shutil.copy(next(base.glob("*.safetensors")), base.parent / "other" / "model.safetensors")
    (base / INDEX).write_text(json.dumps(index))
    refused(base, INDEX)


def test_links_to_blobs_are_followed_as_in_a_cache_of_the_hub(base):
    expected = load_model(base)[0].state_dict()
    (base.parent / "blobs").mkdir()
    for number, path in enumerate(sorted(base.iterdir())):
        path.rename(base.parent / "blobs" / str(number))
        path.symlink_to(f"../blobs/{number}")
    found = load_model(base)[0].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_end_tokens_that_are_none(base):
    (base / "generation_config.json").write_text('{"eos_token_id": "x"}')
    refused(base, "generation_config.json", "eos_token_id 'x'")


def test_a_missing_tokenizer(base):
    (base / "tokenizer.json").unlink()
    (base / "tokenizer_config.json").unlink()
    refused(base, str(base), "tokenizer")


# ── Safetensors ───────────────────────────────────────────────────────────────────────────────────────


def header(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": b"",
    "no header": b"1234",
    "header of 10 GB": struct.pack("<Q", 10**10) + b"{}",
    "header past the end": struct.pack("<Q", 1000) + b"{}",
    "a list": header([]),
    "overlapping": header({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, b"0" * 12),
    "out of range": header({"a": {**ENTRY, "data_offsets": [0, 2**62]}}, b"0" * 8),
    "negative": header({"a": {**ENTRY, "shape": [-2]}}, b"0" * 8),
    "enormous": header({"a": {**ENTRY, "shape": [2**40, 2**40]}}, b"0" * 8),
    "another dtype": header({"a": {**ENTRY, "dtype": "X1"}}, b"0" * 8),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_safetensors_that_are_broken(base, content):
    path = sorted(base.glob("*.safetensors"))[1]
    path.write_bytes(content)
    refused(base, str(path), "is damaged")


def test_safetensors_that_are_cut_short_or_a_folder(base):
    path = sorted(base.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    refused(base, str(path), "is damaged")
    path.unlink()
    path.mkdir()
    refused(base, path.name)


def test_tensors_that_do_not_fit(base):
    path = sorted(base.glob("*.safetensors"))[-1]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    for change, said in (
        ({name: tensors[name].long()}, "as I64; weights are read as F64, F32, F16, BF16"),
        ({name: tensors[name].to(torch.float8_e4m3fn)}, "as F8_E4M3"),
        ({name: tensors[name][:1].clone()}, "has shape"),
        ({"model.layers.0": torch.zeros(2)}, "holds model.layers.0, which a llama model"),
        ({"model.layers.77.mlp.up_proj.weight": torch.zeros(2)}, "does not fit its config"),
        ({"evil": torch.zeros(2)}, "holds evil"),
    ):
        save_file({**tensors, **change}, path)
        refused(base, said)


# ── Adapters ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "garfa.safetensors"])
def test_adapters_that_are_cut_short(adapter, name):
    content = (adapter / name).read_bytes()
    for kept in (0, 7, 40, len(content) - 1):
        (adapter / name).write_bytes(content[:kept])
        refused(adapter, str(adapter / name), "is damaged")


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS.keys())
def test_markers_that_hold_no_json_object(adapter, content):
    (adapter / "farsight_adapter.json").write_bytes(content)
    refused(adapter, "farsight_adapter.json")


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [3], {"x": 1}, -1, "../../x"])
def test_markers_of_any_other_shape(adapter, value):
    """Replacing any value, at the top level or in the adapter settings, gives an error of ours, or none."""
    path = adapter / "farsight_adapter.json"
    marker = json.loads(path.read_text())
    places = [(marker, key) for key in marker]
    places += [(marker[part], key) for part in ("base", "architecture", "adapter") for key in marker[part]]
    places += [(marker["adapter"][part], key) for part in ("lora", "garfa") for key in marker["adapter"][part]]
    passed = []
    for table, key in places:
        kept, table[key] = table[key], value
        path.write_text(json.dumps(marker))
        table[key] = kept
        try:
            load_adapter(adapter)
        except UserError:
            continue
        passed.append(key)
    # Settings that only affect training, optional fields, and values that are valid in other adapters.
    unnoticed = {
        "training",
        "checksum",
        "init",
        "lr",
        "dropout",
        "garfa",
        "lora",
        "rank_pattern",
        "alpha_pattern",
        "position",
    }
    assert set(passed) <= unnoticed | {"norm_eps", "trained_length", "path", "alpha"}, passed


def test_an_adapter_notices_one_changed_weight_of_its_base(whole, tmp_path):
    base = Path(shutil.copytree(whole / "base", tmp_path / "base"))
    trained_adapter(tmp_path / "adapter", base)
    path = sorted(base.glob("*.safetensors"))[0]
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name][2, 3] += 1e-3  # not a row that the fingerprint samples
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="its weights differ"):
        load_adapter(tmp_path / "adapter")
    load_adapter(tmp_path / "adapter", other_base=True)
    marker = tmp_path / "adapter" / "farsight_adapter.json"
    values = json.loads(marker.read_text())
    del values["base"]["checksum"]  # as written by earlier versions
    marker.write_text(json.dumps(values))
    assert read_adapter(tmp_path / "adapter").checksum is None
    load_adapter(tmp_path / "adapter")


def test_the_checksum_is_of_every_byte_in_however_many_files(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_BLOCK", 100)  # so that tensors are read in several parts, the last one shorter
    base = Path(shutil.copytree(whole / "base", tmp_path / "base"))
    paths = [*base.glob("*.safetensors")]
    tensors = {name: tensor for path in paths for name, tensor in load_file(path).items()}

    def by_hand() -> str:
        ours = {TensorNames().parts(name)[0]: tensor for name, tensor in tensors.items()}
        each = [
            xxhash.xxh3_128(
                f"{name} {ours[name].dtype} {tuple(ours[name].shape)}".encode()
                + bytes(ours[name].contiguous().flatten().view(torch.uint8).tolist())
            ).hexdigest()
            for name in sorted(ours)
        ]
        return xxhash.xxh3_128("".join(each).encode()).hexdigest()

    before = base_entry(base)
    assert before["checksum"] == by_hand()
    for path in paths:
        path.unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, base / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    assert base_entry(base) == before
    tensors[names[-1]].view(-1)[-1] += 1e-3
    save_file({name: tensors[name] for name in files["a.safetensors"]}, base / "a.safetensors")
    save_file({name: tensors[name] for name in files["b.safetensors"]}, base / "b.safetensors")
    assert base_entry(base)["checksum"] == by_hand() != before["checksum"]


@pytest.mark.parametrize("saved", [{"base": "f", "base_checksum": "c"}, {"base": "f"}])
def test_checkpoints_without_a_checksum_of_the_base_resume(tmp_path, monkeypatch, saved):
    config = FinetuneConfig()
    entry = {"adapter": adapter_entry(config), **saved}
    monkeypatch.setattr(resume, "read_history", lambda checkpoint: [entry])
    resume.refuse_other_layers(tmp_path, config, {"base": "f", "base_checksum": "c"})
    for other in ({"base": "g", "base_checksum": "c"}, {"base": "f", "base_checksum": "d"}):
        if other["base"] == "g" or len(saved) == 2:
            with pytest.raises(ConfigError, match="holds other weights"):
                resume.refuse_other_layers(tmp_path, config, other)


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────


CONFIG = ModelConfig(ARCHITECTURE, Position(), 128)


def write(out: Path, broken: str = "", value: float = float("nan"), dtype: torch.dtype | None = None) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in parameter_shapes(CONFIG).items()}
    if broken:
        tensors[broken].view(-1)[-1] = value
    write_model_dir(out, CONFIG, tensors, dtype=dtype)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_that_are_not_finite_are_not_saved(tmp_path, whole):
    name = "layers.2.feed_forward.w1.weight"
    for value, dtype in ((float("nan"), None), (-float("inf"), torch.bfloat16), (70000.0, torch.float16)):
        with pytest.raises(ConfigError, match=r"model\.layers\.2\.mlp\.gate_proj\.weight has values that are infinite"):
            write(tmp_path / "model", name, value, dtype)
    write(tmp_path / "model", name, 70000.0, torch.bfloat16)
    config = finetune_config(whole / "base")
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.garfa\.raw has values that are infinite"):
        write_adapter(
            tmp_path / "adapter", config, {"layers.0.attention.garfa.raw": torch.tensor([0.0, torch.inf])}, base_entry(whole / "base")
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no partial adapter either


@pytest.mark.parametrize(
    "added", ["notes.txt", "model/build.py", "evals/thoughts.md", "evals/more/x.json", "pytorch_model.bin"]
)
def test_a_folder_with_somebody_s_files_is_not_replaced(tmp_path, adapter, added):
    write(tmp_path / "model")
    for folder, check in ((tmp_path / "model", check_model_out), (adapter, check_adapter_out)):
        (folder / "evals").mkdir()
        (folder / "evals" / "perplexity.json").write_text("{}")  # results of our tools for these weights
        check(folder)
        (folder / added).parent.mkdir(parents=True, exist_ok=True)
        (folder / added).write_text("mine")
        before = files(folder)
        with pytest.raises(UserError, match="holds files that Farsight did not write there"):
            check(folder)
        with pytest.raises(UserError, match="holds files that Farsight did not write there"):
            write(folder)
        assert files(folder) == before


def test_what_is_no_model_directory_is_not_replaced(tmp_path, base):
    """For example the project's own package model/, a Hugging Face model, a file, a link."""
    (base / "farsight.json").unlink()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(base)
    package = Path(shutil.copytree(ROOT / "model", tmp_path / "package"))
    for out in (base, tmp_path / "file", tmp_path / "link", package):
        with pytest.raises(UserError, match="move"):
            write(out)
    assert (package / "build.py").is_file()
    assert len(files(base)) > 3


def test_an_older_model_and_what_a_killed_writer_left_are_replaced(tmp_path, monkeypatch):
    out, part = tmp_path / "model", tmp_path / "model.part"
    write(out)
    with monkeypatch.context() as patch:  # killed while writing: nothing is cleaned up
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr("farsight.checkpoints.model_dir.api.write_tensors", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(out)
    assert (part / ".farsight-writing").is_file()
    write(out)
    assert not part.exists()
    renames = []
    with monkeypatch.context() as patch:  # killed between removing the old one and renaming the new one
        rename = Path.rename
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(
            Path,
            "rename",
            lambda *paths: rename(*paths) if not renames.append(paths[0].name) and len(renames) < 2 else 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            write(out)
    assert (renames, out.exists(), part.exists()) == (["model", "model.part"], False, True)
    write(out)
    with monkeypatch.context() as patch:  # killed afterwards, while deleting the old one
        patch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(out)
    assert (out / ".farsight-replaced" / "config.json").is_file()
    load_model(out)
    write(out)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "farsight.json",
        "model.safetensors",
    ]
    assert not part.exists()
    part.mkdir()
    (part / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"model\.part holds files"):
        write(out)
    with pytest.raises(UserError, match=r"model\.part holds files"):
        check_model_out(out)
