"""Every tool of analysis/ on a directory written by `transformers`, and the page and CSV files of their results."""

import csv
import json
import shlex

import pytest

from farsight.analysis.graft_sweep import __main__ as graft_sweep
from farsight.checkpoints.graft.__main__ import main as graft
from farsight.configs.schema import Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.reports.collect import collect_results
from farsight.reports.inside import main
from farsight.reports.sections.analyses import ANALYSES
from farsight.training.runs import find_models
from tests.checkpoints.test_convert import write_with_transformers
from tests.reports.test_report import Page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A plain Llama after --measure, with a sweep of grafts onto itself."""
    root = tmp_path_factory.mktemp("measured")
    model, data = root / "llama", root / "text.txt"
    write_with_transformers(model, "default", tied=False)
    load_tokenizer(Tokenizer(kind="bytes")).save(model)
    data.write_text("".join(f"{i} times {i} is {i * i}, and " for i in range(120)))
    (model / "analysis").mkdir()
    sweep = ["--base", str(model), "--long", str(model), "--data", str(data), "--lengths", "32", "--windows", "2"]
    graft_sweep.main([*sweep, "--json", str(model / "analysis" / "graft_sweep.json")])
    options = ["--measure", "--data", str(data), "--out", str(root / "page.html"), "--csv", str(root / "csv")]
    main([str(model), *options])
    return root


def result(root, kind):
    return json.loads((root / "llama" / "analysis" / f"{kind}.json").read_text())


def rows(root, name):
    with (root / "csv" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_tool_measured_and_is_on_the_page(measured):
    page = Page((measured / "page.html").read_text(encoding="utf-8"))
    for tool in ANALYSES:
        found = result(measured, tool.kind)
        assert found["tool"] == f"analysis.{tool.kind}"
        if tool.kind == "graft_sweep":  # of two models
            continue
        assert found["model"] == str(measured / "llama")
    said = " ".join(page.texts)
    assert "Not measured" not in said
    for heading in (
        "Plasticity",
        "Geometry of queries and keys",
        "Layer sensitivity",
        "One layer disturbed",
        "Position probes",
        "Order awareness",
        "Grafts",
    ):
        assert heading in said
    assert not [tag for tag, _ in page.tags if tag == "script"]
    glance = dict(page.rows[1:12])  # before the other tables
    assert glance["plasticity"] == f"{result(measured, 'plasticity')['ap_overall']:.3f}"
    assert glance["δ with |ρ|"] == f"{result(measured, 'layers')['spearman_absolute']:.3f}"
    assert glance["order horizon"] == f"{result(measured, 'order_awareness')['horizon']:,}"
    best = min(layer["error"] for layer in result(measured, "probes")["layers"])
    assert glance["position error"] == f"{best:.1f}"


def test_csv_has_what_the_tools_wrote(measured):
    geometry, plasticity = result(measured, "geometry"), result(measured, "plasticity")
    heads = {(int(row["layer"]), int(row["head"])): row for row in rows(measured, "heads")}
    assert len(heads) == len(geometry["heads"]) == 8
    for one in geometry["heads"]:
        row = heads[one["layer"], one["head"]]
        assert float(row["bias_strength"]) == one["bias_strength"]
        assert row["class"] == one["class"]
    for one in plasticity["heads"]:
        written = heads[one["layer"], one["head"]]["ap_drop"]
        assert written == ("" if one["ap_drop"] is None else str(one["ap_drop"]))
    layers = {int(row["layer"]): row for row in rows(measured, "layers")}
    assert [float(layers[n]["delta"]) for n in range(2)] == result(measured, "layers")["delta"]
    assert [float(layers[n]["rho"]) for n in range(2)] == result(measured, "layers")["rho"]
    masked = result(measured, "layer_probes")["layers"]
    assert [float(layers[n]["mask_perplexity"]) for n in range(2)] == [one["perplexity"] for one in masked]
    probes = result(measured, "probes")["layers"]
    assert [float(layers[n]["position_error"]) for n in (-1, 0, 1)] == [one["error"] for one in probes]
    assert [float(row["position"]) for row in rows(measured, "positions")] == plasticity["positions"]
    spans = result(measured, "order_awareness")["spans"]
    assert [int(row["tokens"]) for row in rows(measured, "order")] == [span["tokens"] for span in spans]
    sweep = result(measured, "graft_sweep")
    assert len(rows(measured, "grafts")) == sum(len(points) for points in sweep["modes"].values())


def test_older_files_of_plasticity_are_read(measured, tmp_path):
    """They lack the "ap_" of the aggregate figures, of the model and of its layers and heads."""
    text = (measured / "llama" / "analysis" / "plasticity.json").read_text()
    (tmp_path / "old.json").write_text(text.replace('"ap_', '"'))
    assert '"drop"' in (tmp_path / "old.json").read_text()
    (read,) = collect_results(ANALYSES, find_models([measured / "llama"]), [tmp_path / "old.json"])[-1:]
    assert read.file == tmp_path / "old.json"
    assert read.values == json.loads(text)


def test_what_was_not_measured_is_named_with_its_command(measured, tmp_path):
    write_with_transformers(tmp_path / "m", "default", tied=False)
    load_tokenizer(Tokenizer(kind="bytes")).save(tmp_path / "m")
    main([str(tmp_path / "m"), "--out", str(tmp_path / "page.html"), "--data", str(measured / "text.txt")])
    text = " ".join(Page((tmp_path / "page.html").read_text(encoding="utf-8")).texts)
    (model,) = find_models([tmp_path / "m"])
    measurable = [tool for tool in ANALYSES if tool.measured]
    assert len(measurable) == 6
    for tool in measurable:
        command = tool.command_line(model, [measured / "text.txt"])
        assert command in text
        # The options of --measure, which ran.
        ran = tool.arguments_for(model, [measured / "text.txt"])
        words = shlex.split(command)
        assert words[words.index("farsight") + 1 :] == [tool.command, *ran]


def test_results_of_other_models_and_configs_are_refused(measured, tmp_path):
    write_with_transformers(tmp_path / "m", "default", tied=False)
    other = measured / "llama" / "analysis" / "geometry.json"
    with pytest.raises(SystemExit, match="no result for any model on this page"):
        main([str(tmp_path / "m"), "--out", str(tmp_path / "p.html"), "--results", str(other)])
    (tmp_path / "needle.json").write_text('{"cells": []}')
    with pytest.raises(SystemExit, match=r"not a result of farsight perplexity.*, farsight plasticity"):
        main([str(tmp_path / "m"), "--out", str(tmp_path / "p.html"), "--results", str(tmp_path / "needle.json")])
    with pytest.raises(SystemExit, match="no weights"):
        main(["configs/recipes/nano_scope.toml", "--out", str(tmp_path / "p.html")])


def test_grafts_take_one_command_too(measured, tmp_path):
    model = str(measured / "llama")
    graft(["--front", model, "--back", model, "--layers", "1", "--out", str(tmp_path / "graft")])
    assert (tmp_path / "graft" / "config.json").is_file()
