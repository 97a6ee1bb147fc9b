"""The pages of docs/papers: the tool that each command names reads it, and it runs at tiny size.

In the tiny run, models that a page names are tiny ones, and its numbers are small. Recipes are run with `--tiny --dry-run`: another test
trains the tiny form of each (tests/launch/test_recipe.py).
"""

import argparse
import importlib
import json
import random
import re
import shlex
from dataclasses import replace
from functools import partialmethod
from glob import glob
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import MptConfig, MptForCausalLM

from farsight import commands
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import load_config, parse_options
from farsight.configs.schema import NoRotary, Position, Scope, YarnRope
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.evals.harness import run as harness
from farsight.model.build import ModelConfig, build_model
from farsight.training.stages import load_recipe
from tests.checkpoints.test_adapter import trained_adapter
from tests.evals.harness_models import make_model, sentence
from tests.evals.test_external import helmet
from tests.evals.test_harness import make_manager, piqa_rows
from tests.finetuned import write_base
from tests.launch.test_recipe import CONFIGS
from tests.running import ROOT, train

TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager

PAGES = sorted((ROOT / "docs" / "papers").glob("*.md"))
FENCE = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINES = [
    pytest.param(line, id=f"{page.stem}: {line[:60]}")
    for page in PAGES
    for block in FENCE.findall(page.read_text("utf-8"))
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith(("farsight ", "python -m "))
]
SMALLER = {
    "--lengths": "32 48", "--length": "48", "--depths": "2", "--trials": "1", "--windows": "2", "--sequences": "4", "--count": "2",
    "--min-tokens": "64", "--max-tokens": "0", "--epochs": "1", "--max-length": "64", "--heads": "4", "--layers": "1", "--buckets": "4",
    "--passkey": "1 --passkey-length 200",
}  # fmt: skip
"""Options of evaluations and analyses, with what they are given instead."""
ONE_TOOLS = {
    "needle": {"--lengths": "480"},
    "plasticity": {"--buckets": "8"},
    "ripra": {"--length": "600", "--passkeys": "2"},
}
ADDED = {
    "recipe": ["--tiny", "--dry-run"],
    "depth-sweep": ["--tiny", "--dry-run"],
    "ablation": ["--tiny", "--dry-run"],
    "graft-sweep": ["--windows", "2", "--depths", "1"],
    "harness": ["--data", "piqa=piqa.jsonl"],
    "capture": ["--per-bucket", "2"],
    "corpus": ["--min-tokens", "64", "--max-tokens", "0"],
}


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class _ReadError(BaseException):
    """Raised once a tool has read its options; no tool catches it."""


def test_pages_have_commands():
    assert len(LINES) > 30


@pytest.mark.parametrize("line", LINES)
def test_the_tool_reads_every_command(line, monkeypatch):
    """Its options are known and of the right type; options of config sections are read when it runs."""
    known = argparse.ArgumentParser.parse_known_args

    def read(parser, arguments=None, namespace=None, whole=False):
        _, rest = known(parser, arguments, namespace)
        if whole and rest:
            parser.error(f"unrecognized arguments: {rest}")
        parse_options(rest)
        raise _ReadError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", read)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", partialmethod(read, whole=True))
    program, *arguments = shlex.split(line, comments=True)
    if arguments[0] == "finetune":
        load_config([word for word in arguments[1:] if word != "--dry-run"], FinetuneConfig)
        return
    main = commands.main
    if program == "python":
        _, module, *arguments = arguments
        folder = (ROOT / module.replace(".", "/")).is_dir()
        main = importlib.import_module(f"farsight.{module}{'.__main__' * folder}").main
    with pytest.raises(_ReadError):
        main(arguments)


