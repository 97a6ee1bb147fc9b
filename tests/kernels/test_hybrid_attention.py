"""The hybrid backend against the reference, with heads on both sides of the split and on one.

PyTorch's FlashAttention has no kernels for CPUs. Its two operators get some here, written from the documentation of
`varlen_attn` and FlashAttention's README; PyTorch's own code above them runs as it is. Triton is interpreted. On a GPU
nothing is stood in for.
"""

import inspect
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen as pytorchs

from farsight.kernels.scoped_attention import choice, documents, host, hybrid, scoped_attention, varlen
from farsight.kernels.scoped_attention.cost import Split
from tests.kernels import test_scoped_attention as cases
from tests.kernels.test_scoped_attention import INT32_MAX, any_inputs, draw, sees, with_grads
from tests.kernels.test_segments import ODD, ONE, TWO, any_segments, assert_equals_the_whole, packed, segments_of
from tests.kernels.test_triton_attention import DEVICE, assert_no_worse_than_pytorch, on_device

DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32
"""FlashAttention takes no fp32; the stand-in does, for closer comparisons."""


class FlashAttention:
    """`aten::_flash_attention_forward` and its backward pass in plain PyTorch. Records the calls."""

    def __init__(self):
        self.calls = []

    def forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, return_debug_mask, *, scale=None, window_size_left=None,
        window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert (dropout, return_debug_mask, alibi_slopes) == (0.0, False, None)
        self.calls.append(types.SimpleNamespace(q=q, k=k, documents=len(cu_q) - 1, window=window_size_left))
        o, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
        window = (window_size_left, window_size_right)
        for (own, theirs), scores, seen in self.documents(q, k, cu_q, cu_k, max_q, max_k, causal, scale, window):
            scores = scores.masked_fill(~seen, -torch.inf)
            lse[:, own] = scores.logsumexp(-1)
            values = v[theirs].repeat_interleave(q.shape[1] // k.shape[1], 1)
            o[own] = torch.einsum("nij,jnh->inh", scores.softmax(-1).to(q.dtype), values)
        return o, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(
        self, do, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout == 0.0
        window = (window_size_left, window_size_right)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        share = q.shape[1] // k.shape[1]
        for (own, theirs), scores, seen in self.documents(q, k, cu_q, cu_k, max_q, max_k, causal, scale, window):
            p = torch.where(seen, (scores - lse[:, own, None]).exp(), 0)
            dp = torch.einsum("inh,jnh->nij", do[own], v[theirs].repeat_interleave(share, 1)).float()
            delta = (do[own] * o[own]).float().sum(-1).T
            ds = (p * (dp - delta[..., None]) * scale).to(q.dtype)
            dq[own] = torch.einsum("nij,jnh->inh", ds, k[theirs].repeat_interleave(share, 1))
            for total, x, y in ((dk, ds, q), (dv, p.to(q.dtype), do)):
                total[theirs] = torch.einsum("nij,inh->jnh", x, y[own]).unflatten(1, (-1, share)).sum(2)
        return dq, dk, dv

    def documents(self, q, k, cu_q, cu_k, max_q, max_k, causal, scale, window):
        """Of each: where its queries and keys are, scores [heads, queries, keys], and which of them count."""
        assert q.shape[1] % k.shape[1] == 0
        assert q.stride(-1) == k.stride(-1) == 1
        assert cu_q.shape == cu_k.shape
        for cumulative, most, x in ((cu_q, max_q, q), (cu_k, max_k, k)):
            assert cumulative.dtype == torch.int32
            assert (cumulative[0], cumulative[-1]) == (0, len(x))
            assert 0 <= cumulative.diff().min() <= cumulative.diff().max() <= most
        for (i, j), (m, n) in zip(
            *(zip(c[:-1].tolist(), c[1:].tolist(), strict=True) for c in (cu_q, cu_k)), strict=True
        ):
            # Query i is at the key that is as far from the end.
            distance = torch.arange(n - m - (j - i), n - m)[:, None] - torch.arange(n - m)
            seen = distance >= (0 if causal else -window[1])
            if window[0] >= 0:
                seen &= distance <= window[0]
            keys = k[m:n].repeat_interleave(q.shape[1] // k.shape[1], 1)
            yield (slice(i, j), slice(m, n)), torch.einsum("inh,jnh->nij", q[i:j], keys).float() * scale, seen


@pytest.fixture
def flash(monkeypatch):
    stand_in = FlashAttention()
    if DEVICE == "cuda":
        yield stand_in
        return
    monkeypatch.setattr(hybrid, "DTYPES", (*hybrid.DTYPES, torch.float32))
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", stand_in.forward, "CPU")
    library.impl("_flash_attention_backward", stand_in.backward, "CPU")
    yield stand_in
    library._destroy()


@pytest.fixture
def split(monkeypatch, flash):
    """Sets the scope from which heads are wide, forward and backward."""

    def at(forward, backward=None):
        least = {"forward": forward, "backward": forward if backward is None else backward}
        monkeypatch.setattr(hybrid, "best_split", lambda *arguments: Split(least[arguments[-1]], 0.0))

    return at


# Against the reference


@pytest.mark.parametrize("wide_from", [1, 20, 35])  # all heads, some, those that see everything
@pytest.mark.parametrize(("with_documents", "q_offset"), [(False, 0), (True, 0), (False, 9), (True, 9)])
def test_splits_documents_and_offsets(split, flash, wide_from, with_documents, q_offset):
    split(wide_from)
    starts = cases.documents(2, 34 + q_offset, 0.1, seed=1).int() if with_documents else None
    qkv, do = draw(B=2, Lq=34, N=4, K=2, H=16, q_offset=q_offset, dtype=DTYPE)
    scopes = [1, 20, 300, 20]
    assert_no_worse_than_pytorch(qkv, do, scopes, "hybrid", starts=starts, q_offset=q_offset)
    if DEVICE == "cpu":
        wide = {min(s, 34 + q_offset) for s in scopes if s >= wide_from}
        assert 0 < len(flash.calls) <= len(wide)


@pytest.mark.parametrize(("ratio", "wide_from"), [(1, 2), (3, 2), (3, 30), (4, 30)])
def test_grouped_query_ratios(split, ratio, wide_from):
    """Heads that share keys on both sides of the split."""
    split(wide_from)
    scopes = [30, 1, 30, 9, 16, 9, 50, 1][: 2 * ratio]
    qkv, do = draw(Lq=33, N=2 * ratio, K=2, H=16, dtype=DTYPE)
    assert_no_worse_than_pytorch(qkv, do, scopes, "hybrid")


def test_another_split_in_the_backward_pass(split):
    """The log-sum-exp of one kernel serves the other."""
    qkv, do = draw(B=2, Lq=33, N=4, K=2, H=16, dtype=DTYPE)
    for passes in ((9, 30), (1, 1000), (1000, 1)):
        split(*passes)
        assert_no_worse_than_pytorch(qkv, do, [3, 9, 30, 40], "hybrid", starts=cases.documents(2, 33))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(split, dtype):
    split(20)
    qkv, do = draw(Lq=65, N=8, K=2, H=32, dtype=dtype)
    assert_no_worse_than_pytorch(qkv, do, [50, 2, 30, 65, 10, 65, 20, 19], "hybrid")


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_inputs(split, data):
    qkv, do, scopes, options = any_inputs(data, (2, 2, 3), 40, 16, DTYPE)
    split(data.draw(st.sampled_from(scopes)), data.draw(st.sampled_from(scopes)))
    assert_no_worse_than_pytorch(qkv, do, scopes, "hybrid", **options)


def test_heads_with_a_bias_are_tritons(split, flash):
    split(1)
    qkv, do = draw(Lq=40, N=4, K=2, H=16, dtype=DTYPE)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    assert_no_worse_than_pytorch(qkv, do, [3, 9, 40, 99], "hybrid", slopes=slopes)
    assert flash.calls == []


def test_heads_first_inputs(split):
    split(9)
    (q, k, v), do = draw(B=2, Lq=40, N=4, K=2, H=16, dtype=DTYPE)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    do = do.transpose(1, 2).contiguous().transpose(1, 2)
    assert_no_worse_than_pytorch(strided, do, [3, 9, 3, 40], "hybrid", starts=cases.documents(2, 40))


# Over segments


CLOSE = {"dtype": DTYPE, "tolerance": 4e-3 if DEVICE == "cuda" else 1e-5}


@pytest.mark.parametrize("pieces", [ONE, TWO, ODD], ids=["one", "two", "odd"])
@pytest.mark.parametrize("wide_from", [1, 30, 60])  # all heads, some, those that see the most
@pytest.mark.parametrize("with_documents", [False, True])
def test_segments(split, flash, pieces, wide_from, with_documents):
    """Pieces share calls: one for each window and different keys."""
    split(wide_from)
    starts = cases.documents(2, 112, 0.1, seed=1).int() if with_documents else None
    scopes = [1, 60, 60, 60, 35, 35, INT32_MAX, 1]
    assert_equals_the_whole(112, pieces, scopes, 4, "hybrid", B=2, starts=starts, **CLOSE)
    wide = {scope for scope in scopes if scope >= wide_from}
    assert DEVICE == "cuda" or 0 < len(flash.calls) <= len(wide) + (1 in wide)  # heads of one token in two parts


def test_another_split_of_segments_in_the_backward_pass(split):
    for passes in ((9, 60), (1, 1000), (INT32_MAX, 1)):
        split(*passes)
        assert_equals_the_whole(112, TWO, [3, 9, 30, 60], 2, "hybrid", starts=cases.documents(1, 112), **CLOSE)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_segments(split, data):
    T, pieces, scopes, K, options = any_segments(data)
    split(data.draw(st.sampled_from(scopes)), data.draw(st.sampled_from(scopes)))
    assert_equals_the_whole(T, pieces, scopes, K, "hybrid", **options, **CLOSE)


def test_opcheck_of_segments(split):
    split(20)
    segments = segments_of(TWO, [7, 50], 1)
    shapes = (1, 64, 2, 16), (segments.rows, 2, 1, 16)
    q, kv = (torch.randn(*shape, dtype=DTYPE, device=DEVICE).requires_grad_() for shape in shapes)
    scopes, starts = torch.tensor([7, 50], device=DEVICE), cases.documents(1, 112).int().to(DEVICE)
    rest = scopes, starts, None, segments.numbers, 0.3, 0
    torch.library.opcheck(hybrid.hybrid_segmented_forward, (q, kv, *rest))
    with torch.no_grad():
        o, lse = hybrid.hybrid_segmented_forward(q, kv, *rest)
        torch.library.opcheck(hybrid.hybrid_segmented_backward, (o, q, kv, o, lse, *rest))


# As an operator


def test_opcheck_and_whole_compilation(split):
    split(8)
    qkv, do = draw(Lq=9, N=2, K=1, H=16, dtype=DTYPE)
    (q, k, v), do = on_device(qkv), do.to(DEVICE)
    scopes, starts = torch.tensor([7, 99], device=DEVICE), cases.documents(1, 9, 0.2).to(DEVICE)
    torch.library.opcheck(hybrid.hybrid_forward, (q, k, v, scopes, starts, None, 0, 0.3, 0))
    with torch.no_grad():
        o, lse = hybrid.hybrid_forward(q, k, v, scopes, starts, None, 0, 0.3, 0)
        torch.library.opcheck(hybrid.hybrid_backward, (do, q, k, v, o, lse, scopes, starts, None, 0, 0.3, 0))
    compiled = torch.compile(
        lambda q, k, v, s: scoped_attention(q * 1.0, k, v, sees(s), backend="hybrid"),
        fullgraph=True,
        backend="aot_eager",
    )
    o = compiled(q, k, v, scopes)
    found = o, *torch.autograd.grad(o, (q, k, v), do)
    close = {"rtol": 4e-3, "atol": 4e-3} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip(found, with_grads((q, k, v), do, scopes, backend="reference"), strict=True):
        torch.testing.assert_close(a, b, **close)
    # Other scopes, on the other sides of the split, reuse the compiled program.
    others = torch.tensor([9, 1], device=DEVICE)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = compiled(q, k, v, others)
    torch.testing.assert_close(found, scoped_attention(q, k, v, sees(others), backend="reference"), **close)


@pytest.mark.parametrize("window", [-1, 0, 40])
def test_pytorchs_own_shapes_and_dtypes(window):
    """The two calls on the meta device, where PyTorch checks arguments and gives outputs without data."""
    q, k = (torch.empty(60, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    sequences = documents.whole_rows(2, ((0, 30),), (0,), torch.device("meta"))
    o, lse = varlen.varlen_forward(q, k, k, sequences, window, 0.3)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((4, 60), torch.float32)
    found = varlen.varlen_backward(q, q, k, k, o, lse, sequences, window, 0.3)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (q, k, k)]


def test_varlen_attn_of_other_versions(split, flash, monkeypatch):
    """Before enable_gqa kernels took groups without it; without windows Triton takes all heads."""
    split(1)
    qkv, do = draw(Lq=40, N=4, K=2, H=16, dtype=DTYPE)
    signature = inspect.signature(pytorchs.varlen_attn)
    grouped = {"enable_gqa": True} if "enable_gqa" in signature.parameters else {}

    def without(*missing):
        def varlen_attn(*arguments, **options):
            assert not options.keys() & set(missing)
            return pytorchs.varlen_attn(*arguments, **options, **grouped)

        kept = [p for name, p in signature.parameters.items() if name not in missing]
        varlen_attn.__signature__ = signature.replace(parameters=kept)
        monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
        varlen._takes.cache_clear()
        varlen.dense_kernel.cache_clear()
        flash.calls.clear()

    try:
        without("enable_gqa")
        assert_no_worse_than_pytorch(qkv, do, [3, 9, 40, 99], "hybrid")
        assert DEVICE == "cuda" or flash.calls
        without("enable_gqa", "window_size")
        assert_no_worse_than_pytorch(qkv, do, [3, 9, 40, 99], "hybrid")
        assert not flash.calls
    finally:
        varlen._takes.cache_clear()
        varlen.dense_kernel.cache_clear()


# What the host reads


@pytest.fixture
def reads(monkeypatch):
    """Names of the ways in which tensors were read on the host."""
    found = []

    def record(name):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, *a: found.append(name) or original(x, *a))

    for name in ("tolist", "item", "cpu", "__int__", "__bool__", "__float__"):
        record(name)
    return found


def test_nothing_is_read_that_the_host_was_told(split, flash, monkeypatch, reads):
    split(9)
    monkeypatch.setattr(FlashAttention, "documents", lambda *_: ())
    monkeypatch.setattr(hybrid.Call, "forward", lambda *_: None)
    (q, k, v), _ = draw(Lq=60, N=4, K=2, H=16, dtype=DTYPE)
    scopes, starts = torch.tensor([3, 9, 60, 20]), cases.documents(1, 60).int()
    batch, kept = torch.cat((starts, starts)), torch.tensor([0, 2])
    found = documents.Documents.of(batch)
    host.host_values(kept)
    reads.clear()
    host.remember_scopes(scopes, (3, 9, 60, 20))
    host.remember(batch, documents.Documents, found)
    whole = sees(scopes, batch[:1])  # a row, as of a pipeline's micro-batch
    part = whole.for_keys(slice(10, 60), 5).for_heads(slice(0, 4, 2))  # as under context parallelism
    chosen = whole.for_heads(kept)
    with torch.no_grad():
        hybrid.hybrid_attention(*on_device((q, k, v)), whole, 0.3)
        hybrid.hybrid_attention(*on_device((q[:, 15:, ::2], k[:, 10:], v[:, 10:])), part, 0.3)
        hybrid.hybrid_attention(*on_device((q[:, :, [0, 2]], k, v)), chosen, 0.3)
        segments = segments_of([(10, 20), (50, 60)], [3, 9, 60, 20], 2)
        hybrid.hybrid_segmented(*on_device((q[:, :20], packed(k, v, segments))), segments, whole, 0.3)
    assert reads == []
    expected = [found.number] * (len(flash.calls) - 2) + [2 * found.number] * 2  # two windows in documents this short
    assert DEVICE == "cuda" or [call.documents for call in flash.calls] == expected


@pytest.mark.parametrize("new_document", [1.0, 0.2, 0.01])
@pytest.mark.parametrize("q_offset", [0, 1, 33])
@pytest.mark.parametrize("more", [0, 3])
def test_sequences_are_the_documents(new_document, q_offset, more):
    """Counted by hand; more documents than there are become empty ones at the end."""
    starts, Lq = cases.documents(3, 50 + q_offset, new_document), 50
    lengths = [(row[i:] == i).sum() for row in starts for i in row.unique()]
    found = documents.documents_of(starts)
    assert found[:2] == (len(lengths), max(lengths))
    assert found.mean == pytest.approx(sum(int(x) ** 2 for x in lengths) / starts.numel())
    host.remember(starts, documents.Documents, found._replace(number=found.number + more))
    cu_q, cu_k, max_q, max_k = documents.sequences_of(starts, ((q_offset, 50 + q_offset),), (0,), starts.device)
    assert (max_q, max_k) == (min(Lq, max(lengths)), max(lengths))
    assert cu_k.diff().tolist() == lengths + [0] * more
    own = [((row == i) & (torch.arange(50 + q_offset) >= q_offset)).sum() for row in starts for i in row.unique()]
    assert cu_q.diff().tolist() == own + [0] * more


def test_rows_of_a_batch_are_bounded_by_the_batch():
    batch = cases.documents(4, 60)
    found = documents.documents_of(batch)
    assert documents.documents_of(batch[1:2]) == found
    visibility = sees([3], batch[1:2]).for_keys(slice(20, 45), 5)
    own = documents.Documents.of(visibility.document_starts_BL)
    bound = documents.documents_of(visibility.document_starts_BL)
    assert own.number <= bound.number == found.number
    assert own.longest <= bound.longest <= 25


# Choices


def test_auto_tries_both_kernels(flash, monkeypatch, caplog):
    monkeypatch.setattr(choice, "_can_run_triton", lambda *_: True)
    monkeypatch.setattr(choice, "TRIAL_TOKENS", 20)
    monkeypatch.setattr(choice, "TRIAL_DOCUMENT", 7)
    choice._pick.cache_clear()
    caplog.set_level("INFO", logger="farsight.kernels")
    try:
        q, k, v = on_device(draw(Lq=9, N=4, K=2, H=16, dtype=torch.bfloat16)[0])
        o = scoped_attention(q, k, v, sees([3, INT32_MAX, 5, 9]))
        assert DEVICE == "cuda" or flash.calls
        assert torch.equal(o, scoped_attention(q, k, v, sees([3, INT32_MAX, 5, 9]), backend="hybrid"))
        assert (
            caplog.records[-1]
            .getMessage()
            .startswith("attention backend for bfloat16, head dim 16, on cpu: hybrid (tried")
        )
        choice._pick.cache_clear()
        right = hybrid.varlen_forward
        monkeypatch.setattr(hybrid, "varlen_forward", lambda *x: [y * 1.1 for y in right(*x)])
        with pytest.raises(RuntimeError, match=r'are off by .* set the attention backend to "triton"'):
            scoped_attention(q, k, v, sees([3, INT32_MAX, 5, 9]))
    finally:
        choice._pick.cache_clear()
