"""The ablation command with fake runs and evaluations, and its tables against the paper's."""

import json
import signal
import sys
from pathlib import Path

import pytest

from farsight.errors import ConfigError
from farsight.launch.ablation import ablation, evaluations
from farsight.launch.ablation.__main__ import main
from farsight.launch.ablation.ablation import read_experiments
from farsight.launch.ablation.evaluations import Evaluation, evaluate, read_evaluations
from farsight.launch.ablation.tables import BASE, MEAN, differences, markdown, text, with_means
from tests.running import ROOT

CONFIGS = ROOT / "configs" / "finetune"

NAMES = ("MMLU", "GPQA", "HumanEval+", "MATH", "MGSM", "ARC")
TABLE_4 = {
    BASE: (68.88, 35.49, 68.90, 31.46, 45.67, 56.66),
    "A": (68.53, 34.82, 67.07, 28.95, 43.60, 56.14),
    "B": (67.21, 34.82, 60.37, 25.04, 43.45, 56.23),
    "C": (67.18, 31.70, 60.37, 28.12, 39.78, 53.16),
    "D": (64.01, 26.56, 51.22, 22.87, 34.04, 52.65),
}
"""Scores of the GARFA paper, and their averages."""
AVERAGES = {BASE: 51.18, "A": 49.85, "B": 47.85, "C": 46.72, "D": 41.89}
TABLE_5 = {"HumanEval+": 15.8, "MGSM": 9.6, "GPQA": 8.3, "MATH": 6.1, "MMLU": 4.5, "ARC": 3.5}
PAPERS = {label: dict(zip(NAMES, row, strict=True)) for label, row in TABLE_4.items()}
PERCENT = dict.fromkeys(NAMES, ("higher", True))

EVALUATION = """
import json, sys
model, name, out = sys.argv[1:]
label = model.split("/")[-2][-1] if "ablation_" in model else "base"
if name == "broken" and label == "c":
    sys.exit(7)
score = {"base": 0.9, "a": 0.8, "b": 0.7, "c": 0.6, "d": 0.5}[label]
out = out.replace(".json", "_2026-01-01T00-00-00.json") if name == "dated" else out
json.dump({"results": {name: {"acc,none": score}}}, open(out, "w"))
"""
TRAINING = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--job.dump_folder") + 1])
label = folder.name[-1]
if label == "b" and "FAIL" in os.environ:
    sys.exit(3)
if label == "b" and "KILL" in os.environ:
    os.kill(os.getpid(), int(os.environ["KILL"]))
rows = [{"step": 0, "val_loss": 3.0}, {"step": 5, "loss": 2.5}] + [{"step": s, "val_loss": v} for s, v in ((5, 2.0), (10, 1.75))]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(folder / "adapter").mkdir()
with open(folder.parent / "log", "a") as log:
    log.write("trained " + label + " " + " ".join(sys.argv[sys.argv.index("--job.dump_folder") + 2:]) + "\\n")
"""
MERGING = """
import json, pathlib, sys, tomllib
adapter, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
assert adapter.is_dir() and sys.argv[2] == "--out"
out.mkdir()
(out / "config.json").write_text("{}")
config = tomllib.loads((out.parent / "experiment.toml").read_text())
optimizer = {"name": "AdamW", "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0, "warmup_steps": 0, "decay": "linear",
             "min_lr_factor": 0}
run = {"name": "x", "start": "y", "layers": "all", "seq_len": 8, "tokens": 80, "dtype": "float32", "optimizer": optimizer, "data": []}
garfa = {**config["garfa"], "layers": [0]}
entry = {**run, "steps": 5, "adapter": {**config["base_model"], "garfa": garfa}}
(out / "farsight.json").write_text(json.dumps({"training": [{**run, "steps": 100}, entry]}))
"""
"""The second validation improves by less than min_delta: the first one's adapter was kept."""


