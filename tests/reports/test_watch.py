"""farsight watch: figures and states of runs on the terminal and on its page, while their files grow, are cut, or are damaged."""

import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len  # comes with import-linter

from farsight.errors import ConfigError
from farsight.reports.watch import run as run_module
from farsight.reports.watch.__main__ import main
from farsight.reports.watch.figures import figures
from farsight.reports.watch.run import Run, Watched
from farsight.reports.watch.screen import BLOCKS, Painter, block, clip, frame, sparkline
from farsight.reports.watch.web_page import MOST_POINTS, WebPage
from farsight.training.metrics import _cut_after
from tests.reports.test_report import Page
from tests.running import ROOT, environment, metrics, train

BEGAN = 1_800_000_000.0
PACE = 2.0
"""Seconds a step."""


def at(step):
    return BEGAN + 30 + PACE * step


def start(step=0, steps=1000, **more):
    row = {"step": step, "time": at(step) - 30, "run": "story", "kind": "pre-training", "steps": steps, "ranks": 4}
    return row | {"seq_len": 2048, "tokens_per_step": 8192, "device": "NVIDIA H200"} | more


def logged(step, loss=None, **more):
    loss = 8 / math.sqrt(step) if loss is None else loss
    speed = {"tokens": 8192 * step, "tokens_per_second": 4096.4, "memory_gib": 71.256, "mfu": 0.4321}
    return {"step": step, "time": at(step), "loss": loss, **speed} | more


