"""`make gpu` at small size on a CPU: every part starts, its figures are those that can be worked out by hand, and the page has them."""

import json
import sys

import pytest
import torch

from farsight.benchmarks import attention
from farsight.benchmarks.gpu import (
    __main__ as runner,
)
from farsight.benchmarks.gpu import (
    correctness,
    decoding,
    finetuning,
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
        return found

    return run


@pytest.fixture
def forked_runs(monkeypatch, tmp_path):
    """Runs train.py in forks of a process that has imported everything."""
    monkeypatch.setattr(
        runs, "run_train", lambda arguments, on_cpu=False: forked(arguments, tmp_path / f"printed-{len(arguments)}")
    )


# Parts


def test_correctness(figures, forked_runs):
    rows = figures(correctness)["rows"]
    assert {row["what"] for row in rows} == {
        "triton, descriptors as shipped", "triton, pointers", "triton", "banded", "decode", "chunked loss",
        "tokens that differ in a CUDA graph", "losses of a run, against the CPU's",
    }  # fmt: skip
    assert all(row["error"] <= 3e-2 for row in rows)

    def looks_too_far(q, k, v, visibility):
        return correctness.scoped_attention(q, k, v, Visibility(visibility.scopes_N + 1), backend="banded")

    with pytest.raises(correctness.WrongNumbersError, match="off by"):
        correctness.attention_error(correctness.SMALL, looks_too_far, "cpu")


def test_a_part_names_what_failed_and_goes_on(tmp_path, monkeypatch, capsys):
    rows = part.Rows(part.part_parser("x", "").parse_args(["--small", "--json", str(tmp_path / "x.json")]), "x")
    assert rows.attempt("half", lambda: 1 / 0) is None
    rows.add(what="other", value=rows.attempt("other", lambda: 3.0))

    def too_much():
        raise torch.OutOfMemoryError

    assert rows.attempt("huge", too_much) is None
    monkeypatch.setattr(part, "SECONDS", 0)
    assert rows.attempt("late", lambda: 4.0) is None
    assert rows.end() == 1
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["failed"] == ["half: ZeroDivisionError at test_gpu.py:74: division by zero"]
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
    rows = part.Rows(part.part_parser("x", "").parse_args(["--small"]), "x")
    rows.small = False
    for T in (8192, 32768, 131072):
        for _, scope in runs.MODELS:
            options = runs.pretraining_options(T, scope, rows)
            plan = runs.plan_of(runs.PRETRAINING, options)
            assert plan.fits
            assert plan.run.tokens_per_step == 131072
            assert round(plan.parameters / 1e6) == 1236


def test_decoding(figures):
    rows = figures(decoding)["rows"]
    assert [(row["heads"], row["batch"], row["graph"]) for row in rows] == [
        (heads, *case) for heads in ("dense", "SCOPE") for case in ((1, True), (1, False), (8, True))
    ]
    assert rows[0]["cache_bytes"] == rows[0]["dense_cache_bytes"] > rows[3]["cache_bytes"]


@pytest.mark.parametrize("pass_", ["forward", "forward+backward", "training step", "prefill", "decode"])
def test_attention(tmp_path, pass_):
    out = tmp_path / "attention.json"
    options = ["--device", "cpu", "--quick", "--lengths", "256", "--repeats", "1", "--heads", "4", "--kv-heads", "2"]
    assert attention.main([*options, "--passes", pass_, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["pass"] for row in rows} == {pass_}
    scoped = next(row for row in rows if row["backend"] == "banded")
    dense = next(row for row in rows if row["backend"] == scoped["dense_backend"])
    assert scoped["speedup_over_dense"] == pytest.approx(dense["median_s"] / scoped["median_s"])


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
    machine = {"device": "NVIDIA H200", "torch": "2.11.0", "failed": ["flex: RuntimeError"], "left_out": []}
    rows = [
        attention_row("hybrid", "forward", 131072, 0.040, 0.230),
        attention_row("triton", "forward", 131072, 0.050, 0.230),
        attention_row("hybrid", "forward+backward", 131072, 0.150, 0.720),
        attention_row("flex", "forward+backward", 131072, 0.240, 0.720),
    ]
    (tmp_path / "attention.json").write_text(json.dumps(machine | {"rows": rows}))
    text = page.page(tmp_path)
    assert "| SCOPE over the best dense attention at 131,072 tokens, forward | 5.5 | 5.75 | yes |" in text
    assert "| the same, forward and backward | 5 | 4.8 | no |" in text
    assert "| over FlexAttention with the same mask | 1.3 | 1.6 | yes |" in text
    assert "| hybrid | exponential | forward | 131,072 | 40 | 1 | 5.75 | 7 | 1 |" in text
    assert "NVIDIA H200, torch 2.11.0." in text
    assert "- failed: flex: RuntimeError" in text
    assert text.count("Not run.") == len(runner.PARTS) - 1


def test_the_page_in_the_docs_is_what_the_command_writes():
    committed = (ROOT / "docs/performance/gpu.md").read_text()
    assert committed == page.page(ROOT / "docs/performance/gpu")


def test_every_part_has_a_section():
    assert [*page.SECTIONS] == [*runner.PARTS] or {*page.SECTIONS} == {*runner.PARTS}


def test_the_command_runs_parts_and_stops_those_that_take_too_long(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(runner.PARTS, "tiles", ["gpu.tile_search", "--kernels", "forward"])
    assert runner.main(["tiles", "--small", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "tiles.json").read_text())["rows"]
    monkeypatch.setattr(runner, "LIMIT", 0.1)
    assert runner.main(["tiles", "--small", "--out", str(tmp_path)]) == 1
    assert "tiles: stopped after 0.1 s" in capfd.readouterr().out


def test_missing_packages_are_named(monkeypatch, capsys):
    found = runner.importlib.util.find_spec
    monkeypatch.setattr(
        runner.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    assert runner.main(["--wheels"]) == 0
    assert "missing: bitsandbytes (fine-tuning)" in capsys.readouterr().out


def test_without_a_gpu_a_part_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="PyTorch sees no GPU here: --small runs the same on a CPU"):
        decoding.main([])
    assert "triton" in sys.modules
