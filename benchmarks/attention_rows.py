"""What `benchmarks.attention` measures: our attention and PyTorch's dense one side by side, after a check of both.

Shape suffixes: B batch, L tokens, N query heads, K key-value heads, H head dim.
"""

import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.layer_stack import Attend, LayerStack, StackShape
from kernels.scoped_attention import RollingCache, scoped_attention, scoped_decode, visible_pairs

PASSES = ("forward", "forward+backward", "decode", "prefill", "training step")
SCOPES = ("exponential", "dense", "window")
WINDOW = 1024
CHECKED_ROWS = 64  # of each of three places in the sequence: the reference keeps their scores over all keys
CHECKED_TOKENS = 1024  # of a model's layers
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest value
STACK_TOLERANCE = 4  # times as much for the layers of a model, whose roundings add up
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
        g = torch.Generator().manual_seed(0)
        shapes = [(1, self.T, heads, self.H) for heads in (self.N, self.K, self.K, self.N)]
        q, k, v, do = (torch.randn(shape, generator=g).to(self.device, self.dtype) for shape in shapes)
        return [x.requires_grad_() for x in (q, k, v)], do

    def row(self, backend: str, pass_: str, scopes: str, times: list[float], pairs: int, flops: float, **more) -> dict:
        median = statistics.median(times)
        return {
            "backend": backend, "pass": pass_, "T": self.T, "N": self.N, "K": self.K, "H": self.H,
            "dtype": str(self.dtype).removeprefix("torch."), "scopes": scopes, "median_s": median,
            "spread_s": max(times) - min(times), "visible_pairs": pairs, "tflops": flops / median / 1e12, **more,
        }  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    name: str
    run: Callable[..., Tensor]
    scopes: str
    dense: bool  # an alternative, to the best of which the others are compared
    error: float
    backward: bool = True


def dense_backends(device: str) -> dict[str, SDPBackend]:
    # On GPUs without the memory-efficient kernel: it is slower than both, and minutes of a long run.
    names = ["FLASH_ATTENTION"] if device == "cpu" else ["FLASH_ATTENTION", "CUDNN_ATTENTION"]
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
    return ["triton", "flex"] + ["flash"] * (importlib.util.find_spec("flash_attn") is not None)