def write(folder, rows, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def append(folder, text):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def read(folder):
    run = Run(folder)
    run.read()
    return run


def lines_of(folder, now, width=80):
    return block(read(folder), now, width, Painter(colour=False))


STORY = [
    start(),
    {"step": 0, "time": at(0), "val_loss": 9.25},
    *(logged(step) for step in range(10, 260, 10)),
    {"step": 250, "time": at(250), "val_loss": 0.625},
    {
        "step": 250,
        "time": at(250),
        "evaluation": "needle",
        "needle.mean": 0.75,
        "needle.512": 0.5,
        "evaluation_seconds": 3.0,
    },
    {"step": 250, "time": at(250), "evaluation": "mine", "mine.score": 12, "evaluation_seconds": 3.0},
    {"step": 250, "time": at(250), "checkpoint": "step-250"},
    {"step": 260, "time": at(260), "slow": [{"rank": 3, "host": "node7", "device": "cuda:3", "ratio": 1.5}]},
    logged(270),
]


def test_figures_are_those_of_the_newest_rows(tmp_path):
    found = figures(read(write(tmp_path, STORY)), at(320))
    left = PACE * (1000 - 270)
    assert found == {
        "step": "270/1,000 (27%)",
        "left": f"{round(left / 60)} min",
        "loss": f"{8 / math.sqrt(270):.4f}",
        "validation": "0.6250 (step 250)",
        "tokens/s": "4,096",
        "MFU": "43.2%",
        "memory": "71.26 GiB",
        "checkpoint": "step-250, 2 min ago",
        "needle.mean": "0.75 (step 250)",
        "needle.512": "0.5 (step 250)",
        "mine.score": "12 (step 250)",
        "slow": "rank 3 on node7, cuda:3: 1.50 × the median (step 260)",
    }


def test_ranks_are_slow_until_they_no_longer_are(tmp_path):
    folder = write(tmp_path, STORY)
    for after in ({"step": 280, "time": at(280), "slow": []}, start(270)):  # a start may be on other machines
        assert "slow" in figures(read(write(tmp_path, STORY)), at(280))
        append(folder, json.dumps(after) + "\n")
        assert "slow" not in figures(read(folder), at(280))


def test_figures_that_come_late_are_shown_with_their_step(tmp_path):
    """Those of an evaluation beside the run, behind rows of later steps; the page has one row for a step."""
    late = {"step": 250, "time": at(290), "evaluation": "long", "long.mean": 0.125, "evaluation_seconds": 80.0}
    run = read(write(tmp_path, [*STORY, logged(280), late]))
    assert figures(run, at(290)) | {"step": "280/1,000 (28%)", "long.mean": "0.125 (step 250)"} == figures(run, at(290))
    page = Page(WebPage("").text([run], at(290), None))
    assert ["step", "needle.mean", "needle.512", "mine.score", "long.mean"] in page.rows
    assert ["250", "0.75", "0.5", "12", "0.125"] in page.rows


def test_the_terminal_shows_them_all(tmp_path):
    folder = write(tmp_path / "story", STORY)
    for width in (80, 140):
        first, *lines = lines_of(folder, at(280), width)
        assert first == "story  pre-training, 2,048 tokens, 4 × NVIDIA H200".ljust(width - 7) + "running"
        text = "   ".join(line.strip() for line in lines)
        for label, value in figures(read(folder), at(280)).items():
            assert f"{label} {value}" in text
        bar = re.match("━*─*", text)[0]
        assert len(bar) == {80: 30, 140: 50}[width]
        assert bar.count("━") == round(0.27 * len(bar))
        assert max(map(len, lines)) > 0.75 * width


def end(status, sentence, step=270):
    return {"step": step, "time": at(step) + 5, "ended": status, "sentence": sentence}


@pytest.mark.parametrize(
    ("rows", "seconds", "kind", "words"),
    [
        ([], 3, "running", "running"),
        ([], 59, "running", "running"),  # less than a minute
        ([], 70, "silent", "silent for 70 s"),  # rows came every 20 s
        ([logged(300)], 60 + 170, "running", "running"),  # 60 s between the last two
        ([logged(300)], 60 + 190, "silent", "silent for 3 min"),
        ([end(0, "finished")], 65, "finished", "finished 60 s ago"),
        ([end(75, "stopped after step 270")], 65, "stopped", "stopped 60 s ago"),
        ([end(130, "stopped at once")], 65, "stopped", "stopped 60 s ago"),
        ([end(6, "needle.mean meets stop_if")], 65, "stopped", "stopped 60 s ago"),
        ([end(3, "loss nan")], 65, "failed", "failed 60 s ago, status 3"),
        ([end(1, "lost a rank"), start(250)], 3, "running", "running"),  # resumed
        ([start(270), logged(271), logged(272)], 4 + 55, "running", "running"),  # under a minute
        ([start(270), logged(271), logged(272)], 4 + 65, "silent", "silent for 65 s"),
        ([end(1, "lost a rank"), start(270)], 600, "running", "running"),  # the first step may take long
    ],
)
def test_the_state_follows_from_the_last_rows(tmp_path, rows, seconds, kind, words):
    run = read(write(tmp_path, [*STORY[:-2], logged(260), logged(270), *rows]))
    assert run.state(at(270) + seconds) == (kind, words)


def test_the_time_left_counts_from_the_last_start(tmp_path):
    folder = write(tmp_path, [start(), *(logged(step) for step in (10, 20, 40))])
    assert read(folder).seconds_left() == PACE * (1000 - 40)
    later = [start(40) | {"time": at(5000)}, logged(50) | {"time": at(5010)}]
    write(folder, [start(), *(logged(step) for step in (10, 20, 40)), *later])
    assert read(folder).seconds_left() is None  # one step gives no pace
    # Four seconds a step from there on.
    many = [logged(step) | {"time": at(5010) + 4 * (step - 50)} for step in range(60, 500)]
    write(folder, [start(), *(logged(step) for step in (10, 20, 40)), *later, *many])
    assert read(folder).seconds_left() == 4 * (1000 - 499)
    append(folder, json.dumps(end(0, "finished")) + "\n")
    assert read(folder).seconds_left() is None


def test_only_what_was_appended_is_read(tmp_path, monkeypatch):
    parsed = []
    parse = run_module.row_of
    monkeypatch.setattr(run_module, "row_of", lambda line: parsed.append(line) or parse(line))
    folder = write(tmp_path, STORY, '{"step": 280, "time": 1, "lo')
    run = read(folder)
    assert len(parsed) == len(STORY)
    run.read()
    assert len(parsed) == len(STORY)
    assert run.losses[-1][0] == 270
    append(folder, 'ss": 0.5}\n{"step": 290, "loss": 0.25}')
    run.read()
    assert len(parsed) == len(STORY) + 1
    assert run.losses[-1] == (280, 0.5)
    append(folder, "\n")
    run.read()
    assert run.losses[-1] == (290, 0.25)


@pytest.mark.parametrize("steps", [3, 60], ids=["shorter", "longer"])
def test_a_resumed_run_is_read_again(tmp_path, steps):
    """Its rows after the checkpoint are cut out of the file, which may be longer again by the next look."""
    folder = write(tmp_path, [*STORY, *(logged(step) for step in range(280, 400, 10))])
    run = read(folder)
    assert run.reached == 390
    _cut_after(folder / "metrics.jsonl", 250)
    again = [logged(step, 0.5, time=at(1000 + step)) for step in range(251, 251 + steps)]
    append(folder, "".join(json.dumps(row) + "\n" for row in [start(250, time=at(1000)), *again]))
    run.read()
    fresh = read(folder)
    for name in (
        "start",
        "end",
        "step",
        "checkpoint",
        "losses",
        "validations",
        "evaluations",
        "times",
        "first",
        "written",
    ):
        assert getattr(run, name) == getattr(fresh, name), name
    assert run.reached == 250 + steps
    assert [step for step, _ in run.losses] == [*range(10, 260, 10), *range(251, 251 + steps)]
    (folder / "metrics.jsonl").unlink()
    run.read()
    assert run.state(at(300)) == ("waiting", "no figures yet")


def test_damaged_rows_cost_themselves_alone(tmp_path):
    whole = read(write(tmp_path / "whole", STORY))
    lines = [json.dumps(row).encode() for row in STORY]
    damage = [b"\0\0\0", b"\xff\xfe", b"[1, 2]", b"", b'{"step": 20, "lo', b'{"step": "x", "loss": 9}', b'{"loss": 3}']
    folder = write(tmp_path / "damaged", [])
    (folder / "metrics.jsonl").write_bytes(b"\n".join([*lines[:5], *damage, *lines[5:], b""]))
    assert figures(read(folder), at(280)) == figures(whole, at(280))


def test_rows_of_earlier_versions(tmp_path):
    """Without times and starts."""
    folder = write(tmp_path, [{key: row[key] for key in row if key != "time"} for row in STORY if "loss" in row])
    os.utime(folder / "metrics.jsonl", (BEGAN, BEGAN))
    run = read(folder)
    assert run.state(BEGAN + 86400 * 3) == ("silent", "silent for 3.0 days")
    assert figures(run, BEGAN) | {"step": "270", "loss": f"{8 / math.sqrt(270):.4f}"} == figures(run, BEGAN)


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    run = read(tmp_path)
    assert run.state(0) == ("unreadable", "can't be read: Is a directory")
    assert "can't be read: Is a directory" in Page(WebPage("").text([run], 0, None)).texts


# ── Lines that fit ────────────────────────────────────────────────────────────────────────────────────

KEYS = ["step", "time", "run", "loss", "val_loss", "ended", "sentence", "checkpoint", "slow", "evaluation", "steps", "ranks", "seq_len",
        "device", "kind", "mfu", "memory_gib", "tokens_per_second", "needle.mean", "長い名前"]  # fmt: skip
SLOW = st.fixed_dictionaries(
    {}, optional={"rank": st.integers(), "host": st.text(), "ratio": st.floats(), "device": st.none()}
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text("長い文脈é́한글", min_size=20), st.lists(SLOW), SLOW,
    st.sampled_from([1e99, -1e99, 10**400, 0, 75, 3]),
)  # fmt: skip


ROWS = st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES) | st.builds(logged, st.integers(1, 10**9)), max_size=12)
NAMES, NOW = st.text(st.characters(exclude_characters="/\0")), st.floats(0, 4e9)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, name=NAMES, width=st.integers(4, 200), now=NOW)
def test_no_row_makes_a_line_too_wide(tmp_path_factory, rows, name, width, now):
    run = read(write(tmp_path_factory.mktemp("run"), rows))
    run.name = name
    for colour in (False, True):
        for line in frame([run, run], now, width, Painter(colour), head="x" * 300):
            plain = re.sub(r"\033\[\d+m", "", line) if colour else line
            assert cell_len(plain) <= width
            assert plain.isprintable()


