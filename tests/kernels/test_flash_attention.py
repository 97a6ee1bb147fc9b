"""The flash backend against the reference, with a stand-in for flash-attn written from the package's documentation.

Only the last test runs the package itself, which needs a GPU.
"""

import gc
import importlib.util
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.kernels.scoped_attention import flash, host, windows
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


class FlashAttn(types.ModuleType):
    """flash-attn 2.8.3 in plain PyTorch, as documented, with the checks of its C++ code. Records the arguments of calls."""

    def __init__(self):
        super().__init__("flash_attn")
        self.calls = []
        self.dtypes = (torch.bfloat16, torch.float16, torch.float64)  # fp64 for exact comparisons

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert q.dim() == k.dim() == v.dim() == 4
        assert q.shape[0] == k.shape[0]
        self.check(q, k, v, alibi_slopes)
        self.calls.append(types.SimpleNamespace(q=q, k=k, v=v, window=window_size, deterministic=deterministic))
        rows = [attend(*x, softmax_scale, causal, window_size, alibi_slopes) for x in zip(q, k, v, strict=True)]
        return torch.stack(rows)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert q.dim() == k.dim() == v.dim() == 3
        self.check(q, k, v, alibi_slopes)
        self.calls.append(types.SimpleNamespace(q=q, k=k, v=v, window=window_size, deterministic=deterministic))
        sequences = len(cu_seqlens_q) - 1
        for cu_seqlens, longest, x in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
            assert cu_seqlens.dtype == torch.int32
            assert cu_seqlens.shape == (sequences + 1,)
            assert cu_seqlens.is_contiguous()
            assert not cu_seqlens.is_inference()  # it is saved for a backward pass
            assert isinstance(longest, int)
            assert (cu_seqlens[0], cu_seqlens[-1]) == (0, len(x))
            assert 0 <= cu_seqlens.diff().min() <= cu_seqlens.diff().max() <= longest
        assert 0 < sequences <= 65535  # the second dimension of the CUDA grids
        if max_seqlen_q == 1 and q.shape[1] > k.shape[1] and window_size == (-1, -1) and alibi_slopes is None:
            assert len(q) == sequences  # it reshapes q to one query a sequence
        parts = [
            attend(q[i:j], k[m:n], v[m:n], softmax_scale, causal, window_size, alibi_slopes)
            for (i, j), (m, n) in zip(pairs(cu_seqlens_q), pairs(cu_seqlens_k), strict=True)
        ]
        return torch.cat(parts)

    def check(self, q, k, v, slopes):
        assert q.dtype in self.dtypes
        assert q.dtype == k.dtype == v.dtype
        assert k.shape == v.shape
        assert q.shape[-1] == k.shape[-1] <= 256
        assert q.shape[-2] % k.shape[-2] == 0
        if slopes is not None:
            assert slopes.dtype == torch.float32
            assert slopes.shape == (q.shape[-2],)
            assert slopes.stride() == (1,)


def pairs(cumulative):
    return zip(cumulative[:-1].tolist(), cumulative[1:].tolist(), strict=True)


