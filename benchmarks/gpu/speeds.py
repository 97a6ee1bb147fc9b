"""Measures the constants of the hybrid backend's cost model on this GPU, and compares what it predicts with what splits take.

    python -m benchmarks.gpu.speeds --json speeds.json [--write]

The constants are the speeds of causal attention and of windows of 1,024 tokens, by kernel and pass; the time from one call to
the next; the memory bandwidth; and the time of a block of queries that a document does not have. `--write` puts
them into `kernels/scoped_attention/speeds.json`, from which the backend and `farsight plan` take them.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import attention

from farsight.benchmarks.attention_rows import Case, drawn
from farsight.benchmarks.gpu.part import Rows, milliseconds, part_parser
from farsight.cli import command
from farsight.files import write_text
from farsight.kernels.scoped_attention import visible_pairs
from farsight.kernels.scoped_attention.cost import (
    FLOPS_PER_PAIR,
    SPEEDS,
    WINDOW,
    Gpu,
    Pass,
    Shape,
    best_split,
    read_gpu,
    split_seconds,
)
from farsight.kernels.scoped_attention.documents import Sequences, whole_rows
from farsight.kernels.scoped_attention.hybrid import hybrid_backward, hybrid_forward
from farsight.kernels.scoped_attention.triton.attention import triton_backward, triton_forward
from farsight.kernels.scoped_attention.varlen import dense_kernel, varlen_backward, varlen_forward
from farsight.parallel.device import peak_flops

PASSES: tuple[Pass, ...] = ("forward", "backward")
CALLS = 50
"""In the measurement of the time from one to the next."""
EMPTY_DOCUMENTS = 256


class Attention:
    """Both passes of a kernel on random inputs, for one scope."""

    def __init__(self, case: Case, scope: int, kernel: str) -> None:
        (q, k, v), do = case.inputs()
        q, k, v = (x.detach() for x in (q, k, v))
        scale = case.H**-0.5
        if kernel == "triton":
            rest = (torch.full((case.N,), scope, device=case.device), None, None, 0, scale)
            o, lse = triton_forward(q, k, v, *rest)
            self.forward: Callable[[], object] = lambda: triton_forward(q, k, v, *rest)
            self.backward: Callable[[], object] = lambda: triton_backward(do, q, k, v, o, lse, *rest)
            return
        q, k, v, do = (x.flatten(0, 1) for x in (q, k, v, do))
        sequences, window = whole_rows(1, ((0, case.T),), (0,), q.device), -1 if scope >= case.T else scope - 1
        o_THN, lse_NT = varlen_forward(q, k, v, sequences, window, scale)
        self.forward = lambda: varlen_forward(q, k, v, sequences, window, scale)
        self.backward = lambda: varlen_backward(do, q, k, v, o_THN, lse_NT, sequences, window, scale)


def tflops(case: Case, scope: int, kernel: str, pass_: Pass, small: bool) -> float:
    """Speed in TFLOP/s of the visible pairs."""
    ms = milliseconds(getattr(Attention(case, scope, kernel), pass_), case.device, *((1, 0) if small else ()))
    return FLOPS_PER_PAIR[pass_] * case.H * visible_pairs([scope] * case.N, case.T) / ms / 1e9


def kernels(device: str) -> list[str]:
    """Triton; FlashAttention 2 where this PyTorch has it; FlashAttention 3 on Hopper where its package is installed."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", device.upper()):
        return ["triton"]
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    return ["triton", "FA2"] + ["FA3"] * (hopper and importlib.util.find_spec("flash_attn_interface") is not None)


