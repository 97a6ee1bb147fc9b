"""The report page: it is self-contained, shows every figure, and draws each where it belongs."""

import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Architecture, JobConfig, NoRotary, Position, Scope, Tokenizer
from farsight.configs.typed import to_toml
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError
from farsight.evals.needle import __main__ as needle
from farsight.model.build import ModelConfig, build_model
from farsight.reports import tools
from farsight.reports.build import collect
from farsight.reports.report import main
from farsight.reports.results import line_numbers, names, of_kind
from farsight.reports.sections.training import thin
from farsight.training.metrics_file import evaluation_points
from farsight.training.runs import find_models

ARCHITECTURE = Architecture(vocab_size=320, dim=32, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=48)
HOSTILE = "<script>alert('x')&amp;\"y"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Parses a page into its texts and tags; a tag that does not close is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.texts, self.titles = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def write_model(folder, position=None, trained_length=64):
    config = ModelConfig(ARCHITECTURE, position or Position(), trained_length)
    model = build_model(config)
    model.init_weights()
    load_tokenizer(Tokenizer(kind="bytes")).save(folder.with_name("tokenizer"))
    write_model_dir(folder, config, model.state_dict(), tokenizer_dir=folder.with_name("tokenizer"))
    return folder


def write_run(folder, losses, start="", tokens=1000, stage=False):
    """A run folder with a logged step for each loss, and validations before and after."""
    config = JobConfig(architecture=ARCHITECTURE)
    config.training.seq_len, config.training.steps = 64, len(losses)
    config.lr_scheduler.warmup_steps = 0
    config.job.dump_folder, config.checkpoint.initial_load_path = str(folder), start or None
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    if stage:
        (folder / "stage.toml").write_text(to_toml(config))
    rows = [{"step": 0, "val_loss": losses[0] + 0.5}]
    for step, loss in enumerate(losses, start=1):
        rows.append({"step": step, "loss": loss, "tokens": step * tokens, "tokens_per_second": 100.0 * step})
    rows.append({"step": len(losses), "val_loss": losses[-1] + 0.25})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "lo')  # cut off while it was written
    return folder


def perplexities(model, seed=0):
    draw = random.Random(seed)
    lengths = {str(length): draw.uniform(5, 900) for length in (32, 64, 128, 256)}
    grown = {length: value * draw.uniform(0.5, 2) for length, value in lengths.items()}
    return {
        "model": str(model), "lengths": lengths, "lengths_scope_length": grown, "tokens": 1234, "trained_length": 64,
        "buckets": {length: [draw.uniform(5, 900) for _ in range(4)] for length in ("64", "256")}, "data": ["book.txt"],
        "log_buckets": {"256": {"edges": [1, 2, 16, 64, 256], "perplexity": [draw.uniform(5, 900) for _ in range(4)]}},
    }  # fmt: skip


def needles(model, seed=0, task="passkey"):
    draw = random.Random(seed)
    depths = (0.0, 1 / 3, 1.0) if task == "passkey" else (None,)

    def cells():
        return [
            {"length": n, "depth": d, "accuracy": draw.random(), "trials": 7} for n in (32, 64, 128) for d in depths
        ]

    return {
        "model": str(model), "task": task, "trained_length": 64, "cells": cells(), "mean": draw.random(),
        "cells_scope_length": cells(), "mean_scope_length": draw.random(),
    }  # fmt: skip


def harness(model, seed=0):
    draw = random.Random(seed)
    tasks = {t: {"value": draw.random(), "stderr": 0.0123, "metric": "acc,none", "shots": 5, "n": 99} for t in "abc"}
    return {"model": str(model), "results": tasks, "means": {"group": draw.random()}, "mean": draw.random()}


def generated(model):
    usage = {"tokens_read": 4096, "seconds_reading": 2.0, "tokens_written": 33, "seconds_writing": 3.0}
    return {"model": str(model), "completions": [], "usage": {**usage, "cache_bytes": 3072, "dense_cache_bytes": 12288}}


