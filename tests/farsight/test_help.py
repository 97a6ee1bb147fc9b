"""`--help` of every command prints its usage without importing the libraries that make it slow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farsight.commands import COMMANDS, main

ROOT = Path(__file__).parents[2]

ASK_EVERY_COMMAND = """
import contextlib, importlib.abc, io, json, sys

HEAVY = {"torch", "numpy", "matplotlib", "transformers", "datasets", "pyarrow", "torchtitan"}

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise AssertionError(f"imports {name}")

sys.meta_path.insert(0, Forbid())
from farsight.commands import COMMANDS, main

said = {}
for name in COMMANDS:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = main([name, "--help"])
    except SystemExit as stop:
        status = stop.code
    except BaseException as error:
        status = f"{type(error).__name__}: {error}"
    said[name] = status or 0, output.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Each command's exit status, or its error, and the text that it printed."""
    folder = tmp_path_factory.mktemp("help")  # an unexpected error writes its traceback here
    done = subprocess.run(
        [sys.executable, "-c", ASK_EVERY_COMMAND],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_imports_nothing_heavy(said, name):
    status, text = said[name]
    assert status == 0, text
    assert name in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "farsight 0.1.0\n"


@pytest.mark.parametrize("module", ["evals.generate", "evals.report", "analysis.report"])
def test_modules_that_forward_to_a_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: farsight {'inside' if module == 'analysis.report' else module.partition('.')[2]}" in done.stdout


def test_commands_that_take_foreign_models_are_listed(said):
    """A refusal and the page on models name the commands that have the option for such models' code, and no others."""
    taking = {name for name in COMMANDS if "--trust-remote-code" in said[name][1]}
    for path, begin, end in (
        ("checkpoints/model_dir/hf_config.py", "}. farsight ", " also take types"),
        ("docs/inference/models.md", "## Models that only transformers builds\n\n", " also take\n"),
    ):
        listed = (ROOT / path).read_text().split(begin)[1].split(end)[0]
        assert set(re.findall(r"[a-z]{4,}", listed.replace("farsight", ""))) == taking