@settings(max_examples=5, deadline=None)
@given(rows=ROWS, name=NAMES, now=NOW)
def test_no_row_breaks_the_page(tmp_path_factory, rows, name, now):
    run = read(write(tmp_path_factory.mktemp("run"), rows))
    run.name = name
    Page(WebPage("").text([run], now, 5))


def test_wide_characters_are_cut_where_they_do_not_fit():
    assert [clip("長い文脈", width) for width in (8, 7, 6, 5, 1, 0)] == [
        "長い文脈",
        "長い文…",
        "長い…",
        "長い…",
        "…",
        "",
    ]


def test_a_curve():
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    # What is far above the rest does not flatten it.
    assert sparkline([1e6, *range(8, 0, -1)]) == "█▃▃▃▂▂▂▁▁"  # the others' median is 5 and their lowest 1: cut at 21
    assert set(sparkline([float(n) for n in range(9)])) == set(BLOCKS)


def test_runs_that_have_ended_make_room(tmp_path):
    folders = [write(tmp_path / f"r{n}", [*STORY, *([end(0, "finished")] if n != 1 else [])]) for n in range(4)]
    runs = [read(folder) for folder in folders]
    paint = Painter(colour=False)
    names = lambda lines: re.findall(r"^r\d", "\n".join(lines), re.MULTILINE)  # noqa: E731
    whole = frame(runs, at(280), 80, paint, head="head")
    assert names(whole) == ["r0", "r1", "r2", "r3"]
    assert frame(runs, at(280), 80, paint, len(whole) + 1, "head") == whole
    for height in range(1, len(whole) + 1):
        lines = frame(runs, at(280), 80, paint, height, "head")
        shown = names(lines)
        assert len(lines) <= height or not shown
        assert shown in (["r0", "r1", "r2", "r3"], ["r1", "r2", "r3"], ["r1", "r3"], ["r1"], [])
        assert (f"{4 - len(shown)} more" in lines[-1]) == (len(shown) < 4)


