"""Rows of `benchmarks.attention`: our attention and PyTorch's dense one side by side, after a check of both.

Shape suffixes: B batch, L tokens, N query heads, K key-value heads, H head dim.
"""

import gc
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from farsight.benchmarks.layer_stack import Attend, LayerStack, StackShape
from farsight.kernels.scoped_attention import RollingCache, Visibility, scoped_attention, scoped_decode, visible_pairs

PASSES = ("forward", "forward+backward", "decode", "prefill", "training step")
SCOPES = ("exponential", "dense", "window")
WINDOW = 1024
CHECKED_ROWS = 64  # of each of three places in the sequence: the reference keeps their scores over all keys
CHECKED_TOKENS = 1024  # of a model's layers
CHECKED_PARTS = 16  # of the keys, whose gradients are compared part by part
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # norm of the error over the norm
FLOPS_PER_PAIR = {"forward": 4, "forward+backward": 14, "decode": 4}  # times head dim: 2 products forward, 5 backward
DECODES = 10  # steps in one timing: one takes microseconds on a GPU


@dataclass(frozen=True)
class Case:
    T: int
    scopes: str
    N: int
    K: int
    H: int
    dtype: torch.dtype
    device: str

    def scopes_N(self, kind: str = "") -> Tensor:
        match kind or self.scopes:
            case "exponential":
                # Rounded before the ceiling: T^(h/N) of an exact power comes out a hair above it.
                scopes = [math.ceil(round(self.T ** (h / self.N), 9)) for h in range(1, self.N + 1)]
            case "window":
                scopes = [WINDOW] * self.N
            case _:
                scopes = [self.T] * self.N
        return torch.tensor(scopes, device=self.device)

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        shapes = [(1, self.T, heads, self.H) for heads in (self.N, self.K, self.K, self.N)]
        q, k, v, do = drawn(shapes, self.dtype, self.device)
        return [x.requires_grad_() for x in (q, k, v)], do

    def named(self, what: str) -> str:
        """With its length and scopes."""
        return f"{what} at T = {self.T:,}, {self.scopes} scopes"

    def row(self, backend: str, pass_: str, scopes: str, times: list[float], pairs: int, flops: float, **more) -> dict:
        median = statistics.median(times)
        return {
            "backend": backend, "pass": pass_, "T": self.T, "N": self.N, "K": self.K, "H": self.H,
            "dtype": str(self.dtype).removeprefix("torch."), "scopes": scopes, "median_s": median,
            "spread_s": max(times) - min(times), "visible_pairs": pairs, "tflops": flops / median / 1e12, **more,
        }  # fmt: skip


def drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]


@dataclass(frozen=True)
class Candidate:
    name: str
    run: Callable[..., Tensor]
    scopes: str
    dense: bool  # an alternative, to the best of which the others are compared
    error: float
    backward: bool = True

    @property
    def key(self) -> str:
        return f"{self.name}, {self.scopes} scopes"


def dense_backends(device: str, dtype: torch.dtype) -> dict[str, SDPBackend]:
    """PyTorch's kernels by name. On GPUs in half precision, the memory-efficient one is left out: both others are faster."""
    names = ["FLASH_ATTENTION"]
    if device == "cuda":
        names = ["EFFICIENT_ATTENTION"] if dtype == torch.float32 else ["FLASH_ATTENTION", "CUDNN_ATTENTION"]
    return {"sdpa " + name.removesuffix("_ATTENTION").lower(): getattr(SDPBackend, name) for name in names}


def dense(backend: SDPBackend, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, q_offset: int = 0) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    grouped = q.shape[1] != k.shape[1]
    mask = causal_lower_right(q.shape[2], k.shape[2]) if q_offset and q.shape[2] > 1 else None
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1, enable_gqa=grouped
        )
    return o.transpose(1, 2)


def scoped_backends(device: str) -> list[str]:
    if device == "cpu":
        return ["banded"]
    return ["hybrid", "triton", "flex"] + ["flash"] * (importlib.util.find_spec("flash_attn") is not None)


failed: list[str] = []
"""Measurements that failed, and why."""
left_out: list[str] = []
"""Those that do not fit into memory, that there was no time for, or for which PyTorch's kernels are not made."""


def leave_out(what: str, error: Exception) -> None:
    """Names a measurement and its error in the list where it belongs."""
    expected = "sdpa" in what or isinstance(error, torch.OutOfMemoryError)
    reasons = left_out if expected else failed
    reasons.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    print(reasons[-1], file=sys.stderr, flush=True)


