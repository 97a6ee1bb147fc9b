"""Scoped attention against PyTorch's dense causal attention: time, memory and error, in one process.

    python -m benchmarks.attention --device cpu --json attention.json

Each backend is checked against the fp64 reference on the timed inputs before it gets a row. A model's layers are checked on a
short sequence, against the reference in their own dtype. Scopes are SCOPE's exponential ones, S_h = ceil(γ^h) with
γ = T^(1/N); dense heads and windows of 1,024 tokens are controls. It needs only torch and, on a GPU, Triton.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from farsight.benchmarks.attention_rows import (
    PASSES,
    SCOPES,
    Case,
    WrongNumbersError,
    candidates,
    failed,
    leave_out,
    left_out,
    measure_decode,
    measure_kernels,
    measure_stack,
    scoped_backends,
)
from farsight.benchmarks.layer_stack import StackShape
from farsight.benchmarks.machine import device_name, origin
from farsight.cli import command, new_parser, positive
from farsight.kernels.scoped_attention import BACKENDS
from farsight.outputs import add_json_option, write_json


def table(rows: list[dict]) -> str:
    """Our backends, and the fastest of PyTorch's in each comparison. The JSON has all of them."""
    header = (
        "backend", "scopes", "pass", "T", "N/K/H", "median ms", "spread ms", "TFLOP/s", "speed-up", "of pairs", "extra MiB",
        "error",
    )  # fmt: skip
    lines = [
        (
            row["backend"],
            row["scopes"],
            row["pass"],
            str(row["T"]),
            f"{row['N']}/{row['K']}/{row['H']}",
            f"{row['median_s'] * 1e3:.4g}",
            f"{row['spread_s'] * 1e3:.2g}",
            f"{row['tflops']:.3g}",
            f"{row['speedup_over_dense']:.2f}",
            f"{row['pair_ratio']:.2f}",
            f"{row['extra_bytes'] / 2**20:.0f}",
            f"{row['max_error']:.0e}",
        )
        for row in rows
        if row["backend"] == row["dense_backend"] or not row["backend"].startswith("sdpa")
    ]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in (header, *lines)
    )


@dataclass(frozen=True)
class Sizes:
    """The defaults of a run's sizes."""

    lengths: tuple[int, ...]
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    chunk: int
    training: tuple[int, ...]
    heads: tuple[int, int, int]
    dtype: str
    repeats: int
    stack: StackShape
    training_layers: int


SIZES = {
    # Estimated at under eight minutes on an H200. The lengths that matter most come first.
    "cuda": Sizes(
        (131072, 32768, 8192), (131072, 32768), (131072, 262144), 16384, (131072,), (32, 8, 128), "bfloat16", 5,
        StackShape(32, 4096, 32, 8, 128, 14336), 4,
    ),
    "cpu": Sizes(
        (2048, 8192), (8192,), (4096,), 1024, (2048,), (16, 16, 64), "float32", 5,
        StackShape(2, 256, 16, 4, 16, 512), 2,
    ),
    "quick": Sizes(
        (2048,), (4096,), (2048,), 512, (1024,), (16, 16, 64), "float32", 3, StackShape(2, 256, 16, 4, 16, 512), 2
    ),
}  # fmt: skip


