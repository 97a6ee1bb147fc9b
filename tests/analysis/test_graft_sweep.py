"""farsight graft-sweep against grafts written to disk and measured by farsight perplexity and farsight needle."""

import json

import pytest
import torch

from farsight.analysis.graft_sweep import __main__ as graft_sweep
from farsight.checkpoints.graft.build import graft
from farsight.checkpoints.load import load_model
from farsight.configs.schema import Garfa, GarfaLayer, Llama3Rope, NoRotary, Position, Rope, Scope
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.evals.needle import __main__ as needle
from farsight.evals.perplexity import __main__ as perplexity
from farsight.evals.perplexity.measure import perplexity_by_length
from farsight.evals.windows import Windows
from tests.checkpoints.test_graft import TIED, N, write

CALL = ["--lengths", "32", "96", "--windows", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A base model with GARFA, a long one with growing scopes, and a text."""
    folder = tmp_path_factory.mktemp("sweep")
    garfa = Garfa(layers=(GarfaLayer(0, (1.0, -4.0)), GarfaLayer(2, (0.0, 2.0))))
    write(folder / "base", Position(rotary=Rope(theta=500.0), garfa=garfa), length=48, seed=1)
    write(folder / "long", Position(rotary=NoRotary(), heads=Scope()), length=64, seed=2)
    for name in ("base", "long"):
        BytesTokenizer().save(folder / name)
    (folder / "text.txt").write_text("".join(f"{i} of {i * i % 17}; " for i in range(120)))
    return folder


def sweep(places, *options, base="base", long="long"):
    target = places / "sweep.json"
    call = ["--base", str(places / base), "--long", str(places / long), "--data", str(places / "text.txt"), *CALL]
    graft_sweep.main([*call, *options, "--json", str(target)])
    return json.loads(target.read_text())


def test_figures_are_those_of_the_directories(places, tmp_path, capsys):
    picture = tmp_path / "sweep.png"
    found = sweep(places, "--depths", "1", "--passkey", "2", "--passkey-length", "300", "--picture", str(picture))
    assert (found["tool"], found["model"]) == ("analysis.graft_sweep", str(places / "long"))
    assert found["trained_length"] == {"base": 48, "long": 64}
    assert picture.stat().st_size > 10_000
    printed = capsys.readouterr().out
    folders = {"base": found["plain"]["base"], "long": found["plain"]["long"]}
    for mode, names in {"B-Front": ("base", "long"), "L-Front": ("long", "base")}.items():
        front, back = (places / name for name in names)
        graft(front, back, 1, tmp_path / mode)
        folders[mode] = found["modes"][mode][0]
        assert f"{mode:>8}{1:>6}{folders[mode]['perplexity']['32']:>16.3f}" in printed
    assert len({tuple(figures["perplexity"].values()) for figures in folders.values()}) == 4
    for name, figures in folders.items():
        folder = str(places / name if name in ("base", "long") else tmp_path / name)
        perplexity.main([folder, "--data", str(places / "text.txt"), *CALL, "--json", str(tmp_path / "f.json")])
        written = json.loads((tmp_path / "f.json").read_text())
        assert figures["perplexity"] == pytest.approx(written["lengths"], rel=1e-6)
        if name != "base":
            assert figures["perplexity_scope_length"] == pytest.approx(written["lengths_scope_length"], rel=1e-6)
    call = [str(tmp_path / "L-Front"), "--lengths", "300", "--depths", "2", "--trials", "1", "--device", "cpu"]
    needle.main([*call, "--json", str(tmp_path / "f.json")])
    mean = json.loads((tmp_path / "f.json").read_text())["mean"]
    assert folders["L-Front"]["passkey"] == {"300": mean}


def test_ends_are_not_the_models_themselves(places):
    """At depths 0 and N all layers come from one model; the embedding, or norm and head, from the other."""
    found = sweep(places, "--depths", str(N), "0")
    assert [row["depth"] for row in found["modes"]["L-Front"]] == [0, N]
    (base, _), (long, _) = (load_model(places / name) for name in ("base", "long"))
    with torch.no_grad():
        base.norm.weight.copy_(long.norm.weight)
        base.output.weight.copy_(long.output.weight)
    graft_rows = found["modes"]["B-Front"]
    documents = [torch.tensor(list((places / "text.txt").read_bytes()))]
    config = load_model(places / "base")[1]
    by_hand = perplexity_by_length(base, config, documents, [32, 96], Windows(3))["lengths"]
    assert graft_rows[1]["perplexity"] == pytest.approx(by_hand, rel=1e-6)
    assert graft_rows[0]["perplexity"] != pytest.approx(found["plain"]["long"]["perplexity"], rel=1e-3)


def test_a_model_with_itself_is_a_flat_line(places):
    found = sweep(places, "--depths", "0", "2", long="base")
    for rows in found["modes"].values():
        for row in rows:
            assert row["perplexity"] == pytest.approx(found["plain"]["base"]["perplexity"], rel=1e-6)


def test_what_is_refused(places, capsys):
    for name, seed in (("tied", 1), ("other", 2)):
        write(places / name, shape=TIED, seed=seed)
        BytesTokenizer().save(places / name)
    with pytest.raises(SystemExit, match="the two embeddings differ"):
        sweep(places, base="tied", long="other")
    found = sweep(places, "--depths", "1", "--untie", base="tied", long="other")
    assert found["untie"]
    with pytest.raises(SystemExit, match="--depths 9: the models have 4 layers"):
        sweep(places, "--depths", "9")
    with pytest.raises(SystemExit):
        sweep(places, "--passkey-length", "300")
    assert "--passkey-length needs --passkey" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llama_places(places):
    """A base with plain RoPE, and a long model whose RoPE is scaled as Llama 3.1's."""
    write(places / "short", Position(rotary=Rope(theta=500.0)), length=32, seed=1)
    scaled = Llama3Rope(theta=500.0, factor=8.0, original_length=32)
    write(places / "scaled", Position(rotary=scaled), length=96, seed=2)
    for name in ("short", "scaled"):
        BytesTokenizer().save(places / name)
    return places


def of_directory(places, folder, *options):
    target = places / "perplexity.json"
    perplexity.main([str(folder), "--data", str(places / "text.txt"), *CALL, *options, "--json", str(target)])
    return pytest.approx(json.loads(target.read_text())["lengths"], rel=1e-6)


def test_one_rope_for_all_layers(llama_places, tmp_path):
    """Figures of the directories that farsight graft --rope writes; the base's are those of --extend llama3:8."""
    base, long = llama_places / "short", llama_places / "scaled"
    found = sweep(llama_places, "--depths", "1", "--rope", "long", base="short", long="scaled")
    graft(long, base, 1, tmp_path / "g", rope=long)
    assert found["modes"]["L-Front"][0]["perplexity"] == of_directory(llama_places, tmp_path / "g")
    assert found["plain"]["base"]["perplexity"] == of_directory(llama_places, base, "--extend", "llama3:8")
    assert found["plain"]["long"]["perplexity"] == of_directory(llama_places, long)
    own = sweep(llama_places, "--depths", "1", base="short", long="scaled")
    assert (found["rope"], own["rope"]) == ("long", None)
    assert own["modes"]["L-Front"][0]["perplexity"] != pytest.approx(
        found["modes"]["L-Front"][0]["perplexity"], rel=1e-3
    )


def test_the_base_alone_is_extended_where_the_long_model_is_scaled(llama_places, capsys):
    base, long = llama_places / "short", llama_places / "scaled"
    found = sweep(llama_places, "--depths", "2", "--extend", "llama3:8", base="short", long="scaled")
    assert f"--extend llama3:8 scales the layers of {base} alone" in capsys.readouterr().out
    assert found["plain"]["base"]["perplexity"] == of_directory(llama_places, base, "--extend", "llama3:8")
    assert found["plain"]["long"]["perplexity"] == of_directory(llama_places, long)
    # This base's scaling is the long model's: all layers have it.
    same = sweep(llama_places, "--depths", "2", "--rope", "long", base="short", long="scaled")
    assert found["modes"]["B-Front"][0]["perplexity"] == pytest.approx(
        same["modes"]["B-Front"][0]["perplexity"], rel=1e-6
    )
    with pytest.raises(SystemExit, match="--extend yarn:8 does nothing here: --rope long gives all layers"):
        sweep(llama_places, "--depths", "2", "--extend", "yarn:8", "--rope", "long", base="short", long="scaled")
