"""farsight plasticity and farsight geometry on runs, on lists of checkpoints and on several models."""

import csv
import dataclasses
import json
import re

import numpy as np
import pytest
import torch

from farsight.analysis.capture import __main__ as capture
from farsight.analysis.geometry import __main__ as geometry
from farsight.analysis.plasticity import __main__ as plasticity
from farsight.analysis.plasticity.summary import by_range, range_edges
from farsight.analysis.timeline import Timeline
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Position, Rope, Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.model.build import ModelConfig
from farsight.reports.inside import main as inside
from tests.model.test_model import SMALL, fresh_model
from tests.reports.test_report import Page, write_run

OPTIONS = ["--buckets", "8", "--per-bucket", "4", "--heads", "5", "--sequences", "12"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two models of 64 tokens; a recipe whose stages ended with one and the other; a text."""
    root = tmp_path_factory.mktemp("checkpoints")
    load_tokenizer(Tokenizer(kind="bytes")).save(root / "tokenizer")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        config = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), Position(rotary=Rope()), trained_length=64)
        weights = fresh_model(config).state_dict()
        write_model_dir(root / name, config, weights, tokenizer_dir=root / "tokenizer")
    for stage, name, start in (("short", "one", ""), ("long", "two", str(root / "recipe" / "short" / "model"))):
        write_run(root / "recipe" / stage, [5.0, 4.0], start=start, stage=True)
        (root / "recipe" / stage / "model").symlink_to(root / name)
    (root / "text.txt").write_text("Which keys does the query prefer? " * 60)
    return root


def measured(tool, models, root, tmp_path, *options):
    """The JSON of a tool on some of the fixture's models."""
    out = tmp_path / "figures.json"
    own = ["--draws", "40"] if tool is plasticity else []
    paths = [str(root / model) for model in models]
    tool.main([*paths, "--data", str(root / "text.txt"), *OPTIONS, *own, *options, "--json", str(out)])
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def alone(root, tmp_path_factory):
    """The figures of each tool for each model by itself."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        tool: {name: measured(tool, [name], root, folder) for name in ("one", "two")} for tool in (plasticity, geometry)
    }


@pytest.mark.slow
def test_a_row_of_a_run_is_its_model(root, alone, tmp_path):
    """In both tools, which also agree with each other on what bias strength consists of."""
    for tool, picture in ((plasticity, "p.png"), (geometry, "g.svg")):
        figures = measured(tool, ["recipe"], root, tmp_path, "--picture", str(tmp_path / picture))
        assert (tmp_path / picture).stat().st_size > 10_000
        assert (figures["tool"], figures["model"]) == (f"analysis.{tool.__name__.split('.')[-2]}", str(root / "recipe"))
        assert (figures["length"], figures["buckets"], figures["bos"], figures["dtype"]) == (None, 8, False, "float32")
        rows = figures["checkpoints"]
        assert [(row["stage"], row["step"], row["tokens"], row["length"]) for row in rows] == [
            ("short", 2, 2000.0, 64),
            ("long", 2, 4000.0, 64),
        ]
        for row, own, other in zip(rows, alone[tool].values(), alone[geometry].values(), strict=True):
            if tool is geometry:
                assert {key: row[key] for key in ("model_summary", "layers", "heads")} == {
                    key: own[key] for key in ("model_summary", "layers", "heads")
                }
                continue
            for key in ("ap_overall", "ap_first", "ap_last", "ap_drop", "profile", "positions", "counted", "quintiles"):
                assert row[key] == own[key], key
            names = {"query_mean": "query_mean", "key_slope": "abs_key_slope", "separation": "separation"}
            for key, name in {**names, "bias_strength": "bias_strength", "key_correlation": "abs_r_k"}.items():
                assert row[key] == pytest.approx(other["model_summary"][name], rel=1e-12), key
        # The same models as a list.
        listed = measured(tool, ["one", "two"], root, tmp_path, "--checkpoints", "--picture", str(tmp_path / "l.png"))
        assert listed["model"] == str(root / "two")
        told = [{"stage": name, "step": None, "tokens": None, "path": str(root / name)} for name in ("one", "two")]
        assert listed["checkpoints"] == [row | own for row, own in zip(rows, told, strict=True)]


@pytest.mark.slow
def test_several_models_side_by_side(root, alone, tmp_path, capsys):
    capture.main([str(root / "two"), "--data", str(root / "text.txt"), *OPTIONS, "--out", str(tmp_path / "captured")])
    for tool in (plasticity, geometry):
        capsys.readouterr()
        both = measured(tool, ["one", "two"], root, tmp_path, "--picture", str(tmp_path / "both.png"))
        assert both == {"models": {str(root / name): figures for name, figures in alone[tool].items()}}
        assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
        printed = capsys.readouterr().out
        if tool is plasticity:
            for name, figures in alone[tool].items():
                shown = [f"{value:.3f}" for value in (*figures["quintiles"], figures["ap_overall"], figures["ap_drop"])]
                assert re.search(rf"^{name} +64 +" + " +".join(map(re.escape, shown)), printed, re.MULTILINE)
            continue
        # Figure A.3: over the heads of both, and within each.
        pairs = [
            np.array([(head["bias_strength"], head["separation"]) for head in figures["heads"]])
            for figures in alone[tool].values()
        ]
        over, one, two = (np.corrcoef(of, rowvar=False)[0, 1] for of in (np.concatenate(pairs), *pairs))
        assert f"{over:+.2f} over all; one {one:+.2f}, two {two:+.2f}" in printed
    geometry.main([str(tmp_path / "captured"), "--json", str(tmp_path / "c.json")])
    assert json.loads((tmp_path / "c.json").read_text())["heads"] == alone[geometry]["two"]["heads"]


def test_ranges_of_positions():
    """The columns of Table A.1, and means over buckets found by a loop over their middles."""
    rows = [{"length": 32768, "profile": [None] * 64}, {"length": 65536, "profile": [None, *np.arange(1.0, 64)]}]
    edges = range_edges(rows)
    assert edges == [0, 1024, 2048, 4096, 8192, 16384, 32768, 49152, 65536]
    found = by_range(rows[1], edges)
    for low, high, value in zip(edges[:-1], edges[1:], found, strict=True):
        inside = [bucket for bucket in range(1, 64) if low <= bucket * 1024 + 512 < high]
        assert value == (np.mean(inside) if inside else None)
    assert by_range(rows[0], edges) == [None] * 8
    # Stages of 4K, 32K and 64K in 16 buckets; the second of the shortest has its middle at 384.
    stages = [{"length": length, "profile": [None] * 16} for length in (4096, 32768, 65536)]
    assert range_edges(stages)[:3] == [0, 512, 1024]
    assert range_edges([{"length": 64, "profile": [None] * 8}]) == [0, 16, 32, 48, 64]


def test_lines_are_broken_where_the_length_changes():
    rows = [
        {"stage": name, "step": None, "tokens": None, "length": length}
        for name, length in zip("abcd", (4, 4, 8, 8), strict=True)
    ]
    assert [[place for place, _ in stage] for stage in Timeline(rows).stages] == [[0, 1], [2, 3]]
    trained = [{"stage": "s" if at < 3 else "t", "step": at, "tokens": at * 2e6, "length": 4} for at in range(1, 5)]
    assert [[place for place, _ in stage] for stage in Timeline(trained).stages] == [[2.0, 4.0], [6.0, 8.0]]
    assert Timeline(trained).label.startswith("million tokens")


@pytest.mark.slow
def test_the_page_and_its_csv(root, tmp_path):
    """Runs' results have tables of their own, and leave the figures of models out."""
    files = []
    for tool in (plasticity, geometry):
        measured(tool, ["recipe"], root, tmp_path)
        files.append(tmp_path / f"{tool.__name__.split('.')[-2]}.json")
        (tmp_path / "figures.json").rename(files[-1])
    inside(
        [str(root / "recipe"), "--results", *map(str, files), "--out", str(tmp_path / "p.html"), "--csv", str(tmp_path)]
    )
    page = Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert " ".join(page.texts).count("While it trained") == 2
    rows = [json.loads(file.read_text())["checkpoints"] for file in files]
    shown = [row for row in page.rows if row[0] == "long, step 2"]
    assert [row[1] for row in shown] == [
        f"{rows[0][1]['bias_strength']:.3g}",
        f"{rows[1][1]['model_summary']['bias_strength']:.3g}",
    ]
    assert shown[1][4] == f"{rows[1][1]['model_summary']['separation']:.3f}"
    assert dict(row[:2] for row in page.rows if len(row) == 2)["bias × context"] == "–"
    with (tmp_path / "checkpoints.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["measured"], row["stage"]) for row in written] == [
        ("plasticity", "short"), ("plasticity", "long"), ("geometry", "short"), ("geometry", "long"),
    ]  # fmt: skip
    assert float(written[1]["ap_drop"]) == rows[0][1]["ap_drop"]
    assert float(written[3]["query_mean"]) == rows[1][1]["model_summary"]["query_mean"]


@pytest.mark.parametrize("tool", [plasticity, geometry])
@pytest.mark.parametrize(
    ("models", "options", "words"),
    [
        (
            ["one", "recipe"],
            [],
            r"recipe is a run folder.*and .*one is one model: name only models, such as .*recipe/model",
        ),
        (["one", "two", "one"], [], "one is named twice"),
        (["recipe"], ["--checkpoints"], "--checkpoints: .*recipe is a run folder, whose checkpoints are found without"),
    ],
)
def test_refused(root, tmp_path, tool, models, options, words):
    with pytest.raises(SystemExit, match=words):
        measured(tool, models, root, tmp_path, *options)


def test_one_file_of_needles_is_for_one_model(root, tmp_path):
    with pytest.raises(SystemExit, match="--needle is for one model: measure each"):
        measured(plasticity, ["one", "two"], root, tmp_path, "--needle", str(tmp_path / "needle.json"))