@pytest.fixture
def two_models(tmp_path):
    """A model with a hostile name and every kind of result, and a recipe's folder with two stages."""
    model = write_model(tmp_path / HOSTILE / "model", Position(rotary=NoRotary(), heads=Scope()))
    (model / "evals").mkdir()
    found = [perplexities(model), needles(model), needles(model, 1, "common_words"), harness(model), generated(model)]
    for number, values in enumerate(found):
        (model / "evals" / f"{number}.json").write_text(json.dumps(values))
    root = tmp_path / "recipe"
    write_run(root / "z-first", [6.0, 5.0, 4.0], stage=True)
    write_run(root / "a-second", [4.5, 3.5], start=str(root / "z-first" / "model"), stage=True)
    write_model(root / "a-second" / "model")
    return model, root, found


def make(tmp_path, *arguments):
    main([*map(str, arguments), "--out", str(tmp_path / "report.html")])
    return (tmp_path / "report.html").read_text()


def test_the_page_stands_alone_and_escapes_names(two_models, tmp_path):
    text = make(tmp_path, *two_models[:2])
    page = Page(text)  # closes what it opens
    assert text.startswith("<!DOCTYPE html>")
    assert any(HOSTILE in said for said in page.texts)
    assert "evals.perplexity" in page.texts  # in a tag of its own
    assert not any(mark in said for said in page.texts for mark in ("<code", "<small", "<span", "`"))
    assert not {"script", "iframe", "object", "embed", "img", "base"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href", "action", "srcset", "xlink:href"):
            assert attributes.get(name) in (None, "data:,")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace(str(tmp_path), ""))
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert "default-src 'none'" in policy


def test_every_figure_of_the_files_is_in_a_table(two_models, tmp_path):
    page = Page(make(tmp_path, *two_models[:2]))
    cells = {cell for row in page.rows for cell in row}
    perplexity, passkey, words, scores, _ = two_models[2]
    for key in ("lengths", "lengths_scope_length"):
        assert {f"{value:,.3f}" for value in perplexity[key].values()} <= cells
    assert {f"{value:,.3f}" for values in perplexity["buckets"].values() for value in values} <= cells
    by_ratio = [f"{value:,.3f}" for value in perplexity["log_buckets"]["256"]["perplexity"]]
    assert [[part, figure] for part, figure in zip(["1", "2–15", "16–63", "64–255"], by_ratio, strict=True)] == [
        row for row in page.rows if row[1] in by_ratio
    ]
    assert any(title.endswith(f": {by_ratio[1]}\nmean of 2–15") for title in page.titles)
    for values in (passkey, words):
        for key in ("cells", "cells_scope_length"):
            assert {f"{100 * cell['accuracy']:.1f}" for cell in values[key]} <= cells
    said = " ".join(page.texts)
    for mean in (passkey["mean"], passkey["mean_scope_length"], words["mean"], words["mean_scope_length"]):
        assert f"{100 * mean:.1f}" in said
    for task, entry in scores["results"].items():
        row = next(row for row in page.rows if row[0].startswith(f"{task} ("))
        assert row[1] == f"{entry['value']:.4g} ± 0.012"
        assert "acc,none" in row[0]
        assert "5 shots" in row[0]
    assert ["mean of group", f"{scores['means']['group']:.4g}"] in page.rows
    assert ["mean of all", f"{scores['mean']:.4g}"] in page.rows
    assert [HOSTILE, "4,096", "2,048.0", "33", "11.0", "3 KiB 25.0 %"] in page.rows


def test_stages_are_joined_in_the_order_they_were_trained(two_models, tmp_path):
    root = two_models[1]
    (model,) = find_models([root])
    assert [run.name for run in model.runs] == ["z-first", "a-second"]
    assert model.weights == root / "a-second" / "model"
    page = Page(make(tmp_path, root, "--json", tmp_path / "f.json"))
    assert ["recipe, z-first", "64", "3", "3,000", "6.000 → 4.000", "6.500 → 4.250", "250"] in page.rows
    assert ["recipe, a-second", "64", "2", "2,000", "4.500 → 3.500", "5.000 → 3.750", "200"] in page.rows
    held_out = [title for title in page.titles if "held out" in title]
    assert [re.findall(r"[\d.]+", title) for title in held_out] == [
        ["0", "6.5000"], ["0.003", "4.2500"], ["0.003", "5.0000"], ["0.005", "3.7500"],
    ]  # fmt: skip
    assert json.loads((tmp_path / "f.json").read_text())["models"][str(root)]["tokens"] == 5000


