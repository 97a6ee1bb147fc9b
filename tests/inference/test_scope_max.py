"""`--scope-max`: a model read with other growth of its scopes, against one whose config says so."""

import argparse
import csv
import json

import pytest
import torch

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import LayerRule, NoRotary, Position, Scope
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import ConfigError
from farsight.evals import loft
from farsight.evals.needle import __main__ as needle
from farsight.evals.perplexity import __main__ as perplexity
from farsight.inference.generate import __main__ as generate
from farsight.inference.loading import load
from farsight.inference.model_options import add_model_options
from farsight.model.build import ModelConfig, build_model
from tests.finetuned import ARCHITECTURE

TRAINED = 32
TEXT = " ".join(f"word {n * n % 97}" for n in range(60))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same weights in models whose scopes stay as trained or grow, and in one without scopes."""
    found = {}
    for name in ("trained", "length", "dense"):
        rules = (LayerRule("1", NoRotary()),)
        position = Position(rules=rules) if name == "dense" else Position(heads=Scope(scope_max=name), rules=rules)
        config = ModelConfig(ARCHITECTURE, position, TRAINED)
        model = build_model(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
        folder = tmp_path_factory.mktemp(name)
        BytesTokenizer().save(folder / "tokenizer")
        write_model_dir(folder / "model", config, model.state_dict(), tokenizer_dir=folder / "tokenizer")
        found[name] = folder / "model"
    return found


def loaded(folder, *arguments):
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    return load(folder, parser.parse_args(["--device", "cpu", *arguments]))


def written(command, folder, tmp_path, *arguments):
    command.main([str(folder), "--device", "cpu", *arguments, "--json", str(tmp_path / "f.json")])
    return json.loads((tmp_path / "f.json").read_text())


def test_generate_and_loft(folders, tmp_path):
    def answers(folder, *more):
        figures = written(generate, folder, tmp_path, "--prompt", TEXT, "--new-tokens", "12", *more)
        with (tmp_path / "p.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("prompt_id", "prompt"), ("1", TEXT)])
        out = tmp_path / "out.jsonl"
        command = [str(folder), "--device", "cpu", "--prompts", str(tmp_path / "p.csv"), "--max-new-tokens", "12"]
        loft.main([*command, "--out", str(out), *more])
        return figures["completions"][0]["tokens"], json.loads(out.read_text())["metadata"]["text"]

    kept, grown = answers(folders["trained"]), answers(folders["length"])
    assert kept[0] != grown[0]
    assert kept[1] != grown[1]
    assert answers(folders["trained"], "--scope-max", "length") == grown
    assert answers(folders["length"], "--scope-max", "trained") == kept


def test_log_likelihoods_of_the_harness(folders):
    pytest.importorskip("lm_eval")
    from farsight.evals.harness.model import HarnessModel, Reading
    from tests.evals.harness_models import requests

    def scores(*model):
        asked = requests("loglikelihood", [(TEXT[:n], " word") for n in (20, 90, 300)])
        return [total for total, _ in HarnessModel(loaded(*model), Reading(400)).loglikelihood(asked)]

    kept, grown = scores(folders["trained"]), scores(folders["length"])
    assert kept[0] == pytest.approx(grown[0], abs=1e-5)  # within the trained length
    assert abs(kept[1] - grown[1]) > 1e-3
    assert scores(folders["trained"], "--scope-max", "length") == pytest.approx(grown, abs=1e-5)
    assert scores(folders["length"], "--scope-max", "trained") == pytest.approx(kept, abs=1e-5)


def test_perplexity_and_needles_take_one_reading(folders, tmp_path):
    """Without the option they take both, where scopes can grow."""
    (tmp_path / "t.txt").write_text(TEXT)
    texts = "--data", str(tmp_path / "t.txt"), "--lengths", "32", "200"
    both = written(perplexity, folders["trained"], tmp_path, *texts)
    assert both["lengths"]["200"] != pytest.approx(both["lengths_scope_length"]["200"], rel=1e-4)
    for scope_max, key in (("trained", "lengths"), ("length", "lengths_scope_length")):
        figures = written(perplexity, folders["trained"], tmp_path, *texts, "--scope-max", scope_max)
        assert figures["lengths"]["200"] == pytest.approx(both[key]["200"], rel=1e-6)
        assert "lengths_scope_length" not in figures
        assert figures["scope_max"] == scope_max
    few = "--lengths", "400", "--depths", "0.5", "--trials", "1"
    assert "cells_scope_length" in written(needle, folders["trained"], tmp_path, *few)
    for scope_max in ("trained", "length"):
        figures = written(needle, folders["trained"], tmp_path, *few, "--scope-max", scope_max)
        assert "cells_scope_length" not in figures
        assert figures["scope_max"] == scope_max


def test_a_model_without_scopes_is_refused(folders):
    with pytest.raises(ConfigError, match=r"--scope-max length: no head of .* has a scope; leave --scope-max out"):
        loaded(folders["dense"], "--scope-max", "length")
