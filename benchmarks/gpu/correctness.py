"""Numbers of every kernel on this GPU, against the definition in fp64; and of a training run and of decoding, against the CPU's.

    python -m benchmarks.gpu.correctness --json correctness.json
    python -m benchmarks.gpu.correctness --small            # the same cases on a CPU, with interpreted kernels

The first row tells whether tensor descriptors work here: the kernels for Hopper and Blackwell load their keys through them.
A row's error is the largest norm of an error over the norm of the exact values, by head, for the output and each gradient.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farsight.benchmarks.attention_rows import TOLERANCE, drawn, relative
from farsight.benchmarks.gpu.part import Rows, part_parser
from farsight.benchmarks.gpu.runs import train
from farsight.benchmarks.tiny import MODEL, SETTINGS
from farsight.cli import command
from farsight.configs.load import build_config
from farsight.inference.decoder import Decoder
from farsight.inference.step import WARM_UP, Step
from farsight.kernels.chunked_loss import chunked_cross_entropy
from farsight.kernels.scoped_attention import (
    RollingCache,
    ScoreBias,
    Segments,
    Visibility,
    scoped_attention,
    scoped_decode,
    scoped_prefill,
    segmented_attention,
)
from farsight.kernels.scoped_attention.hybrid import hybrid_attention, hybrid_segmented
from farsight.kernels.scoped_attention.triton.tiles import tiles, use_tiles
from farsight.kernels.scoped_attention.varlen import DTYPES as VARLEN_DTYPES
from farsight.kernels.scoped_attention.varlen import dense_kernel
from farsight.kernels.triton_rows import padded
from farsight.model.build import ModelConfig, build_model
from farsight.process import EXIT_NON_FINITE

LOSS_TOLERANCE = 1e-4
"""Relative, of fp32 losses on the GPU and the CPU."""


class WrongNumbersError(Exception):
    """An error beyond the tolerance."""


@dataclass(frozen=True)
class Case:
    """A call of attention. Its scopes, documents and slopes are random."""

    heads: tuple[int, int] = (8, 2)
    """Query heads and key-value heads."""
    head_dim: int = 128
    queries: int = 1000
    q_offset: int = 0
    documents: bool = False
    slopes: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        has = {"documents": self.documents, "slopes": self.slopes, f"{self.q_offset} keys before": bool(self.q_offset)}
        sizes = f"{self.heads[0]} heads on {self.heads[1]} of {self.head_dim}, {self.queries} queries"
        return ", ".join(
            [str(self.dtype).removeprefix("torch."), sizes, *(name for name, there in has.items() if there)]
        )

    def visibility(self, device: str) -> Visibility:
        generator, keys = torch.Generator().manual_seed(1), self.queries + self.q_offset
        scopes_N = torch.exp(torch.rand(self.heads[0], generator=generator) * torch.tensor(keys).log()).ceil().long()
        scopes_N[-1] = keys
        starts_BL = None
        if self.documents:
            begins_BL = torch.rand(2, keys, generator=generator) < 5 / keys
            starts_BL = torch.where(begins_BL, torch.arange(keys), 0).cummax(1).values.int().to(device)
        slopes_PN = torch.rand(1, self.heads[0], generator=generator).to(device)
        bias = ScoreBias("alibi", slopes_PN) if self.slopes else None
        return Visibility(scopes_N.to(device), starts_BL, bias, self.q_offset)

    def inputs(self, device: str) -> list[Tensor]:
        """q, k, v and the output's gradient."""
        (N, K), keys = self.heads, self.queries + self.q_offset
        shapes = [
            (2, tokens, heads, self.head_dim)
            for tokens, heads in ((self.queries, N), (keys, K), (keys, K), (self.queries, N))
        ]
        return drawn(shapes, self.dtype, device)


SMALL = Case(heads=(2, 1), head_dim=16, queries=24)


