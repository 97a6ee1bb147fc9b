"""`make gpu` at small size on a CPU: every part starts, its figures are those that can be worked out by hand, and the page has them."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from farsight.benchmarks import attention, attention_rows
from farsight.benchmarks.gpu import (
    __main__ as runner,
)
from farsight.benchmarks.gpu import (
    correctness,
    decoding,
    finetuning,
    limits,
    page,
    part,
    pretraining,
    profiles,
    runs,
    speeds,
    tile_search,
)
from farsight.kernels.scoped_attention import Visibility, cost
from tests.kernels.test_hybrid_attention import flash  # noqa: F401  a fixture
from tests.running import ROOT, forked

pytestmark = pytest.mark.slow


@pytest.fixture
def figures(tmp_path):
    """Runs a part at small size and returns its file."""

    def run(module, *options):
        out = tmp_path / "part.json"
        assert module.main(["--small", "--json", str(out), *options]) == 0
        found = json.loads(out.read_text())
        assert found["failed"] == found["left_out"] == []
        assert found["outcome"] == "ended"
        assert found["small"]
        return found

    return run


@pytest.fixture
def forked_runs(monkeypatch, tmp_path):
    """Runs train.py in forks of a process that has imported everything."""
    monkeypatch.setattr(
        runs, "run_train", lambda arguments, limit, on_cpu: forked(arguments, tmp_path / f"printed-{len(arguments)}")
    )


# Parts


def test_correctness(figures, forked_runs):
    rows = figures(correctness)["rows"]
    assert {row["what"] for row in rows} == {
        "triton, descriptors as shipped", "triton, pointers", "triton", "banded", "decode", "chunked loss",
        "tokens that differ in a CUDA graph", "losses of a run, against the CPU's",
        *(f"{name}, {what}" for name in ("triton", "banded") for what in ("segments of context parallelism", "a prompt in chunks")),
    }  # fmt: skip
    assert all(row["error"] <= 3e-2 for row in rows)

    def looks_too_far(q, k, v, visibility):
        return correctness.scoped_attention(q, k, v, Visibility(visibility.scopes_N + 1), backend="banded")

    with pytest.raises(correctness.WrongNumbersError, match="off by"):
        correctness.attention_error(correctness.SMALL, looks_too_far, "cpu")


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", ["hybrid, split", "banded"])
def test_segments_are_compared_with_the_whole(name):
    attend = correctness.segmented_backends(["hybrid", "banded"])[name]
    case = correctness.Case(heads=(2, 1), head_dim=16, queries=30, documents=True, dtype=torch.float32)

    def in_segments(attend, change=0):
        def run(q, k, v, seen):
            return correctness.in_segments(attend, q, k, v, Visibility(seen.scopes_N + change, seen.document_starts_BL))

        return correctness.attention_error(case, run, "cpu")

    assert in_segments(attend) <= 2e-5
    with pytest.raises(correctness.WrongNumbersError, match="off by"):
        in_segments(attend, change=1)


def test_a_prompt_in_chunks_is_compared_with_the_whole():
    case = correctness.Case(heads=(4, 2), head_dim=16, queries=50, slopes=True, dtype=torch.float32)

    def forgets(q, k, v, seen):
        return correctness.in_chunks("banded", q, torch.cat((k[:, :1] * 0, k[:, 1:]), 1), v, seen)

    assert correctness.attention_error(case, lambda *x: correctness.in_chunks("banded", *x), "cpu", False) <= 2e-5
    with pytest.raises(correctness.WrongNumbersError, match="off by"):
        correctness.attention_error(case, forgets, "cpu", backward=False)


def test_a_part_names_what_failed_and_goes_on(tmp_path, monkeypatch, capsys):
    rows = part.Rows(part.part_parser("x", "").parse_args(["--small", "--json", str(tmp_path / "x.json")]), "x")
    assert rows.attempt("half", lambda: 1 / 0) is None
    rows.add(what="other", value=rows.attempt("other", lambda: 3.0))

    def too_much():
        raise torch.OutOfMemoryError

    assert rows.attempt("huge", too_much) is None
    monkeypatch.setattr(limits, "START", 0)
    assert rows.attempt("late", lambda: 4.0) is None
    assert rows.end() == 1
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["failed"] == ["half: ZeroDivisionError at test_gpu.py:111: division by zero"]
    assert found["rows"] == [{"what": "other", "value": 3.0}]
    assert found["left_out"] == ["huge: does not fit into the GPU's memory", "late: no time left"]
    assert "left out: late" in capsys.readouterr().out


def test_tiles(figures):
    rows = figures(tile_search, "--kernels", "forward", "dkv")["rows"]
    assert [(row["kernel"], row["scopes"], row["shipped"]) for row in rows] == [
        (kernel, scopes, shipped)
        for scopes in ("exponential", "dense")
        for kernel in ("forward", "dkv")
        for shipped in (True, False)
    ]


def test_speeds(figures, flash, monkeypatch):  # noqa: F811  the fixture
    monkeypatch.setattr(speeds, "milliseconds", lambda run, *_: (run(), 2.0)[1])
    monkeypatch.setattr(speeds, "EMPTY_DOCUMENTS", 3)
    found = figures(speeds)
    values = {row["what"]: row["value"] for row in found["rows"] if row["what"] != "split"}
    seen = sum(min(16, t + 1) for t in range(64))
    for kernel in ("triton", "FA2"):
        # Two heads of 16: two products forward and five backward, of two FLOPs each.
        assert values[f"{kernel} forward, dense, TFLOP/s"] == pytest.approx(2 * 16 * 2 * 2 * (64 * 65 / 2) / 2e9)
        assert values[f"{kernel} backward, window, TFLOP/s"] == pytest.approx(2 * 16 * 5 * 2 * seen / 2e9)
    assert values["launch_us"] == 2000 / speeds.CALLS
    gpu = cost.read_gpu(found["speeds"])
    assert gpu.measured
    splits = [row for row in found["rows"] if row["what"] == "split"]
    for pass_ in ("forward", "backward"):
        of_pass = [row for row in splits if row["pass"] == pass_]
        assert [row["wide_heads"] for row in of_pass][:: len(of_pass) - 1] == [0, 4]
        assert sum(row["chosen"] for row in of_pass) == 1
        shape = cost.Shape(1, 64, group=2, head_dim=16)
        none = cost.split_seconds((3, 8, 23, 64), shape, gpu, "FA2", pass_, 65)
        assert of_pass[0]["predicted_ms"] == pytest.approx(1e3 * none)


def test_measured_speeds_are_those_that_the_backend_reads(tmp_path, monkeypatch):
    copy = tmp_path / "speeds.json"
    copy.write_text(cost.SPEEDS.read_text())
    for module in (cost, speeds):
        monkeypatch.setattr(module, "SPEEDS", copy)
    cost.gpu_of.cache_clear()
    try:
        before = {major: cost.gpu_of(major) for major in (8, 9)}
        table = json.loads(copy.read_text())["9"] | {"gpu": "Measured", "memory_tbytes": 4.2}
        speeds.write_speeds(table, 9)
        cost.gpu_of.cache_clear()
        assert (cost.gpu_of(9).name, cost.gpu_of(9).memory) == ("Measured", 4.2e12)
        assert vars(cost.gpu_of(8)) == vars(before[8])
    finally:
        cost.gpu_of.cache_clear()
    with pytest.raises(SystemExit):
        speeds.main(["--small", "--write"])


def test_training_runs_and_their_plans(figures, forked_runs):
    (row,) = figures(pretraining)["rows"]
    assert row["losses"][1] < row["losses"][0]
    assert row["planned"]["gpu"] == runs.planned_gpu()
    assert row["planned"]["memory_gib"] > 0
    (row,) = figures(finetuning)["rows"]
    assert row["losses"][1] < row["losses"][0]
    (row,) = figures(profiles)["rows"]
    assert row["kernels"] > 100
    assert {"matrix products", "attention"} <= row["by_kind_ms"].keys()


def test_the_1b_shaped_runs_can_be_planned_at_all_lengths():
    for T in (8192, 32768, 131072):
        for _, scope in runs.MODELS:
            options = runs.pretraining_options(T, scope, small=False)
            plan = runs.plan_of(runs.PRETRAINING, options)
            assert plan.fits
            assert plan.run.tokens_per_step == 131072
            assert round(plan.parameters / 1e6) == 1236


def test_decoding(figures):
    rows = figures(decoding)["rows"]
    assert [(row["heads"], row["batch"], row["graph"]) for row in rows] == [
        (heads, *case) for heads in ("dense", "SCOPE") for case in ((1, True), (1, False), (4, True))
    ]
    assert rows[0]["cache_bytes"] == rows[0]["dense_cache_bytes"] > rows[3]["cache_bytes"]


@pytest.mark.parametrize("pass_", ["forward", "forward+backward", "training step", "prefill", "decode"])
def test_attention(tmp_path, pass_):
    out = tmp_path / "attention.json"
    options = ["--device", "cpu", "--quick", "--lengths", "256", "--repeats", "1", "--heads", "4", "--kv-heads", "2"]
    assert attention.main([*options, "--passes", pass_, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = found["rows"]
    assert {row["pass"] for row in rows} == {pass_}
    assert found["outcome"] == "ended"
    scoped = next(row for row in rows if row["backend"] == "banded")
    dense = next(row for row in rows if row["backend"] == scoped["dense_backend"])
    assert scoped["speedup_over_dense"] == pytest.approx(dense["median_s"] / scoped["median_s"])


def test_attention_begins_nothing_late_and_tells_failures_from_what_is_left_out(tmp_path, monkeypatch):
    failed, left_out = [], []
    for module in (attention, attention_rows):
        monkeypatch.setattr(module, "failed", failed)
        monkeypatch.setattr(module, "left_out", left_out)
    clock = iter([0.0, 1.0, 500.0, 501.0])
    monkeypatch.setattr(attention.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(attention, "measure_kernels", lambda *_: [])
    monkeypatch.setattr(attention, "table", lambda rows: "")
    out = tmp_path / "attention.json"
    options = ["--device", "cpu", "--lengths", "64", "--passes", "forward", "forward+backward", "--seconds", "420"]
    assert attention.main([*options, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["left_out"] == ["forward+backward, T = 64: no time left"]
    attention_rows.leave_out("sdpa cudnn at T = 64, dense scopes", RuntimeError("no such head dim"))
    attention_rows.leave_out("prefill, T = 64", torch.OutOfMemoryError())
    attention_rows.leave_out("triton at T = 64, window scopes", RuntimeError("a fault"))
    assert [reason.partition(":")[0] for reason in left_out[1:]] == [
        "sdpa cudnn at T = 64, dense scopes",
        "prefill, T = 64",
    ]
    assert failed == ["triton at T = 64, window scopes: RuntimeError: a fault"]


# Summaries


def test_the_summary_of_a_trace():
    def kernel(name, begin, duration):
        return {"cat": "kernel", "name": name, "ts": begin, "dur": duration, "tid": 7}

    found = profiles.summary(
        [
            kernel("nvjet_hsh_128x256", 0, 1000),
            kernel("forward_kernel", 500, 2000),  # on another stream
            kernel("nvjet_hsh_128x256", 3500, 1000),
            kernel("triton_poi_fused_mul_0", 4500, 500),
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e9, "tid": 1},
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert found["span_ms"] == 5.0
    assert found["idle_ms"] == pytest.approx(1.0)
    assert found["by_kind_ms"] == {
        "matrix products": 2.0, "attention": 2.0, "norms, activations and other elementwise work": 0.5,
    }  # fmt: skip
    assert found["largest"][0] == {"name": "nvjet_hsh_128x256", "calls": 2, "ms": 2.0}
    nested = [
        {"cat": "cpu_op", "name": name, "ts": ts, "dur": 10 - 2 * ts, "tid": 1} for name, ts in (("a", 0), ("b", 1))
    ]
    assert profiles.summary(nested)["largest"] == [{"name": "a", "calls": 1, "ms": 0.01}]
    with pytest.raises(ValueError, match="was a step profiled"):
        profiles.summary([])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("cutlass::device_kernel<flash::FlashAttnFwdSm90>", "attention"),
        ("dkv_kernel", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "collectives"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused_rms_norm_1", "norms, activations and other elementwise work"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert profiles.kind_of(name) == kind


# The page, and the command


def attention_row(backend, pass_, T, seconds, dense_seconds):
    return {
        "backend": backend, "scopes": "exponential", "pass": pass_, "T": T, "median_s": seconds, "tflops": 1.0,
        "speedup_over_dense": dense_seconds / seconds, "pair_ratio": 7.0, "extra_bytes": 2**20,
    }  # fmt: skip


def test_the_page_has_the_tables_and_compares_with_the_targets(tmp_path):
    machine = {
        "device": "NVIDIA H200", "small": False, "torch": "2.11.0", "commit": "abc123", "date": "2026-01-02", "outcome": "ended",
        "failed": ["flex: RuntimeError"], "left_out": ["sdpa cudnn: RuntimeError"],
    }  # fmt: skip
    rows = [
        attention_row("hybrid", "forward", 131072, 0.040, 0.230),
        attention_row("triton", "forward", 131072, 0.050, 0.230),
        attention_row("hybrid", "forward+backward", 131072, 0.150, 0.720),
        attention_row("flex", "forward+backward", 131072, 0.240, 0.720),
    ]
    (tmp_path / "attention.json").write_text(json.dumps(machine | {"rows": rows}))
    text = page.page(tmp_path)
    assert (
        "| SCOPE over the best dense attention at 131,072 tokens, forward | 5.5 | 6.67 | 4.59 | 7 | 5.75 | yes |"
        in text
    )
    assert "| the same, forward and backward | 5 | 6.52 | 3.8 | 7 | 4.8 | no |" in text
    assert "| SCOPE over FlexAttention with the same mask, forward and backward | 1.3 |  |  |  | 1.6 | yes |" in text
    assert "| hybrid | exponential | forward | 131,072 | 40 | 1 | 5.75 | 7 | 1 |" in text
    assert "NVIDIA H200, torch 2.11.0, commit abc123, 2026-01-02." in text
    assert "- failed: flex: RuntimeError\n- left out: sdpa cudnn: RuntimeError\n" in text
    assert text.count("Not run.") == len(runner.PARTS) - 1
    assert "No GPU has run" not in text
    assert "Incomplete" not in text
    (tmp_path / "attention.json").write_text(
        json.dumps(machine | {"rows": rows, "small": True, "outcome": "stopped after 480 s"})
    )
    text = page.page(tmp_path)
    assert "**Small shapes on a CPU**" in text
    assert "No GPU has run" in text
    assert "| 7 | 5.75 |" not in text
    assert "**Incomplete** (stopped after 480 s)" in text


def test_predictions_of_prompts():
    """By the milliseconds that kernels.md gives for a layer, and 8B's 218M weights of a layer's products at 0.6 of 989 TFLOP/s."""
    for T, dense, scoped, ceiling in ((131072, 227, 34.0, 2.56), (262144, 908, 126.5, 3.55)):
        products = 2 * T * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) / (0.6 * 989e12)
        expected = (products + dense / 1e3) / (products + scoped / 1e3)
        assert page._prompt_gain(T)("FA3") == pytest.approx(expected, rel=0.005)
        assert page._prompt_ceiling(T) == pytest.approx(ceiling, abs=0.005)


def test_the_page_in_the_docs_is_what_the_command_writes():
    committed = (ROOT / "docs/performance/gpu.md").read_text()
    assert committed == page.page(ROOT / "docs/performance/gpu")


def test_every_part_has_a_section():
    assert [*page.SECTIONS] == [*runner.PARTS] or {*page.SECTIONS} == {*runner.PARTS}


def test_the_command_runs_parts(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(runner.PARTS, "tiles", ["gpu.tile_search", "--kernels", "forward"])
    assert runner.main(["tiles", "--small", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "tiles.json").read_text())["rows"]
    printed = capfd.readouterr().out
    assert "1 of 1 parts without a fault\n" in printed
    assert printed.endswith(f"Files: {tmp_path}. Next: {sys.executable} -m benchmarks.gpu.page {tmp_path}\n")


def test_parts_that_do_not_end_well_are_marked(tmp_path, monkeypatch, capfd):
    scripts = {
        "tiles": "import time; time.sleep(60)",
        "decode": "raise SystemExit(3)",
        "speeds": """import json, sys; open(sys.argv[-1], "w").write(json.dumps({"rows": [], "outcome": "running"})); raise SystemExit(9)""",
        "prefill": """import json, sys; open(sys.argv[-1], "w").write(json.dumps({"outcome": "ended", "failed": ["x"]})); raise SystemExit(1)""",
    }
    monkeypatch.setattr(
        runner,
        "command_of",
        lambda part, out, small: [sys.executable, "-c", scripts[part], str(out / f"{part}.json")],
    )
    monkeypatch.setattr(limits, "PART", 2)
    for name in ("tiles", "decode"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [1, 2], "outcome": "ended"}))
    assert runner.main([*scripts, "--small", "--out", str(tmp_path)]) == 1
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in scripts}
    assert found["tiles"] == {"part": "tiles", "small": True, "rows": [], "outcome": "stopped after 2 s"}
    assert found["decode"] == {"part": "decode", "small": True, "rows": [], "outcome": "ended with status 3"}
    assert found["speeds"] == {"rows": [], "outcome": "ended with status 9"}
    assert found["prefill"] == {"outcome": "ended", "failed": ["x"]}
    assert (
        "0 of 4 parts without a fault; not tiles (stopped after 2 s), decode (ended with status 3), speeds (ended with "
        "status 9), prefill (ended with status 1, failed rows: 1)\n"
    ) in capfd.readouterr().out
    (tmp_path / "prefill.json").unlink()
    (tmp_path / "speeds.json").unlink()
    assert page.page(tmp_path).count("**Incomplete** (") == 2


CHILD = """
import subprocess, sys, tempfile, time
held = "import sys, time; pipe = open(sys.argv[1], 'w'); print('started', end='', file=pipe, flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", held, *sys.argv[1:]])
open(tempfile.gettempdir() + "/base", "w").write("weights")
time.sleep(60)
"""
"""Starts a process that holds a pipe open, and writes a temporary file."""


@pytest.mark.parametrize("signalled", [False, True])
def test_a_stopped_part_leaves_no_process_and_no_temporary_files(tmp_path, monkeypatch, signalled):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(runner.tempfile, "tempdir", str(tmp_path))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command, environment = [sys.executable, "-c", CHILD, str(pipe)], os.environ | {"TMPDIR": str(tmp_path)}
    if signalled:
        wait, begun = subprocess.Popen.wait, []

        def terminated(process, timeout=None):
            if not begun:
                begun.append(process)
                until(lambda: os.read(reader, 7) == b"started")
                raise SystemExit(signal.SIGTERM)
            return wait(process, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", terminated)
        with pytest.raises(SystemExit):
            runner.run_part(command, environment, 60)
    else:
        assert runner.run_part(command, environment, 3) is None
        assert os.read(reader, 7) == b"started"
    until(lambda: os.read(reader, 1) == b"")  # the end: nobody holds it open
    os.close(reader)
    assert [*tmp_path.iterdir()] == [pipe]


def until(true):
    """Waits for something that takes a moment; nothing to read yet is no error."""
    for _ in range(300):
        try:
            if true():
                return
        except BlockingIOError:
            pass
        time.sleep(0.1)
    raise AssertionError("30 s have passed")


def test_a_run_ends_before_its_part(monkeypatch, tmp_path):
    given = []

    def run_train(arguments, limit, on_cpu):
        given.append(limit)
        raise runs.FailedRunError("stopped")

    monkeypatch.setattr(runs, "run_train", run_train)
    rows = part.Rows(part.part_parser("x", "").parse_args(["--small"]), "x")
    for seconds in (0, 400):
        rows.begin = time.perf_counter() - seconds
        with pytest.raises(runs.FailedRunError):
            runs.train(rows, runs.PRETRAINING, {}, tmp_path)
    assert given[0] == 300
    assert given[1] == pytest.approx(70, abs=1)


def test_the_check_names_versions_and_what_to_install(monkeypatch, capsys):
    found = runner.find_spec
    monkeypatch.setattr(runner, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    monkeypatch.setattr(runner, "why_no_gpu", lambda: None)
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    monkeypatch.setattr(runner, "_driver", lambda: "580.65")
    assert runner.main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("bitsandbytes")]
    assert line.startswith("bitsandbytes: missing, for finetuning: pip install --editable ")
    assert f"torch: found {torch.__version__}" in lines
    assert "GPU: NVIDIA H200, 150.0 GiB, capability 9.0, driver 580.65" in lines
    monkeypatch.setattr(runner, "find_spec", lambda name: None if name == "tomli_w" else found(name))
    assert runner.main(["--check"]) == 1
    assert "tomli-w: missing, for everything: make setup" in capsys.readouterr().out.splitlines()


def test_without_a_gpu_the_command_measures_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, status in (["tiles"], 2), (["--check"], 1), (["tile"], 2):
        try:
            ended = runner.main([*options, "--out", str(tmp_path / "out")])
        except SystemExit as stop:
            ended = stop.code
        assert ended == status
    assert not (tmp_path / "out").exists()
    printed = capsys.readouterr()
    assert "PyTorch sees no GPU here" in printed.err + printed.out
    assert "tile is none of the parts correctness, attention" in printed.err


def test_without_a_gpu_a_part_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="PyTorch sees no GPU here: --small runs the same on a CPU"):
        decoding.main([])
    assert "triton" in sys.modules
