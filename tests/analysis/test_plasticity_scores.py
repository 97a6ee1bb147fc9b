"""farsight plasticity-scores against scipy, on the figures that the thesis prints and on files of our tools."""

import json

import numpy as np
import pytest
from scipy import stats

from farsight.analysis.plasticity_scores.__main__ import main
from farsight.analysis.plasticity_scores.compare import p_value, rank_p_value
from farsight.analysis.plasticity_scores.read import is_named

TABLE = {
    "Minstral-3-14B": (40.14, 0.615, 0.655, 0.587, 0.068),
    "Minstral-3-8B": (37.80, 0.608, 0.654, 0.571, 0.083),
    "Qwen-3-14B": (37.11, 0.590, 0.680, 0.519, 0.161),
    "Qwen-3-8B": (33.41, 0.597, 0.694, 0.517, 0.177),
    "Qwen-3-4B": (31.26, 0.594, 0.699, 0.512, 0.187),
    "Minstral-3-3B": (30.18, 0.622, 0.664, 0.592, 0.072),
    "Llama-3.2-3B": (15.71, 0.565, 0.686, 0.456, 0.230),
}
"""Table 6.3: LongBench-Pro, then the figures of AP."""
AP = ("ap_overall", "ap_first", "ap_last", "ap_drop")


def plasticity(name, values):
    return {"tool": "analysis.plasticity", "model": f"models/{name}", **dict(zip(AP, values, strict=True))}


@pytest.fixture
def files(tmp_path):
    """Table 6.3 as a file of farsight plasticity, and a CSV of the published scores."""
    models = {f"models/{name}": plasticity(name, row[1:]) for name, row in TABLE.items()}
    (tmp_path / "p.json").write_text(json.dumps({"models": models}))
    rows = [f"{name},{name.split('-')[0]},{row[0]}" for name, row in reversed(TABLE.items())]
    (tmp_path / "s.csv").write_text("\n".join(["model,family,longbench_pro", *rows, "Other-1B,Other,3.5"]))
    return tmp_path


def run(folder, *arguments):
    main([*arguments, "--json", str(folder / "f.json")])
    return json.loads((folder / "f.json").read_text())


def test_the_thesis_table(files, capsys):
    picture = files / "f.png"
    got = run(files, str(files / "p.json"), "--scores", str(files / "s.csv"), "--picture", str(picture))
    assert [row["name"] for row in got["models"].values()] == [*TABLE]  # the best first
    assert (got["score"], got["left_out"], got["unknown"]) == ("longbench_pro", [], ["Other-1B"])
    columns = np.array([*TABLE.values()]).T
    for key, values in zip(AP, columns[1:], strict=True):
        r, found = stats.pearsonr(values, columns[0]), got["correlations"][key]
        assert (found["pearson"], found["pearson_p"]) == pytest.approx((r.statistic, r.pvalue))
        assert found["spearman"] == pytest.approx(stats.spearmanr(values, columns[0]).statistic)
    # So few models show little: the thesis prints no p-value.
    assert got["correlations"]["ap_drop"]["pearson"] == pytest.approx(-0.675, abs=5e-4)
    assert got["correlations"]["ap_drop"]["pearson_p"] > 0.05
    assert {*got["families"]} == {"Minstral", "Qwen"}
    assert got["families"]["Qwen"]["ap_drop"]["spearman"] == pytest.approx(-1)
    assert got["families"]["Qwen"]["ap_drop"]["spearman_p"] == pytest.approx(1 / 3)  # two of six orders
    printed = capsys.readouterr().out
    assert "-0.675" in printed
    assert "scores of models without plasticity: Other-1B" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_files_beside_the_page(tmp_path):
    got = run(tmp_path, "docs/analysis/table_6_3.json", "--scores", "docs/analysis/table_6_3.csv")
    assert {row["name"]: (row["score"], *(row[key] for key in AP)) for row in got["models"].values()} == TABLE


def test_p_values_against_scipy():
    draw = np.random.default_rng(0)
    for n in (3, 4, 5, 10, 60, 400):
        x = draw.normal(size=n)
        for y in (draw.normal(size=n), x + 0.7 * draw.normal(size=n)):
            r = stats.pearsonr(x, y)
            assert p_value(r.statistic, n) == pytest.approx(r.pvalue, rel=1e-8, abs=1e-14)
            rank = stats.spearmanr(x, y)
            if n > 8:
                assert rank_p_value(x.tolist(), y.tolist()) == pytest.approx(rank.pvalue, rel=1e-8, abs=1e-14)
    for x, y in (([1.0, 2, 3, 4, 5, 6], [2.0, 1, 4, 3, 6, 5]), ([1.0, 1, 2, 3, 3], [5.0, 4, 4, 2, 1])):  # with ties
        exact = stats.permutation_test(
            (x,), lambda x, y=y: stats.spearmanr(x, y).statistic, permutation_type="pairings", n_resamples=np.inf
        )
        counted = np.mean(np.abs(exact.null_distribution) >= abs(exact.statistic) - 1e-9)
        assert rank_p_value(x, y) == pytest.approx(counted)