def largest_error(case: Case, attend: Callable[..., Tensor], scopes_N: Tensor, backward: bool) -> float:
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
    with torch.set_grad_enabled(backward):
        o = attend(*qkv)
    found = (o.detach() * kept[:, None, None], *(torch.autograd.grad(o, qkv, do) if backward else ()))

    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected_o = torch.zeros_like(exact[0])
    gradients = [torch.zeros_like(x) for x in exact]
    done = 0
    for start in starts:
        first, end = max(start, done), start + rows  # short sequences: the runs overlap
        q, k, v = exact[0][:, first:end], exact[1][:, :end], exact[2][:, :end]
        part = scoped_attention(q, k, v, scopes_N, q_offset=first, backend="reference")
        expected_o[:, first:end] = part.detach()
        if backward:
            for total, grad in zip(gradients, torch.autograd.grad(part, exact, do[:, first:end].double()), strict=True):
                total += grad
        done = end
    expected = (expected_o, *(gradients if backward else ()))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def checked(case: Case, name: str, error: float, times: float = 1.0) -> float:
    if not error <= times * TOLERANCE[case.dtype]:
        raise SystemExit(f"{name} at T = {case.T}, {case.scopes} scopes: error {error:.1e}; nothing was measured")
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
    """Seconds of each run, all in turn, so that what disturbs the machine disturbs them alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run, device))
    return times


def extra_bytes(run: Callable[[], object], device: str) -> int:
    """Most bytes allocated at once during a run, above what was there before it."""
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
    """The rows but for slower dense ones, each with its speed-up over the fastest dense one."""
    best = min((row for row in rows if row["backend"] in dense_names), key=lambda row: row["median_s"])
    kept = [row for row in rows if row is best or row["backend"] not in dense_names]
    for row in kept:
        row["speedup_over_dense"] = best["median_s"] / row["median_s"]
        row["dense_backend"] = best["backend"]
        row["pair_ratio"] = best["visible_pairs"] / row["visible_pairs"]
    return kept


def candidates(case: Case, backends: list[str]) -> list[Candidate]:
    """All that run here, each with its error, which has been checked."""
    scopes_N, causal = case.scopes_N(), case.scopes_N("dense")
    found = []
    for name in backends:
        backward = not (name == "flex" and case.device == "cpu")
        scoped = partial(scoped_attention, scopes_N=scopes_N, backend=name)
        error = checked(case, name, largest_error(case, scoped, scopes_N, backward))
        found.append(Candidate(name, scoped, case.scopes, False, error, backward))
    (q, k, v), _ = case.inputs()
    for name, backend in dense_backends(case.device).items():
        try:
            dense(backend, q, k, v)
        except RuntimeError:  # PyTorch has no such kernel for this dtype, head dim or device
            continue
        attend = partial(dense, backend)
        error = checked(case, name, largest_error(case, attend, causal, backward=True))
        found.append(Candidate(name, attend, "dense", True, error))
    return found


def measure_kernels(case: Case, backends: list[str], passes: list[str], repeats: int) -> list[dict]:
    """Rows of a forward pass, and of forward and backward."""
    tried = candidates(case, backends)
    qkv, do = case.inputs()

    def forward(c: Candidate) -> Callable[[], object]:
        q, k, v = qkv
        return torch.no_grad()(lambda: c.run(q, k, v))

    def both(c: Candidate) -> Callable[[], object]:
        return lambda: torch.autograd.grad(c.run(*qkv), qkv, do)

    rows = []
    for pass_ in (p for p in ("forward", "forward+backward") if p in passes):
        those = [c for c in tried if pass_ == "forward" or c.backward]
        runs = {c.name: (forward if pass_ == "forward" else both)(c) for c in those}
        memory = {name: extra_bytes(run, case.device) for name, run in runs.items()}  # warms up, too
        times = timed(runs, repeats, case.device)
        of_pass = []
        for c in those:
            pairs = visible_pairs(case.scopes_N(c.scopes).cpu(), case.T)
            flops = FLOPS_PER_PAIR[pass_] * case.H * pairs
            more = {"extra_bytes": memory[c.name], "max_error": c.error}
            of_pass.append(case.row(c.name, pass_, c.scopes, times[c.name], pairs, flops, **more))
        rows += compared(of_pass, {c.name for c in those if c.dense})
    return rows


def captured(run: Callable[[], object], device: str) -> Callable[[], object]:
    """On a GPU a CUDA graph, as in serving: launching kernels one by one would take longer than running them."""
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
    """Rows of one token's attention over a rolling cache, and over a dense cache."""
    scopes_N, causal = case.scopes_N(), case.scopes_N("dense")
    (q, k, v), _ = case.inputs()
    cache = RollingCache(scopes_N.tolist(), case.K, case.T, 1, case.H, case.dtype, case.device)
    cache.append(k, v)
    last = q[:, -1:].detach()

    def exact(scopes: Tensor) -> Tensor:
        wide = last.double(), k.double(), v.double()
        return scoped_attention(*wide, scopes, q_offset=case.T - 1, backend="reference")

    def error(o: Tensor, scopes: Tensor, name: str) -> float:
        expected = exact(scopes).view_as(o)
        return checked(case, name, float((o - expected).abs().max() / expected.abs().max()))

    name = "triton" if case.device == "cuda" else "banded"
    ours = partial(scoped_decode, last[:, 0], cache, scopes_N, backend=name)
    runs: dict[str, Callable[[], Tensor]] = {name: ours}
    errors = {name: error(ours(), scopes_N, name)}
    for dense_name, backend in dense_backends(case.device).items():
        run = partial(dense, backend, last, k, v, case.T - 1)
        try:
            o = run()
        except RuntimeError:  # no such kernel for one query
            continue
        runs[dense_name], errors[dense_name] = run, error(o, causal, dense_name)
    memory = {name: extra_bytes(run, case.device) for name, run in runs.items()}

    def steps(run: Callable[[], object]) -> Callable[[], object]:
        return lambda: [run() for _ in range(DECODES)]

    times = timed({name: captured(steps(run), case.device) for name, run in runs.items()}, repeats, case.device)
    rows = []
    for name, taken in times.items():
        kind, kept = (case.scopes, cache.nbytes) if name in ("triton", "banded") else ("dense", k.nbytes + v.nbytes)
        pairs = visible_pairs(case.scopes_N(kind).cpu(), case.T, case.T - 1)
        more = {"extra_bytes": memory[name], "cache_bytes": kept, "max_error": errors[name]}
        each = [seconds / DECODES for seconds in taken]
        rows.append(case.row(name, "decode", kind, each, pairs, FLOPS_PER_PAIR["decode"] * case.H * pairs, **more))
    return compared(rows, set(runs) - {"triton", "banded"})


