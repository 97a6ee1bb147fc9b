"""Progress without a terminal: lines at intervals."""

import sys

import pytest
from tqdm import tqdm

from farsight import progress as module
from farsight.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests advance."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_lines_in_a_log_at_intervals(clock, capsys):
    for _ in progress(range(100), desc="needles", unit="prompt"):
        clock[0] += 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 99 * 3 // 12  # after 2 s, then the first update that is 10 s or more after the last line
    assert lines[0] == "needles: 1 of 100 (prompt), 3.00s/prompt, 04:56 left"
    assert lines[1].startswith("needles: 5 of 100")


def test_short_work_prints_nothing_and_other_ranks_never(clock, capsys, monkeypatch):
    with progress(total=10, desc="read", unit="token") as bar:
        bar.update(10)
    monkeypatch.setenv("RANK", "1")
    with progress(total=10, desc="read", unit="token") as bar:
        clock[0] += 1000
        bar.update(5)
    assert capsys.readouterr().err == ""


def test_what_is_known_besides_stands_at_the_end(clock, capsys):
    with progress(total=10, desc="read", unit="token") as bar:
        clock[0] += 30
        bar.set_postfix_str("3 tokens written")
        bar.set_postfix_str("4 tokens written")
    assert [line[-18:] for line in capsys.readouterr().err.splitlines()] == [", 3 tokens written"]


def test_a_terminal_has_a_bar(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert type(progress(total=1, desc="read", unit="token")) is tqdm