# ── Which runs ────────────────────────────────────────────────────────────────────────────────────────


def test_runs_are_found_below_folders(tmp_path, capsys):
    stages = [write(tmp_path / "runs" / "story" / f"s{n}", [start(time=BEGAN + n)]) for n in (2, 1)]
    for stage in stages:
        (stage / "stage.toml").touch()
    write(tmp_path / "runs" / "alone", [start(time=BEGAN + 1.5)])
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "begun").mkdir()
    (tmp_path / "runs" / "begun" / ".lock").touch()
    watched = Watched([tmp_path / "runs"])
    assert [run.name for run in watched.read()] == ["story/s1", "story/s2", "alone", "begun"]
    kept = watched.read()[0]
    write(tmp_path / "runs" / "later", [start(time=BEGAN + 9)])
    assert [run.name for run in watched.read()] == ["story/s1", "story/s2", "alone", "later", "begun"]
    assert watched.read()[0] is kept
    assert [run.name for run in Watched([tmp_path / "runs" / "story"]).read()] == ["story/s1", "story/s2"]
    both = Watched([tmp_path / "runs" / "alone", tmp_path / "runs" / "empty", tmp_path / "runs" / "alone"]).read()
    assert [(run.name, run.state(BEGAN)[0]) for run in both] == [("alone", "running"), ("empty", "waiting")]
    with pytest.raises(ConfigError, match="nothing is not a folder"):
        Watched([tmp_path / "nothing"])
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "name a run folder" in capsys.readouterr().err


# ── The page ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_has_every_figure(tmp_path):
    hostile = "<script>alert('x')&"
    runs = [
        read(write(tmp_path / name, rows))
        for name, rows in (("story", STORY), ("b", [*STORY, end(3, hostile)]), ("c", []))
    ]
    text = WebPage("farsight watch runs").text(runs, at(280), 5.0)
    page = Page(text)
    refresh = [given for tag, given in page.tags if tag == "meta" and given.get("http-equiv") == "refresh"]
    assert [given["content"] for given in refresh] == ["5"]
    assert 'http-equiv="refresh' not in WebPage("").text(runs, at(280), None)
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    header, story, failed, waiting = page.rows[:4]
    assert header == ["run", "step", "loss", "validation", "tokens/s", "MFU", "memory", "left"]
    loss = f"{8 / math.sqrt(270):.4f}"
    assert story == ["storyrunning", "270/1,000 (27%)", loss, "0.6250", "4,096", "43.2%", "71.26 GiB", "24 min"]
    assert failed[:3] == ["bfailed 15 s ago, status 3", "270/1,000 (27%)", loss]
    assert waiting == ["cno figures yet", *["–"] * 7]
    bars = [given for tag, given in page.tags if tag == "progress"]
    assert [(float(bar["value"]), float(bar["max"])) for bar in bars] == [(270, 1000)] * 2
    for value in figures(runs[0], at(280)).values():
        assert value in page.texts
    assert ["step", "needle.mean", "needle.512", "mine.score"] in page.rows
    assert ["250", "0.75", "0.5", "12"] in page.rows
    assert any(hostile in said for said in page.texts)
    assert "validation\nstep: 250\nloss, nats per token: 0.6250" in page.texts


def test_long_curves_are_means_and_are_drawn_once(tmp_path, monkeypatch):
    folder = write(tmp_path, [start(steps=5000), *(logged(step, float(step % 7)) for step in range(1, 1201))])
    run = read(folder)
    points = run.curve(MOST_POINTS)
    assert len(points) == 400
    for number, (step, loss) in enumerate(points):
        three = range(3 * number + 1, 3 * number + 4)
        assert step == pytest.approx(sum(three) / 3)
        assert loss == pytest.approx(sum(step % 7 for step in three) / 3)
    page = WebPage("")
    first = page.text([run], at(1200), 5)
    assert "the mean of 3 logged steps" in first
    monkeypatch.setattr("farsight.reports.watch.web_page.line_chart", lambda *_: pytest.fail("drawn again"))
    run.read()
    page.text([run], at(1201), 5)
    append(folder, json.dumps(logged(1201)) + "\n")
    run.read()
    with pytest.raises(pytest.fail.Exception, match="drawn again"):
        page.text([run], at(1201), 5)