@command
def main(argv: list[str] | None = None) -> int:
    cuda = torch.cuda.is_available()
    parser = new_parser("python -m benchmarks.attention", __doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    add("--quick", action="store_true", help="short sequences: under a minute on two cores")
    add("--passes", choices=PASSES, nargs="+", default=list(PASSES), help="what to time (default: all)")
    add("--lengths", type=positive, nargs="+", metavar="T", help="tokens, for all passes (default: by pass and device)")
    add("--scopes", choices=SCOPES, nargs="+", default=list(SCOPES), help="for the kernels alone (default: all)")
    add(
        "--backends",
        choices=BACKENDS,
        nargs="+",
        help="of ours, for the kernels alone; prompts and training take the first (default: banded; hybrid, triton and flex, "
        "and flash if it is installed, on GPUs)",
    )
    add("--heads", type=positive, metavar="N", help="query heads (default: 16; 32 on GPUs)")
    add("--kv-heads", type=positive, metavar="K", help="key-value heads, a divisor of N (default: 16; 8)")
    add("--head-dim", type=positive, metavar="H", help="(default: 64; 128)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(default: float32; bfloat16)")
    add("--repeats", type=positive, help="timed runs of each kernel; the median counts (default: 5)")
    add("--seconds", type=positive, metavar="S", help="start no measurement after this time (default: no limit)")
    add_json_option(parser, "the rows, after each measurement,")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda, but PyTorch sees no GPU here: use --device cpu")
    sizes = SIZES["quick" if args.quick else args.device]
    N, K, H = (
        given or usual for given, usual in zip((args.heads, args.kv_heads, args.head_dim), sizes.heads, strict=True)
    )
    if N % K:
        parser.error(f"--heads {N} is not a multiple of --kv-heads {K}")
    dtype = getattr(torch, args.dtype or sizes.dtype)
    repeats = args.repeats or sizes.repeats
    backends = args.backends or scoped_backends(args.device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory, prints a line a run

    def case(T: int, scopes: str) -> Case:
        return Case(T, scopes, N, K, H, dtype, args.device)

    def stack(T: int, pass_: str) -> list[dict]:
        s = sizes.stack if pass_ == "prefill" else replace(sizes.stack, layers=sizes.training_layers)
        stack_case = Case(T, "exponential", s.N, s.K, s.H, dtype, args.device)
        times = min(repeats, 2) if args.device == "cuda" else repeats  # seconds each, there
        return measure_stack(stack_case, s, pass_, sizes.chunk, backends[0], times, compiled=args.device == "cuda")

    work: list[tuple[str, Callable[[], list[dict]]]] = []
    kernels = [pass_ for pass_ in ("forward", "forward+backward") if pass_ in args.passes]
    for T in (args.lengths or sizes.lengths) if kernels else ():
        tried = cache(partial(candidates, [case(T, kind) for kind in args.scopes], backends))
        for pass_ in kernels:
            measure = partial(measure_kernels, case(T, args.scopes[0]), tried, pass_, repeats)
            work.append((f"{pass_}, T = {T:,}", measure))
    for T in (args.lengths or sizes.decode) if "decode" in args.passes else ():
        work.append((f"decode, T = {T:,}", partial(measure_decode, case(T, "exponential"), repeats)))
    for pass_, lengths in (("training step", sizes.training), ("prefill", sizes.prefill)):
        for T in (args.lengths or lengths) if pass_ in args.passes else ():
            work.append((f"{pass_}, T = {T:,}", partial(stack, T, pass_)))

    rows: list[dict] = []
    result = origin(args.device) | {
        "threads": torch.get_num_threads(), "outcome": "running", "rows": rows, "failed": failed, "left_out": left_out,
    }  # fmt: skip
    write_json(args.json, result)
    begin = time.perf_counter()
    for done, (name, measure) in enumerate(work, 1):
        seconds = time.perf_counter() - begin
        if args.seconds and seconds > args.seconds:
            left_out.append(f"{name}: no time left")
            continue
        # No progress bar: tqdm may be missing here.
        print(f"[{seconds:5.0f} s] {done} of {len(work)}: {name}", file=sys.stderr, flush=True)
        try:
            rows += measure()
        except (RuntimeError, ValueError, WrongNumbersError) as error:  # the other measurements are still worth having
            leave_out(name, error)
        gc.collect()
        write_json(args.json, result)
    write_json(args.json, result | {"outcome": "ended"})
    print(
        f"{device_name(args.device)}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"{str(dtype).removeprefix('torch.')}; {time.perf_counter() - begin:.0f} s"
    )
    print(table(rows))
    for what, reasons in (("failed", failed), ("left out", left_out)):
        for reason in reasons:
            print(f"{what}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
