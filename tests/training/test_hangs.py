"""Ranks that hang: what they record by themselves, and the sentence about it."""

import json
import os
import pickle
import random
import re
import signal
import time
from dataclasses import replace

import pytest
import torch

from farsight import process
from farsight.benchmarks.forked import Forked
from farsight.configs.load import load_config
from farsight.errors import DataError
from farsight.training.hangs import watch
from farsight.training.hangs.__main__ import main
from farsight.training.hangs.read import (
    Collective,
    Dump,
    Group,
    Heartbeat,
    describe,
    find_hang,
    hang_sentence,
    plain_unpickle,
    ranks_text,
    read_dumps,
    read_heartbeats,
)
from tests.running import ROOT, metrics, train_command
from tests.training.test_endings import PATCHED

LONG = [
    "--training.local_batch_size",
    "2",
    "--training.steps",
    "5000",
    "--checkpoint.interval",
    "5000",
    "--validation.no_enable",
]


def until(ready, seconds=60.0):
    """Waits for something, and returns it."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.fixture
def start(tmp_path):
    """Starts two ranks, and yields them once they train; kills what is left of them."""
    started = []

    def begin(*options, patch=""):
        (tmp_path / "patched.py").write_text(PATCHED.format(root=str(ROOT), patch=patch))
        arguments = train_command(tmp_path / "run", *LONG, *options)[2:]
        ranks = Forked(arguments, 2, tmp_path / "printed", str(tmp_path / "patched.py") if patch else "train.py")
        started.append(ranks)
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run")) > 3)
        return ranks

    yield begin
    for ranks in started:
        for rank in ranks.processes:
            rank.kill()


# ── Runs ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stopped_rank_is_named_with_the_step_and_the_collective(start, tmp_path, capsys):
    ranks, traces = start("--comm.train_timeout_seconds", "6"), tmp_path / "run" / "comm_traces"
    until(lambda: read_heartbeats(tmp_path / "run")[1].step > 3)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    time.sleep(0.5)
    # The main thread waits inside the collective, and no handler of Python's runs.
    os.kill(ranks.processes[0].pid, signal.SIGUSR1)
    until(lambda: re.search(r'trainer\.py", line \d+ in train_step', (traces / "stacks-0.txt").read_text()))
    until(lambda: (traces / "rank-0.json").exists())
    until(lambda: not ranks.processes[0].is_alive())
    ranks.processes[1].kill()
    done = ranks.wait()

    said = [line for line in done.stderr.splitlines() if "hung" in line or "lost contact" in line]
    assert len(said) == 1, done.stderr
    pattern = (
        r"step (\d+) hung: (rank 1 \(\S+, cpu, silent for \d+ s since step (\d+)\) did not reach (\w+) #(\d+) "
        r"\(float\d\d, .* elements\), in which rank 0 \(step \1\) has waited for \d+ s); see farsight hang (\S+)"
    )
    found = re.fullmatch(pattern, said[0])
    assert found, said[0]
    # No step can end without its collectives, so the rank stopped in the step in which the other one waits, or before it.
    assert 4 <= int(found[3]) <= int(found[1]) == metrics(tmp_path / "run")[-1]["step"] + 1
    # The record of the recorder agrees: all earlier collectives of the group have ended, and none is later.
    dump = read_dumps(traces)[0]
    assert [(c.name, c.number) for c in dump.collectives if not c.done] == [(found[4], int(found[5]))]
    assert dump.collectives[-1].number == int(found[5])

    assert main([found[6], "--json", str(tmp_path / "hang.json")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(found[2])
    assert str(traces / "stacks-0.txt") in printed
    figures = json.loads((tmp_path / "hang.json").read_text())
    assert (figures["sentence"], figures["hang"]["missing"], figures["hang"]["waiting"]) == (found[2], [1], [0])
    assert [row["silent"] for row in figures["ranks"]] == [False, True]


LATE = """
step = trainer.Trainer.train_step
def late(self, batches):
    if self.step == 9 and os.environ["RANK"] == "1":
        self.watch.at(self.step, "dreaming")
        __import__("time").sleep(100)
    step(self, batches)