# ── The command ───────────────────────────────────────────────────────────────────────────────────────


def test_a_real_run(tmp_path, capsys):
    folder = tmp_path / "real"
    train(folder)
    main([str(folder), "--html", str(tmp_path / "page.html"), "--once"])
    said = capsys.readouterr().out
    last, validation = metrics(folder)[-1], metrics(folder, "val_loss")[-1]
    for text in (
        "step 12/12 (100%)",
        f"loss {last['loss']:.4f} ",
        f"validation {validation['val_loss']:.4f} (step 12)",
        f"tokens/s {last['tokens_per_second']:,.0f}",
        f"memory {last['memory_gib']:.2f} GiB",
        "checkpoint step-12, ",
        "real  pre-training, 64 tokens, CPU ",
    ):
        assert text in said
    assert re.search(r"finished \d+ s ago$", said, re.MULTILINE)
    assert "left" not in said
    assert "12/12 (100%)" in Page((tmp_path / "page.html").read_text()).rows[1]


class Terminal:
    """A process under a terminal of its own."""

    def __init__(self, arguments, columns=80, **environ):
        self.terminal, inner = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(inner)
        self.inner, self.seen = inner, ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "farsight", "watch", *arguments], stdin=inner, stdout=inner, stderr=inner, cwd=ROOT,
            env=environment() | {"TERM": "xterm"} | environ, start_new_session=True,
        )  # fmt: skip

    def resize(self, columns):
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def wait_for(self, text):
        deadline, begun = time.monotonic() + 30, len(self.seen)
        while text not in self.seen[begun:]:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.seen += os.read(self.terminal, 65536).decode()
        return self.seen[begun:]

    def close(self):
        status = self.process.wait(30)
        while select.select([self.terminal], [], [], 0)[0]:
            self.seen += os.read(self.terminal, 65536).decode()
        assert termios.tcgetattr(self.inner) == self.before
        os.close(self.terminal)
        os.close(self.inner)
        return status


@pytest.mark.parametrize("how", ["q", signal.SIGINT, signal.SIGTERM])
def test_a_view_that_follows(tmp_path, how):
    folder, page = write(tmp_path / "run", STORY), tmp_path / "page.html"
    view = Terminal(
        [str(folder), "--interval", "0.1", "--html", str(page)], **({"NO_COLOR": "1"} if how == "q" else {})
    )
    seen = view.wait_for("270/1,000")
    assert seen.count("\033[?1049h") == 1
    assert ("\033[2m" in seen) == (how != "q")  # colours
    append(folder, json.dumps(logged(280)) + "\n")
    view.wait_for("280/1,000")
    view.resize(140)
    view.wait_for("━" * 14 + "─" * 36)
    assert 'http-equiv="refresh"' in page.read_text()
    if how == "q":
        os.write(view.terminal, b"xq")
    else:
        view.process.send_signal(how)
    assert view.close() == 0
    assert view.seen.endswith("\033[?25h\033[?1049l")
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "280/1,000 (28%)" in Page(page.read_text()).rows[1]


def test_a_terminal_of_another_size_is_drawn_at_once(tmp_path):
    view = Terminal([str(write(tmp_path / "run", STORY)), "--interval", "60"], COLUMNS="80", LINES="24")
    view.wait_for("270/1,000")
    view.resize(140)
    view.wait_for("━" * 14 + "─" * 36)
    os.write(view.terminal, b"q")
    assert view.close() == 0


def test_a_page_without_a_terminal(tmp_path):
    """In the background, it is written until something ends the command."""
    folder, page = write(tmp_path / "run", STORY), tmp_path / "page.html"
    command = [sys.executable, "-m", "farsight", "watch", str(folder), "--interval", "0.1", "--html", str(page)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert "story" not in process.stdout.readline()
        append(folder, json.dumps(logged(280)) + "\n")
        deadline = time.monotonic() + 30
        while "280/1,000" not in page.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        said = process.communicate()[0]
    assert process.returncode == 0
    assert "step 270/1,000 (27%)" in said
    assert "\033" not in said
