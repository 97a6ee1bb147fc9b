"""Places with a scheme: what is downloaded, by which rank, what is shown, and what is said when it can't be."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from farsight import remote
from farsight.benchmarks.forked import Forked
from farsight.checkpoints.cards.model import read_history
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.cli import model_path, new_parser
from farsight.configs.load import load_config, read_toml
from farsight.errors import UserError
from farsight.evals.perplexity.__main__ import main as perplexity
from farsight.model.build import ModelConfig, build_model
from farsight.remote import local, shown, url_of
from tests.checkpoints import hub_client
from tests.checkpoints.hub_server import Repository
from tests.checkpoints.test_hub import contents, hub, model  # noqa: F401  fixtures
from tests.running import TINY, metrics


@pytest.fixture
def there(hub, model):  # noqa: F811
    """The hub, with a repository that has a model, other files, and the model in a subfolder too."""
    files = contents(model)
    more = {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"again", "onnx/config.json": b"{}"}
    hub.repositories["org/model"] = Repository()
    hub.repositories["org/model"].commit(files | more | {f"deep/er/{name}": files[name] for name in files})
    return hub


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("hf://org/model", "hf://org/model"),
        (Path("hf://org/model@v1/sub"), "hf://org/model@v1/sub"),
        ("runs/hf/model", None),
        (Path("/tmp/hf:/model"), None),
        ("C:/models", None),
    ],
)
def test_places_are_told_from_paths(place, url):
    assert url_of(place) == url
    if url is None:
        assert local(place) == Path(place)
        assert shown(Path(place)) == str(place)


def test_a_folder_is_downloaded_once_without_what_no_model_needs(there, model):  # noqa: F811
    own = contents(model)
    folder = local("hf://org/model")
    assert contents(folder) == own
    assert there.sent == {name: len(content) for name, content in own.items()}
    assert shown(folder) == "hf://org/model"
    assert shown(folder / "evals" / "needle.json") == "hf://org/model/evals/needle.json"
    hub_client.forget()
    assert local(Path("hf://org/model")) == folder
    assert there.sent == {name: len(content) for name, content in own.items()}

    deep = local("hf://org/model@main/deep/er")
    assert contents(deep) == own
    assert shown(deep) == "hf://org/model@main/deep/er"


def test_configs_and_tokenizers_are_read_without_weights(there):
    folder = local("hf://org/model", weights=False)
    assert (folder / "tokenizer_config.json").is_file()
    assert not list(folder.glob("*.safetensors"))
    assert local("hf://org/model") == folder
    assert (folder / "model.safetensors").is_file()


def test_a_run_reads_one_version(there, model):  # noqa: F811
    """The weights are those of the commit whose config was read, though the branch has moved on between."""
    local("hf://org/model", weights=False)
    there.repositories["org/model"].commit({"config.json": b"other", "model.safetensors": b"other"})
    assert contents(local("hf://org/model")) == contents(model)
    hub_client.forget()
    assert (local("hf://org/model") / "config.json").read_bytes() == b"other"


def test_without_a_network_the_cache_is_read(there, model, monkeypatch):  # noqa: F811
    local("hf://org/model", weights=False)
    hub_client.forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (local("hf://org/model", weights=False) / "config.json").is_file()
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set, and .*cache has no complete copy"):
        local("hf://org/model")
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set, and .*cache has no complete copy"):
        local("hf://org/other")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("hf://org/none", "hf://org/none is not there: correct the name; if .*/org/none is private, log in"),
        ("hf://org/model@v9", "hf://org/model@v9 has no revision 'v9': name a branch, a tag or a commit"),
        ("hf://org/model/nowhere", r"hf://org/model@\w+/nowhere has no files of a model"),
        ("hf://org", "write hf://ORG/NAME"),
        ("hf://datasets/org/data", "does not name a model of the hub"),
        ("hf://org/model/../other", "does not name a model of the hub"),
        ("ftp://host/model", "ftp:// is not a scheme that can be read here"),
    ],
)
def test_what_is_not_there_is_one_sentence(there, place, said):
    with pytest.raises(UserError, match=said):
        local(place)


def test_a_gated_repository_says_where_its_conditions_are(there, monkeypatch):
    there.repositories["org/model"].private, there.repositories["org/model"].gated = False, True
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(UserError, match=rf"is gated: accept its conditions on {there.url}/org/model, and log in"):
        local("hf://org/model")


def test_a_hub_that_is_gone_says_so(there, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 can't be reached, and .*cache has no complete copy"):
        local("hf://org/model")


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────────


def test_results_name_the_place(there, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("All work and no play. " * 40)
    command = ["--data", str(tmp_path / "text.txt"), "--lengths", "32", "--device", "cpu"]
    perplexity(["hf://org/model", *command, "--json", str(tmp_path / "remote.json")])
    perplexity([str(local("hf://org/model")), *command, "--json", str(tmp_path / "same.json")])
    found = json.loads((tmp_path / "remote.json").read_text())
    assert found == json.loads((tmp_path / "same.json").read_text())
    assert found["model"] == "hf://org/model"


def test_options_are_checked_before_a_download(there, capsys):
    parser = new_parser("tool", None)
    parser.add_argument("models", type=model_path, nargs="+")
    parser.add_argument("--other", type=model_path)
    with pytest.raises(SystemExit):
        parser.parse_args(["hf://org/model", "--otter", "x"])
    assert not there.requests
    with pytest.raises(SystemExit):
        parser.parse_args(["ftp://host/model"])
    assert "ftp:// is not a scheme" in capsys.readouterr().err
    options = parser.parse_args(["here", "hf://org/model", "--other", "hf://org/model"])
    assert options.models == [Path("here"), local("hf://org/model")]
    assert options.other == local("hf://org/model")


# ── Ranks ─────────────────────────────────────────────────────────────────────────────────────────────


def ranks(hub, tmp_path, *arguments, count=2):  # noqa: F811
    client = str(Path(hub_client.__file__).relative_to(Path(__file__).parents[2]))
    given = [hub.url, str(tmp_path / "cache"), *map(str, arguments)]
    return Forked(given, count, tmp_path / "printed", client).wait()


def test_one_rank_looks_up_and_downloads(there, model, tmp_path):  # noqa: F811
    """The ranks then meet for the work itself, at the same address."""
    (tmp_path / "text.txt").write_text("All work and no play. " * 40)
    command = ["--data", tmp_path / "text.txt", "--lengths", "32", "--device", "cpu", "--json", tmp_path / "f.json"]
    done = ranks(there, tmp_path, "perplexity", "hf://org/model", *command)
    assert done.returncode == 0, done.stderr
    assert there.requests == {"info": 1, "tree": 1}
    assert there.sent == {name: len(content) for name, content in contents(model).items()}
    assert json.loads((tmp_path / "f.json").read_text())["model"] == "hf://org/model"


def test_all_ranks_end_when_the_one_that_looks_up_fails(there, tmp_path):
    done = ranks(there, tmp_path, "perplexity", "hf://org/none", "--data", "x", "--lengths", "32")
    assert done.returncode == 2
    assert done.stderr.count("hf://org/none is not there") == 2
    assert there.requests == {"info": 1}


def test_the_stores_of_ranks_are_of_the_launcher(monkeypatch):
    """In one process nothing is connected."""
    monkeypatch.setattr(remote, "_store", lambda: pytest.fail("connected"))
    assert local("runs/model") == Path("runs/model")


FINETUNING = """
[base_model]
path = "hf://org/model"
dtype = "float32"
quantization = "none"

