"""Evaluations on the way: the run does not notice them, and their figures are those of the saved checkpoint."""

import contextlib
import json
import math
import random
import re
import shutil
import signal
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.dcp import load
from farsight.checkpoints.steps import complete_steps
from farsight.configs.evaluations import NeedleEvaluation, name_of, parse_condition
from farsight.configs.load import build_config, load_config
from farsight.configs.schema import Tokenizer
from farsight.configs.typed import to_dict, to_toml
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError, SaveError
from farsight.evals.harness.__main__ import main as harness
from farsight.evals.live import LiveEvaluations, same_randomness
from farsight.evals.needle.__main__ import main as needle
from farsight.evals.perplexity.__main__ import main as perplexity
from farsight.training import evaluations
from farsight.training.evaluations import Beside, Best, RunEvaluations, _Running
from tests.running import ROOT, TINY, contents, metrics, train
from tests.training.test_endings import PATCHED

EVERY = 5
TWO_ROWS = "--training.local_batch_size=2"
FLOAT8 = (
    "--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate",
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
)  # fmt: skip
LAYOUTS = {
    "one": (1, ()),
    "fsdp": (2, (TWO_ROWS,)),
    "tp": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "pp": (2, ("--parallelism.pipeline_parallel_degree=2",)),
    "cp": (2, ("--parallelism.context_parallel_degree=2",)),
    "ddp": (2, ("--parallelism.data_parallel_replicate_degree=2", TWO_ROWS)),
    "fsdp_tp": (4, ("--parallelism.tensor_parallel_degree=2", TWO_ROWS)),
    "float8": (2, (*FLOAT8, TWO_ROWS)),
    "zero": (2, ("--engine=deepspeed", "--deepspeed.zero_stage=3", TWO_ROWS)),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of random words."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = random.Random(0).choices(["the", "river", "runs", "under", "a", "red", "stone", "and", "sings"], k=2000)
    path.write_text(" ".join(words))
    return path


def evaluating(text, **options):
    """The tiny config, which evaluates perplexity and needles every five steps."""
    needle_, perplexity_ = options.get("needle", ""), options.get("perplexity", "")
    return f"""{TINY}
[[evaluations]]
kind = "perplexity"
every = {EVERY}
data = ["{text}"]
lengths = [32, 64]
windows = 6
{perplexity_}

[[evaluations]]
kind = "needle"
every = {EVERY}
lengths = [192]
depths = 2
trials = 2
{needle_}
"""


def measured(checkpoint, text, folder):
    """Figures by the commands from the model directory of a checkpoint."""
    model = folder / checkpoint.name
    checkpoint_to_model_dir(checkpoint, model)
    perplexity(
        [str(model), "--data", str(text), "--lengths", "32", "64", "--windows", "6", "--json", str(folder / "p.json")]
    )
    needle([str(model), "--lengths", "192", "--depths", "2", "--trials", "2", "--json", str(folder / "n.json")])
    lengths = json.loads((folder / "p.json").read_text())["lengths"]
    found = json.loads((folder / "n.json").read_text())
    return {"perplexity.32": lengths["32"], "perplexity.64": lengths["64"], "needle.mean": found["mean"]}


def assert_same_run(a, b):
    """Equal losses, norms and validation losses, and equal checkpoints to the last bit."""
    for key in ("loss", "grad_norm", "val_loss"):
        assert [(row["step"], row[key]) for row in metrics(a, key)] == [
            (row["step"], row[key]) for row in metrics(b, key)
        ]
    ours, theirs = (contents_of(run / "checkpoint" / "step-12") for run in (a, b))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


def contents_of(checkpoint):
    state = contents(checkpoint)
    load(state, checkpoint)
    return state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_does_not_notice_evaluations_whose_figures_are_those_of_its_checkpoints(layout, text, tmp_path):
    ranks, options = LAYOUTS[layout]
    pytest.importorskip({"zero": "deepspeed", "float8": "torchao"}.get(layout, "torch"))
    options = (*options, "--checkpoint.interval=5", "--checkpoint.keep_latest_k=0")
    train(tmp_path / "plain", *options, ranks=ranks)
    done = train(tmp_path / "run", *options, ranks=ranks, config=evaluating(text))
    assert_same_run(tmp_path / "plain", tmp_path / "run")
    rows = metrics(tmp_path / "run", "evaluation")
    assert [(row["step"], row["evaluation"]) for row in rows] == [
        (step, name) for step in (5, 10, 12) for name in ("perplexity", "needle")
    ]
    for step in (5, 10, 12):
        found = {key: value for row in rows if row["step"] == step for key, value in row.items()}
        expected = measured(tmp_path / "run" / "checkpoint" / f"step-{step}", text, tmp_path)
        assert {key: found[key] for key in expected} == expected
    assert "perplexity: 32 " in done.stderr


def test_the_harness_on_the_way_finds_what_the_command_finds(tmp_path):
    pytest.importorskip("lm_eval")
    rows = tmp_path / "rows"
    rows.mkdir()
    draw = random.Random(0)
    with (rows / "piqa.jsonl").open("w") as file:
        for _ in range(12):
            goal, *answers = ("".join(draw.choices("abc de", k=12)) for _ in range(3))
            file.write(
                json.dumps({"goal": goal, "sol1": answers[0], "sol2": answers[1], "label": draw.randrange(2)}) + "\n"
            )
    config = f"""{TINY}
[[evaluations]]
kind = "harness"
name = "public"
every = 6
tasks = ["piqa"]
limit = 8
data_dir = "{rows}"
"""
    train(tmp_path / "plain")
    train(tmp_path / "run", config=config)
    assert_same_run(tmp_path / "plain", tmp_path / "run")
    found = metrics(tmp_path / "run", "evaluation")
    assert [row["step"] for row in found] == [6, 12]
    out = tmp_path / "found.json"
    model = str(tmp_path / "run" / "model")
    harness([model, "--tasks", "piqa", "--limit", "8", "--data-dir", str(rows), "--json", str(out)])
    expected = json.loads(out.read_text())
    assert found[-1]["public.piqa"] == expected["results"]["piqa"]["value"]
    assert found[-1]["public.mean"] == expected["mean"]
    complete = json.loads((tmp_path / "run" / "evaluations" / "step-12" / "public.json").read_text())
    assert complete["results"] == expected["results"]


def test_random_numbers_go_on_where_they_were():
    """Fine-tuning draws its dropout from torch's generator; lm-eval seeds all three."""

    def drawn():
        return random.random(), np.random.rand(), float(torch.rand(()))

    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = [drawn() for _ in range(2)]
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    found = [drawn()]
    with same_randomness():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        drawn()
    assert [*found, drawn()] == expected


# ── Gates ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gate_stops_the_run_after_saving_until_it_is_changed(ranks, text, tmp_path):
    options = ("--checkpoint.interval=100", "--training.local_batch_size=2")
    config = evaluating(text, perplexity='stop_if = "perplexity.32 > 1"\nwarn_if = "perplexity.64 >= 1"')
    done = train(tmp_path / "run", *options, ranks=ranks, config=config, check=False)
    assert done.returncode == 6
    assert "meets stop_if = 'perplexity.32 > 1' of the evaluation perplexity" in done.stderr
    assert "meets warn_if = 'perplexity.64 >= 1' of the evaluation perplexity" in done.stderr
    assert "Traceback" not in done.stderr
    assert complete_steps(tmp_path / "run" / "checkpoint") == [EVERY]
    rows = metrics(tmp_path / "run", "step")
    again = train(tmp_path / "run", *options, ranks=ranks, config=config, check=False)
    assert again.returncode == 6
    start, end = metrics(tmp_path / "run", "step")[len(rows) :]
    assert start["run"] == "run"
    assert end["ended"] == 6
    if ranks == 1:
        train(tmp_path / "run", *options, "--evaluations.0.stop_if=perplexity.32 < 1", config=config)
        train(tmp_path / "plain", *options)
        assert_same_run(tmp_path / "plain", tmp_path / "run")


@pytest.mark.parametrize(
    ("figures", "text", "holds"),
    [
        ({"n.mean": 0.5}, "n.mean < 0.5", False),
        ({"n.mean": 0.5}, "n.mean <= 0.5", True),
        ({"n.mean": 0.5}, "n.mean>=.5", True),
        ({"n.mean": 0.5}, " n.mean > 4e-1 ", True),
        ({"n.mean": 0.5}, "n.mean > 0.5", False),
        ({}, "n.mean < 0.5", False),
        ({"n.mean": math.nan}, "n.mean < 0.5", False),
    ],
)
def test_conditions(figures, text, holds):
    assert parse_condition(text, "stop_if").holds(figures) == holds


def start(arguments):
    """What a run does about its evaluations before it builds the model."""
    LiveEvaluations(load_config(arguments)).check(load_tokenizer(Tokenizer(kind="bytes")))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--evaluations.1.stop_if=needle.mean"], "stop_if of the evaluation needle = 'needle.mean' must compare"),
        (["--evaluations.1.stop_if=needle.mean < half"], "must compare one figure with a number"),
        (["--evaluations.1.stop_if=needle.mean < 1 and 2"], "must compare one figure with a number"),
        (["--evaluations.1.warn_if=needle.maen < 1"], "no figure 'needle.maen'. Did you mean 'needle.mean'?"),
        (["--evaluations.0.stop_if=perplexity.128 > 9"], "has no figure 'perplexity.128'. Did you mean 'perplexity."),
        (["--evaluations.1.name=perplexity"], "there is another evaluation 'perplexity'"),
        (["--evaluations.1.name=a.b"], "evaluations.1.name = 'a.b' must be of letters"),
        (["--evaluations.0.lengths=[]"], "evaluations.0 (perplexity) needs lengths"),
        (["--evaluations.0.kind=perplexty"], "evaluations.0.kind = 'perplexty' is unknown. Did you mean 'perplexity'?"),
        (["--evaluations.1.evry=5"], "Did you mean 'every'?"),
        (["--evaluations.1.task=paskey"], "evaluation needle: "),
        (["--evaluations.0.field=content"], "evaluation perplexity: --field goes with .jsonl or .parquet"),
        (["--evaluations.0.device=cuda:99"], "evaluation perplexity: argument --device: cuda:99"),
        (["--evaluations.0.where=beside", "--checkpoint.no_enable"], '"beside" needs checkpoints'),
        (["--checkpoint.keep_best=needles.mean"], "there is no such evaluation. Did you mean 'needle'?"),
        (["--checkpoint.keep_best=needle.men"], "needle has no such figure. Did you mean 'needle.mean'?"),
        (["--checkpoint.keep_best=val_loss", "--validation.no_enable"], "set validation.enable = true"),
        (["--checkpoint.keep_best=val_loss", "--checkpoint.no_enable"], "keep_best = 'val_loss' needs checkpoints"),
    ],
)
def test_what_can_not_be_used_is_refused_before_training(options, says, text, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(evaluating(text))
    with pytest.raises(ConfigError, match=re.escape(says)):
        start(["--job.config_file", str(path), *options])


def test_the_documentations_config_can_be_used():
    text = (ROOT / "docs" / "training" / "evaluations.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    config = build_config(tomllib.loads(example))
    assert [name_of(evaluation) for evaluation in config.evaluations] == ["perplexity", "passkey", "harness"]
    assert LiveEvaluations(config).higher_is_better
    assert to_dict(build_config(tomllib.loads(to_toml(config)))) == to_dict(config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--evaluations.0.lengths=32,100000"], "evaluation perplexity: length 100,000: the longest document has"),
        (["--evaluations.1.lengths=20"], "evaluation needle: --lengths 20: "),
    ],
)
def test_lengths_that_do_not_fit_are_refused_before_training(options, says, text, tmp_path):
    done = train(tmp_path / "run", *options, config=evaluating(text), check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ── Beside the run ─────────────────────────────────────────────────────────────────────────────────


def test_a_process_beside_the_run_finds_the_same_figures(text, tmp_path):
    options = ("--checkpoint.interval=100", "--evaluations.1.every=12")
    config = evaluating(text)
    train(tmp_path / "inside", *options, config=config)
    done = train(
        tmp_path / "beside", *options, "--evaluations.0.where=beside", "--evaluations.1.where=beside", config=config
    )
    assert_same_run(tmp_path / "inside", tmp_path / "beside")

    def figures(run):
        return sorted(
            json.dumps({key: value for key, value in row.items() if key not in ("time", "evaluation_seconds")})
            for row in metrics(run, "evaluation")
        )

    # Step 10 waits while step 5 is measured, and is left out if step 12 comes first.
    inside, beside = figures(tmp_path / "inside"), figures(tmp_path / "beside")
    assert {*beside} <= {*inside}
    assert {json.loads(row)["step"] for row in beside} >= {5, 12}
    assert "waiting for evaluations beside the run" in done.stderr


def test_a_process_is_run_again_after_an_interruption_and_stops_the_run_at_its_gate(text, tmp_path):
    """Steps take milliseconds, and the process seconds: it is ended with the run."""
    config = evaluating(text, perplexity='where = "beside"\nstop_if = "perplexity.64 > 1e6"').partition(
        'kind = "needle"'
    )[0]
    config = config.rpartition("[[evaluations]]")[0]
    script = tmp_path / "script.py"
    script.write_text(PATCHED.format(root=str(ROOT), patch=STOPPED))
    done = train(tmp_path / "run", config=config, script=str(script), check=False)
    assert done.returncode == 75
    assert not metrics(tmp_path / "run", "evaluation")
    gate = ["--checkpoint.keep_best=perplexity.32", "--evaluations.0.stop_if=perplexity.64 > 1"]
    done = train(tmp_path / "run", *gate, config=config, check=False)
    assert done.returncode == 6
    assert [row["step"] for row in metrics(tmp_path / "run", "evaluation")] == [5, 12]
    assert not (tmp_path / "run" / "model").exists()
    found = json.loads((tmp_path / "run" / "best.json").read_text())
    figures = {row["step"]: row["perplexity.32"] for row in metrics(tmp_path / "run", "evaluation")}
    assert found["value"] == min(figures.values())
    assert train(tmp_path / "run", *gate, config=config, check=False).returncode == 6
    train(tmp_path / "run", config=config)
    assert (tmp_path / "run" / "model" / "config.json").is_file()


STOPPED = """
import signal
step = trainer.Trainer.train_step
def stopped(self, batches):
    if self.step == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    step(self, batches)
trainer.Trainer.train_step = stopped
"""


def test_a_checkpoint_is_looked_for_once_its_save_is_over(start_run, monkeypatch, caplog):
    """Training does not ask a store or a slow disk at every step."""
    run, started = start_run(interval=100, keep_latest_k=0), []
    beside = Beside(None, run.folder.parent, run.manager)
    monkeypatch.setattr(beside, "_start", lambda evaluation, step, checkpoint: started.append((step, checkpoint)))
    one, two = NeedleEvaluation(name="one"), NeedleEvaluation(name="two")
    beside.add(one, 3)
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "is_complete", lambda checkpoint: pytest.fail("looked"))
        patch.setattr(evaluations, "complete_steps", lambda folder: pytest.fail("looked"))
        assert not beside.poll()
    run.save(3, last_step=True)
    beside.add(two, 2)
    for _ in range(3):
        beside.poll()
    assert started == [(3, run.folder / "step-3")]
    assert "step 2: the evaluation two is left out" in caplog.text
    assert not beside.waiting


def test_a_checkpoint_is_kept_until_its_figures_are_reported(start_run):
    run = start_run(interval=100, keep_latest_k=2)
    own = evaluations_of(run)
    run.manager.upkeep.spared = own._spared
    ended = SimpleNamespace(poll=lambda: 0, wait=lambda: 1)
    own.beside.running = _Running(NeedleEvaluation(), 3, ended, 0.0, SimpleNamespace(close=lambda: None, name="log"))
    for step in (3, 6, 9, 12):
        run.save(step, last_step=True)
    assert complete_steps(run.folder) == [3, 9, 12]
    outcome = own.beside.take()
    assert own.beside.needs(3)
    own._report(outcome)
    assert not own.beside.needs(3)
    own.finish()
    assert complete_steps(run.folder) == [9, 12]


def evaluations_of(run):
    """Evaluations of a run that has a manager of checkpoints alone."""
    own = object.__new__(RunEvaluations)
    own.all, own.best, own.gate, own.checkpoints = (NeedleEvaluation(),), None, "", run.manager
    own.beside = Beside(None, run.folder.parent, run.manager)
    own.told_to_stop, own.metrics = (lambda: False), SimpleNamespace(paused=contextlib.nullcontext)
    return own


def test_an_adapter_that_can_not_be_written_for_an_evaluation_does_not_end_the_run(start_run, caplog):
    def full(step):
        raise SaveError("the disk is full")

    own = evaluations_of(start_run())
    own.model = full
    assert own._inside(NeedleEvaluation(), 3).figures is None
    assert "step 3: the evaluation needle is left out: the disk is full" in caplog.text


def test_a_process_that_fails_does_not_end_the_run(text, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text(text.read_text())
    config = evaluating(data, perplexity='where = "beside"').replace(f"every = {EVERY}", "every = 12")
    script = tmp_path / "script.py"
    script.write_text(PATCHED.format(root=str(ROOT), patch=VANISHING.format(path=str(data))))
    done = train(tmp_path / "run", config=config, script=str(script))
    assert "step 12: the evaluation perplexity failed beside the run (status 2)" in done.stderr
    assert str(data) in (tmp_path / "run" / "evaluations" / "step-12" / "perplexity.log").read_text()
    assert [row["evaluation"] for row in metrics(tmp_path / "run", "evaluation")] == ["needle"]
    assert (tmp_path / "run" / "model" / "config.json").is_file()


VANISHING = """
import pathlib
step = trainer.Trainer.train_step
def losing(self, batches):
    pathlib.Path({path!r}).unlink(missing_ok=True)
    step(self, batches)
trainer.Trainer.train_step = losing
"""
"""Deletes a file after training has begun; several ranks do, at the same moment."""


def test_an_evaluation_inside_that_fails_does_not_end_the_run(text, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text(text.read_text())
    script = tmp_path / "script.py"
    script.write_text(PATCHED.format(root=str(ROOT), patch=VANISHING.format(path=str(data))))
    options = ("--training.local_batch_size=2",)
    done = train(tmp_path / "run", *options, ranks=2, config=evaluating(data), script=str(script))
    assert "step 5: the evaluation perplexity failed, and the run goes on: " in done.stderr
    assert {row["evaluation"] for row in metrics(tmp_path / "run", "evaluation")} == {"needle"}


# ── Interruptions ──────────────────────────────────────────────────────────────────────────────────

INTERRUPTED = """
import signal
import farsight.evals.live as live
measure = live.LiveEvaluations.measure
def killed(self, evaluation, path, training):
    results = measure(self, evaluation, path, training)
    if path.name == "step-10" and evaluation.kind == {kind!r} and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), {number})
    return results
live.LiveEvaluations.measure = killed
"""


@pytest.mark.parametrize(
    ("number", "status", "kind"), [(signal.SIGKILL, -9, "needle"), (signal.SIGTERM, 75, "perplexity")]
)
def test_a_run_that_ends_during_an_evaluation_goes_on_without_doubled_rows(number, status, kind, text, tmp_path):
    script, config = tmp_path / "script.py", evaluating(text)
    patch = INTERRUPTED.format(mark=str(tmp_path / "mark"), number=int(number), kind=kind)
    script.write_text(PATCHED.format(root=str(ROOT), patch=patch))
    done = train(tmp_path / "run", config=config, script=str(script), check=False)
    assert done.returncode == status
    train(tmp_path / "run", config=config, script=str(script))
    train(tmp_path / "plain")
    assert_same_run(tmp_path / "plain", tmp_path / "run")
    rows = [(row["step"], row["evaluation"]) for row in metrics(tmp_path / "run", "evaluation")]
    expected = [(step, name) for step in (5, 10, 12) for name in ("perplexity", "needle")]
    # A run that is told to stop leaves its evaluations, and saves.
    assert rows == [row for row in expected if row[0] != 10 or number == signal.SIGKILL]
    assert ("the evaluation needle is left out, as the run stops" in done.stderr) == (number == signal.SIGTERM)


# ── The best checkpoint ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("higher", [False, True])
def test_the_best_checkpoint_is_kept(higher, start_run, tmp_path, caplog):
    run = start_run(interval=100, keep_latest_k=2)
    best = Best("a.figure", higher, tmp_path / "run", run.manager)
    run.manager.upkeep.spared = best.needs
    values = {3: 3.0, 6: 1.0, 9: 2.0, 12: 1.0, 15: 2.5, 18: 4.0, 21: 3.0, 24: 3.5}
    for step, value in values.items():
        best.consider(step, {"a.figure": value, "b.figure": -value})
        assert run.manager.overdue == run.manager.due(step)
        run.manager.overdue = True
        run.save(step)
    run.manager.finish()
    expected = 18 if higher else 6
    assert complete_steps(run.folder) == sorted({expected, 21, 24})
    found = json.loads((tmp_path / "run" / "best.json").read_text())
    assert (found["figure"], found["step"], found["value"]) == ("a.figure", expected, values[expected])
    # What is resumed: the best among the steps that are still saved, by this or another figure.
    rows = [{"step": step, "a.figure": value, "b.figure": -value} for step, value in values.items()]
    again = Best("a.figure", higher, tmp_path / "run", run.manager)
    saved = complete_steps(run.folder)
    again.read([{"step": 0, "a.figure": 99.0 if higher else -99.0}, {"step": 24}, *rows], saved)
    assert (again.kept, again.value) == (expected, values[expected])
    other = Best("b.figure", higher, tmp_path / "run", run.manager)
    other.read(rows, saved)
    assert (other.kept, other.value) == ((21, -3.0) if higher else (24, -3.5))
    assert json.loads((tmp_path / "run" / "best.json").read_text())["figure"] == "b.figure"
    # Where best.json can't be written, both checkpoints are kept.
    other.path = tmp_path / "run" / "best.json" / "in the way"
    other.consider(27, {"b.figure": -99.0 if not higher else 99.0}, saved=True)
    assert other.needs(27)
    assert other.needs(other.kept)
    assert "it does not name step 27" in caplog.text


def test_a_run_keeps_its_best_checkpoint_over_a_restart(text, tmp_path):
    """With a high learning rate, perplexity on another text than that of the training rises again."""
    options = ["--checkpoint.interval=100", "--checkpoint.keep_best=perplexity.32", "--validation.no_enable"]
    config = evaluating(text).replace(f"every = {EVERY}", "every = 1", 1).replace(f"every = {EVERY}", "every = 12")
    done = train(tmp_path / "run", *options, "--optimizer.lr=0.05", config=config)
    values = {row["step"]: row["perplexity.32"] for row in metrics(tmp_path / "run", "perplexity.32")}
    best = min(values, key=values.__getitem__)
    found = json.loads((tmp_path / "run" / "best.json").read_text())
    assert (found["step"], found["value"]) == (best, values[best])
    assert best in complete_steps(tmp_path / "run" / "checkpoint")
    assert f"step {best}: best perplexity.32 so far" in done.stderr
    assert best < 11
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-12")
    shutil.rmtree(tmp_path / "run" / "model")
    done = train(tmp_path / "run", *options, "--optimizer.lr=0.05", config=config)
    assert f"step {best}: best perplexity.32 so far, {values[best]:.6g}" in done.stderr
    assert json.loads((tmp_path / "run" / "best.json").read_text()) == found


def test_the_best_validation_loss_is_kept_where_ranks_save_in_the_background(tmp_path):
    options = ["--checkpoint.interval=100", "--checkpoint.keep_best=val_loss", "--checkpoint.async_mode=async"]
    options += ["--validation.freq=2", "--validation.steps=1", "--training.local_batch_size=2"]
    train(tmp_path / "run", *options, "--optimizer.lr=0.2", ranks=2)
    losses = {row["step"]: row["val_loss"] for row in metrics(tmp_path / "run", "val_loss") if row["step"]}
    best = min(losses, key=losses.__getitem__)
    found = json.loads((tmp_path / "run" / "best.json").read_text())
    assert (found["figure"], found["step"], found["value"]) == ("val_loss", best, losses[best])
    assert {best, 12} <= {*complete_steps(tmp_path / "run" / "checkpoint")}
