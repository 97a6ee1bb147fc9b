"""push and pull, against a stand-in of the hub: what arrives, what is sent again after a kill, and what is never shown."""

import json
import time
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from torch.testing import assert_close

from farsight.benchmarks.forked import Forked
from farsight.checkpoints.adapter.write import write_adapter
from farsight.checkpoints.cards.results import eval_results, with_metadata
from farsight.checkpoints.hub.pull import main as pull
from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.fingerprint import base_entry
from farsight.configs.schema import Architecture, Position, Rope, Scope
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import ConfigError
from farsight.remote import local
from farsight.reports.push import main as push
from farsight.training.finetune.model import whole_weights
from tests.checkpoints import hub_client
from tests.checkpoints.hub_server import TOKEN, Hub, Repository
from tests.finetuned import adapted_model, finetune_config, tokens, write_base

PERPLEXITY = {"lengths": {"32": 12.5, "64": 11.25}, "data": ["/home/me/books.txt"], "trained_length": 64}
NEEDLE = {
    "task": "passkey", "mean": 0.75, "trained_length": 64, "extend": "ntk:factor=2",
    "cells": [{"length": 64, "depth": d, "accuracy": a, "trials": 4} for d, a in ((0.0, 1.0), (1.0, 0.5))],
}  # fmt: skip
HARNESS = {
    "results": {"piqa": {"value": 0.625, "stderr": 0.01, "metric": "acc,none", "shots": 5, "n": 8, "metrics": {}}},
    "mean": 0.625,
}
LARGE = Architecture(vocab_size=9000, dim=256, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=64, ffn_dim=512)
"""Its embedding and head have 9.2 MB each: two files, sent in parts, and one of them longer than the library reads at once."""
SHARD = 14 * 10**6


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE", "HF_HUB_CACHE", "HF_HUB_DISABLE_XET"):
        monkeypatch.setattr(constants, name, getattr(constants, name))
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", constants.ENDPOINT)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as hub:
        hub_client.use(hub.url, tmp_path / "cache")
        yield hub
    hub_client.forget()


@pytest.fixture
def model(tmp_path):
    write_base(tmp_path / "model", Position(rotary=Rope(), heads=Scope()))
    BytesTokenizer().save(tmp_path / "model")
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files(hub: Hub, name: str = "org/model", branch: str = "main") -> dict[str, bytes]:
    repository = hub.repositories[name]
    there = dict(repository.commits[repository.branches[branch]])
    del there[".gitattributes"]
    return there