class WrongNumbersError(Exception):
    """A backend's numbers differ from the reference."""


def relative(found: Tensor, exact: Tensor, dim: tuple[int, ...]) -> float:
    """Norm of the error over the norm of the exact values, both taken over `dim`; the largest of these ratios.

    Heads and positions are compared separately: the last rows of a wide head are averages of many values and so are small.
    Relative to the largest value overall, all of their keys could be missing unnoticed.
    """
    error, norm = (torch.linalg.vector_norm(x, dim=dim) for x in (found.double() - exact, exact))
    return float(torch.where(error == 0, 0, error / norm).max())  # where nothing is seen, both are 0


def largest_error(case: Case, attend: Callable[..., Tensor], scopes_N: Tensor, backward: bool) -> float:
    """Largest relative error of the output and of all gradients against the fp64 reference.

    The output's gradient is zero but for three runs of rows, so that the reference needs those rows only and yet
    checks every key's gradient. Errors are those of a head in a run of rows, or in a part of the keys.
    """
    qkv, do = case.inputs()
    rows = min(CHECKED_ROWS, case.T)
    starts = sorted({0, case.T // 3, case.T - rows})
    kept = torch.zeros(case.T, dtype=torch.bool, device=case.device)
    for start in starts:
        kept[start : start + rows] = True
    do = do * kept[:, None, None]
    with torch.set_grad_enabled(backward):
        o = attend(*qkv)
    dq, dk, dv = torch.autograd.grad(o, qkv, do) if backward else (None, None, None)

    exact = [x.detach().double().requires_grad_() for x in qkv]
    exact_dk, exact_dv = torch.zeros_like(exact[1]), torch.zeros_like(exact[2])
    errors = []
    done = 0
    for start in starts:
        run = slice(max(start, done), start + rows)  # short sequences: the runs overlap
        q, k, v = exact[0][:, run], exact[1][:, : run.stop], exact[2][:, : run.stop]
        part = scoped_attention(q, k, v, Visibility(scopes_N, q_offset=run.start), backend="reference")
        errors.append(relative(o.detach()[:, run], part.detach(), (0, 1, 3)))
        if dq is not None:
            part_dq, *part_dkv = torch.autograd.grad(part, exact, do[:, run].double())
            errors.append(relative(dq[:, run], part_dq[:, run], (0, 1, 3)))
            exact_dk += part_dkv[0]
            exact_dv += part_dkv[1]
        done = run.stop
    if dk is not None and dv is not None:
        for found, expected in ((dk, exact_dk), (dv, exact_dv)):
            parts = zip(found.chunk(CHECKED_PARTS, dim=1), expected.chunk(CHECKED_PARTS, dim=1), strict=True)
            errors += [relative(a, b, (0, 1, 3)) for a, b in parts]
    return max(errors)


def checked(case: Case, name: str, error: float) -> float:
    if not error <= TOLERANCE[case.dtype]:
        raise WrongNumbersError(f"{name} is off by {error:.1e} of the norm, {TOLERANCE[case.dtype]:.0e} is allowed")
    return error


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def timed(runs: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each run. They alternate, so that other work on the machine slows all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run, device))
    return times


def extra_bytes(run: Callable[[], object], device: str) -> int:
    """Peak memory of a run in bytes, beyond what was allocated before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def compared(rows: list[dict], dense_names: set[str]) -> list[dict]:
    """Adds to each row its speed-up over the fastest dense kernel."""
    of_pytorch = [row for row in rows if row["backend"] in dense_names]
    if not of_pytorch:
        raise RuntimeError("none of PyTorch's dense kernels ran, so there is nothing to compare with")
    best = min(of_pytorch, key=lambda row: row["median_s"])
    for row in rows:
        row["speedup_over_dense"] = best["median_s"] / row["median_s"]
        row["dense_backend"] = best["backend"]
        row["pair_ratio"] = best["visible_pairs"] / row["visible_pairs"]
    return rows


def candidates(cases: list[Case], backends: list[str]) -> list[Candidate]:
    """All backends that run here, with their checked errors, for cases that differ only in scopes."""
    found = []
    for case in cases:
        scopes_N = case.scopes_N()
        for name in backends:
            backward = not (name == "flex" and case.device == "cpu")
            scoped = partial(scoped_attention, visibility=Visibility(scopes_N), backend=name)
            try:
                error = checked(case, name, largest_error(case, scoped, scopes_N, backward))
            except (RuntimeError, ValueError, WrongNumbersError) as reason:
                leave_out(case.named(name), reason)
                continue
            found.append(Candidate(name, scoped, case.scopes, False, error, backward))
    case = replace(cases[0], scopes="dense")
    for name, backend in dense_backends(case.device, case.dtype).items():
        attend = partial(dense, backend)
        try:
            error = checked(case, name, largest_error(case, attend, case.scopes_N(), backward=True))
        except (RuntimeError, WrongNumbersError) as reason:  # such as a head dim that the kernel does not take
            leave_out(case.named(name), reason)
            continue
        found.append(Candidate(name, attend, "dense", True, error))
    return found


def measure_kernels(case: Case, tried: Callable[[], list[Candidate]], pass_: str, repeats: int) -> list[dict]:
    """Rows of one pass of the candidates, "forward" or "forward+backward"; only their scopes differ from the case's."""
    those = [c for c in tried() if pass_ == "forward" or c.backward]
    (q, k, v), do = case.inputs()

    def forward(c: Candidate) -> Callable[[], object]:
        return torch.no_grad()(lambda: c.run(q, k, v))

    def both(c: Candidate) -> Callable[[], object]:
        return lambda: torch.autograd.grad(c.run(q, k, v), (q, k, v), do)

    runs = {c.key: (forward if pass_ == "forward" else both)(c) for c in those}
    memory = {key: extra_bytes(run, case.device) for key, run in runs.items()}  # warms up, too
    times = timed(runs, repeats, case.device)
    rows = []
    for c in those:
        pairs = visible_pairs(case.scopes_N(c.scopes).cpu(), case.T)
        flops = FLOPS_PER_PAIR[pass_] * case.H * pairs
        more = {"extra_bytes": memory[c.key], "max_error": c.error}
        rows.append(case.row(c.name, pass_, c.scopes, times[c.key], pairs, flops, **more))
    return compared(rows, {c.name for c in those if c.dense})


def captured(run: Callable[[], object], device: str) -> Callable[[], object]:
    """On a GPU, the run as a CUDA graph, as in serving: launching its kernels one by one takes longer than running them."""
    if device != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@torch.no_grad()
def measure_decode(case: Case, repeats: int) -> list[dict]:
    """Rows of one token's attention over a rolling cache and over a dense cache."""
    scopes_N, causal = case.scopes_N(), case.scopes_N("dense")
    (q, k, v), _ = case.inputs()
    cache = RollingCache(scopes_N.tolist(), case.K, case.T, 1, case.H, case.dtype, case.device)
    cache.append(k[:, :-1], v[:, :-1])
    last = q[:, -1:].detach()

    def error(o: Tensor, scopes: Tensor, name: str) -> float:
        wide = last.double(), k.double(), v.double()
        exact = scoped_attention(*wide, Visibility(scopes, q_offset=case.T - 1), backend="reference")
        return checked(case, name, relative(o.view_as(exact), exact, (0, 1, 3)))

    name = "triton" if case.device == "cuda" else "banded"
    token, visibility = (last[:, 0], k[:, -1], v[:, -1]), Visibility(scopes_N)

    def ours() -> Tensor:
        """Decodes the last token, as if again for the first time."""
        cache.tokens.fill_(case.T - 1)
        return scoped_decode(*token, cache, visibility, backend=name)

    runs: dict[str, Callable[[], Tensor]] = {name: ours}
    errors = {name: error(ours(), scopes_N, name)}
    for dense_name, backend in dense_backends(case.device, case.dtype).items():
        run = partial(dense, backend, last, k, v, case.T - 1)
        try:
            errors[dense_name] = error(run(), causal, dense_name)
        except RuntimeError as reason:  # such as no kernel for one query
            leave_out(case.named(dense_name), reason)
            continue
        runs[dense_name] = run
    memory = {name: extra_bytes(run, case.device) for name, run in runs.items()}

    def steps(run: Callable[[], object]) -> Callable[[], object]:
        return lambda: [run() for _ in range(DECODES)]

    times = timed({name: captured(steps(run), case.device) for name, run in runs.items()}, repeats, case.device)
    rows = []
    for name, taken in times.items():
        kind, kept = (case.scopes, cache.nbytes) if name in ("triton", "banded") else ("dense", k.nbytes + v.nbytes)
        pairs = visible_pairs(case.scopes_N(kind).cpu(), case.T, case.T - 1)
        more = {"extra_bytes": memory[name], "cache_bytes": kept, "max_error": errors[name]}
        each = [time_taken / DECODES for time_taken in taken]
        rows.append(case.row(name, "decode", kind, each, pairs, FLOPS_PER_PAIR["decode"] * case.H * pairs, **more))
    return compared(rows, set(runs) - {"triton", "banded"})


def measure_stack(
    case: Case, shape: StackShape, pass_: str, chunk: int, backend: str, repeats: int, compiled: bool
) -> list[dict]:
    """Rows of a model's layers: a prompt read in chunks, or a training step (forward, backward, AdamW).

    Both are checked on the first CHECKED_TOKENS tokens: outputs, and for a training step the input's gradient.
    """
    training = pass_ == "training step"
    stack = LayerStack(shape, case.dtype, case.device, compiled)
    (x,) = drawn([(1, case.T, shape.D)], case.dtype, case.device)
    short = x[:, :CHECKED_TOKENS].clone().requires_grad_(training)
    caches = stack.caches(short.shape[1] if training else case.T, x)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-9, fused=case.device == "cuda") if training else None

    def step(attend: Attend) -> None:
        assert optimizer is not None
        stack(x, attend).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def result(attend: Attend, whole: bool, size: int) -> tuple[Tensor, ...]:
        if training:
            out = stack(short, attend)
            return out.detach(), *torch.autograd.grad(out.float().square().sum(), short)
        return (stack.prefill(short, attend, size, caches, whole),)

    scopes_N, causal = case.scopes_N(), case.scopes_N("dense")

    def scoped(q: Tensor, k: Tensor, v: Tensor, q_offset: int) -> Tensor:
        return scoped_attention(q, k, v, Visibility(scopes_N, q_offset=q_offset), backend=backend)

    attends: dict[str, Attend] = {backend: scoped}
    of_pytorch = dense_backends(case.device, case.dtype).items()
    attends |= {name: partial(dense, dense_backend) for name, dense_backend in of_pytorch}
    runs: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    for name, attend in attends.items():
        # A chunk needs a mask aligned with the last key; on GPUs PyTorch has one for its flash kernel.
        whole = not (name == backend or (name == "sdpa flash" and case.device == "cuda"))
        scopes = scopes_N if name == backend else causal

        def reference(q: Tensor, k: Tensor, v: Tensor, q_offset: int, scopes: Tensor = scopes) -> Tensor:
            return scoped_attention(q, k, v, Visibility(scopes, q_offset=q_offset), backend="reference")

        try:
            found = result(attend, whole, 3 * short.shape[1] // 4)
            exact = result(reference, True, short.shape[1])
            off = max(relative(a, b[:, -a.shape[1] :].double(), (0, 1, 2)) for a, b in zip(found, exact, strict=True))
            errors[name] = checked(case, name, off)
        except (RuntimeError, ValueError, WrongNumbersError) as reason:
            leave_out(case.named(f"{pass_} with {name}"), reason)
            continue
        runs[name] = partial(step, attend) if training else partial(stack.prefill, x, attend, chunk, caches, whole)

    gc.collect()  # an earlier stack's compiled functions refer to it, and it to them
    if case.device == "cuda" and not training:  # up to a minute a run, all of it compiled by now: each once
        times: dict[str, list[float]] = {}
        memory = {name: extra_bytes(partial(_time_once, name, run, times), "cuda") for name, run in runs.items()}
    else:
        memory = {name: extra_bytes(run, case.device) for name, run in runs.items()}  # warms up, too
        times = timed(runs, repeats, case.device)
    rows = []
    for name, taken in times.items():
        kind = case.scopes if name == backend else "dense"
        pairs = visible_pairs(case.scopes_N(kind).cpu(), case.T)
        flops = shape.flops(case.T, pairs) * (3 if training else 1)  # what is recomputed is not counted
        more = {"extra_bytes": memory[name], "max_error": errors[name], "layers": shape.layers}
        rows.append(case.row(name, pass_, kind, taken, pairs * shape.layers, flops, **more))
    return compared(rows, set(runs) - {backend})


def _time_once(name: str, run: Callable[[], object], times: dict[str, list[float]]) -> None:
    times[name] = [seconds(run, "cuda")]
