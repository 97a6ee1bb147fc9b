"""The Triton kernels against the reference, and compiled for GPUs that this machine lacks.

On a machine with a GPU they run there; elsewhere Triton interprets them on the CPU, which tests neither a GPU's rounding
nor its compiler.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.tools.tensor_descriptor import TensorDescriptor

from farsight.benchmarks import ahead_of_time
from farsight.benchmarks.ahead_of_time import SHARED_MEMORY
from farsight.kernels.scoped_attention import scoped_attention
from farsight.kernels.scoped_attention.triton import attention as triton_attention
from farsight.kernels.scoped_attention.triton.tiles import Tiles, tiles, use_tiles
from farsight.kernels.triton_rows import described
from tests.kernels.test_scoped_attention import (
    INT32_MAX,
    SCOPES,
    any_inputs,
    documents,
    draw,
    math_attention,
    sees,
    with_grads,
)
from tests.running import ROOT, environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(tensors):
    """The tensors as leaves on the device, with the same strides."""
    return [x.detach().to(DEVICE).requires_grad_() for x in tensors]


def triton_with_grads(qkv, do, scopes, backend="triton", **options):
    """Output and gradients, computed on the device and copied back."""
    return [x.cpu() for x in with_grads(on_device(qkv), do.to(DEVICE), scopes, backend, **options)]


def assert_no_worse_than_pytorch(qkv, do, scopes, backend="triton", **options):
    """At most twice the error of PyTorch's math attention in the same dtype, both against fp64, or a few ulp."""
    wide = [x.detach().double().requires_grad_() for x in qkv]
    exact = with_grads(wide, do.double(), scopes, backend="reference", **options)
    extra = (options.get("starts"), options.get("slopes"), options.get("q_offset", 0))
    o = math_attention(*qkv, torch.as_tensor(scopes), *extra)
    pytorch = o, *torch.autograd.grad(o, qkv, do)
    found = triton_with_grads(qkv, do, scopes, backend, **options)
    # dq and dk come from differences of products do · v, which cancel: to zero if a head sees one token. The kernel computes
    # the two products as different sums.
    cancelled = 2 * float(do.norm(dim=-1).max() * qkv[2].detach().norm(dim=-1).max())
    for name, a, theirs, ours in zip(("o", "dq", "dk", "dv"), exact, pytorch, found, strict=True):
        assert ours.dtype == qkv[0].dtype
        floor = 8 * max(1.0, float(a.detach().abs().max())) if name in ("o", "dv") else cancelled
        floor *= torch.finfo(ours.dtype).eps
        off, theirs_off = (float((x.detach().double() - a.detach()).abs().max()) for x in (ours, theirs))
        assert off <= 2 * theirs_off + floor, (name, off, theirs_off)


@pytest.mark.parametrize("L", [1, 63, 65, 127, 129])
def test_lengths_and_scopes(L):
    """Every kind of scope, each in its own head."""
    scopes = [*(SCOPES[kind](L)[0] for kind in SCOPES if kind != "mixed"), 2, 40, max(1, L - 1)]
    assert_no_worse_than_pytorch(*draw(Lq=L, N=8, K=2, H=16, dtype=torch.float32), scopes)


def test_a_long_sequence():
    """Runs of blocks that all queries see, between blocks that only some see."""
    starts = documents(1, 1000, 0.003)
    qkv, do = draw(Lq=1000, N=2, K=1, H=16, dtype=torch.float32)
    with use_tiles(**dict.fromkeys(("forward", "dq", "dkv"), Tiles(64, 64, 4, 1))):
        assert_no_worse_than_pytorch(qkv, do, [1000, 300], starts=starts)


@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_grouped_query_ratios(ratio):
    scopes = ([5, 150, 150, 9, 64, 65, 1, 100, 90, 90] * 2)[: 2 * ratio]
    assert_no_worse_than_pytorch(*draw(Lq=130, N=2 * ratio, K=2, H=16, dtype=torch.float32), scopes)