def test_a_long_curve_is_drawn_by_means():
    points = [(float(step), draw) for step, draw in enumerate(random.Random(0).choices(range(100), k=2300))]
    drawn, together = thin(points)
    assert (len(drawn), together) == (767, 3)
    assert drawn[5] == (16.0, pytest.approx(sum(points[step][1] for step in (15, 16, 17)) / 3))
    assert drawn[-1] == (2298.5, pytest.approx((points[2298][1] + points[2299][1]) / 2))
    assert thin(points[:1000]) == (points[:1000], 1)


def test_a_run_that_diverged_has_a_page(tmp_path):
    page = Page(make(tmp_path, write_run(tmp_path / "run", [6.0, math.nan, math.inf, 5.0])))
    assert [row[:4] for row in page.rows if row[0] == "run"][-1] == ["run", "64", "4", "4,000"]
    assert len([title for title in page.titles if "held out" in title]) == 2


def test_what_is_missing_is_named_with_its_command(two_models, tmp_path):
    model, root, _ = two_models
    said = Page(make(tmp_path, model, root, "--lengths", 128)).texts
    commands = [text for text in said if text.startswith("mkdir")]
    weights = root / "a-second" / "model"
    assert commands == [
        f"mkdir -p {weights}/evals && farsight {kind} {weights} {options} --json {weights}/evals/{kind}.json"
        for kind, options in (
            ("perplexity", "--data FILE --lengths 128 --buckets 8"),
            ("needle", "--lengths 128 --depths 10"),
            ("generate", "--prompt-file FILE"),
            ("harness", "--tasks scope_nlu"),
        )
    ]
    assert any("losses of <script>" in text for text in said)


def test_evaluations_on_the_way_are_drawn_by_tokens(tmp_path):
    """A step of the first stage is 1,000 tokens; the second stage begins at 3,000. What arrives late is in the order of steps."""
    root = tmp_path / "recipe"
    write_run(root / "z-first", [6.0, 5.0, 4.0], stage=True)
    write_run(root / "a-second", [4.5, 3.5], start=str(root / "z-first" / "model"), stage=True)
    write_model(root / "a-second" / "model")
    assert not any("Evaluations on the way" in said for said in Page(make(tmp_path, root)).texts)
    for stage, found in {"z-first": {3: 0.5, 2: 0.25}, "a-second": {1: 0.75}}.items():
        rows = [
            {"step": s, "evaluation": "needle", "needle.mean": v, "evaluation_seconds": 9.0} for s, v in found.items()
        ]
        text = (root / stage / "metrics.jsonl").read_text().rpartition("\n")[0]
        (root / stage / "metrics.jsonl").write_text("".join(f"{row}\n" for row in [text, *map(json.dumps, rows)]))
    assert evaluation_points(root / "z-first") == {"needle.mean": [(2000, 0.25), (3000, 0.5)]}
    page = Page(make(tmp_path, root))
    assert any("Evaluations on the way" in said for said in page.texts)
    rows = page.rows[page.rows.index(["million tokens", "needle.mean"]) :]
    assert rows[1:4] == [["0.002", "0.25"], ["0.003", "0.5"], ["0.004", "0.75"]]


def test_measure_runs_the_tools_for_what_is_missing(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", trained_length=256)
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i % 97}\n" for i in range(100)))
    asked = []

    def fake(arguments):
        real([*arguments, "--show"])  # takes these options, and stops before it measures
        asked.append(arguments)
        (model / "evals" / "needle.json").write_text(json.dumps(needles(model)))

    real = needle.main
    monkeypatch.setattr(needle, "main", fake)
    arguments = [model, "--measure", "--data", tmp_path / "text.txt", "--lengths", 256, 512]
    page = Page(make(tmp_path, *arguments))
    figures = json.loads((model / "evals" / "perplexity.json").read_text())
    assert list(figures["lengths"]) == ["256", "512"]
    assert {f"{value:,.3f}" for value in figures["lengths"].values()} <= {cell for row in page.rows for cell in row}
    assert asked == [
        [str(model), "--lengths", "256", "512", "--depths", "10", "--json", str(model / "evals" / "needle.json")]
    ]
    monkeypatch.setattr(tools, "run", lambda name, arguments: pytest.fail(f"ran {name} again"))
    make(tmp_path, *arguments)


