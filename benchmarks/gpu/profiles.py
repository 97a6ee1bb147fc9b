"""Where a training step's time goes on the GPU: a profiler trace of one, summed up by kind of kernel.

    python -m benchmarks.gpu.profiles --length 8192 --json F
    python -m benchmarks.gpu.profiles --trace runs/X/profile_traces/iteration_10/rank0_trace.json

Idle is the time between the first kernel and the last in which none ran. Kernels that run at the same time on two streams count
their own time each, so shares can add up to more than one.
"""

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from farsight.benchmarks.gpu.part import Rows, add_length_option, part_parser
from farsight.benchmarks.gpu.runs import MODELS, PRETRAINING, pretraining_options, train
from farsight.cli import command
from farsight.outputs import write_json

KINDS = (
    ("attention", r"flash|fmha|forward_kernel|dq_kernel|dkv_kernel|delta_kernel|scoped|attention"),
    ("collectives", r"nccl|all_?gather|reduce_scatter|all_?reduce"),
    ("matrix products", r"gemm|cutlass|nvjet|matmul|::mm|mmbackward|addmm|linear|xmma|wgmma"),
    ("copies", r"^Mem|memcpy|memset|copy_"),
    ("optimizer", r"adam|foreach|multi_tensor"),
    ("norms, activations and other elementwise work", r""),
)
"""Kinds of kernels and the words of their names, the first that fits."""
LARGEST = 12


def summary(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of a trace's kernels by kind, the largest kernels, and the idle time.

    Args:
        events: of a Chrome trace of PyTorch's profiler. Without a GPU's kernels in it, its outermost operators count.
    """
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = kernels or _outermost([e for e in events if e.get("cat") == "cpu_op"])
    if not kernels:
        raise ValueError("the trace has neither kernels nor operators: was a step profiled?")
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        by_kind[kind_of(event["name"])] += event["dur"] / 1e3
        by_name[event["name"]].append(event["dur"] / 1e3)
    begin, end = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
    largest = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:LARGEST]
    return {
        "span_ms": (end - begin) / 1e3,
        "idle_ms": (end - begin) / 1e3 - _covered(kernels),
        "kernels": len(kernels),
        "by_kind_ms": dict(sorted(by_kind.items(), key=lambda pair: -pair[1])),
        "largest": [{"name": name[:100], "calls": len(times), "ms": sum(times)} for name, times in largest],
    }


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next(kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE))


def _covered(events: Sequence[dict[str, Any]]) -> float:
    """Milliseconds in which at least one event ran."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        begin, end = max(event["ts"], until), event["ts"] + event["dur"]
        total += max(0.0, end - begin)
        until = max(until, end)
    return total / 1e3


def _outermost(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that are within no other of their thread."""
    found, until = [], defaultdict(lambda: float("-inf"))
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] + event["dur"] > until[event["tid"]]:
            found.append(event)
            until[event["tid"]] = event["ts"] + event["dur"]
    return found


def traced(rows: Rows, options: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run's last step."""
    steps = options["training.steps"]
    own = {"profiling.enable_profiling": True, "profiling.profile_freq": steps, "profiling.profiler_warmup": 1}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        train(rows, PRETRAINING, options | own, folder)
        (trace,) = (folder / "profile_traces").rglob("*trace.json")
        return summary(json.loads(trace.read_text())["traceEvents"])


@command
def main(argv: list[str] | None = None) -> int:
    parser = part_parser("profiles", __doc__)
    add_length_option(parser)
    parser.add_argument("--trace", type=Path, metavar="F", help="sum up this trace, and train nothing")
    options = parser.parse_args(argv)
    if options.trace:
        found = summary(json.loads(options.trace.read_text())["traceEvents"])
        print(json.dumps(found, indent=2))
        write_json(options.json, found)
        return 0
    rows = Rows(options, "profiles")
    T = 128 if rows.small else options.length
    for name, scope in MODELS[rows.small :]:
        settings = pretraining_options(T, scope, rows.small, steps=4 if rows.small else 6)
        if (found := rows.attempt(f"{name}, T = {T:,}", partial(traced, rows, settings))) is not None:
            rows.add(heads=name, T=T, **found)
    return rows.end()


if __name__ == "__main__":
    sys.exit(main())