def cases(backend: str, device: str, small: bool) -> Iterator[Case]:
    """Those that a backend takes."""
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    if backend in ("flash", "hybrid"):
        dtypes = [*VARLEN_DTYPES]
    if small:
        yield from (replace(SMALL, dtype=dtype) for dtype in dtypes)
        yield replace(SMALL, documents=True, slopes=True, q_offset=13)
        return
    yield from (Case(dtype=dtype) for dtype in dtypes)
    for documents, slopes, offset in itertools.product((False, True), (False, True), (0, 333)):
        if documents or slopes or offset:
            yield Case(documents=documents, slopes=slopes, q_offset=offset)
    yield from (Case(head_dim=head_dim, documents=True) for head_dim in (64, 96, 40))
    yield from (Case(heads=heads) for heads in ((8, 8), (16, 1)))


def attention_error(case: Case, attend: Callable[..., Tensor], device: str, backward: bool = True) -> float:
    """The largest error of output and, with `backward`, gradients.

    Raises:
        WrongNumbersError: it is beyond the tolerance.
    """
    visibility, (*qkv, do) = case.visibility(device), case.inputs(device)

    def results(of: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).detach().requires_grad_() for x in qkv]
        o = of(*inputs, visibility)
        return [o.detach(), *(torch.autograd.grad(o, inputs, do.to(dtype)) if backward else ())]

    exact = results(partial(scoped_attention, backend="reference"), torch.float64)
    return within(
        max(relative(x, y, (0, 1, 3)) for x, y in zip(results(attend, case.dtype), exact, strict=True)), case.dtype
    )


def within(error: float, dtype: torch.dtype) -> float:
    """The error.

    Raises:
        WrongNumbersError: it is beyond the dtype's tolerance.
    """
    if not error <= TOLERANCE[dtype]:
        raise WrongNumbersError(f"off by {error:.1e} of the norm, {TOLERANCE[dtype]:.0e} is allowed")
    return error


def without_descriptors(major: int, *inputs: Tensor, visibility: Visibility) -> Tensor:
    """Triton's attention with the same tiles, through pointers."""
    q = inputs[0]
    shipped = {name: tiles(name, padded(q.shape[-1]), q.itemsize, major) for name in ("forward", "dq", "dkv")}
    with use_tiles(**{name: replace(tile, descriptors=False) for name, tile in shipped.items()}):
        return scoped_attention(*inputs, visibility, backend="triton")


def backends(rows: Rows) -> dict[str, Callable[..., Tensor]]:
    """Attention by name, on this device."""
    found: dict[str, Callable[..., Tensor]] = {"triton": partial(scoped_attention, backend="triton")}
    if rows.device == "cuda":
        if dense_kernel(torch.device("cuda")) is not None:
            found["hybrid"] = partial(scoped_attention, backend="hybrid")
            # Half of the heads on each side, whatever the cost model says of such short sequences.
            found["hybrid, split"] = lambda q, k, v, seen: hybrid_attention(
                q, k, v, seen, q.shape[-1] ** -0.5, wide_from=int(seen.scopes_N.median())
            )
        installed = find_spec("flash_attn") is not None
        found |= {name: partial(scoped_attention, backend=name) for name in ["flex", *["flash"] * installed]}
    return found | {"banded": partial(scoped_attention, backend="banded")}


def segmented_backends(names: Collection[str]) -> dict[str, Callable[..., Tensor]]:
    """`segmented_attention` by those of the backends that have their own way to compute it, and by calls of "banded"."""
    found: dict[str, Callable[..., Tensor]] = {
        name: partial(segmented_attention, backend=name) for name in ("triton", "hybrid", "banded") if name in names
    }
    if "hybrid" in names:
        found["hybrid, split"] = lambda q, kv, segments, seen: hybrid_segmented(
            q, kv, segments, seen, q.shape[-1] ** -0.5, wide_from=int(seen.scopes_N.median())
        )
    return found