def test_a_tool_that_refuses_does_not_cost_the_page(tmp_path, capsys):
    """The text is too short for the length: perplexity and needles are listed as missing."""
    model = write_model(tmp_path / "model", trained_length=256)
    (tmp_path / "text.txt").write_text("short\n")
    page = make(tmp_path, model, "--measure", "--data", tmp_path / "text.txt", "--lengths", 20)
    said = capsys.readouterr().err.splitlines()
    for tool, reason in (
        ("perplexity", "length 20: the longest document has 6 tokens; name a longer text."),
        ("needle", "--lengths 20: 20 tokens are too few: without any haystack the prompt and its answer take 165."),
    ):
        [place] = [
            i for i, line in enumerate(said) if line.endswith(f": {tool} was not measured, for the reason above.")
        ]
        assert said[place - 1] == reason
    assert page.count("Not measured") >= 2


def test_a_glance_shows_what_compares(tmp_path):
    """It shows no figures of extended or quantized readings or sliding windows, and names tasks other than passkey."""
    model = write_model(tmp_path / "model")
    (model / "evals").mkdir()

    def glance(**files):
        for name, values in files.items():
            (model / f"evals/{name}.json").write_text(json.dumps(values))
        rows = Page(make(tmp_path, model)).rows
        return dict(rows[1:8])  # before the other tables

    measured = {"lengths": {"64": 7.5}, "lengths_scope_length": {}}
    page = glance(
        a={**perplexities(model), **measured, "stride": 16}, b={**perplexities(model), **measured, "extend": "ntk:factor=2"},
        c={**needles(model), "mean": 0.875, "extend": "ntk:factor=2"}, g={**needles(model), "mean": 0.75, "quantization": "nf4"},
    )  # fmt: skip
    assert (page["perplexity"], page["needles"]) == ("–", "–")
    page = glance(d={**perplexities(model), **measured}, e={**needles(model, 1, "common_words"), "mean": 0.25})
    assert (page["perplexity"], page["needles"]) == ("7.500 at 64", "25.0 % (common_words)")
    assert glance(f={**needles(model), "mean": 0.5})["needles"] == "50.0 %"


# Whose a result is


def test_results_go_to_the_models_that_they_name(tmp_path, monkeypatch):
    a, b = (write_model(tmp_path / name / "model") for name in "ab")
    models = find_models([a, b])
    both = {"models": {str(a): perplexities(a), str(b): perplexities(b, 1), "elsewhere/c": perplexities("c", 2)}}
    (tmp_path / "both.json").write_text(json.dumps(both))
    found = collect(models, [tmp_path / "both.json"])
    assert [(r.model.name, r.values["lengths"]) for r in found] == [
        ("a", both["models"][str(a)]["lengths"]), ("b", both["models"][str(b)]["lengths"]),
    ]  # fmt: skip
    # Written from another folder, by a relative path.
    (tmp_path / "one.json").write_text(json.dumps(needles("b/model")))
    (result,) = collect(models, [tmp_path / "one.json"])
    assert (result.model.name, result.kind) == ("b", "needle")
    # A file that names no model belongs to the one that it lies with.
    (a / "evals").mkdir()
    (a / "evals" / "old.json").write_text(json.dumps({"lengths": {"64": 3.0}, "tokens": 1, "trained_length": 64}))
    assert [r.model.name for r in of_kind(collect(models, []), "perplexity")] == ["a"]
    found = of_kind(collect(models, [tmp_path / "both.json"]), "perplexity")
    assert names(found) == ["a, old", "a, both", "b"]
    assert line_numbers(found) == [0, 2, 1]


def test_a_relative_path_is_of_the_checkout_that_its_file_lies_in(tmp_path, monkeypatch):
    here, there = (write_model(tmp_path / checkout / "runs/a") for checkout in ("here", "there"))
    for seed, folder in enumerate((here, there)):
        (folder / "evals").mkdir()
        (folder / "evals/perplexity.json").write_text(json.dumps(perplexities("runs/a", seed)))
    (tmp_path / "named.json").write_text(json.dumps(perplexities("runs/a", 2)))
    models = find_models([here, there])
    found = collect(models, [])
    assert [(r.model.path, r.file.is_relative_to(r.model.path)) for r in found] == [(here, True), (there, True)]
    with pytest.raises(ConfigError, match=re.escape("name the model by its absolute path")):
        collect(models, [tmp_path / "named.json"])
    # From the first checkout the path is that model's, as the tool that wrote it had it.
    monkeypatch.chdir(tmp_path / "here")
    assert [r.model.path for r in collect(models, [tmp_path / "named.json"]) if r.file.name == "named.json"] == [here]