def memory_tbytes(device: str, small: bool) -> float:
    """Bandwidth of a copy in TB/s, reads and writes counted."""
    x = torch.empty(2**20 if small else 2**31, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / milliseconds(lambda: y.copy_(x), device) / 1e9


def launch_us(device: str) -> float:
    """Microseconds from one short call of variable-length attention to the next."""
    q, k, v = (x.flatten(0, 1) for x in drawn([(1, 64, heads, 64) for heads in (2, 1, 1)], _dtype(device), device))
    sequences = whole_rows(1, ((0, 64),), (0,), q.device)

    def calls() -> None:
        for _ in range(CALLS):
            varlen_forward(q, k, v, sequences, 15, 0.125)

    return 1e3 * milliseconds(calls, device) / CALLS


def empty_block_ns(device: str, small: bool) -> float:
    """Nanoseconds of a block of queries past the end of its document, over all processors."""
    T, N = (64, 2) if small else (8192, 32)
    q, k, v = (x.flatten(0, 1) for x in drawn([(1, T, N, 64)] * 3, _dtype(device), device))

    def ms(empty: int) -> float:
        starts = torch.tensor([0] + [T] * (empty + 1), dtype=torch.int32, device=device)
        sequences = Sequences(starts, starts, T, T)
        return milliseconds(lambda: varlen_forward(q, k, v, sequences, 15, 0.125), device)

    blocks = EMPTY_DOCUMENTS * -(-T // 128)
    return max(0.0, ms(EMPTY_DOCUMENTS) - ms(0)) * 1e6 / (blocks * N)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def measure(rows: Rows) -> dict[str, Any]:
    """The table of this GPU, in the form of speeds.json."""
    small, device = rows.small, rows.device
    case = (
        Case(64, "dense", 2, 1, 16, torch.float32, device)
        if small
        else Case(32768, "dense", 32, 8, 128, torch.bfloat16, device)
    )
    table: dict[str, Any] = {}
    for kernel in kernels(device):
        if kernel == "FA3":
            attention.activate_flash_attention_impl("FA3")
        for pass_ in PASSES:
            for name, scope in (("dense", case.T), ("window", 16 if small else WINDOW)):
                speed = rows.attempt(f"{kernel} {pass_}, {name}", partial(tflops, case, scope, kernel, pass_, small))
                if speed is not None:
                    rows.add(what=f"{kernel} {pass_}, {name}, TFLOP/s", value=speed)
                    table.setdefault(kernel, {}).setdefault(pass_, []).append(_rounded(speed))
    table = {kernel: passes for kernel, passes in table.items() if [*map(len, passes.values())] == [2, 2]}
    others: dict[str, Callable[[], float]] = {"memory_tbytes": partial(memory_tbytes, device, small)}
    if len(kernels(device)) > 1:
        others |= {"launch_us": partial(launch_us, device), "empty_block_ns": partial(empty_block_ns, device, small)}
    constants = {name: rows.attempt(name, run) for name, run in others.items()}
    for name, value in constants.items():
        rows.add(what=name, value=value)
    assumed = json.loads(SPEEDS.read_text())[str(rows.major)]
    peak = None if small else peak_flops(torch.device("cuda"))
    return {
        "gpu": rows.figures["device"], "measured": True,
        "source": f"python -m benchmarks.gpu.speeds, torch {torch.__version__}, Triton {rows.figures['triton']}",
        "peak_tflops": round(peak / 1e12) if peak else assumed["peak_tflops"],
        **{name: assumed[name] if constants.get(name) is None else _rounded(constants[name]) for name in ("memory_tbytes", "launch_us", "empty_block_ns")},
        "processors": assumed["processors"] if small else torch.cuda.get_device_properties().multi_processor_count,
        "kernels": table,
    }  # fmt: skip


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def compare(rows: Rows, gpu: Gpu, kernel: str, T: int, pass_: Pass) -> None:
    """Adds a row for each of some splits: its predicted and its measured time."""
    N, K, H = (4, 2, 16) if rows.small else (32, 8, 128)
    case = Case(T, "exponential", N, K, H, _dtype(rows.device), rows.device)
    (q, k, v), do = case.inputs()
    q, k, v = (x.detach() for x in (q, k, v))
    scopes_N = case.scopes_N()
    scopes = tuple(scopes_N.tolist())
    shape = Shape(1, T, group=N // K, head_dim=H)
    best = best_split(scopes, shape, gpu, kernel, pass_).wide_from
    wide = sum(scope >= best for scope in scopes)
    for heads in sorted({0, N, *(min(N, max(0, wide + more)) for more in (-4, -2, 0, 2, 4))}):
        wide_from = sorted(scopes)[-heads] if heads else max(scopes) + 1

        def run(wide_from: int = wide_from) -> Callable[[], object]:
            rest = (scopes_N, None, None, 0, H**-0.5, wide_from)
            if pass_ == "forward":
                return lambda: hybrid_forward(q, k, v, *rest)
            o, lse = hybrid_forward(q, k, v, *rest)
            return lambda: hybrid_backward(do, q, k, v, o, lse, *rest)

        ms = milliseconds(run(), rows.device, *((1, 0) if rows.small else ()))
        predicted = 1e3 * split_seconds(scopes, shape, gpu, kernel, pass_, wide_from)
        rows.add(
            what="split", T=T, **{"pass": pass_}, wide_heads=heads, chosen=heads == wide, ms=ms, predicted_ms=predicted
        )


def write_speeds(table: dict[str, Any], major: int) -> None:
    """Puts the table of a major architecture into speeds.json."""
    tables = json.loads(SPEEDS.read_text()) | {str(major): table}
    write_text(SPEEDS, json.dumps(tables, indent=2) + "\n")


@command
def main(argv: list[str] | None = None) -> int:
    parser = part_parser("speeds", __doc__)
    parser.add_argument("--write", action="store_true", help="change kernels/scoped_attention/speeds.json")
    options = parser.parse_args(argv)
    if options.write and options.small:
        parser.error("--write takes the speeds of a GPU, and --small has none")
    rows = Rows(options, "speeds")
    table = rows.figures["speeds"] = measure(rows)
    device = torch.device(rows.device)
    if len(table["kernels"]) > 1:
        kernel = dense_kernel(device) or ""
        for T in (64,) if rows.small else (8192, 32768, 131072):
            for pass_ in PASSES:
                rows.attempt(f"splits, T = {T:,}, {pass_}", partial(compare, rows, read_gpu(table), kernel, T, pass_))
    if options.write and not rows.figures["failed"]:
        write_speeds(table, rows.major)
    return rows.end()


if __name__ == "__main__":
    sys.exit(main())
