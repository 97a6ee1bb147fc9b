"""Packages that only some features need, and what is said when one is missing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from farsight.cli import explain
from farsight.extras import EXTRAS, REQUIRED
from tests.running import metrics, run, train_command

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def named(requirements):
    """The modules of packages; MLflow's client has a package without its server."""
    return {
        re.match(r"[\w-]+", requirement)[0].removesuffix("-skinny").replace("-", "_") for requirement in requirements
    }


def test_every_optional_package_is_of_its_extra_and_of_no_other_group():
    extras = PROJECT["optional-dependencies"]
    found = {name: extra for extra in extras if extra != "dev" for name in named(extras[extra])}
    assert found == EXTRAS
    assert named(PROJECT["dependencies"]) == REQUIRED
    assert not REQUIRED & EXTRAS.keys()


def test_a_missing_package_is_named_with_its_extra():
    assert explain(ModuleNotFoundError("No module named 'farsight.nothing'", name="farsight.nothing")) is None
    sentence = explain(ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.parquet"))
    command = f"pip install --editable '{CHECKOUT}[data]'"
    assert sentence == f"This needs the package pyarrow, which is not installed: {command}"


def test_a_python_without_the_dependencies_is_told_what_to_install(tmp_path):
    for command in (["-m", "farsight", "positions", "tiny"], ["train.py", "--job.config_file", "tiny"]):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", BARE, *command], cwd=CHECKOUT, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert f"This Python ({sys.executable}) has no " in done.stderr
        assert "make setup" in done.stderr


BARE = """
import runpy, sys
sys.path.insert(0, ".")
sys.dont_write_bytecode = True
del sys.argv[0]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True) if sys.argv[0] == "-m" else runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_training_needs_none_of_them(tmp_path):
    """`make quickstart` installs neither the extras nor, beside PyTorch for CPUs, Triton; nor datasets."""
    absent = [*EXTRAS, "torchtitan", "triton", "sklearn", "pytest"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); from farsight.train import main; main(sys.argv[1:])"
    )
    options = train_command(tmp_path / "run", "--training.steps", "2")[2:]
    run([sys.executable, "-c", code, *options, "--lr_scheduler.warmup_steps", "1", "--validation.freq", "2"])
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