def measure_stack(
    case: Case, shape: StackShape, pass_: str, chunk: int, backend: str, repeats: int, compiled: bool
) -> list[dict]:
    """Rows of a model's layers: a prompt read in chunks, or a training step (forward, backward, AdamW)."""
    stack = LayerStack(shape, case.dtype, case.device, compiled)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, case.T, shape.D, generator=generator).to(case.device, case.dtype)
    short = x[:, :CHECKED_TOKENS]
    caches = stack.caches(case.T if pass_ == "prefill" else short.shape[1], x)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-9, fused=case.device == "cuda")

    def step(attend: Attend) -> None:
        stack(x, attend).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    scopes_N, causal = case.scopes_N(), case.scopes_N("dense")

    def scoped(q: Tensor, k: Tensor, v: Tensor, q_offset: int) -> Tensor:
        return scoped_attention(q, k, v, scopes_N, q_offset=q_offset, backend=backend)

    attends: dict[str, Attend] = {backend: scoped}
    attends |= {name: partial(dense, dense_backend) for name, dense_backend in dense_backends(case.device).items()}
    runs: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    for name, attend in attends.items():
        # A chunk needs a mask that is aligned with the last key, which PyTorch has for its flash kernel on GPUs.
        chunks = name == backend or (name == "sdpa flash" and case.device == "cuda")

        def reference(q: Tensor, k: Tensor, v: Tensor, q_offset: int, ours: bool = name == backend) -> Tensor:
            return scoped_attention(q, k, v, scopes_N if ours else causal, q_offset=q_offset, backend="reference")

        try:
            found = stack.prefill(short, attend, 3 * short.shape[1] // 4 if chunks else short.shape[1], caches)
        except RuntimeError:  # PyTorch has no such kernel for this dtype, head dim or device
            continue
        exact = stack.prefill(short, reference, short.shape[1], caches)[:, -found.shape[1] :]
        error = float((found.float() - exact.float()).abs().max() / exact.float().abs().max())
        errors[name] = checked(case, f"{pass_} with {name}", error, STACK_TOLERANCE)
        runs[name] = partial(step, attend)
        if pass_ == "prefill":
            runs[name] = partial(stack.prefill, x, attend, chunk if chunks else case.T, caches)

    if pass_ == "prefill" and case.device == "cuda":  # up to a minute a run, compiled for any length by now: each once
        times: dict[str, list[float]] = {}
        memory = {name: extra_bytes(partial(_time_once, name, run, times), "cuda") for name, run in runs.items()}
    else:
        memory = {name: extra_bytes(run, case.device) for name, run in runs.items()}  # warms up, too
        times = timed(runs, repeats, case.device)
    rows = []
    for name, taken in times.items():
        kind = case.scopes if name == backend else "dense"
        pairs = visible_pairs(case.scopes_N(kind).cpu(), case.T)
        flops = shape.flops(case.T, pairs) * (3 if pass_ == "training step" else 1)
        more = {"extra_bytes": memory[name], "max_error": errors[name], "layers": shape.layers}
        rows.append(case.row(name, pass_, kind, taken, pairs * shape.layers, flops, **more))
    return compared(rows, set(runs) - {backend})


def _time_once(name: str, run: Callable[[], object], times: dict[str, list[float]]) -> None:
    times[name] = [seconds(run, "cuda")]