def test_a_result_of_a_model_that_is_not_on_the_page_is_not_shown(tmp_path, monkeypatch):
    model, base = (write_model(tmp_path / "runs" / name / "model") for name in ("a", "base"))
    (model / "evals").mkdir()
    (model / "evals/base.json").write_text(json.dumps(perplexities("runs/base/model")))
    monkeypatch.chdir(tmp_path)
    assert collect(find_models([model]), []) == []
    shutil.rmtree(base)  # then it may be the model's own, from before it was moved
    assert len(collect(find_models([model]), [])) == 1


@pytest.mark.parametrize(
    "content",
    [
        {"lengths": {"64": 2.0}, "model": {"name": "x"}}, {"results": {"a": 0.5}}, [1], {"models": 3}, {"lengths": {}},
        {"lengths": {"x": 2.0}}, {"lengths": {"64": "x"}}, {"cells": [], "mean": 0}, {"cells": [3], "mean": 0},
        {"cells": [{"length": 1, "depth": 0.5, "accuracy": None}], "mean": 0}, {"results": {"a": {"value": "x"}}},
        {"usage": {"tokens_read": 3}}, {"results": {}},
    ],
)  # fmt: skip
def test_other_json_in_a_model_s_folder_does_no_harm(content, tmp_path):
    model = write_model(tmp_path / "model")
    (model / "evals").mkdir()
    (model / "evals/odd.json").write_text(json.dumps(content))
    assert "At a glance" in make(tmp_path, model)


def test_a_model_read_in_several_ways_has_a_name_for_each(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "evals").mkdir()
    ways = [{}, {"extend": "yarn:factor=4"}, {"quantization": "nf4"}]
    for number, way in enumerate(ways):
        (model / "evals" / f"{number}.json").write_text(json.dumps({**needles(model), **way}))
    found = collect(find_models([model]), [])
    assert line_numbers(found) == [0, 1, 2]
    assert names(found) == [tmp_path.name, f"{tmp_path.name}, yarn:factor=4", f"{tmp_path.name}, nf4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"lengths": {"64": 2.0}}), "has no result for any model on this page. It names no path"),
        (json.dumps({"lengths": {"64": 2.0}, "model": "other/model"}), "It names other/model; the page has"),
        (json.dumps({"rows": []}), "is not a result of farsight perplexity"),
        ("{", "is not valid JSON"),
    ],
)
def test_results_of_no_model_are_refused(content, message, tmp_path):
    model = write_model(tmp_path / "mine" / "model")
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        collect(find_models([model]), [tmp_path / "f.json"])


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="does not exist"):
        make(tmp_path, tmp_path / "nothing")
    with pytest.raises(SystemExit, match=r"no config\.json\. Nor is it a run folder"):
        make(tmp_path, tmp_path)
    model = write_model(tmp_path / "model")
    with pytest.raises(SystemExit, match="named twice"):
        make(tmp_path, model, tmp_path / "model" / ".")


def test_files_that_cannot_be_written_are_told_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("farsight.training.runs.find_models", lambda *_: pytest.fail("work began"))
    (tmp_path / "file").touch()
    for options in (
        ["--out", str(tmp_path)],
        ["--out", str(tmp_path / "r"), "--json", str(tmp_path / "file" / "f.json")],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["model", *options])
        assert stopped.value.code == 2
        assert re.search("is a folder; name a file|its folder can't be made", capsys.readouterr().err)


def test_folders_of_the_page_are_made(tmp_path):
    main([str(write_model(tmp_path / "model")), "--out", str(tmp_path / "new" / "page" / "r.html")])
    assert "At a glance" in (tmp_path / "new" / "page" / "r.html").read_text()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_it_without_complaint(two_models, tmp_path):
    make(tmp_path, *two_models[:2])
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'browser'}", "--enable-logging=stderr", "--dump-dom",
        (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr
    page = Page(done.stdout)
    assert not any(tag == "script" for tag, _ in page.tags)
    assert len([tag for tag, _ in page.tags if tag == "section"]) == 7
    assert len([1 for tag, attributes in page.tags if tag == "svg" and attributes.get("class") == "chart"]) == 8