def test_files_of_our_tools(files):
    """Needles and harness results, of several models, of a chat model that stands for its base, and without a name."""
    cells = [
        {"length": length, "depth": depth, "accuracy": depth, "trials": 2}
        for length in (64, 128)
        for depth in (0.0, 1.0)
    ]
    needles = {
        f"/elsewhere/models/{name}": {"task": "passkey", "cells": cells, "mean": number / 9}
        for number, name in enumerate(TABLE)
    }
    (files / "n.json").write_text(json.dumps({"models": needles}))
    # Absolute paths of another place don't fit; the end of a path does.
    says = r"no name matches: plasticity is of .*; scores are of /elsewhere/models/.* --scores NAME=FILE"
    with pytest.raises(SystemExit, match=says):
        run(files, str(files / "p.json"), "--scores", str(files / "n.json"))
    relative = {path.removeprefix("/elsewhere/"): values for path, values in needles.items()}
    (files / "n.json").write_text(json.dumps({"models": relative}))
    got = run(files, str(files / "p.json"), "--scores", str(files / "n.json"), "--score", "passkey")
    assert [row["score"] for row in got["models"].values()] == sorted((n / 9 for n in range(7)), reverse=True)
    got = run(files, str(files / "p.json"), "--scores", str(files / "n.json"), "--score", "passkey@128")
    assert {row["score"] for row in got["models"].values()} == {0.5}
    assert got["correlations"]["ap_drop"] == dict.fromkeys(("pearson", "pearson_p", "spearman", "spearman_p"))
    # farsight harness, with the chat model's results for each base, and farsight external, without a model.
    arguments = []
    for number, name in enumerate([*TABLE][:4]):
        results = {task: {"value": number + at} for at, task in enumerate(("qa", "sum"))}
        chat = {"model": f"{name}-it", "results": results, "means": {"all": number}, "mean": 10 - number}
        (files / f"{number}.json").write_text(json.dumps(chat))
        arguments.append(f"{name}={files / f'{number}.json'}")
    got = run(files, str(files / "p.json"), "--scores", *arguments)
    assert (got["score"], [row["score"] for row in got["models"].values()]) == ("mean", [10, 9, 8, 7])
    assert got["left_out"] == [*TABLE][4:]
    got = run(files, str(files / "p.json"), "--scores", *arguments, "--score", "sum")
    assert [row["score"] for row in got["models"].values()] == [4, 3, 2, 1]


def test_names():
    assert is_named("runs/x/model", "/data/runs/x/model")
    assert is_named("runs/x", "/data/runs/x/model")
    assert is_named("x", "runs/x/model")
    assert is_named("/data/runs/x", "/data/runs/x/model")
    assert not is_named("/other/runs/x", "/data/runs/x")
    assert not is_named("model", "/data/runs/x/model")
    assert not is_named("y", "/data/runs/x/y/model/z")


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ("model,a\nQwen-3-8B,1\n", "1 models have plasticity and the score 'a', and a correlation needs 3"),
        ("name,a\nQwen-3-8B,1\n", 'has no column "model"'),
        ("model,a\nQwen-3-8B,high\n", "line 2: a is 'high', not a number"),
        ("model,a\nQwen-3-8B,1\nQwen-3-4B,nan\n", "line 3: a is 'nan', not a number"),
        ("model,a\nQwen-3-8B,1\nQwen-3-8B,2\n", "has a of Qwen-3-8B again"),
        ("model,a,b\nQwen-3-8B,1,2\nQwen-3-4B,1,2\n", "choose one with --score. They all have a, b"),
        ("model,a,b\nQwen-3-8B,1,\nQwen-3-4B,,2\n", "no score in common"),
    ],
)
def test_refused_csv(files, scores, words):
    (files / "s.csv").write_text(scores)
    with pytest.raises(SystemExit, match=words):
        run(files, str(files / "p.json"), "--scores", str(files / "s.csv"))


def test_refused_json(files):
    texts = {
        "nameless": {"results": {"a": {"value": 1}}},
        "other": {"model": "Qwen-3-8B"},
        "broken": {"model": "Qwen-3-8B", "results": {"a": 1}},
        "words": {"model": "Qwen-3-8B", "results": {"a": {"value": "high"}}},
        "run": {"tool": "analysis.plasticity", "model": "runs/x", "checkpoints": []},
        "bare": {"tool": "analysis.plasticity", "model": "m", **dict.fromkeys(AP)},
        "two": {"models": {name: plasticity("q", TABLE["Qwen-3-8B"][1:]) for name in ("a/q", "b/q")}},
    }
    for name, content in texts.items():
        (files / f"{name}.json").write_text(json.dumps(content))
    p, s = str(files / "p.json"), str(files / "s.csv")
    for arguments, words in (
        ([p, "--scores", str(files / "nameless.json")], "names no model: give it as NAME="),
        ([p, "--scores", str(files / "other.json")], "was not written by farsight needle, farsight harness"),
        ([p, "--scores", str(files / "broken.json")], "has a value of the wrong type"),
        ([p, "--scores", str(files / "words.json")], "has a value of the wrong type"),
        ([p, "--scores", str(files / "gone.json")], "can't be read"),
        ([p, "--scores", f"x={s}"], "a CSV file names its models itself"),
        ([str(files / "run.json"), "--scores", s], "has the checkpoints of runs/x"),
        ([str(files / "bare.json"), "--scores", s], "m lacks plasticity in the first or last 20 %"),
        ([str(files / "other.json"), "--scores", s], "was not written by farsight plasticity"),
        ([p, p, "--scores", s], "has figures of models/Minstral-3-14B again"),
        ([str(files / "two.json"), "--scores", f"q={files / 'nameless.json'}"], "which may be a/q or b/q"),
    ):
        with pytest.raises(SystemExit, match=words):
            run(files, *arguments)