@pytest.fixture
def faked(tmp_path, monkeypatch):
    """Fakes training, merging and evaluations; returns the command's arguments."""
    for name, code in {"train": TRAINING, "merge": MERGING, "evaluate": EVALUATION}.items():
        (tmp_path / f"{name}.py").write_text(code)
    training, merging = ablation.Experiment.training, ablation.Experiment.merging
    monkeypatch.setattr(
        ablation.Experiment, "training", lambda e: [sys.executable, str(tmp_path / "train.py"), *training(e)[2:]]
    )
    monkeypatch.setattr(
        ablation.Experiment, "merging", lambda e: [sys.executable, str(tmp_path / "merge.py"), *merging(e)[4:]]
    )
    entry = '[[evaluations]]\nname = "{0}"\ncommand = "python {1} {{model}} {0} {{json}}"\nvalue = "results.{0}.acc,none"\npercent = true\n'
    entries = [entry.format(name, tmp_path / "evaluate.py") for name in ("plain", "dated", "broken")]
    (tmp_path / "evaluations.toml").write_text("".join(entries))
    monkeypatch.chdir(ROOT)
    configs = sorted(str(path) for path in CONFIGS.glob("ablation_*.toml"))
    return [*configs, "--evaluations", str(tmp_path / "evaluations.toml"), "--out", str(tmp_path / "out"), "--tiny"]