def in_segments(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Attention as two ranks of context parallelism compute it, one of a sequence's first and last quarter."""
    T, K = k.shape[1:3]
    reach = visibility.scopes_N.unflatten(0, (K, -1)).amax(1).tolist()
    quarters = [*pairwise(T * part // 4 for part in range(5))]
    found: dict[tuple[int, int], Tensor] = {}
    for pieces in ((quarters[0], quarters[3]), (quarters[1], quarters[2])):
        first_keys = tuple(tuple(max(0, begin - far + 1) for far in reach) for begin, _ in pieces)
        segments = Segments(pieces, first_keys)
        rows = [torch.stack((k[:, a:b, head], v[:, a:b, head])).permute(2, 0, 1, 3) for _, head, (a, b) in segments]
        queries = torch.cat([q[:, a:b] for a, b in pieces], 1)
        o = attend(queries, torch.cat(rows), segments, visibility)
        found |= zip(pieces, o.split([b - a for a, b in pieces], 1), strict=True)
    return torch.cat([found[quarter] for quarter in quarters], 1)


def in_chunks(backend: str, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Attention of a prompt that is read in three chunks."""
    cache = RollingCache(
        visibility.scopes_N.tolist(), k.shape[2], k.shape[1], k.shape[0], k.shape[3], k.dtype, k.device
    )
    chunks = zip(*(x.chunk(3, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([scoped_prefill(*chunk, cache, visibility, backend=backend) for chunk in chunks], 1)


def decode_error(case: Case, device: str) -> float:
    """The largest error of tokens that are decoded one by one, after a prompt of half of them.

    Raises:
        WrongNumbersError: it is beyond the tolerance.
    """
    (q, k, v, _), visibility = case.inputs(device), case.visibility(device)
    prompt = case.queries // 2
    cache = RollingCache(
        visibility.scopes_N.tolist(), case.heads[1], case.queries, 2, case.head_dim, case.dtype, device
    )
    cache.append(k[:, :prompt], v[:, :prompt])
    exact = scoped_attention(*(x.double() for x in (q, k, v)), visibility, backend="reference")
    outputs = [
        scoped_decode(q[:, t], k[:, t], v[:, t], cache, visibility, backend="triton")
        for t in range(prompt, case.queries)
    ]
    return within(relative(torch.stack(outputs, 1), exact[:, prompt:], (0, 1, 3)), case.dtype)


def loss_error(device: str, small: bool) -> float:
    """The largest error of the chunked loss and its gradients, in bf16, with chunks that do not divide the tokens.

    Raises:
        WrongNumbersError: it is beyond the tolerance.
    """
    T, D, V = (50, 32, 300) if small else (5000, 512, 32000)
    h, weight = drawn([(T, D), (V, D)], torch.bfloat16, device)
    labels = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0)).to(device)
    labels[::7] = -100

    def results(loss: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [(x.double() / D**0.25).to(torch.bfloat16).to(dtype).requires_grad_() for x in (h, weight)]
        value = loss(*inputs)
        return [value.detach(), *torch.autograd.grad(value, inputs)]

    found = results(lambda h, w: chunked_cross_entropy(h, w, labels), torch.bfloat16)
    exact = results(lambda h, w: F.cross_entropy(h @ w.T, labels, reduction="sum"), torch.float64)
    return within(max(relative(x, y, tuple(range(x.dim()))) for x, y in zip(found, exact, strict=True)), torch.bfloat16)


def run_error(rows: Rows) -> float:
    """The largest relative difference between the losses of a short run here and on the CPU, in fp32.

    Raises:
        WrongNumbersError: it is beyond the tolerance.
        FailedRunError: a run failed, or did not stop at a loss that is not finite.
    """
    options = {
        "training.steps": 6, "training.seq_len": 128, "training.mixed_precision_param": "float32", "checkpoint.enable": False,
        "validation.enable": False, "metrics.log_freq": 1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text(MODEL + SETTINGS + '[position]\nheads = { kind = "scope" }\n')

        def losses(name: str, **how: Any) -> list[float]:
            return [row["loss"] for row in train(rows, config, options, Path(folder) / name, **how) if "loss" in row]

        here, there = losses("here"), losses("cpu", on_cpu=True)
        error = max(abs(x / y - 1) for x, y in zip(here, there, strict=True))
        if not error <= LOSS_TOLERANCE:
            raise WrongNumbersError(f"losses {here} here, {there} on the CPU")
        options["optimizer.lr"] = 1e38
        losses("diverging", expected=EXIT_NON_FINITE)
        return error


@torch.no_grad()
def replayed_tokens(device: str) -> int:
    """Tokens that differ if they are decoded in a CUDA graph and without one: none.

    Raises:
        WrongNumbersError: some do.
    """
    config = build_config(
        {"model": {"flavor": "tiny"}, "architecture": {"vocab_size": 512}, "position": {"heads": {"kind": "scope"}}}
    )
    model_config = ModelConfig.from_job(config)
    model = build_model(model_config)
    model.init_weights()
    decoder = Decoder(model.to(device, torch.bfloat16).eval(), model_config)
    prompt = torch.arange(100, device=device)[None] * 5 % 509

    def tokens(capturable: bool) -> list[int]:
        rows = decoder.start([100], new_tokens=WARM_UP + 12)
        for h_BLD in rows.chunks(prompt):
            logits = model.head(h_BLD[:, -1:])[:, -1].float()
        step = Step(rows, logits, 512)
        if not capturable:
            step._graph = None
        found = [int(step.likeliest_B)]
        for _ in range(WARM_UP + 8):
            step()
            found.append(int(step.likeliest_B))
        return found

    replayed, eager = tokens(True), tokens(False)
    if replayed != eager:
        raise WrongNumbersError(f"{replayed} in a CUDA graph, {eager} without")
    return 0


@command
def main(argv: list[str] | None = None) -> int:
    rows = Rows(part_parser("correctness", __doc__).parse_args(argv), "correctness")
    device, small = rows.device, rows.small

    def check(what: str, measure: Callable[[], float], case: Case | None = None) -> None:
        if (error := rows.attempt(f"{what}, {case}" if case else what, measure)) is not None:
            rows.add(what=what, error=error, case=str(case or ""))

    first = SMALL if small else Case()
    check(
        "triton, descriptors as shipped",
        partial(attention_error, first, partial(scoped_attention, backend="triton"), device),
        first,
    )
    pointers = lambda q, k, v, seen: without_descriptors(rows.major, q, k, v, visibility=seen)  # noqa: E731
    check("triton, pointers", partial(attention_error, first, pointers, device), first)
    found = backends(rows)
    for name, attend in found.items():
        for case in cases(name.partition(",")[0], device, small):
            check(name, partial(attention_error, case, attend, device), case)
    for name, attend in segmented_backends(found).items():
        for case in dict.fromkeys(replace(case, q_offset=0) for case in cases(name.partition(",")[0], device, small)):
            measure = partial(attention_error, case, partial(in_segments, attend), device)
            check(f"{name}, segments of context parallelism", measure, case)
    for name in ("triton", *["hybrid"] * ("hybrid" in found), "banded"):
        for case in dict.fromkeys(replace(case, q_offset=0, documents=False) for case in cases(name, device, small)):
            measure = partial(attention_error, case, partial(in_chunks, name), device, backward=False)
            check(f"{name}, a prompt in chunks", measure, case)
    for case in cases("triton", device, small):
        if not (case.documents or case.slopes or case.q_offset):
            check("decode", partial(decode_error, replace(case, queries=min(case.queries, 300)), device), case)
    check("chunked loss", partial(loss_error, device, small))
    check("tokens that differ in a CUDA graph", partial(replayed_tokens, device))
    check("losses of a run, against the CPU's", partial(run_error, rows))
    return rows.end()


if __name__ == "__main__":
    sys.exit(main())
