"""Untrusted checkpoints: none of their code is run, and no path leads out of their folder."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex, TensorProperties

from farsight.checkpoints.checkpoint_tensors import parameter_shapes
from farsight.checkpoints.checksums import sums_of, write_manifest
from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.dcp import Writer, load, read_metadata
from farsight.checkpoints.intact.__main__ import main
from farsight.checkpoints.intact.check import faults
from farsight.configs.schema import Architecture, Position
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from tests.running import forked

CONFIG = ModelConfig(
    Architecture(vocab_size=320, dim=16, n_layers=1, head_dim=4, n_heads=2, n_kv_heads=2), Position(), 64
)


class Attack:
    """Creates a file when it is unpickled as DCP and torch would."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "ran"


def save(folder: Path, **more) -> Path:
    folder.mkdir()
    CONFIG.save(folder / "farsight.json", checksums="checksums.json")
    weights = {name: torch.randn(shape) for name, shape in parameter_shapes(CONFIG).items()}
    dcp.save({**weights, **more}, storage_writer=Writer(folder), no_dist=True)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "step-1", state={"step": 1})


def sign(folder: Path) -> None:
    """The author of a checkpoint can also write its checksums."""
    files = [path for path in folder.iterdir() if path.name != "checksums.json"]
    write_manifest(folder, {path.name: sums_of(path) for path in files})


def write_metadata(folder: Path, value) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(value, protocol=4))
    sign(folder)


def test_the_attack_is_real(folder, mark):
    write_metadata(folder, Attack(mark))
    with pytest.raises(BaseException, match=r"metadata is None|has no attribute"):
        dcp.load({"state": {"step": 0}}, checkpoint_id=folder, no_dist=True)
    assert mark.exists()


def test_metadata_is_not_run(folder, mark, tmp_path, capsys):
    write_metadata(folder, Attack(mark))
    asks = r"step-1/\.metadata .* asks for posix\.system"
    for use in (
        lambda: read_metadata(folder),
        lambda: load({"state": {"step": 0}}, folder),
        lambda: checkpoint_to_model_dir(folder, tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match=asks):
            use()
    assert "posix.system" in faults(folder)[0]
    assert main([str(folder)]) == 1
    assert "asks for posix.system" in capsys.readouterr().out
    assert not mark.exists()


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "{folder}", "--prompt", "a"],
        ["convert", "to-hf", "{folder}", "{folder}-out"],
        ["graft", "--front", "{folder}", "--back", "{folder}", "--layers", "1", "--out", "{folder}-out"],
    ],
)
def test_no_tool_runs_it(folder, mark, command):
    write_metadata(folder, Attack(mark))
    module, *arguments = [part.format(folder=folder) for part in command]
    done = forked(arguments, folder.parent / "printed", script=module)
    assert done.returncode
    assert "asks for posix.system" in done.stderr
    assert "Traceback" not in done.stderr
    assert not mark.exists()


def test_single_objects_are_not_run(tmp_path, mark):
    folder = save(tmp_path / "step-1", state={"step": Attack(mark)})
    assert faults(folder) == []  # intact, as its author intended
    where = r"step-1: __0_0\.distcp, bytes 0 to [\d,]+, asks for posix\.system"
    with pytest.raises(ConfigError, match=where):
        load({"state": {"step": 0}}, folder)
    assert not mark.exists()


def test_tensors_are_not_run(folder, mark):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    data = pickle.dumps(Attack(mark))
    (index,) = (index for index in metadata.storage_data if index.fqn == "norm.weight")
    metadata.storage_data[index] = _StorageInfo("__0_1.distcp", 0, len(data))
    (folder / "__0_1.distcp").write_bytes(data)
    write_metadata(folder, metadata)
    with pytest.raises(ConfigError, match=r"__0_1\.distcp, bytes 0 to"):
        load({"norm.weight": torch.empty(16)}, folder)
    assert not mark.exists()


GLOBALS = [
    "builtins eval", "builtins setattr", "builtins __import__", "os system", "torch load", "torch hub",
    "torch serialization.load", "torch.serialization load", "torch.distributed.checkpoint.metadata os",
    "torch.distributed.checkpoint.metadata torch.load", "torch.distributed.checkpoint.filesystem FileSystem",
    "torch.distributed.checkpoint.filesystem pickle.loads", "pathlib Path.write_text", "numpy load", "collections deque",
]  # fmt: skip


@pytest.mark.parametrize("name", GLOBALS)
def test_only_what_metadata_needs_is_found(folder, name):
    module, attribute = name.split()
    texts = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute))
    (folder / ".metadata").write_bytes(b"\x80\x04" + texts + b"\x93.")  # STACK_GLOBAL
    with pytest.raises(ConfigError, match=f"asks for {module}.{attribute}"):
        read_metadata(folder)


