"""A part of benchmarks.faults: bad input of every kind, damaged checkpoints, full disks, and kills by a recipe's own means."""

import pytest

from farsight.benchmarks.faults import hostile
from farsight.benchmarks.faults.__main__ import every_case, table
from farsight.benchmarks.faults.runs import DISKS, Runs, can_mount
from farsight.benchmarks.faults.workshop import Case, Workshop, fingerprint, judge
from farsight.benchmarks.forked import Finished
from farsight.commands import GROUPS

TRIED = every_case()[::9]
"""About sixty of all; `python -m benchmarks.faults` runs every one."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    shop = Workshop(tmp_path_factory.mktemp("faults") / "workshop")
    shop.build()
    return shop


def test_the_table_is_large_and_names_what_messages_must_have():
    cases = every_case()
    assert len(cases) > 500
    assert len({(case.name, case.command) for case in cases}) == len(cases)
    assert all(case.says for case in cases if case.status)


def test_every_command_that_opens_a_model_meets_the_attacks():
    """All commands that read models are covered, except those that read no model."""
    programs = {
        *GROUPS["models and checkpoints"],
        *GROUPS["generate and evaluate"],
        *GROUPS["look inside"],
        "positions",
    }
    modelless = {"external", "order-simulation", "loss-curves", "plasticity-scores", "pull"}
    endless = {"serve"}  # opens models as generate does, and does not end by itself
    tried = {case.command.split()[0] for case in hostile.cases() if "leads out" in case.name}
    assert programs - modelless - endless == tried - {"train.py"} | hostile.WITHOUT_WEIGHTS


@pytest.mark.parametrize("number", range(len(TRIED)), ids=lambda number: TRIED[number].name[:50])
def test_bad_input_ends_with_a_sentence(workshop, number):
    verdict = workshop.check(TRIED[number], number)
    assert not verdict.wrong, f"{verdict.command}\n{verdict.done.stdout}\n{verdict.done.stderr}"


def test_a_verdict_sees_what_is_wrong(tmp_path):
    case = Case("x", "tool", ("spoon",))
    (tmp_path / "kept").write_text("a")
    before = fingerprint(tmp_path)
    assert judge(case, Finished(2, "", "no spoon"), 1.0, tmp_path, before) == ()
    traceback = Finished(1, "", "Traceback (most recent call last):\nKeyError: 'spoon'")
    assert judge(case, traceback, 1.0, tmp_path, before) == ("traceback", "status 1, not 2")
    assert judge(case, Finished(2, "", "oh"), 1000.0, tmp_path, before) == ("hang", "unclear: nothing of 'spoon'")
    (tmp_path / "executed").touch()
    (tmp_path / "kept").write_text("b")
    found = judge(case, Finished(2, "", "no spoon"), 1.0, tmp_path, before)
    assert found == ("executed", "lost data: kept changed")


def test_damage_is_named_and_the_run_goes_on(workshop):
    runs = Runs(workshop)
    for number in range(4):
        outcome = runs.damaged(number)
        assert not outcome.wrong, f"{outcome.name}: {outcome.said}"
    if not can_mount(workshop.folder):
        pytest.skip("a full disk is a tmpfs here, and this user may not mount one")
    for name in [*DISKS][::3]:
        outcome = runs.full(name)
        assert not outcome.wrong, f"{name}: {outcome.said}"


def test_the_table_counts_what_went_wrong():
    rows = [{"wrong": ()}, {"wrong": ("traceback", "status 1, not 2")}, {"wrong": ("lost data: x",)}]
    assert table({"inputs": rows}).splitlines()[1].split() == [
        "inputs", "3", "2", "traceback", "1,", "status", "1,", "lost", "data", "1",
    ]  # fmt: skip