@pytest.mark.parametrize("new_document", [1.0, 0.2, 0.01])  # documents of one token, short ones, long ones
@pytest.mark.parametrize("with_alibi", [False, True])
@pytest.mark.parametrize("q_offset", [0, 70])
def test_documents_offsets_and_slopes(new_document, with_alibi, q_offset):
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0]) if with_alibi else None
    starts = documents(1, 130 + q_offset, new_document, seed=1).int()
    qkv, do = draw(Lq=130, N=4, K=2, H=16, q_offset=q_offset, dtype=torch.float32)
    options = {"starts": starts, "slopes": slopes, "q_offset": q_offset}
    assert_no_worse_than_pytorch(qkv, do, [1, 40, 150, INT32_MAX], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", [8, 24, 64, 80, 128])
def test_dtypes_and_head_dims(dtype, H):
    qkv, do = draw(Lq=129, N=4, K=2, H=H, dtype=dtype)
    assert_no_worse_than_pytorch(qkv, do, [10, 100, 64, 129])


@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_inputs(data):
    qkv, do, scopes, options = any_inputs(data, (2, 2, 2), 100, 16, torch.float32)
    assert_no_worse_than_pytorch(qkv, do, scopes, **options)


DESCRIPTORS = {
    "forward": Tiles(32, 32, 4, 2, descriptors=True),
    "dq": Tiles(64, 16, 4, 2, descriptors=True),
    "dkv": Tiles(16, 64, 4, 2, descriptors=True),
}


def test_tensor_descriptors():
    """Rows past the last, and dims past H, are those of other heads in memory: no descriptor may read them."""
    qkv, do = draw(B=2, Lq=70, N=2, K=2, H=24, q_offset=9, dtype=torch.bfloat16)
    assert isinstance(described(qkv[1].detach(), 32), TensorDescriptor)
    options = {"starts": documents(2, 79, 0.05, seed=1), "slopes": torch.tensor([0.5, 0.1]), "q_offset": 9}
    with use_tiles(**DESCRIPTORS):
        assert_no_worse_than_pytorch(qkv, do, [20, INT32_MAX], **options)


def test_tensors_that_no_descriptor_takes():
    """Rows of 40 bytes lie at no multiple of 16, and neither do those of a slice that starts 2 bytes in: pointers load them."""
    qkv, do = draw(Lq=40, N=4, K=2, H=20, dtype=torch.bfloat16)
    shifted = torch.zeros(1 * 8 * 2 * 16 + 1, dtype=torch.bfloat16)[1:].view(1, 8, 2, 16)
    for x in (qkv[1].detach(), shifted, shifted[:, :, :1].expand(-1, -1, 2, -1)):
        assert described(x, 16) is x
    with use_tiles(**DESCRIPTORS):
        assert_no_worse_than_pytorch(qkv, do, [3, 10, 30, 40])


def test_strided_inputs_and_uninitialised_memory():
    """Heads and tokens in any order in memory; torch.empty returns NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        (q, k, v), do = draw(B=2, Lq=70, N=4, K=2, H=16, dtype=torch.float32)
        strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        assert strided[0].stride() != q.stride()
        scopes, starts = [2, 33, 60, 70], documents(2, 70, 0.05)
        expected = triton_with_grads((q, k, v), do, scopes, starts=starts)
        found = triton_with_grads(strided, do, scopes, starts=starts)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
            assert b.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_opcheck_and_whole_compilation():
    qkv, do = draw(B=2, Lq=20, N=2, K=1, H=16, dtype=torch.float32)
    (q, k, v), do = on_device(qkv), do.to(DEVICE)
    scopes, starts, slopes = torch.tensor([7, 99]), documents(2, 20, 0.2), torch.tensor([0.5, 0.0])
    scopes, starts, slopes = (x.to(DEVICE) for x in (scopes, starts, slopes))
    for extra in ((None, None), (starts, slopes)):
        torch.library.opcheck(triton_attention.triton_forward, (q, k, v, scopes, *extra, 0, 0.3))
        with torch.no_grad():
            o, lse = triton_attention.triton_forward(q, k, v, scopes, *extra, 0, 0.3)
            torch.library.opcheck(triton_attention.triton_backward, (do, q, k, v, o, lse, scopes, *extra, 0, 0.3))
    compiled = torch.compile(
        lambda q, k, v, s: scoped_attention(q * 1.0, k, v, sees(s), backend="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    o = compiled(q, k, v, scopes)
    found = o, *torch.autograd.grad(o, (q, k, v), do)
    for a, b in zip(found, with_grads((q, k, v), do, scopes, backend="reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # Other scopes reuse the compiled program.
    with torch.compiler.set_stance("fail_on_recompile"):
        found = compiled(q, k, v, torch.tensor([9, 1], device=DEVICE))
    torch.testing.assert_close(
        found, scoped_attention(q, k, v, sees(torch.tensor([9, 1], device=DEVICE)), backend="reference")
    )


def test_log_sum_exp_is_the_rows_own():
    (q, k, v), _ = draw(Lq=50, N=2, K=1, H=16, q_offset=9, dtype=torch.float32)
    scopes = torch.tensor([20, 59])
    _, lse_BNL = triton_attention.triton_forward(*on_device((q, k, v)), scopes, None, None, 9, 0.3)
    t, i = torch.arange(9, 59)[:, None], torch.arange(59)
    scores = torch.einsum("blnh,bmkh->bnlm", q, k) * 0.3
    seen = (i <= t) & (i > t - scopes[:, None, None])
    torch.testing.assert_close(lse_BNL.cpu(), scores.masked_fill(~seen, -torch.inf).logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": torch.float64}, "does not take torch.float64"), ({"H": 160}, "head dims up to 128, not 160")],
)
def test_refuses(change, message):
    q, k, v = on_device(draw(**{"Lq": 8, "dtype": torch.float32, **change})[0])
    with pytest.raises(ValueError, match=message):
        scoped_attention(q, k, v, sees([1] * 4), backend="triton")


def test_a_cpu_is_told_what_to_use():
    code = (
        "import torch; from farsight.kernels.scoped_attention import Visibility, scoped_attention as a;"
        "x = torch.zeros(1, 2, 1, 16); a(x, x, x, Visibility(torch.tensor([1])), backend='triton')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert 'needs a GPU: use "banded" on a CPU' in done.stderr


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv", "decode", "delta", "combine"])
def test_every_tile_compiles_without_spills_and_fits(kernel):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ahead_of_time", kernel],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["head_dim"], row["dtype"], row["sm"], row["segments"]) for row in rows} == {
        (h, d, s, segments)
        for h in (64, 128)
        for d in ("bfloat16", "float32")
        for s in SHARED_MEMORY
        for segments in ((False, True) if kernel in ("forward", "dq", "dkv") else (False,))
    }
    for row in rows:
        assert row["spills"] == 0, row
        assert 0 <= row["shared"] <= SHARED_MEMORY[row["sm"]], row
        if kernel in ("forward", "dq", "dkv"):
            wide_fp32 = (kernel, row["head_dim"], row["dtype"]) == ("dkv", 128, "float32")
            assert row["tensor_work"] == ({80: 2.5, 90: 1.5, 100: 1.5}[row["sm"]] if wide_fp32 else 1), row


def test_tensor_work_counts_what_warps_repeat():
    """Eight warps lay over 128 rows of a block of 64, so that each warpgroup does the whole product of 64 × 64 × 32."""
    product = "!ttg.memdesc<64x32xbf16, #shared> * !ttg.memdesc<32x64xbf16, #shared1> -> tensor<64x64xf32, #mma>"
    ttgir = (
        f"%0 = ttng.warp_group_dot %a, %b, %c : {product}\n%1 = ttng.warp_group_dot_wait %0 : tensor<64x64xf32, #mma>"
    )
    for instructions, expected in (
        (["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}"] * 2, 2),
        (["wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1}"] * 2, 1),  # each does half the columns
        (["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}"] * 8, 1),
    ):
        asm = {"ttgir": ttgir, "ptx": "\n".join(instructions)}
        compiled = SimpleNamespace(asm=asm, metadata=SimpleNamespace(num_warps=8))
        assert ahead_of_time.tensor_work(compiled) == expected
    half = "ttng.tc_gen5_mma %a, %b, %c : !ttg.memdesc<64x32xbf16, #s>, !ttg.memdesc<32x64xbf16, #s>, !ttg.memdesc<64x64xf32, #t>"
    compiled = SimpleNamespace(asm={"ttgir": half, "ptx": ""}, metadata=SimpleNamespace(num_warps=8))
    assert ahead_of_time.tensor_work(compiled) == 2  # 64 of 128 rows


def test_candidates_are_sound_and_the_shipped_tile_is_first(monkeypatch):
    """Three programs of 4 warps fit a multiprocessor, and one of 8; steps of 128 spill, and three stages repeat work."""

    def compiled(kernel, head_dim, dtype, sm, group, given, segments, tile):
        sound = {
            "spills": 8 * (tile.block_n == 128),
            "tensor_work": 1 if tile.stages == 2 else 1.5,
            "shared": 0,
            "sm": sm,
        }
        return {**sound, "programs": 3 if tile.warps == 4 else 1}

    monkeypatch.setattr(ahead_of_time, "report", compiled)
    found = ahead_of_time.candidates("dq", 128, 2, 9, processes=1)
    assert found[0] == tiles("dq", 128, 2, 9) == Tiles(128, 64, 8, 2, descriptors=True)
    assert [(tile.block_m, tile.block_n, tile.warps, tile.stages) for tile in found[1:]] == [
        (128, 64, 4, 2), (64, 64, 4, 2), (128, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2),
    ]  # fmt: skip