def test_classes_are_not_changed(folder):
    """BUILD with slots sets attributes of the object on the stack, which may be a class."""
    module = b"torch.distributed.checkpoint.metadata"
    stream = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c\x0dMetadataIndex\x93"
    stream += b"N}\x8c\x08__hash__K\x01s\x86b."
    (folder / ".metadata").write_bytes(stream)
    hashed = MetadataIndex.__hash__
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not a checkpoint's table of contents"):
            read_metadata(folder)
    assert MetadataIndex.__hash__ is hashed
    assert hash(MetadataIndex("a")) == hash(MetadataIndex("a"))


def test_what_is_read_is_what_was_written(folder):
    found, written = read_metadata(folder), pickle.loads((folder / ".metadata").read_bytes())
    assert found.storage_data == written.storage_data
    assert found.state_dict_metadata.keys() == written.state_dict_metadata.keys()
    for name, entry in written.state_dict_metadata.items():
        assert found.state_dict_metadata[name] == entry
    assert any(isinstance(getattr(e, "properties", None), TensorProperties) for e in found.state_dict_metadata.values())


PLACES = {
    "above": ({"relative_path": "../other/__0_0.distcp"}, "lies outside"),
    "absolute": ({"relative_path": "/etc/passwd"}, "lies outside"),
    "no name": ({"relative_path": 3}, "is not a file name"),
    "before the start": ({"offset": -5}, "is impossible"),
    "of negative length": ({"length": -1}, "is impossible"),
    "not a number": ({"offset": 1.5}, "is impossible"),
    "compressed": ({"transform_descriptors": ["zstd"]}, "is impossible"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_places_stay_in_the_folder(folder, tmp_path, kind):
    shutil.copytree(folder, tmp_path / "other")
    changes, says = PLACES[kind]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        vars(place).update(changes)
    write_metadata(folder, metadata)
    for use in (lambda: read_metadata(folder), lambda: load({"norm.weight": torch.empty(16)}, folder)):
        with pytest.raises(ConfigError, match=says):
            use()
    assert faults(folder)


def test_parts_lie_in_their_tensor(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["norm.weight"].chunks[0].offsets = torch.Size([-4])
    write_metadata(folder, metadata)
    with pytest.raises(ConfigError, match="a part of size"):
        read_metadata(folder)


def test_a_checkpoint_of_something_else_is_refused(folder):
    with pytest.raises(ConfigError, match=r"lacks what is to be loaded: .*optimizer"):
        load({"optimizer": {"a": torch.empty(3)}}, folder)
    with pytest.raises(ConfigError, match=r"lacks what is to be loaded: .*norm.weight"):
        load({"norm.weight": torch.empty(17)}, folder)
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        load({"norm.weight": torch.empty(16)}, folder.parent)


def test_a_run_that_resumes_runs_nothing(start_run, mark, monkeypatch):
    """Finding, verifying and reading a checkpoint runs no code from it."""
    saved = start_run()
    saved.save(3)
    saved.save(6)
    write_metadata(saved.folder / "step-6", Attack(mark))
    loaded = torch.load

    def safely(*arguments, weights_only, **options):
        assert weights_only
        return loaded(*arguments, weights_only=weights_only, **options)

    monkeypatch.setattr(torch, "load", safely)
    monkeypatch.setattr(pickle, "load", None)
    assert start_run().load() == 3
    assert (saved.folder / "damaged-6").is_dir()
    assert start_run(folder="other", initial_load_path=str(saved.folder / "step-3")).load() == 3
    with pytest.raises(ConfigError, match=r"initial_load_path = .* is damaged: .* asks for posix\.system"):
        start_run(folder="third", initial_load_path=str(saved.folder / "damaged-6")).load()
    assert not mark.exists()


class Getattr:
    """Pickled as a call of `getattr`."""

    def __init__(self, *arguments) -> None:
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_enum_members_as_python_3_11_2_writes_them(folder, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickles a member of an enum as `getattr(class, name)`."""
    before = read_metadata(folder)
    kind = _MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, protocol: (getattr, (kind, self.name)))
    with (folder / ".metadata").open("rb") as file:
        write_metadata(folder, pickle.load(file))  # our own, written above
    monkeypatch.undo()
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_metadata(folder).state_dict_metadata == before.state_dict_metadata


@pytest.mark.parametrize("arguments", [(torch.Size, "__base__"), (Metadata, "__init__")])
def test_getattr_serves_nothing_else(folder, arguments):
    write_metadata(folder, Getattr(*arguments))
    with pytest.raises(ConfigError, match=r"builtins\.getattr"):
        read_metadata(folder)


def test_getattr_itself_is_no_metadata(folder):
    write_metadata(folder, getattr)
    with pytest.raises(ConfigError, match="stands where a Metadata is expected"):
        read_metadata(folder)