def test_runs_measures_and_goes_on_after_failures(faked, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv("FAIL", "1")
    copy = tmp_path / "copy.json"
    assert main([*faked, "--training.steps", "7", "--json", str(copy)]) == 1
    assert (tmp_path / "out" / "log").read_text() == "".join(f"trained {x} --training.steps 7 --tiny\n" for x in "acd")
    figures = json.loads(copy.read_text())
    assert figures["failures"][0] == "training B ended with status 3"
    assert "broken of C ended with status 7" in figures["failures"][1]
    assert "training B ended with status 3" in caplog.text
    assert figures["results"]["B"] == {}
    assert figures["note"] == "held-out loss of the base: before A's first step, in nf4"
    assert figures["results"][BASE] == {"held-out loss": 3.0, "plain": 90.0, "dated": 90.0, "broken": 90.0}
    assert figures["results"]["A"] == {"held-out loss": 2.0, "plain": 80.0, "dated": 80.0, "broken": 80.0}
    assert "broken" not in figures["results"]["C"]
    shown = capsys.readouterr().out
    assert figures["note"] in shown
    rows = {
        line.split("  ")[0]: line.split()[2:]
        for line in shown.splitlines()
        if line.startswith(("untuned", "experiment"))
    }
    assert list(rows) == ["untuned base", "experiment D", "experiment C", "experiment B", "experiment A"]
    assert rows["experiment A"] == ["2", "80.00", "80.00", "80.00", "80.00"]
    assert rows["experiment B"] == ["-"] * 5
    assert rows["experiment C"] == ["2", "60.00", "60.00", "-", "-"]

    # Finished work is not repeated; failed work is.
    monkeypatch.delenv("FAIL")
    (tmp_path / "evaluate.py").write_text(EVALUATION.replace('"broken"', '""'))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*/evaluations/plain.json")}
    assert main([*faked, "--training.steps", "7"]) == 0
    assert (tmp_path / "out" / "log").read_text().splitlines()[3:] == ["trained b --training.steps 7 --tiny"]
    assert before == {path: path.stat().st_mtime_ns for path in before}
    results = json.loads((tmp_path / "out" / "ablation.json").read_text())["results"]
    assert (results["C"]["broken"], results["B"]["plain"]) == (60.0, 70.0)
    assert (tmp_path / "out" / "ablation.png").stat().st_size > 10_000
    assert "| experiment B | 2 | 70.00 | 70.00 | 70.00 | 70.00 |" in (tmp_path / "out" / "ablation.md").read_text()

    caplog.clear()
    assert main([*faked, "--training.steps", "8"]) == 0
    assert "its settings have changed since" in caplog.text


def test_a_run_that_is_stopped_ends_the_ablation(faked, tmp_path, caplog, monkeypatch):
    (tmp_path / "train.py").write_text("import sys; sys.exit(75)")
    assert main(faked) == 75
    assert "the same command continues from here" in caplog.text
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.setenv("KILL", str(int(signal.SIGTERM)))
    assert main(faked) == 75


def test_what_crashes_or_does_not_start_is_a_failure(faked, tmp_path, monkeypatch):
    monkeypatch.setenv("KILL", str(int(signal.SIGKILL)))
    commands = {
        "killed": "python -c 'import os; os.kill(os.getpid(), 11)' {model} {json}",
        "mistyped": "no-such-program {model} {json}",
        "plain": f"python {tmp_path / 'evaluate.py'} {{model}} plain {{json}}",
    }
    entry = '[[evaluations]]\nname = "{0}"\ncommand = "{1}"\nvalue = "results.plain.acc,none"\n'
    evaluations = tmp_path / "crashing.toml"
    evaluations.write_text("".join(entry.format(*item) for item in commands.items()))
    assert main([*faked[:2], *faked[4:], "--evaluations", str(evaluations)]) == 1
    figures = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert figures["results"] == {
        BASE: {"held-out loss": 3.0, "plain": 0.9},
        "A": {"held-out loss": 2.0, "plain": 0.8},
        "B": {},
    }
    first, *others = figures["failures"]
    assert first.startswith("training B was killed by SIGKILL")
    starts = ["killed of base was killed by SIGSEGV", "killed of A was killed by SIGSEGV"]
    starts += ["mistyped of base did not start: ", "mistyped of A did not start: "]
    assert len(others) == len(starts)
    assert all(line.startswith(start) for line, start in zip(others, starts, strict=True))


def test_a_base_that_garfa_has_changed_is_not_the_base(faked, tmp_path):
    """With the paper's init, alpha is 9.012 before the first step: the base's loss comes from the first run without it."""
    changed = tmp_path / "ablation_a.toml"
    changed.write_text(f'base = "{faked[0]}"\n[garfa]\ninit = "paper"\n')
    assert main([str(changed), "--tiny", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert (found["results"], found["note"]) == ({BASE: {}, "A": {"held-out loss": 2.0}}, "")
    assert main([str(changed), faked[1], *faked[6:], "--base_model.quantization", "none"]) == 0
    found = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert found["results"][BASE] == {"held-out loss": 3.0}
    assert found["note"] == "held-out loss of the base: before B's first step, in float32"


def test_a_figure_is_of_these_weights_and_of_this_key(tmp_path):
    """A changed key only rereads the file; a changed command, changed weights or a missing file rerun the command."""
    model, folder, script = tmp_path / "model", tmp_path / "measured", tmp_path / "count.py"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    log = tmp_path / "log"
    script.write_text(
        f"import json, sys\nopen({str(log)!r}, 'a').write('x')\nruns = len(open({str(log)!r}).read())\n"
        "json.dump({'runs': runs, 'tens': 10 * runs}, open(sys.argv[2], 'w'))\n"
    )
    command = f"python {script} {{model}} {{json}}"

    def measured(value="runs", command=command):
        return evaluate("A", model, folder, Evaluation("figure", command, value))

    assert (measured(), measured(), measured("tens")) == (1, 1, 10)
    with pytest.raises(ConfigError, match=r"has no 'ten': .* Correct the evaluation's value"):
        measured("ten")
    (model / "README.md").write_text("a card")
    assert measured() == 1
    assert measured(command=f"{command} --more") == 2
    script.write_text(script.read_text() + "sys.exit(sys.argv[-1] == '--fail')\n")
    with pytest.raises(ConfigError, match="ended with status 1"):
        measured(command=f"{command} --fail")  # the third
    assert measured(command=f"{command} --more") == 4
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(b"2")
    assert measured(command=f"{command} --more") == 5
    (folder / "figure.json").unlink()
    assert measured(command=f"{command} --more") == 6


def test_dry_run_prints_commands_and_runs_none(faked, tmp_path, capsys):
    assert main([*faked, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 4 + 3 * 5
    assert lines[0].endswith(f"--job.dump_folder {tmp_path}/out/ablation_a --tiny")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_used_is_said(faked, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert "would both be experiment A" in refused(faked[0], faked[0])
    assert "is a folder" in refused(*faked, "--json", str(tmp_path))
    other = tmp_path / "ablation_x.toml"
    other.write_text('[base_model]\npath = "elsewhere"\n')
    with pytest.raises(ConfigError, match="different bases"):
        read_experiments([Path(faked[0]), other], [], tmp_path)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[[evaluations]]\nname = "x"\ncommand = "python x.py {model}"\nvalue = "x"\n')
    with pytest.raises(ConfigError, match=r"evaluations\.0 needs a name, a value, and a command with"):
        read_evaluations(wrong)
    entry = '[[evaluations]]\nname = "{}"\ncommand = "python x.py {{model}} {{json}}"\nvalue = "x"\n'
    for names, message in (
        (["mean"], "is the column of the evaluations' mean"),
        (["a b", "A-b"], "'a b' and 'A-b' would write the same file"),
        (["held-out loss"], "would write the same file"),
    ):
        wrong.write_text("".join(map(entry.format, names)))
        with pytest.raises(ConfigError, match=message):
            read_evaluations(wrong)
    for name in ("dump_folder", "config_file"):
        said = refused(*faked, f"--job.{name}", str(other), "--dry-run")
        assert f"--job.{name} would be the same for all experiments" in said
    for text_, message in (
        (None, "did not write"),
        ({"a": {"c": 1}}, "where 'b' should be there is c"),
        ({"a": {"b": "x"}}, "'a.b' is 'x', not a number"),
    ):
        out = tmp_path / "r.json"
        if text_:
            out.write_text(json.dumps(text_))
        with pytest.raises(ConfigError, match=message):
            evaluations.figure(out, "a.b")


def test_evaluations_that_come_with_the_project_can_be_read():
    for path in (ROOT / "configs" / "finetune" / "evaluations").glob("*.toml"):
        assert len(read_evaluations(path)) > 1


# The paper's tables


def test_averages_are_table_4s():
    means = {label: round(row[MEAN], 2) for label, row in with_means(PAPERS, PERCENT).items()}
    assert means == AVERAGES


def test_differences_are_table_5s():
    found = differences(PAPERS, PERCENT)
    for name, points in TABLE_5.items():
        assert found[name]["A − D"] == pytest.approx(points, abs=0.0501)  # printed to one place
    a_less_b = [1.32, 0, 6.70, 3.91, 0.15, -0.09]
    assert [found[name]["A − B"] for name in NAMES] == pytest.approx(a_less_b, abs=1e-9)
    assert all(found[name]["A − base"] < 0 for name in NAMES)  # below the untuned base on all six
    assert [*found["MMLU"]] == ["A − D", "A − C", "A − B", "A − base"]


def test_rows_are_printed_as_the_papers():
    lines = text(PAPERS, PERCENT).splitlines()
    assert lines[0].split() == [*NAMES, MEAN]
    assert lines[1].split() == ["untuned", "base", "68.88", "35.49", "68.90", "31.46", "45.67", "56.66", "51.18"]
    assert lines[5].split() == ["experiment", "A", "68.53", "34.82", "67.07", "28.95", "43.60", "56.14", "49.85"]
    assert "| ARC | +3.49 | +2.98 | -0.09 | -0.52 |" in markdown(PAPERS, PERCENT)
    missing = {**PAPERS, "B": {}}
    assert "A − B" not in differences(missing, PERCENT)["MMLU"]
