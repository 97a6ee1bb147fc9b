"""Scoped attention against PyTorch's dense causal attention: time, memory and error, in one process.

    python -m benchmarks.attention --device cpu --json attention.json

A row appears only after its output and gradients matched the fp64 reference, on the inputs that are then timed.
Scopes are SCOPE's exponential ones, S_h = ceil(γ^h) with γ = T^(1/N), and, as a control, dense ones.

Shape suffixes: B batch, L tokens, N query heads, K key-value heads, H head dim.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from kernels.scoped_attention import scoped_attention, visible_pairs

PASSES = ("forward", "forward+backward")
CHECKED_ROWS = 64  # of each of three places in the sequence: the reference keeps their scores over all keys
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest value
FLOPS_PER_PAIR = {"forward": 4, "forward+backward": 14}  # times head dim: two products forward, five backward


@dataclass(frozen=True)
class Case:
    T: int
    scopes: str  # "exponential" or "dense"
    N: int
    K: int
    H: int
    dtype: torch.dtype
    device: str

    def scopes_N(self) -> Tensor:
        if self.scopes == "dense":
            return torch.full((self.N,), self.T)
        # Rounded before the ceiling: T^(h/N) of an exact power comes out a hair above it.
        return torch.tensor([math.ceil(round(self.T ** (h / self.N), 9)) for h in range(1, self.N + 1)])

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        g = torch.Generator().manual_seed(0)
        shapes = [(1, self.T, heads, self.H) for heads in (self.N, self.K, self.K, self.N)]
        q, k, v, do = (torch.randn(shape, generator=g).to(self.device, self.dtype) for shape in shapes)
        return [x.requires_grad_() for x in (q, k, v)], do


def dense_backends(device: str) -> dict[str, SDPBackend]:
    names = ["FLASH_ATTENTION"] if device == "cpu" else ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"]
    return {"sdpa " + name.removesuffix("_ATTENTION").lower(): getattr(SDPBackend, name) for name in names}


def dense(backend: SDPBackend, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


def runnable(attend: Callable[..., Tensor], qkv: list[Tensor], do: Tensor, name: str) -> Callable[[], object]:
    if name == "forward":
        return torch.no_grad()(lambda: attend(*qkv))
    return lambda: torch.autograd.grad(attend(*qkv), qkv, do)


def largest_error(case: Case, attend: Callable[..., Tensor], scopes_N: Tensor) -> float:
    """Largest error of the output and of all gradients, in parts of the largest value, against the fp64 reference.

    The output's gradient is zero but for three runs of rows, so that the reference needs those rows only and yet
    checks every key's gradient.
    """
    qkv, do = case.inputs()
    rows = min(CHECKED_ROWS, case.T)
    starts = sorted({0, case.T // 3, case.T - rows})
    kept = torch.zeros(case.T, dtype=torch.bool, device=case.device)
    for start in starts:
        kept[start : start + rows] = True
    do = do * kept[:, None, None]
    o = attend(*qkv)
    found = o.detach(), *torch.autograd.grad(o, qkv, do)

    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected_o = torch.zeros_like(exact[0])
    total = torch.zeros((), dtype=torch.float64, device=case.device)
    done = 0
    for start in starts:
        first, end = max(start, done), start + rows  # short sequences: the runs overlap
        q, k, v = exact[0][:, first:end], exact[1][:, :end], exact[2][:, :end]
        part = scoped_attention(q, k, v, scopes_N, q_offset=first, backend="reference")
        expected_o = torch.cat((expected_o[:, :first], part.detach(), expected_o[:, end:]), dim=1)
        total, done = total + (part * do[:, first:end]).sum(), end
    expected = expected_o, *torch.autograd.grad(total, exact)
    found = found[0] * kept[:, None, None], *found[1:]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def extra_bytes(run: Callable[[], object], device: str) -> int:
    """Most bytes allocated at once during a run, above what was there before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(case: Case, repeats: int) -> list[dict]:
    """Rows of both passes for the banded backend and PyTorch's fastest dense one, timed in turn. Checks numbers first."""
    scopes_N = case.scopes_N().to(case.device)
    candidates = {"banded": lambda q, k, v: scoped_attention(q, k, v, scopes_N, backend="banded")}
    errors = {"banded": largest_error(case, candidates["banded"], scopes_N)}
    qkv, do = case.inputs()
    causal = torch.full((case.N,), case.T, device=case.device)
    for name, backend in dense_backends(case.device).items():
        try:
            dense(backend, *qkv)
        except RuntimeError:  # PyTorch has no such kernel for this dtype, head dim or device
            continue
        candidates[name] = lambda q, k, v, backend=backend: dense(backend, q, k, v)
        errors[name] = largest_error(case, candidates[name], causal)
    for name, error in errors.items():
        if not error <= TOLERANCE[case.dtype]:
            raise SystemExit(f"{name} at T = {case.T}, {case.scopes} scopes: error {error:.1e}; nothing was measured")

    rows = []
    for pass_ in PASSES:
        runs = {name: runnable(attend, qkv, do, pass_) for name, attend in candidates.items()}
        memory = {name: extra_bytes(run, case.device) for name, run in runs.items()}  # warms up, too
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                times[name].append(seconds(run, case.device))
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        best_dense = min((name for name in medians if name != "banded"), key=medians.__getitem__)
        for name in ("banded", best_dense):
            pairs = visible_pairs(scopes_N if name == "banded" else causal, case.T)
            rows.append(
                {
                    "backend": name,
                    "pass": pass_,
                    "T": case.T,
                    "N": case.N,
                    "K": case.K,
                    "H": case.H,
                    "dtype": str(case.dtype).removeprefix("torch."),
                    "scopes": case.scopes if name == "banded" else "dense",
                    "median_s": medians[name],
                    "spread_s": max(times[name]) - min(times[name]),
                    "visible_pairs": pairs,
                    "pair_ratio": visible_pairs(causal, case.T) / pairs,
                    "tflops": FLOPS_PER_PAIR[pass_] * case.H * pairs / medians[name] / 1e12,
                    "speedup_over_dense": medians[best_dense] / medians[name],
                    "dense_backend": best_dense,
                    "extra_bytes": memory[name],
                    "max_error": errors[name],
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    header = (
        "backend",
        "scopes",
        "pass",
        "T",
        "median ms",
        "spread ms",
        "TFLOP/s",
        "speed-up",
        "of pairs",
        "extra MiB",
        "error",
    )
    lines = [
        (
            row["backend"],
            row["scopes"],
            row["pass"],
            str(row["T"]),
            f"{row['median_s'] * 1e3:.1f}",
            f"{row['spread_s'] * 1e3:.1f}",
            f"{row['tflops']:.3f}",
            f"{row['speedup_over_dense']:.2f}",
            f"{row['pair_ratio']:.2f}",
            f"{row['extra_bytes'] / 2**20:.0f}",
            f"{row['max_error']:.0e}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in (header, *lines)
    )


def main(argv: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description="Time scoped attention against PyTorch's dense causal attention, after checking both.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--quick", action="store_true", help="short sequences: under a minute on two cores")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="T",
        help="tokens (default: 2048 8192; 32768 takes dense attention minutes)",
    )
    parser.add_argument("--scopes", choices=("exponential", "dense"), nargs="+", default=["exponential", "dense"])
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="query heads")
    parser.add_argument("--kv-heads", type=int, default=16, metavar="K", help="key-value heads, a divisor of N")
    parser.add_argument("--head-dim", type=int, default=64, metavar="H")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda, but PyTorch sees no GPU here: use --device cpu")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}")
    lengths = args.lengths or ([1024, 4096] if args.quick else [2048, 8192])
    repeats = 3 if args.quick else args.repeats

    dims = (args.heads, args.kv_heads, args.head_dim, getattr(torch, args.dtype), args.device)
    cases = [Case(T, scopes, *dims) for T in lengths for scopes in args.scopes]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts memory, prints a line a run
    rows: list[dict] = []
    with tqdm(cases, disable=None, unit="case", leave=False) as progress:
        for case in progress:
            progress.set_description(f"T = {case.T}, {case.scopes} scopes")
            rows += measure(case, repeats)
    print(
        f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, N {args.heads}, K {args.kv_heads}, H {args.head_dim}, {args.dtype}"
    )
    print(table(rows))
    if args.json:
        result = {
            "device": device_name(args.device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return models[0] if models else "cpu"


if __name__ == "__main__":
    sys.exit(main())
