"""The wheel: `farsight` alone, which works from any folder without the checkout; and the editable install, which adds no more."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.running import TINY

ROOT = Path(__file__).parents[2]

RECORD = """
import atexit, json, os, sys
atexit.register(lambda: open(f"{os.environ['RECORDED']}/{os.getpid()}", "w").write(json.dumps([sys.argv, sys.path])))
"""
"""As `sitecustomize`: every process leaves its command line and its import path."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy: a build leaves files in its folder, and takes up those of earlier builds."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "docs", "*.egg-info")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(folder / "checkout")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "checkout")
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with nothing but what the wheel holds."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


@pytest.fixture
def run(installed, tmp_path):
    """Runs Python in an empty folder, on the unpacked wheel."""
    (tmp_path / "customize").mkdir()
    (tmp_path / "customize" / "sitecustomize.py").write_text(RECORD)
    (tmp_path / "recorded").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "tiny.toml").write_text(TINY)
    path = os.pathsep.join([str(installed), str(tmp_path / "customize")])
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables = {"PYTHONPATH": path, "RECORDED": str(tmp_path / "recorded"), "OMP_NUM_THREADS": "1"}

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path / "work",
            env=inherited | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_holds_the_package_alone_and_all_of_it(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = set()
    for folder, below, files in os.walk(ROOT / "farsight", followlinks=True):
        below[:] = [name for name in below if name not in ("__pycache__", "benchmarks")]
        ours |= {str((Path(folder) / name).relative_to(ROOT)) for name in files}
    assert names == ours
    assert {"farsight/py.typed", "farsight/train.py", "farsight/configs/tiny.toml"} < names
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_commands_start(run, installed, tmp_path):
    assert run("-c", "import farsight; print(farsight.__file__)").strip() == str(installed / "farsight" / "__init__.py")
    assert run("-m", "farsight", "--help").startswith("usage: farsight COMMAND")
    recipe = installed / "farsight" / "configs" / "quickstart.toml"
    assert "h100-80g" in run("-m", "farsight", "plan", str(recipe), "--gpus", "1", "--gpu", "h100-80g")
    assert not list((tmp_path / "work").iterdir())


STARTS = {
    "train": ("train", "--job.config_file", "{installed}/farsight/configs/tiny.toml", "--job.dump_folder", "run"),
    "recipe": ("recipe", "{tmp}/recipe.toml"),
    "torchrun": (
        *("torchrun", "--standalone", "--nproc_per_node", "1", "-m", "farsight.train"),
        *("--job.config_file", "{tmp}/tiny.toml", "--job.dump_folder", "run"),
    ),
}


@pytest.mark.parametrize("command", STARTS)
def test_training_runs_and_no_process_imports_from_inside_the_package(run, installed, tmp_path, command):
    """A folder of the package on the import path would make `kernels` or `data` of it a module of that name."""
    (tmp_path / "recipe.toml").write_text(
        TINY + '\n[recipe]\nname = "run"\nfolder = "."\nperplexity_tokens = 256\n\n[[stages]]\nname = "only"\n'
    )
    steps = ("--training.steps", "3", "--lr_scheduler.warmup_steps", "1", "--validation.freq", "3")
    run("-m", "farsight", *(part.format(tmp=tmp_path, installed=installed) for part in STARTS[command]), *steps)
    (metrics,) = (tmp_path / "work").rglob("metrics.jsonl")
    assert '"step": 3' in metrics.read_text()
    recorded = [json.loads(file.read_text()) for file in (tmp_path / "recorded").iterdir()]
    assert command == "train" or any(line[0].endswith("farsight/train.py") for line, _ in recorded)
    for line, path in recorded:
        assert not any(entry == str(ROOT) or entry.startswith(str(installed / "farsight")) for entry in path), line


def test_the_editable_install_puts_nothing_else_on_the_import_path(tmp_path):
    """What it makes importable, from another folder and without our `pythonpath`."""
    folders = [path.name for path in (ROOT / "farsight").iterdir() if path.is_symlink() and path.is_dir()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import sys; from importlib.util import find_spec; print([n for n in sys.argv[1:] if find_spec(n)])"
    found = subprocess.run(
        [sys.executable, "-c", code, "farsight", "tests", "train", *folders],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "['farsight']"