trainer.Trainer.train_step = late
"""


def test_a_rank_that_is_elsewhere_writes_its_stacks_when_another_waits(start, tmp_path):
    ranks, run = start("--comm.train_timeout_seconds", "4", patch=LATE), tmp_path / "run"
    until(lambda: not ranks.processes[0].is_alive(), 30)
    ranks.processes[1].kill()
    said = ranks.wait().stderr
    # The exchange of the number of tokens is the first of a step.
    pattern = r"step 9 hung: rank 1 \(\S+, cpu, step 9, dreaming for \d s\) did not reach all_reduce #\d+ \(float64, 1 elements\)"
    assert re.search(pattern, said), said
    assert re.search(r'patched\.py", line \d+ in late', (run / "comm_traces" / "stacks-1.txt").read_text())
    assert not read_dumps(run / "comm_traces")[1].waits_in()


def test_heartbeats_and_asking(start, tmp_path):
    ranks, run = start(), tmp_path / "run"
    first = until(lambda: (beats := read_heartbeats(run)) and beats[0].step > 3 and beats)
    assert [(beat.rank, beat.pid, beat.world_size) for beat in first.values()] == [
        (rank, process.pid, 2) for rank, process in enumerate(ranks.processes)
    ]
    until(lambda: read_heartbeats(run)[1].step > first[1].step)
    for beat in read_heartbeats(run).values():
        assert beat.since <= beat.time
    assert main([str(run), "--ask"]) == 0
    dumps = read_dumps(run / "comm_traces")
    assert [*dumps] == [0, 1]
    assert dumps[0].groups["0"].ranks == (0, 1)
    assert all((run / "comm_traces" / f"stacks-{rank}.txt").stat().st_size for rank in (0, 1))
    for rank in ranks.processes:
        os.kill(rank.pid, signal.SIGTERM)
    assert ranks.wait().returncode == 75
    assert {beat.phase for beat in read_heartbeats(run).values()} == {"ending"}
    assert main([str(run)]) == 0
    path = run / "heartbeat" / "rank-0.json"
    assert path.stat().st_mtime == pytest.approx(json.loads(path.read_text())["since"], abs=1e-3)


# ── Diagnosis ─────────────────────────────────────────────────────────────────────────────────────────


def beats(ranks, now=1000.0, silent=()):
    return {
        r: Heartbeat(r, ranks, "a", r, f"cuda:{r}", 7, "training", now - 40, now - 31 * (r in silent), 5.0)
        for r in range(ranks)
    }


def entry(number, name="all_reduce", group="0", since=30.0, **more):
    return Collective(group, number, name, ("float64",), ((3,),), 1000.0 - since, 60.0, **more)


def dump(rank, *collectives, when=999.0, groups=None):
    return Dump(rank, when, collectives, groups or {"0": Group("default_pg", tuple(range(4)))})


def test_the_sentence():
    dumps = {r: dump(r, entry(122, done=True), entry(123)) for r in (0, 2, 3)}
    hang = find_hang(dumps)
    assert describe(hang, dumps, beats(4, silent=[1]), 1000.0) == (
        "rank 1 (a, cuda:1, silent for 31 s since step 7) did not reach all_reduce #123 (float64, 3 elements), in which "
        "ranks 0, 2, 3 (step 7) have waited for 30 s"
    )
    assert ranks_text([5, 0, 2, 3, 4]) == "ranks 0, 2–5"
    assert ranks_text([3]) == "rank 3"


def test_ranks_in_different_collectives_are_told_apart():
    dumps = {
        0: dump(0, entry(5)),
        1: dump(1, entry(5, "broadcast")),
        2: dump(2, entry(5)),
        3: dump(3, entry(4, done=True)),
    }
    sentence = describe(find_hang(dumps), dumps, beats(4), 1000.0)
    assert sentence == (
        "ranks are in different collectives: ranks 0, 2 (step 7) entered all_reduce #5 (float64, 3 elements), but "
        "rank 1 entered broadcast #5 (float64, 3 elements)"
    )


def test_all_ranks_in_a_collective_that_does_not_end():
    dumps = {r: dump(r, entry(5)) for r in range(4)}
    assert "ranks 0–3 (step 7) entered all_reduce #5 (float64, 3 elements) 30 s ago" in describe(
        find_hang(dumps), dumps, beats(4), 1000.0
    )


def test_ranks_that_have_got_on_do_not_hang(tmp_path, capsys):
    """Rank 1 recorded itself while it waited for an evaluation on rank 0; what counts is whether it still stands there."""
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "comm_traces").mkdir()
    dump(1, entry(9), groups={"0": Group("", (0, 1))}).write(tmp_path / "comm_traces")
    for since, hangs in ((960.0, 1), (999.5, 0)):
        for rank, beat in beats(2).items():
            (tmp_path / "heartbeat" / f"rank-{rank}.json").write_text(json.dumps(vars(beat) | {"since": since}))
        assert main([str(tmp_path)]) == hangs
        assert ("did not reach all_reduce #9" in capsys.readouterr().out) == bool(hangs)


def test_ranks_that_have_ended_are_not_missed():
    for phase, missed in (("training", True), ("ending", False)):
        found = {rank: replace(beat, phase=phase) for rank, beat in beats(2, silent=[1]).items()}
        assert (hang_sentence(found, {}, 1000.0) is not None) == missed


def test_a_dump_of_an_earlier_hang_does_not_count():
    dumps = {0: dump(0, entry(9)), 1: dump(1, entry(3, since=500.0), when=600.0)}
    hang = find_hang(dumps)
    assert (hang.collective.number, hang.missing, hang.waiting) == (9, (1, 2, 3), (0,))
    assert find_hang({0: dump(0, entry(9, done=True))}) is None


def simulate(rng, ranks, stopped):
    """Random collectives in random groups, in one order; runs until no rank gets on. Returns the dumps."""
    groups = {str(g): Group("", tuple(sorted(rng.sample(range(ranks), rng.randint(2, ranks))))) for g in range(5)}
    groups["all"] = Group("", tuple(range(ranks)))
    order, count = [], dict.fromkeys(groups, 0)
    for name in [*rng.choices([*groups], k=20), "all"]:
        count[name] += 1
        order.append((name, count[name]))
    programs = {r: [op for op in order if r in groups[op[0]].ranks] for r in range(ranks)}
    programs[stopped] = programs[stopped][: rng.randrange(len(programs[stopped]))]
    entered, ended, now = {r: [] for r in range(ranks)}, set(), 0.0
    moved = True
    while moved:
        moved = False
        for r in rng.sample(range(ranks), ranks):
            at = len(entered[r])
            if at < len(programs[r]) and (not at or entered[r][-1][0] in ended):
                now += 1e-3
                entered[r].append((programs[r][at], now))
                moved = True
                op = programs[r][at]
                if all(op in [o for o, _ in entered[m]] for m in groups[op[0]].ranks):
                    ended.add(op)
    return {
        r: dump(
            r,
            *(entry(n, group=g, since=1000.0 - t, done=(g, n) in ended) for (g, n), t in log),
            when=1000.0,
            groups=groups,
        )
        for r, log in entered.items()
    }


@pytest.mark.parametrize("alive", [True, False])
def test_the_rank_that_holds_up_all_others_is_found(alive):
    """Through chains of ranks that wait for ranks that wait."""
    rng = random.Random(0)
    for _ in range(100):
        stopped = rng.randrange(5)
        dumps = simulate(rng, 5, stopped)
        if not alive:
            del dumps[stopped]
        assert find_hang(dumps).missing == (stopped,)


# ── NCCL's dumps ──────────────────────────────────────────────────────────────────────────────────────


def nccl(**more):
    """An entry as torch 2.11 writes it."""
    return {
        "record_id": 7, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 8, "p2p_seq_id": 0, "op_id": 8,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 970 * 10**9, "input_sizes": [[3]], "input_dtypes": ["Double"],
        "output_sizes": [[3]], "output_dtypes": ["Double"], "state": "started", "time_discovered_started_ns": 1,
        "time_discovered_completed_ns": None, "retired": False, "timeout_ms": 60000, "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "_exchange", "filename": "/x/farsight/training/trainer.py", "line": 328},
        ],
        **more,
    }  # fmt: skip


def test_dumps_that_nccl_writes_by_itself(tmp_path):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    waits, ended = nccl(), nccl(collective_seq_id=7, state="completed", retired=True)
    for rank, entries in enumerate(([ended, waits], [ended])):
        record = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(record))
    dumps = read_dumps(tmp_path)
    hang = find_hang(dumps)
    assert (hang.missing, str(hang.collective)) == ((1,), "all_reduce #8 (float64, 3 elements)")
    assert hang.collective.where == "training/trainer.py:328, _exchange"

    sends = nccl(profiling_name="nccl:recv 0<-1", is_p2p=True, collective_seq_id=7)
    (tmp_path / "rank_0").write_bytes(pickle.dumps(record | {"entries": [ended, sends]}))
    dumps = read_dumps(tmp_path)
    assert find_hang(dumps).missing == (1,)
    assert "did not reach recv 0<-1 (float64, 3 elements), in which rank 0" in describe(
        find_hang(dumps), dumps, beats(2), 1000.0
    )


def test_a_dump_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    with pytest.raises(pickle.UnpicklingError, match=r"refers to posix\.mkdir"):
        plain_unpickle(pickle.dumps({"entries": [Evil()]}))
    (tmp_path / "rank_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"rank_0 is not a dump of the flight recorder: it refers to posix\.mkdir"):
        read_dumps(tmp_path)
    assert not (tmp_path / "made").exists()


# ── Starting again ────────────────────────────────────────────────────────────────────────────────────


def test_what_a_hang_left_is_kept_through_the_next_start(tmp_path, capsys):
    config = load_config(["--job.dump_folder", str(tmp_path)])
    traces = watch.traces_of(config)
    (tmp_path / "heartbeat").mkdir()
    for rank, beat in beats(2).items():
        (tmp_path / "heartbeat" / f"rank-{rank}.json").write_text(json.dumps(vars(beat)))
    watch.set_aside(config)  # nothing hung: heartbeats alone are of no use
    assert not (tmp_path / "heartbeat").exists()
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat" / "rank-0.json").write_text(json.dumps(vars(beats(2)[0])))
    traces.mkdir()
    dump(0, entry(9), groups={"0": Group("", (0, 1))}).write(traces)
    watch.set_aside(config)
    assert [path.name for path in traces.iterdir()] == ["previous"]
    (tmp_path / "heartbeat").mkdir()
    assert main([str(tmp_path)]) == 1
    assert "rank 1 (no heartbeat) did not reach all_reduce #9" in capsys.readouterr().out


def test_nccl_which_ends_the_process_itself_is_forestalled(tmp_path, start_run, monkeypatch, caplog):
    """With NCCL no error reaches the main thread, so the thread that watches says the sentence when the limit is over."""
    started = time.time()
    waits = nccl(time_created_ns=int((started - 31) * 1e9))
    status = {"0": {"last_enqueued_collective": 8, "last_completed_collective": 7}}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0]"}}
    start_run()
    settings = load_config(["--job.dump_folder", str(tmp_path / "run"), "--comm.train_timeout_seconds", "60"])
    watched = watch.Watch(settings, torch.device("cpu"))
    watched.limit = 60.0
    monkeypatch.setattr(
        watch, "_recorder", lambda entries=True: {"pg_status": status, "entries": [waits], "pg_config": config}
    )
    monkeypatch.setattr(watch.dist, "get_backend", lambda: "nccl")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "note.json"))
    try:
        for seconds in (0, 29):
            watched._look(started + seconds)
            assert not (watched.traces / "rank-0.json").exists()
        watched._look(started + 28 + 31)
        assert (watched.traces / "rank-0.json").exists()
        watched._look(started + 28 + 32)
        assert caplog.messages == [process.read_note(tmp_path / "note.json").sentence]
        assert "entered all_reduce #8 (float64, 3 elements)" in caplog.text
    finally:
        watched.close()