[garfa]
enable = false

[data]
sources = [{{ kind = "jsonl", path = "{folder}/rows.jsonl" }}]

[training]
steps = 4
seq_len = 160
local_batch_size = 1
global_batch_size = 2

[validation]
enable = false

[[evaluations]]
kind = "perplexity"
every = 2
data = ["{folder}/text.txt"]
lengths = [32]
"""


@pytest.mark.slow
def test_fine_tuning_evaluates_an_adapter_of_a_base_on_the_hub(there, tmp_path):
    """Rank 0 alone reads the base again, and asks the hub for nothing."""
    (tmp_path / "text.txt").write_text("All work and no play. " * 40)
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "All play and no work."}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 20)
    (tmp_path / "run.toml").write_text(FINETUNING.format(folder=tmp_path))
    run = tmp_path / "run"
    done = ranks(there, tmp_path, "finetune", "--job.config_file", tmp_path / "run.toml", "--job.dump_folder", run)
    assert done.returncode == 0, done.stderr
    rows = metrics(run, "perplexity.32")
    assert [row["step"] for row in rows] == [2, 4]
    assert there.requests == {"info": 1, "tree": 1}
    out = tmp_path / "figures.json"
    perplexity([str(run / "adapter"), "--data", str(tmp_path / "text.txt"), "--lengths", "32", "--json", str(out)])
    assert json.loads(out.read_text())["lengths"]["32"] == rows[-1]["perplexity.32"] != rows[0]["perplexity.32"]


STEPS = ["--training.steps", "3", "--training.local_batch_size", "2"]


@pytest.mark.slow
def test_a_run_of_two_ranks_starts_from_the_hub(hub, tmp_path):  # noqa: F811
    """Its losses are those of a run from the local folder; what it keeps names the place."""
    (tmp_path / "run.toml").write_text(TINY)
    config = load_config(["--job.config_file", str(tmp_path / "run.toml"), "--architecture.vocab_size", "320"])
    model = build_model(ModelConfig.from_job(config))  # noqa: F811
    model.init_weights()
    write_model_dir(tmp_path / "model", ModelConfig.from_job(config), dict(model.named_parameters()))
    own = contents(tmp_path / "model")
    hub.repositories["org/model"] = Repository()
    hub.repositories["org/model"].commit(own)
    losses = []
    for name, start in (("far", "hf://org/model"), ("near", tmp_path / "model")):
        command = ["train", "--job.config_file", tmp_path / "run.toml", "--job.dump_folder", tmp_path / name]
        done = ranks(hub, tmp_path, *command, "--checkpoint.initial_load_path", start, *STEPS)
        assert done.returncode == 0, done.stderr
        losses.append([row["loss"] for row in metrics(tmp_path / name)])
    assert losses[0] == losses[1]
    assert hub.requests == {"info": 1, "tree": 1}
    assert hub.sent == {name: len(content) for name, content in own.items()}
    assert read_toml(tmp_path / "far" / "config.toml")["checkpoint"]["initial_load_path"] == "hf://org/model"
    assert read_history(tmp_path / "far" / "model")[-1]["start"] == "hf://org/model"