@pytest.fixture(scope="module")
def task_index():
    return dict(make_manager().task_index)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with tiny models and files, and a trained run, under names that pages may use."""
    folder = tmp_path_factory.mktemp("papers")
    models = {
        "long": make_model(folder / "c", Position(rotary=YarnRope(factor=2.0, original_length=48))),
        "scope": make_model(folder / "a", Position(rotary=NoRotary(), heads=Scope()), TEMPLATE),
        "rope": make_model(folder / "b", Position(), TEMPLATE),
    }
    train(folder / "run", "--training.steps", "4", "--checkpoint.interval", "2", "--training.seq_len", "48")
    text = "".join(json.dumps({"text": sentence(random.Random(i), 60)}) + "\n" for i in range(12))
    for name in ("DATA.jsonl", "LONG100.jsonl", "PG19.jsonl", "LBP.jsonl"):
        (folder / name).write_text(text)
    (folder / "long100.toml").write_text(
        '[data]\nheld_out = 0.0\nsources = [{ kind = "jsonl", path = "DATA.jsonl" }]\n'
    )
    (folder / "run" / "stage.toml").touch()
    for name, model in {"BASE": "rope", "LONG": "long", "MODEL": "rope", "MERGED": "rope", "OTHER": "long"}.items():
        (folder / name).symlink_to(models[model])
    for name in ("configs", "docs"):
        (folder / name).symlink_to(ROOT / name)
    mpt = MptForCausalLM(
        MptConfig(vocab_size=320, d_model=32, n_heads=4, n_layers=2, max_seq_len=96, expansion_ratio=2)
    )
    mpt.save_pretrained(folder / "MPT")
    BytesTokenizer().save(folder / "MPT")
    (folder / "PROMPTS.csv").write_text(",prompt_id,prompt,targets\n0,a,Say.,()\n")
    for path in ("HELMET/output/lasp", "LOFT/outputs/rag/nq/128k"):
        (folder / path).mkdir(parents=True)
    helmet(folder / "HELMET/output/lasp", "json_kv", substring_exact_match=80.0)
    (folder / "LOFT/outputs/rag/nq/128k/dev_predictions_metrics.json").write_text(
        '{"quality": {"em": 0.1, "subspan_em": 0.5, "f1": 0.2}, "num_unanswered_queries": 0}'
    )
    write_base(folder / "base")
    trained_adapter(folder / "adapter", folder / "base")
    piqa_rows(folder, 3)
    return folder, models


def run_folder(folder: Path, models: dict[str, Path], path: str) -> None:
    """Makes `path`, a run folder or its model, from what the workspace has."""
    parts = [*Path(path).parts, "stage"]
    target = folder / Path(*parts[:3])
    if target.exists() or target.is_symlink():
        return
    if parts[2] == "adapter":
        target.parent.mkdir(parents=True)
        target.symlink_to(folder / "adapter")
        return
    target.mkdir(parents=True)
    for each in (folder / "run").iterdir():
        if each.name != "model":
            (target / each.name).symlink_to(each)
    (target / "model").symlink_to(models["scope" if "scope" in parts[1] else "rope"])


def write_model(path: Path, config: ModelConfig) -> None:
    """A model for a recipe to start from, with a tokenizer of bytes."""
    config = replace(
        config, architecture=replace(config.architecture, vocab_size=config.architecture.vocab_size or 320)
    )
    model = build_model(config)
    model.init_weights()
    path.parent.mkdir(parents=True)
    BytesTokenizer().save(path.parent / "tokenizer")
    write_model_dir(path, config, model.state_dict(), tokenizer_dir=path.parent / "tokenizer")


def at_tiny_size(words: list[str]) -> list[str]:
    """The command with small numbers in place of its own."""
    dropped = ("--nproc", *["--lengths"] * (words[0] == "harness"))
    small, option, smaller = [], "", SMALLER | ONE_TOOLS.get(words[0], {})
    for word in words:
        if word.startswith("--"):
            option = word
            if option in dropped:
                continue
            small += [word, *smaller.get(option, "").split()]
        elif option in dropped:
            continue
        elif option == "--tasks":
            small.append("scope_nlu/piqa")
        elif option == "--extend":
            small.append(re.sub(r"=(\d{2,})", lambda n: f"={max(2, int(n[1]) // 128)}", word))
        elif option == "--out":
            small.append(f"out/{word}")
        elif option not in smaller:
            small.append({"long100": "long100.toml"}.get(word, word))
    return [word for word in [*small, *ADDED.get(words[0], [])] if word != "--open-data"]


def known_tasks(index: dict):
    manager = TaskManager(include_defaults=False)
    manager.task_index.update(index)
    return manager


@pytest.mark.parametrize(
    "line",
    # Fine-tuning reads its rows from the hub, and `farsight ablation --tiny` stands in for it; a server does not end by itself.
    [
        line
        for line in LINES
        if line.values[0].startswith("farsight") and not re.search(r" (finetune|serve) ", line.values[0])
    ],
)
def test_every_command_runs_at_tiny_size(line, workspace, monkeypatch, task_index):
    folder, models = workspace
    monkeypatch.chdir(folder)
    monkeypatch.setattr(harness, "task_manager", lambda *more: known_tasks(task_index))
    words = [name for word in shlex.split(line, comments=True)[1:] for name in (sorted(glob(word)) or [word])]
    (folder / "out" / "runs").mkdir(parents=True, exist_ok=True)
    if words[0] == "recipe":
        recipe, (first, *_) = load_recipe(CONFIGS[words[1]], {"tiny": True})
        if recipe.start:
            write_model(Path(recipe.start), ModelConfig.from_job(first.config))
    for option, word in zip(["", *words], words, strict=False):
        if word.startswith("runs/") and option != "--out":
            run_folder(folder, models, word)
    small = at_tiny_size(words)
    assert commands.main(small) in (None, 0), small
    for option, path in pairwise(small):
        if option in ("--json", "--picture", "--out") and "--dry-run" not in small:
            assert Path(path).exists(), path