def refused(capsys, command, *arguments) -> str:
    """The sentence with which a command refuses."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        command([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err
    return printed.err


# ── Push, and pull ────────────────────────────────────────────────────────────────────────────────────


def test_what_is_pushed_is_pulled(hub, model, tmp_path, capsys):
    (model / "evals").mkdir()
    (model / "evals" / "perplexity.json").write_text(json.dumps({**PERPLEXITY, "model": str(model)}))
    (model / "notes.docx").write_text("not of the model")
    (tmp_path / "needle.json").write_text(json.dumps({**NEEDLE, "model": str(model)}))
    own = contents(model)
    results = ["--results", str(tmp_path / "needle.json")]
    push([str(model), "org/model", "--license", "apache-2.0", *results])
    printed = capsys.readouterr()
    assert "left out: notes.docx" in printed.out
    assert printed.out.splitlines()[-1] == f"{hub.url}/org/model"
    assert hub.repositories["org/model"].private
    assert contents(model) == own

    there = files(hub)
    assert there.keys() == own.keys() - {"notes.docx"}
    assert all(there[name] == own[name] for name in there if name != "README.md")
    card = ModelCard(there["README.md"].decode())
    assert card.text == ModelCard.load(model / "README.md").text
    assert (card.data.license, card.data.model_name, card.data.library_name) == ("apache-2.0", "model", "transformers")
    assert card.data.tags == ["farsight", "rope", "scope"]
    found = [(entry.metric_type, entry.metric_args, entry.metric_value) for entry in card.data.eval_results]
    assert found == [
        ("perplexity", {"length": 32}, 12.5),
        ("perplexity", {"length": 64}, 11.25),
        ("accuracy", {"extend": "ntk:factor=2", "length": 64}, 0.75),
    ]

    sent, commits = hub.received.copy(), len(hub.messages)
    push([str(model), "org/model", "--license", "apache-2.0", *results])
    assert (hub.received, len(hub.messages)) == (sent, commits)

    pull(["org/model", str(tmp_path / "pulled")])
    assert contents(tmp_path / "pulled") == there
    assert TOKEN not in printed.out + printed.err + "".join(capsys.readouterr())


def test_a_dry_run_shows_the_files_and_asks_no_hub(hub, model, capsys):
    push([str(model), "org/model", "--dry-run", "--license", "mit"])
    printed = capsys.readouterr().out
    assert f"{(model / 'model.safetensors').stat().st_size:,}  model.safetensors" in printed
    assert "license: mit" in printed
    assert not hub.repositories
    assert not hub.requests


def test_a_smaller_model_replaces_the_weights_of_a_larger_one(hub, tmp_path):
    for name, size in (("many", 50_000), ("one", 10**9)):
        write_base(tmp_path / name, shard_bytes=size)
        BytesTokenizer().save(tmp_path / name)
    push([str(tmp_path / "many"), "org/model"])
    assert sum(name.endswith(".safetensors") for name in files(hub)) > 2
    push([str(tmp_path / "one"), "org/model", "--message", "fewer files"])
    assert hub.messages[-1] == "fewer files"
    assert files(hub).keys() == contents(tmp_path / "one").keys()


def test_a_branch_is_made_and_pulled(hub, model, tmp_path):
    push([str(model), "org/model"])
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    push([str(model), "org/model", "--revision", "v2", "--public"])
    assert "generation_config.json" in files(hub, branch="v2")
    assert "generation_config.json" not in files(hub)
    pull(["hf://org/model@v2", str(tmp_path / "pulled")])
    assert contents(tmp_path / "pulled") == files(hub, branch="v2")


def test_a_folder_of_a_repository_is_pulled_alone_and_without_pickles(hub, model, tmp_path, capsys):
    own = contents(model)
    inner = {f"step/1/{name}": content for name, content in own.items()}
    more = {"step/1/pytorch_model.bin": b"pickle", "step/1/old/config.json": b"{}", "step/10/config.json": b"{}"}
    hub.repositories["org/model"] = Repository()
    hub.repositories["org/model"].commit(inner | more | {"optimizer.pt": b"pickle"})
    pull(["org/model/step/1", str(tmp_path / "pulled")])
    assert contents(tmp_path / "pulled") == own
    assert "holds no model" in refused(capsys, pull, "org/model", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_adapter_of_a_base_on_the_hub(hub, model, tmp_path):
    push([str(model), "org/base"])
    config = finetune_config("hf://org/base", "none", "float32")
    assert config.base_model.path == "hf://org/base"
    trained = adapted_model(config)
    base = base_entry(local(config.base_model.path))
    write_adapter(tmp_path / "adapter", config, whole_weights(trained), base)
    marker = json.loads((tmp_path / "adapter" / "farsight_adapter.json").read_text())
    assert marker["base"]["path"] == "hf://org/base"
    plain = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert plain["base_model_name_or_path"] == "org/base"

    push([str(tmp_path / "adapter"), "org/adapter"])
    card = ModelCard(files(hub, "org/adapter")["README.md"].decode())
    assert (card.data.base_model, card.data.library_name) == ("org/base", "peft")
    hub_client.forget()
    loaded, _ = load_model(local("hf://org/adapter"))
    assert_close(loaded(tokens()), trained.eval()(tokens()))


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_model_is_not_pushed(hub, model, capsys):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused(capsys, push, model, "org/model")
    weights.unlink()
    assert "holds no *.safetensors" in refused(capsys, push, model, "org/model")
    assert not hub.repositories


def test_a_public_repository_is_not_written_by_accident(hub, model, capsys):
    hub.repositories["org/model"] = Repository(private=False)
    hub.repositories["org/model"].commit({".gitattributes": b""})
    assert "is public" in refused(capsys, push, model, "org/model")
    assert files(hub) == {}
    push([str(model), "org/model", "--public"])
    assert files(hub)


def test_an_existing_folder_is_not_pulled_into(hub, model, capsys):
    assert "not empty" in refused(capsys, pull, "org/model", model)
    assert not hub.requests


@pytest.mark.parametrize("token", ["", "hf_wrong", TOKEN + "\x01", TOKEN + "ü"])
def test_the_token_is_never_shown(hub, model, tmp_path, monkeypatch, capsys, caplog, token):
    """A header refuses some characters with an error that quotes all of it."""
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, push, model, "org/model") + refused(capsys, pull, "org/model", tmp_path / "out")
    assert "HF_TOKEN" in said
    assert "unexpected" not in said
    assert "TopSecret" not in said + caplog.text
    assert not list(tmp_path.glob("farsight-error*"))


def test_bytes_that_changed_on_their_way_are_found(hub, model, tmp_path, capsys):
    push([str(model), "org/model"])
    hub.damaged = "model.safetensors"
    assert "model.safetensors of hf://org/model came with other bytes" in refused(
        capsys, pull, "org/model", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()
    hub.damaged = None
    pull(["org/model", str(tmp_path / "out")])
    assert contents(tmp_path / "out") == files(hub)


# ── Kills ─────────────────────────────────────────────────────────────────────────────────────────────


def start(hub: Hub, tmp_path: Path, *arguments: object) -> Forked:
    """Starts a command in a process of its own."""
    client = str(Path(hub_client.__file__).relative_to(Path(__file__).parents[2]))
    return Forked([hub.url, str(tmp_path / "cache"), *map(str, arguments)], 1, tmp_path / "printed", client)


def kill_when(reached, process: Forked) -> None:
    end = time.monotonic() + 120
    while not reached() and time.monotonic() < end and process.processes[0].is_alive():
        time.sleep(0.01)
    assert reached(), process.wait(1).stderr
    process.processes[0].kill()
    assert process.wait().returncode == -9


def finish(process: Forked) -> None:
    done = process.wait()
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr


@pytest.fixture
def large(tmp_path):
    write_base(tmp_path / "large", Position(rotary=Rope()), LARGE, shard_bytes=SHARD)
    BytesTokenizer().save(tmp_path / "large")
    return tmp_path / "large"


def test_a_killed_push_goes_on(hub, large, tmp_path):
    first, second = sorted(large.glob("*.safetensors"))
    sizes = {path: path.stat().st_size for path in (first, second)}
    oids = {path: Hub.oid(path.read_bytes()) for path in (first, second)}
    hub.hold = (oids[first], 10 * 10**6)
    process = start(hub, tmp_path, "push", large, "org/model")
    kill_when(lambda: hub.held.is_set() and oids[second] in hub.objects, process)
    hub.hold = None
    hub.go_on.set()
    came = hub.received[oids[first]]
    assert 10 * 10**6 <= came < sizes[first]
    assert files(hub) == {}

    finish(start(hub, tmp_path, "push", large, "org/model"))
    assert hub.received == {oids[first]: came + sizes[first], oids[second]: sizes[second]}
    assert files(hub) == contents(large)


def test_a_killed_pull_goes_on(hub, large, tmp_path):
    hub.repositories["org/model"] = Repository()
    hub.repositories["org/model"].commit(contents(large))
    first = min(path.name for path in large.glob("*.safetensors"))
    size = (large / first).stat().st_size
    hub.hold = (first, constants.DOWNLOAD_CHUNK_SIZE + 10**6)
    process = start(hub, tmp_path, "pull", "org/model", tmp_path / "out")
    others = {name: len(content) for name, content in contents(large).items() if name != first}
    part = tmp_path / "out.part"
    partial = part / f"{first}.incomplete"

    def reached() -> bool:
        arrived = all((part / name).exists() for name in others)
        return arrived and partial.exists() and partial.stat().st_size == constants.DOWNLOAD_CHUNK_SIZE

    kill_when(lambda: hub.held.is_set() and reached(), process)
    hub.hold = None
    hub.go_on.set()
    came, kept = hub.sent[first], partial.stat().st_size
    assert kept <= came < size
    assert not (tmp_path / "out").exists()

    finish(start(hub, tmp_path, "pull", "org/model", tmp_path / "out"))
    assert hub.sent == others | {first: came + size - kept}
    assert contents(tmp_path / "out") == contents(large)
    assert not part.exists()


# ── Results in cards ──────────────────────────────────────────────────────────────────────────────────


def test_results_of_all_tools_survive_the_card():
    grown = {**PERPLEXITY, "lengths_scope_length": {"64": 10.5}, "quantization": "nf4"}
    entries = eval_results("perplexity", grown) + eval_results("needle", NEEDLE) + eval_results("harness", HARNESS)
    card = with_metadata("---\ntags:\n- farsight\n---\n\n# Text stays\n", "name", entries)
    read = ModelCard(card)
    assert read.text == "\n# Text stays\n"
    found = {(r.dataset_type, r.metric_name): (r.metric_value, r.metric_args) for r in read.data.eval_results}
    assert found == {
        ("text", "perplexity at 32 tokens"): (12.5, {"quantization": "nf4", "length": 32}),
        ("text", "perplexity at 64 tokens"): (11.25, {"quantization": "nf4", "length": 64}),
        ("text", "perplexity at 64 tokens, scopes grown"): (
            10.5, {"quantization": "nf4", "scope_max": "length", "length": 64},
        ),
        ("passkey", "accuracy at 64 tokens"): (0.75, {"extend": "ntk:factor=2", "length": 64}),
        ("piqa", "acc of piqa"): (0.625, None),
    }  # fmt: skip
    assert {r.dataset_args and r.dataset_args["num_few_shot"] for r in read.data.eval_results} == {None, 5}
    assert "/home" not in card


def test_figures_that_are_not_finite_are_left_out():
    assert eval_results("perplexity", {"lengths": {"32": float("nan"), "64": None}}) == []


def test_a_card_whose_metadata_is_broken_is_refused():
    with pytest.raises(ConfigError, match="metadata"):
        with_metadata("---\ntags: [\n---\n# Title\n", "name")
