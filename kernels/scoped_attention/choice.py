"""The choice of a backend for "auto". The rule follows the table in docs/performance/kernels.md; the choice is logged once.

On a GPU the kernels are checked before use: a small input, forward and backward, against the reference. This takes a
moment, once per process for each dtype and head dim, so that an untested compiler or GPU can't train on wrong results.
"""

import importlib.util
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial

import torch
from torch import Tensor

from farsight.kernels.scoped_attention.reference import reference_attention
from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.visibility import Visibility

TRITON_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")
TRIAL_TOLERANCE = {"torch.bfloat16": 3e-2, "torch.float16": 4e-3, "torch.float32": 1e-3}
"""Largest error of output and gradients, relative to the largest value: rounding is far below, a wrong tile far above."""

logger = logging.getLogger("farsight.kernels")


@torch.compiler.assume_constant_result
def pick_backend(device_type: str, dtype: str, head_dim: int, decode: bool = False) -> str:
    """The fastest backend for a device, a dtype (as a string, "torch.bfloat16") and a head dim.

    torch.compile calls it while compiling, so that its trial and logging do not break the graph.

    Raises:
        RuntimeError: the kernels give wrong results on this machine.
    """
    return _pick(device_type, dtype, head_dim, decode)


@cache
def _pick(device_type: str, dtype: str, head_dim: int, decode: bool) -> str:
    picked, tried = "banded", ""
    if _can_run_triton(device_type, dtype, head_dim):
        picked, largest = "triton", 0.0
        trials = [("Triton", "banded", _decode_error if decode else _attention_error)]
        if not decode and _can_run_hybrid(device_type, dtype, head_dim):
            picked = "hybrid"
            trials.append(("PyTorch's variable-length", "triton", _hybrid_error))
        for kernels, instead, trial in trials:
            error = in_a_thread(trial, device_type, dtype, head_dim)
            if not error <= TRIAL_TOLERANCE[dtype]:
                raise RuntimeError(
                    f"{kernels} attention kernels are off by {error:.1e} of the largest value for {dtype}, head dim "
                    f"{head_dim}, on this machine, where {TRIAL_TOLERANCE[dtype]:.0e} is expected: set the attention "
                    f'backend to "{instead}", and report this with the output of python -m torch.utils.collect_env'
                )
            largest = max(largest, error)
        tried = f" (tried against the reference: error {largest:.1e})"
    name, what = dtype.removeprefix("torch."), "decoding" if decode else "attention"
    logger.info("%s backend for %s, head dim %d, on %s: %s%s", what, name, head_dim, device_type, picked, tried)
    return picked


@torch.compiler.assume_constant_result
def can_run_triton(device_type: str, dtype: str, head_dim: int) -> bool:
    """True on NVIDIA GPUs from Ampere on, for which the tests compile every tile."""
    return _can_run_triton(device_type, dtype, head_dim)


@cache
def _can_run_triton(device_type: str, dtype: str, head_dim: int) -> bool:
    if device_type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability()[0] >= 8 and dtype in TRITON_DTYPES and head_dim <= 128


def _can_run_hybrid(device_type: str, dtype: str, head_dim: int) -> bool:
    """True where, besides Triton, this PyTorch's variable-length attention takes the heads."""
    from farsight.kernels.scoped_attention import varlen

    kernel = varlen.dense_kernel(torch.device(device_type))
    return kernel is not None and getattr(torch, dtype.removeprefix("torch.")) in varlen.DTYPES and head_dim % 8 == 0


TRIAL_SCOPES = [3, 300, 100, 40]
TRIAL_TOKENS, TRIAL_DOCUMENT = 300, 170  # where the second of two documents starts


def _attention_error(device_type: str, dtype: str, head_dim: int) -> float:
    """That of the Triton kernels."""
    from farsight.kernels.scoped_attention.triton.attention import triton_attention

    return _error_of(triton_attention, device_type, dtype, head_dim)


def _hybrid_error(device_type: str, dtype: str, head_dim: int) -> float:
    """That of both kernels together, each with half of the heads."""
    from farsight.kernels.scoped_attention.hybrid import hybrid_attention

    wide_from = sorted(TRIAL_SCOPES)[len(TRIAL_SCOPES) // 2]
    return _error_of(partial(hybrid_attention, wide_from=wide_from), device_type, dtype, head_dim)


def _error_of(attention: Callable[..., Tensor], device_type: str, dtype: str, head_dim: int) -> float:
    """Largest error of output and gradients, with one document and with two, relative to the largest value."""
    q, k, v, do = _trial_inputs(device_type, dtype, head_dim)
    scopes_N = torch.tensor(TRIAL_SCOPES, device=device_type)
    two_documents = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int32, device=device_type)
    two_documents[:, TRIAL_DOCUMENT:] = TRIAL_DOCUMENT

    def with_gradients(attend: Callable[..., Tensor], kind: torch.dtype, starts: Tensor | None) -> tuple[Tensor, ...]:
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        o = attend(*leaves, Visibility(scopes_N, starts), head_dim**-0.5)
        return o.detach(), *torch.autograd.grad(o, leaves, do.to(kind))

    return max(
        _largest_error(
            with_gradients(attention, q.dtype, starts),
            with_gradients(reference_attention, torch.float32, starts),
        )
        for starts in (None, two_documents)
    )


def _decode_error(device_type: str, dtype: str, head_dim: int) -> float:
    """Largest error of the last token's output, relative to the largest value."""
    from farsight.kernels.scoped_attention.triton.decode import triton_decode

    q, k, v, _ = _trial_inputs(device_type, dtype, head_dim)
    visibility, scale = Visibility(torch.tensor(TRIAL_SCOPES, device=device_type)), head_dim**-0.5
    cache = RollingCache(TRIAL_SCOPES, 2, TRIAL_TOKENS, 1, head_dim, q.dtype, device_type)
    cache.append(k[:, :-1], v[:, :-1])
    found = triton_decode(q[:, -1], k[:, -1], v[:, -1], cache, visibility, None, scale)
    exact = reference_attention(q.float(), k.float(), v.float(), visibility, scale)
    return _largest_error((found,), (exact[:, -1],))


def _trial_inputs(device_type: str, dtype: str, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype.removeprefix("torch."))
    shapes = [(1, TRIAL_TOKENS, heads, head_dim) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to(device_type, kind) for shape in shapes]


def _largest_error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    errors = [
        (ours.float() - theirs).abs().max() / theirs.abs().max() for ours, theirs in zip(found, exact, strict=True)
    ]
    return float(torch.stack(errors).max())  # NaN if any is


def in_a_thread(function: Callable[..., float], *args) -> float:
    """Calls a function in a new thread, outside the caller's thread-local modes (checkpointing, autocast, inference)."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> float:
        with torch.cuda.device(device) if device is not None else nullcontext():
            return function(*args)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()