def attend(q, k, v, scale, causal, window, slopes):
    """One sequence [queries, heads, H]; query i is at key i + keys - queries, and a window of -1 has no limit."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    left, right = window
    if causal:
        right = 0
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    scores = torch.einsum("inh,jnh->nij", q, k) * scale
    if slopes is not None:
        scores = scores - slopes.to(q.dtype)[:, None, None] * distance.abs()
    # Rows that see nothing are zero, as in the package.
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).masked_fill(~seen.any(dim=1, keepdim=True), 0)
    return torch.einsum("nij,jnh->inh", weights, v)


@pytest.fixture
def package(monkeypatch):
    """The stand-in, on CPU tensors."""
    package = FlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(flash, "_check", lambda q: None)
    return package


def run(q, k, v, scopes, *options, scale=None, **named):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return flash.flash_attention(q, k, v, sees(scopes, *options, **named), scale)


def assert_equals_reference(qkv, do, scopes, **options):
    expected = with_grads(qkv, do, scopes, backend="reference", **options)
    o = run(*qkv, scopes, **options)
    for name, a, b in zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, qkv, do)), expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= 1e-11 * max(1.0, b.abs().max()), name


# Against the reference


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("kind", SCOPES)
@pytest.mark.parametrize("L", [1, 63, 65, 127, 129, pytest.param(1000, marks=pytest.mark.slow)])
def test_lengths_and_scopes(L, kind):
    assert_equals_reference(*draw(B=2, Lq=L, N=12, K=3), (SCOPES[kind](L) * 12)[:12])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
@pytest.mark.parametrize("with_documents", [False, True])
def test_grouped_query_ratios(ratio, with_documents):
    scopes = ([5, 90, 90, 9, 64, 9, 1, 100, 90, 90] * 2)[: 2 * ratio]
    starts = documents(2, 97) if with_documents else None
    assert_equals_reference(*draw(B=2, Lq=97, N=2 * ratio, K=2), scopes, starts=starts)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("new_document", [1.0, 0.2, 0.01])  # documents of one token, short ones, long ones
@pytest.mark.parametrize("with_alibi", [False, True])
@pytest.mark.parametrize("q_offset", [0, 1, 70])
def test_documents_offsets_and_slopes(new_document, with_alibi, q_offset):
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0, 1.0, 0.01]) if with_alibi else None
    starts = documents(2, 65 + q_offset, new_document, seed=1).int()
    options = {"starts": starts, "slopes": slopes, "q_offset": q_offset, "scale": 0.2}
    assert_equals_reference(*draw(B=2, Lq=65, N=6, K=2, q_offset=q_offset), [1, 40, 150, 40, INT32_MAX, 9], **options)


@pytest.mark.usefixtures("package")
def test_one_query_of_the_last_of_many_documents():
    """As in decoding: the package takes other code paths for documents without queries and with one query each."""
    starts = torch.tensor([[0, 1, 1, 3, 3, 3], [0, 0, 0, 0, 0, 0]])
    qkv, do = draw(B=2, Lq=1, N=4, K=2, q_offset=5)
    for scopes in ([6, 6, 6, 6], [6, 2, 6, 2]):
        assert_equals_reference(qkv, do, scopes, starts=starts, q_offset=5)


@pytest.mark.usefixtures("package")
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_inputs(data):
    qkv, do, scopes, options = any_inputs(data, (3, 3, 4), 130, 4, torch.float64)
    assert_equals_reference(qkv, do, scopes, **options)


@pytest.mark.usefixtures("package")
def test_heads_first_inputs():
    qkv, do = draw(B=2, Lq=40, N=4, K=2)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv]
    for starts in (None, documents(2, 40)):
        assert_equals_reference(strided, do.transpose(1, 2).contiguous().transpose(1, 2), [3, 9, 3, 40],
                                starts=starts)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_package_is_given_what_it_takes(package, dtype):
    package.dtypes = (dtype,)
    qkv, do = draw(B=2, Lq=40, N=4, K=2, dtype=dtype)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)
    for starts in (None, documents(2, 40)):
        o = run(*qkv, [3, 9, 3, 40], starts, slopes)
        assert [x.dtype for x in (o, *torch.autograd.grad(o, qkv, do))] == [dtype] * 4


# Calls and copies


def test_one_call_for_each_scope(package):
    (q, k, v), _ = draw(Lq=40, N=8, K=4)
    run(q, k, v, [40, 3, 7, 3, 99, INT32_MAX, 7, 1])
    assert sorted(call.window for call in package.calls) == [(-1, 0), (0, 0), (2, 0), (6, 0)]
    package.calls.clear()
    run(q, k, v, [40, 3, 7, 3, 99, 39, 7, 1], (torch.arange(40) >= 35)[None] * 35)
    assert sorted(call.window for call in package.calls) == [
        (-1, 0),
        (0, 0),
        (2, 0),
        (6, 0),
    ]  # 39 sees a whole document


def test_heads_that_are_spaced_evenly_are_not_copied(package):
    (q, k, v), _ = draw(B=2, Lq=40, N=12, K=6)
    cases = {
        "all": ([7] * 12, 1),
        "whole key-value groups": ([7] * 4 + [40] * 2 + [3] * 6, 3),
        "one a group, in turn": ([7, 40] * 6, 2),
        "each its own": (list(range(1, 13)), 12),
        "parts of groups": ([7, 40, 40, 40, 3, 40, 5, 5, 5, 5, 5, 5], 4),
    }
    for name, (scopes, calls) in cases.items():
        package.calls.clear()
        for starts in (None, documents(2, 40)):
            run(q, k, v, scopes, starts)
        assert len(package.calls) == 2 * calls
        gathered = 0
        for call in package.calls:
            gathered += call.q.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
            gathered += call.k.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()
        # In the last, heads 1, 2, 3 and 5 of key-value heads 0, 1, 1 and 2.
        assert gathered == (4 if name == "parts of groups" else 0), name


def test_key_value_heads_are_repeated_no_more_than_needed(package):
    (q, k, v), _ = draw(Lq=9, N=16, K=4)

    def kv_heads(long):
        package.calls.clear()
        run(q, k, v, [9 if n in long else 2 for n in range(16)])
        return next(call.k.shape[2] for call in package.calls if call.window == (-1, 0))

    assert kv_heads({0, 1, 2, 3}) == 1
    assert kv_heads({0, 3, 12, 15}) == 2
    assert kv_heads({0, 1, 2, 3, 4, 5}) == 3  # 4 and 2: the first twice
    assert kv_heads({0, 1, 2, 4}) == 4  # 3 and 1: the first three times


@pytest.mark.parametrize("wanted", [False, True])
def test_determinism_is_pytorchs_switch(package, wanted):
    torch.use_deterministic_algorithms(wanted)
    try:
        qkv, do = draw(Lq=40, N=8, K=2)
        assert_equals_reference(qkv, do, [40, 3, 7, 3, 3, 3, 3, 7])  # of torch.empty no NaN is left
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call.deterministic for call in package.calls] == [wanted] * 3


# Values read on the host


def test_values_are_read_once_a_version(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(1) or tolist(x))
    scopes, equal = torch.tensor([3, 4]), torch.tensor([3, 4])
    for _ in range(3):
        assert host.host_values(scopes) == host.host_values(equal) == (3, 4)
    assert len(reads) == 2
    scopes[1] = 9
    for _ in range(3):
        assert host.host_values(scopes) == (3, 9)
    assert len(reads) == 3
    with torch.inference_mode():
        assert host.host_values(scopes) == (3, 9)
        assert len(reads) == 3
        born = torch.tensor([5, 6])
        assert host.host_values(born) == (5, 6)
        born[0] = 7
        assert host.host_values(born) == (7, 6)


@pytest.mark.usefixtures("package")
def test_documents_are_read_once_a_version(monkeypatch):
    reads = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: reads.append(1) or cpu(x))
    starts = documents(1, 40)
    for layer in range(3):
        assert_equals_reference(*draw(Lq=40), [3, 4, 5, 6 + layer], starts=starts)
    assert len(reads) == 1
    starts.zero_()
    for q_offset in (0, 9, 9):
        qkv, do = draw(Lq=40 - q_offset, q_offset=q_offset)
        assert_equals_reference(qkv, do, [3, 4, 5, 30], starts=starts, q_offset=q_offset)
    assert len(reads) == 2


def test_what_was_read_goes_with_the_tensor():
    gc.collect()
    before = len(host._memory)
    scopes = torch.tensor([3, 4])
    host.host_values(scopes)
    assert len(host._memory) == before + 1
    del scopes
    assert len(host._memory) == before


@pytest.mark.usefixtures("package")
def test_training_after_inference():
    """Results cached in an inference_mode pass serve the next training pass: unevenly spaced heads, and documents."""
    windows._groups.cache_clear()
    qkv, do = draw(Lq=40, N=4, K=2)
    scopes, starts = torch.tensor([3, 9, 9, 3]), documents(1, 40)
    with torch.inference_mode():
        inferred = run(*qkv, scopes, starts)
        run(*qkv, scopes.clone(), starts.clone())  # tensors made under inference_mode
    assert_equals_reference(qkv, do, scopes, starts=starts)
    assert torch.equal(run(*qkv, scopes, starts), inferred)


# Refusals


def test_refuses_what_the_package_cannot_take():
    def inputs(device="cuda", dtype=torch.bfloat16, H=64):
        return types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 8, 4, H))

    flash._check(inputs())
    flash._check(inputs(dtype=torch.float16, H=256))
    with pytest.raises(ValueError, match='needs a GPU, and q_BLNH is on cpu: use "banded"'):
        flash._check(inputs("cpu"))
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=f'does not take {dtype}: use bfloat16 or float16, or "banded"'):
            flash._check(inputs(dtype=dtype))
    with pytest.raises(ValueError, match='head dims up to 256, not 264: use "banded"'):
        flash._check(inputs(H=264))
    with pytest.raises(ValueError, match="needs a GPU"):
        run(*draw(Lq=4)[0], [1, 2, 3, 4])


@pytest.mark.usefixtures("package")
def test_refuses_values_that_do_not_fit(monkeypatch):
    q, k, v = draw(Lq=4)[0]
    with pytest.raises(ValueError, match=r"scopes_N\[1\] is 0"):
        run(q, k, v, [1, 0, 3, 4])
    for starts, message in (
        ([0, 0, 3, 3], r"\[0, 2\] is 3, which lies after its token"),
        ([0, 1, 0, 0], "falls from 1 to 0 at token 2"),
        ([0, 0, 1, 1], r"\[0, 2\] is 1, but token 1 is in the document that starts at 0: .* use \"triton\""),
    ):
        with pytest.raises(ValueError, match=message):
            run(q, k, v, [1, 2, 3, 4], torch.tensor([starts]))
    monkeypatch.setattr(flash, "MAX_DOCUMENTS", 3)
    run(q, k, v, [1, 2, 3, 4], torch.tensor([[0, 1, 2, 2]]))
    with pytest.raises(ValueError, match='takes 3 documents a batch, not 4: use "triton"'):
        run(q, k, v, [1, 2, 3, 4], torch.tensor([[0, 1, 2, 3]]))


def test_says_that_the_package_is_missing(monkeypatch):
    monkeypatch.setattr(flash, "_check", lambda q: None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match='needs the package flash-attn: pip install flash-attn, or use "triton"'):
        run(*draw(Lq=4)[0], [1, 2, 3, 4])


def test_a_package_that_does_not_load_says_why_itself(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("import flash_attn_2_cuda_of_another_torch")
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_2_cuda_of_another_torch"):
        flash.package()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_says_that_it_does_not_compile(fullgraph):
    (q, k, v), _ = draw(Lq=4)
    compiled = torch.compile(lambda q: run(q * 1.0, k, v, [1, 2, 3, 4]), fullgraph=fullgraph, backend="eager")
    with pytest.raises(Exception, match=r'^ValueError: backend "flash" .* turn compile off, or use "triton"\n'):
        compiled(q)


# The package itself


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is None,
    reason="needs a GPU and the package flash-attn",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "documents", "alibi", "offset", "decode", "all"])
@pytest.mark.parametrize("H", [60, 64, 128])
def test_error_is_that_of_pytorch_in_the_same_dtype(kind, H, dtype):
    """At most twice the error of PyTorch's math attention, both against fp64 on the same inputs, or a few ulp."""
    q_offset = {"offset": 300, "all": 300, "decode": 699}.get(kind, 0)
    Lq = 700 - q_offset
    qkv, do = draw(B=2, Lq=Lq, N=8, K=2, H=H, q_offset=q_offset, dtype=dtype)
    scopes = torch.tensor([700, 1, 40, 700, 40, 700, INT32_MAX, 300])
    starts = documents(2, 700, 0.01) if kind in ("documents", "decode", "all") else None
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0, 1.0, 0.01, 0.02, 0.3]) if kind in ("alibi", "all") else None
    options = {"starts": starts, "slopes": slopes, "q_offset": q_offset}

    wide = [x.detach().double().requires_grad_() for x in qkv]
    exact = with_grads(wide, do.double(), scopes, backend="reference", **options)
    o = math_attention(*qkv, scopes, starts, slopes, q_offset)
    pytorch = o, *torch.autograd.grad(o, qkv, do)
    on_gpu = [x.detach().cuda().requires_grad_() for x in qkv]
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    o = run(*on_gpu, scopes.cuda(), **moved)
    found = o, *torch.autograd.grad(o, on_gpu, do.cuda())
    # dq and dk of heads that see one token are differences of products do · v, and cancel to zero.
    cancelled = 2 * float(do.norm(dim=-1).max() * qkv[2].detach().norm(dim=-1).max())
    for name, a, theirs, ours in zip(("o", "dq", "dk", "dv"), exact, pytorch, found, strict=True):
        assert ours.dtype == dtype
        floor = 8 * max(1.0, float(a.detach().abs().max())) if name in ("o", "dv") else cancelled
        floor *= torch.finfo(dtype).eps
        off, theirs_off = (float((x.detach().cpu().double() - a.detach()).abs().max()) for x in (ours, theirs))
        assert off <= 2 * theirs_off + floor, (name, off, theirs_off)
