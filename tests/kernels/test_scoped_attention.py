"""Scoped attention: every backend against the reference, and the reference against the formula written as three loops."""

import dataclasses
import logging
import math
import typing

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from farsight.benchmarks.attention_rows import extra_bytes
from farsight.configs.training import Attention
from farsight.kernels.scoped_attention import (
    BACKENDS,
    ScoreBias,
    Visibility,
    choice,
    scoped_attention,
    visible_pairs,
)
from farsight.kernels.scoped_attention import visible_pairs_in_documents as pairs_in_documents
from farsight.kernels.scoped_attention.banded import banded, masks
from farsight.kernels.scoped_attention.bias import FORMULAS
from farsight.kernels.scoped_attention.semantics import visible_pairs_at_positions

INT32_MAX = 2**31 - 1


@pytest.fixture(params=["fused", "products"])
def banded_path(request, monkeypatch):
    """Both ways in which the banded backend computes a tile: the CPU's fused kernel, and matrix products."""
    if request.param == "products":
        monkeypatch.setattr(banded, "_has_fused_kernel", lambda device: False)


@pytest.fixture(autouse=True)
def _one_thread():
    """These tensors are too small for several threads; a separate test covers their effect on the plan."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(B=1, Lq=65, N=4, K=4, H=8, q_offset=0, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    Lk = Lq + q_offset
    shapes = ((B, Lq, N, H), (B, Lk, K, H), (B, Lk, K, H), (B, Lq, N, H))
    q, k, v, do = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], do


def documents(B, L, new_document=0.05, seed=0):
    begins = torch.rand(B, L, generator=torch.Generator().manual_seed(seed)) < new_document
    return (begins * torch.arange(L)).cummax(dim=1).values


def sees(scopes, starts=None, slopes=None, q_offset=0):
    """Scopes as a list or a tensor; ALiBi where there are slopes."""
    bias = None if slopes is None else ScoreBias("alibi", slopes[None])
    return Visibility(torch.as_tensor(scopes), starts, bias, q_offset)


def with_grads(qkv, do, scopes, backend="auto", scale=None, **options):
    o = scoped_attention(*qkv, sees(scopes, **options), scale, backend)
    return o, *torch.autograd.grad(o, qkv, do)


def assert_equals_reference(qkv, do, scopes, tolerance=1e-11, **options):
    expected = with_grads(qkv, do, scopes, backend="reference", **options)
    found = with_grads(qkv, do, scopes, backend="banded", **options)
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max()), name


def math_attention(q, k, v, scopes, document_starts=None, slopes=None, q_offset=0):
    """PyTorch's own unfused attention with a mask made here, in the dtype of its inputs."""
    L, N, K = k.shape[1], q.shape[2], k.shape[2]
    scopes, document_starts, slopes = (x if x is None else x.to(q.device) for x in (scopes, document_starts, slopes))
    i = torch.arange(L, device=q.device)
    t = i[q_offset:, None]
    seen = (i <= t) & (i > t - scopes.long()[:, None, None])
    seen = seen[None] if document_starts is None else seen & (i >= document_starts[:, None, q_offset:, None])
    bias = torch.zeros((), device=q.device) if slopes is None else -slopes[:, None, None] * (t - i)
    bias = bias.to(q.dtype).expand_as(seen).masked_fill(~seen, -math.inf)
    k, v = (x.repeat_interleave(N // K, dim=2).transpose(1, 2) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias).transpose(1, 2)


# The reference and the rule itself


@pytest.mark.parametrize("q_offset", [0, 3])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_reference_is_the_formula(q_offset, with_documents, with_alibi):
    q, k, v = (x.detach() for x in draw(B=2, Lq=7, N=6, K=2, H=4, q_offset=q_offset)[0])
    L = 7 + q_offset
    scopes = torch.tensor([1, 2, 3, 6, L, INT32_MAX], dtype=torch.int32)
    starts = documents(2, L, 0.3) if with_documents else None
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0, 1.0, 2.0], dtype=torch.float64) if with_alibi else None
    o = scoped_attention(q, k, v, sees(scopes, starts, slopes, q_offset), scale=0.3, backend="reference")
    for b in range(2):
        for row in range(7):
            for n in range(6):
                t = row + q_offset
                first = max(t - int(scopes[n]) + 1, 0, int(starts[b, t]) if with_documents else 0)
                weights = []
                for i in range(first, t + 1):
                    score = 0.3 * float(q[b, row, n] @ k[b, i, n // 3])
                    weights.append(math.exp(score - (float(slopes[n]) * (t - i) if with_alibi else 0)))
                expected = sum(w * v[b, first + j, n // 3] for j, w in enumerate(weights)) / sum(weights)
                torch.testing.assert_close(o[b, row, n], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q_offset", [0, 11])
def test_visible_pairs_counts_the_mask(q_offset):
    scopes, starts = torch.tensor([1, 2, 17, 64, 100, INT32_MAX]), documents(3, 64, 0.1)
    whole = Visibility(scopes, q_offset=q_offset).mask(64 - q_offset)
    assert visible_pairs(scopes, 64, q_offset) == int(whole.sum())
    assert visible_pairs(scopes.tolist(), 64, q_offset) == int(whole.sum())
    packed = Visibility(scopes, starts, q_offset=q_offset).mask(64 - q_offset)
    assert pairs_in_documents(scopes, starts, q_offset) == int(packed.sum())


def test_visible_pairs_at_any_positions():
    """Runs that begin in a document, single tokens, and positions out of order; heads are counted or weighted."""
    positions = torch.tensor([[3, 4, 5, 6, 0, 1, 2, 3], [0, 0, 0, 7, 8, 5, 4, 9]], dtype=torch.int32)
    weights = {1: 2, 3: 5, 6: 1, INT32_MAX: 4}
    expected = sum(n * min(scope, p + 1) for scope, n in weights.items() for p in positions.flatten().tolist())
    assert visible_pairs_at_positions(weights, positions) == expected
    assert visible_pairs_at_positions([s for s, n in weights.items() for _ in range(n)], positions) == expected
    assert visible_pairs_at_positions(weights, positions[:, :0]) == 0


def test_visible_pairs_at_the_papers_lengths():
    """At 128k tokens and 32 heads, SCOPE's S_h = ceil(T^(h/N)) leaves a seventh of the causal pairs."""
    T, N = 131072, 32
    scopes = [math.ceil(round(T ** (h / N), 9)) for h in range(1, N + 1)]
    assert visible_pairs([T] * N, T) / visible_pairs(scopes, T) == pytest.approx(7.00, abs=0.01)


# The banded backend against the reference


SCOPES = {
    "one": lambda L: [1],
    "equal": lambda L: [max(1, L // 3)],
    "length": lambda L: [L],
    "longer": lambda L: [L + 1],
    "huge": lambda L: [INT32_MAX],
    "mixed": lambda L: [1, 2, 40, max(1, L - 1), L, INT32_MAX, 7, 64, 200, 3, 65, 128],
}


@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("kind", SCOPES)
@pytest.mark.parametrize("L", [1, 63, 65, 127, 129, 1000])
def test_lengths_and_scopes(L, kind):
    N = 12 if L < 1000 or kind == "mixed" else 4
    scopes = (SCOPES[kind](L) * 12)[:N]
    assert_equals_reference(*draw(B=2 if L < 1000 else 1, Lq=L, N=N, K=N // 4), scopes)


@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
@pytest.mark.parametrize("B", [1, 2])
def test_grouped_query_ratios(ratio, B):
    scopes = ([5, 300, 300, 9, 64, 65, 1, 200, 90, 90] * 2)[: 2 * ratio]
    assert_equals_reference(*draw(B=B, Lq=257, N=2 * ratio, K=2), scopes)


@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("new_document", [1.0, 0.2, 0.004])  # documents of one token, short ones, long ones
@pytest.mark.parametrize("L", [65, 700])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_documents(new_document, L, with_alibi):
    scopes = [1, 9, 130, L, 250, 64]
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0, 1.0, 0.01]) if with_alibi else None
    starts = documents(2, L, new_document, seed=1)
    qkv, do = draw(B=2, Lq=L, N=6, K=2)
    assert_equals_reference(qkv, do, scopes, starts=starts.int(), slopes=slopes)


@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("q_offset", [1, 100, 500])
@pytest.mark.parametrize("Lq", [1, 64, 301])
def test_query_offset(Lq, q_offset):
    scopes = [1, 33, 101, 450, INT32_MAX, 128]
    assert_equals_reference(*draw(B=2, Lq=Lq, N=6, K=3, q_offset=q_offset), scopes, q_offset=q_offset, scale=0.2)


def test_offset_rows_equal_rows_of_the_whole():
    """Chunked prefill: the last rows alone equal the last rows of the whole sequence."""
    (q, k, v), _ = draw(Lq=400, N=4)
    scopes = torch.tensor([3, 100, 390, 400])
    whole = scoped_attention(q, k, v, sees(scopes))
    torch.testing.assert_close(scoped_attention(q[:, 150:], k, v, sees(scopes, q_offset=150)), whole[:, 150:])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("kind", ["plain", "offset", "documents", "alibi"])
def test_few_heads_on_many_threads(threads, kind):
    """Long triangles and tiles are cut into several blocks, so that every thread has one."""
    options = {
        "plain": {},
        "offset": {"q_offset": 70},
        "documents": {"starts": documents(1, 1543, 0.005)},
        "alibi": {"slopes": torch.tensor([0.5, 0.01])},
    }[kind]
    q_offset = options.get("q_offset", 0)
    qkv, do = draw(Lq=1543 - q_offset, N=2, K=1, q_offset=q_offset)
    torch.set_num_threads(threads)
    assert_equals_reference(qkv, do, [1300, INT32_MAX], **options)


def any_inputs(data, most, longest, H, dtype):
    """Arbitrary inputs, scopes and options; `most` bounds batch, key-value heads and query heads per key-value head."""
    B, K, ratio = (data.draw(st.integers(1, bound)) for bound in most)
    Lq, q_offset = data.draw(st.integers(1, longest)), data.draw(st.sampled_from([0, 0, 1, 37, 130]))
    N, L = K * ratio, Lq + q_offset
    scope = st.one_of(st.integers(1, L + 2), st.integers(1, 20), st.just(INT32_MAX))
    scopes = data.draw(st.lists(scope, min_size=N, max_size=N))
    options: dict = {"q_offset": q_offset}
    if data.draw(st.booleans()):
        options["starts"] = documents(B, L, data.draw(st.sampled_from([0.5, 0.05, 0.01])))
    if data.draw(st.booleans()):
        options["slopes"] = torch.rand(N, generator=torch.Generator().manual_seed(0))
    return *draw(B, Lq, N, K, H, q_offset, dtype, seed=data.draw(st.integers(0, 9))), scopes, options


@pytest.mark.usefixtures("banded_path")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_inputs(data):
    qkv, do, scopes, options = any_inputs(data, (3, 3, 4), 330, 4, torch.float64)
    assert_equals_reference(qkv, do, scopes, **options)


@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("L", [129, 1000])
@pytest.mark.parametrize("options", ["plain", "documents and alibi"])
def test_error_is_that_of_pytorch_in_the_same_dtype(dtype, L, options):
    """At most twice the error of PyTorch's math attention, both against fp64 on the same inputs, or a few ulp."""
    qkv, do = draw(Lq=L, N=4, K=2, H=32, dtype=dtype)
    scopes = torch.tensor([10, 100, L // 2, L])
    extra: tuple = ()
    if options != "plain":
        extra = (documents(1, L, 0.01), torch.tensor([0.5, 0.25, 0.0625, 0.01]))
    wide = [x.detach().double().requires_grad_() for x in qkv]
    o = scoped_attention(*wide, sees(scopes, *extra), backend="reference")
    expected = o, *torch.autograd.grad(o, wide, do.double())
    o = math_attention(*qkv, scopes, *extra)
    pytorch = o, *torch.autograd.grad(o, qkv, do)
    o = scoped_attention(*qkv, sees(scopes, *extra), backend="banded")
    found = o, *torch.autograd.grad(o, qkv, do)
    for name, exact, theirs, ours in zip(("o", "dq", "dk", "dv"), expected, pytorch, found, strict=True):
        assert ours.dtype == dtype
        floor = 4 * torch.finfo(dtype).eps * exact.abs().max()
        theirs_off, ours_off = ((x.double() - exact).abs().max() for x in (theirs, ours))
        assert ours_off <= 2 * theirs_off + floor, (name, float(ours_off), float(theirs_off))


@pytest.mark.usefixtures("banded_path")
def test_gradcheck():
    qkv, _ = draw(B=2, Lq=9, N=4, K=2, H=3)
    scopes, starts, slopes = torch.tensor([1, 3, 6, 20]), documents(2, 9, 0.2), torch.tensor([0.5, 0.2, 0.1, 0.0])
    assert torch.autograd.gradcheck(lambda *x: scoped_attention(*x, sees(scopes, starts, slopes)), qkv)


@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("with_documents", [False, True])
def test_strided_inputs(with_documents):
    """q, k and v as slices of one fused projection, heads first, or with strided head dims."""
    (q, k, v), do = draw(B=2, Lq=130, N=4, K=2)
    scopes, starts = torch.tensor([5, 70, 130, 128]), documents(2, 130) if with_documents else None
    fused = torch.cat((q, k, v), dim=2).detach()
    expected = scoped_attention(q, k, v, sees(scopes, starts), backend="reference")
    layouts = {
        "fused": (fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]),
        "heads first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        "strided head dim": [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)],
    }
    for name, (q_view, k_view, v_view) in layouts.items():
        o = scoped_attention(q_view, k_view, v_view, sees(scopes, starts), backend="banded")
        assert (o - expected).abs().max() < 1e-12, name
    torch.autograd.grad(scoped_attention(q, k, v, sees(scopes)), q, do.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.usefixtures("banded_path")
def test_nothing_depends_on_uninitialised_memory():
    assert torch.utils.deterministic.fill_uninitialized_memory  # makes torch.empty return NaN in the mode below
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for starts in (None, documents(1, 700, 0.01)):
            for q_offset in (0, 100):
                qkv, do = draw(Lq=700 - q_offset, N=4, K=2, q_offset=q_offset)
                options = {"starts": starts, "q_offset": q_offset}
                assert_equals_reference(qkv, do, [2, 90, 300, 700], **options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("backend", ["reference", "banded"])
def test_autocast_changes_nothing(backend):
    qkv, do = draw(B=2, Lq=90, dtype=torch.float32)
    expected = with_grads(qkv, do, [3, 20, 50, 90], backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = scoped_attention(*qkv, sees([3, 20, 50, 90]), backend=backend)
    found = o, *torch.autograd.grad(o, qkv, do)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_training_after_inference():
    """Masks cached in an inference_mode pass serve the next training pass."""
    masks._cached_band_mask.cache_clear()
    qkv, do = draw(Lq=90)
    scopes = torch.tensor([3, 20, 50, 90])
    with torch.inference_mode():
        inferred = scoped_attention(*qkv, sees(scopes))
    o, *_ = with_grads(qkv, do, scopes)
    assert torch.equal(o, inferred)


# As an operator


def test_opcheck():
    (q, k, v), do = draw(B=2, Lq=40, N=4, K=2, dtype=torch.float32)
    scopes, starts, slopes = torch.tensor([1, 7, 30, 99]), documents(2, 40), torch.tensor([0.5, 0.25, 0.1, 0.0])
    for visibility in (sees(scopes), sees(scopes, starts, slopes)):
        arguments = *visibility.parts(), 0.3
        torch.library.opcheck(banded.banded_forward, (q, k, v, *arguments))
        with torch.no_grad():
            o, lse = banded.banded_forward(q, k, v, *arguments)
            torch.library.opcheck(banded.banded_backward, (do, q, k, v, o, lse, *arguments))


def test_compiles_whole_and_logs_its_pick_once(caplog):
    choice._pick.cache_clear()
    qkv, do = draw(B=2, Lq=40, N=4, K=2, dtype=torch.float32)
    scopes = torch.tensor([1, 7, 30, 99])
    expected = with_grads(qkv, do, scopes, backend="reference")
    with caplog.at_level(logging.INFO, logger="farsight.kernels"):
        compiled = torch.compile(
            lambda q, k, v, s: scoped_attention(q * 1.0, k, v, sees(s)), fullgraph=True, backend="aot_eager"
        )
        o = compiled(*qkv, scopes)
        scoped_attention(*qkv, sees(scopes))
    found = o, *torch.autograd.grad(o, qkv, do)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert [r.getMessage() for r in caplog.records if r.name == "farsight.kernels"] == [
        "attention backend for float32, head dim 8, on cpu: banded"
    ]


def test_selective_checkpointing_saves_the_op(monkeypatch):
    """With the op on the list of operators to save, the backward pass does not recompute attention."""
    calls = []
    plan = banded.plan
    monkeypatch.setattr(banded, "plan", lambda *args: calls.append(1) or plan(*args))
    qkv, do = draw(Lq=40, N=4, K=2)
    scopes = torch.tensor([1, 7, 30, 99])

    def policy(ctx, op, *args, **kwargs):
        saved = op == torch.ops.farsight.banded_attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return scoped_attention(q.sin(), k, v, sees(scopes))

    o = checkpoint(block, *qkv, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    found = torch.autograd.grad(o, qkv, do)
    assert len(calls) == 2  # one forward, one backward
    for a, b in zip(found, torch.autograd.grad(block(*qkv), qkv, do), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("banded_path")
@pytest.mark.parametrize("kind", ["plain", "documents", "alibi"])
def test_memory_is_linear_in_tokens(kind):
    def peak(L):
        qkv, do = draw(Lq=L, N=3, K=3, H=8, dtype=torch.float32)
        options = {
            "plain": {},
            "documents": {"starts": (torch.arange(L) >= L // 5)[None] * (L // 5)},
            "alibi": {"slopes": torch.tensor([0.5, 0.1, 0.01])},
        }[kind]
        return extra_bytes(lambda: with_grads(qkv, do, [20, L // 3, L], **options), "cpu")

    # About twice, since chunks grow in steps; with stored scores it would be four times.
    longer = peak(8192)
    assert 0 < longer < 3 * peak(4096)
    assert longer < 8192 * 8192  # a quarter of one head's scores


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_BLNH": torch.zeros(1, 8, 4)}, r"q_BLNH has shape \[1, 8, 4\]"),
        ({"q_BLNH": torch.zeros(1, 8, 4, 8, dtype=torch.int32)}, r"q_BLNH is torch.int32"),
        ({"k_BLKH": torch.zeros(1, 8, 2, 8, dtype=torch.float64)}, "cast them to the same dtype"),
        ({"v_BLKH": torch.zeros(1, 8, 2, 4)}, r"v_BLKH \[1, 8, 2, 4\]"),
        (
            {"q_BLNH": torch.zeros(1, 8, 3, 8), "scopes_N": torch.ones(3, dtype=torch.long)},
            "3 query heads do not share 2",
        ),
        ({"q_BLNH": torch.zeros(2, 8, 4, 8)}, "batch 2"),
        ({"q_BLNH": torch.zeros(1, 6, 4, 8)}, "set q_offset to 2"),
        ({"q_offset": 1}, "so pass 9 keys"),
        ({"q_offset": -1}, "q_offset is -1"),
        ({"scopes_N": torch.ones(3, dtype=torch.long)}, r"one scope a query head, \[4\]"),
        ({"scopes_N": torch.ones(4)}, "scopes_N is torch.float32"),
        ({"scopes_N": torch.tensor([1, 0, 1, 1])}, r"scopes_N\[1\] is 0"),
        ({"document_starts_BL": torch.zeros(1, 7, dtype=torch.long)}, r"one index a key, \[1, 8\]"),
        ({"document_starts_BL": torch.zeros(1, 8)}, "document_starts_BL is torch.float32"),
        (
            {"document_starts_BL": torch.tensor([[0, 0, 3, 3, 3, 3, 3, 3]])},
            r"\[0, 2\] is 3, which lies after its token",
        ),
        ({"document_starts_BL": torch.tensor([[0, -1, 0, 0, 0, 0, 0, 0]])}, "is negative"),
        ({"document_starts_BL": torch.tensor([[0, 1, 2, 2, 1, 1, 1, 1]])}, "falls from 2 to 1 at token 4"),
        ({"bias": ScoreBias("alibi", torch.ones(1, 2))}, r"one value a query head for each coefficient, \[P, 4\]"),
        ({"bias": ScoreBias("alibi", torch.ones(4))}, r"coefficients_PN has shape \[4\]"),
        ({"bias": ScoreBias("alibi", torch.ones(1, 4, dtype=torch.long))}, "pass a float tensor"),
        ({"bias": ScoreBias("alibi", torch.ones(1, 4, requires_grad=True))}, "detach it"),
        ({"bias": ScoreBias("alibis", torch.ones(1, 4))}, 'the bias is of kind "alibis": set it to one of alibi'),
        ({"backend": "triton3"}, 'backend is "triton3"'),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "banded"])
def test_refuses(change, message, backend):
    arguments = {
        "q_BLNH": torch.zeros(1, 8, 4, 8),
        "k_BLKH": torch.zeros(1, 8, 2, 8),
        "v_BLKH": torch.zeros(1, 8, 2, 8),
        "scopes_N": torch.tensor([1, 2, 3, 4]),
        "backend": backend,
    }

    def call(arguments):
        fields = {field.name for field in dataclasses.fields(Visibility)}
        visibility = Visibility(**{name: x for name, x in arguments.items() if name in fields})
        scoped_attention(visibility=visibility, **{name: x for name, x in arguments.items() if name not in fields})

    call(arguments)
    with pytest.raises(ValueError, match=message):
        call(arguments | change)


def test_a_bias_that_a_backend_lacks_is_refused_by_name(monkeypatch):
    """Kernels for ALiBi name the backend, the bias and one that has it; the others compute whatever formula there is."""
    monkeypatch.setitem(FORMULAS, "kerple", lambda distance, r1, r2: -r1 * torch.log1p(r2 * distance))
    visibility = Visibility(torch.tensor([3, 9, 20, 50]), bias=ScoreBias("kerple", torch.rand(2, 4)))
    for backend in ("triton", "flash"):
        with pytest.raises(ValueError, match=f'backend "{backend}" has no bias of kind "kerple", only "alibi": use'):
            visibility.alibi_slopes(backend)
    qkv, do = draw(Lq=50, N=4, K=2)
    found = []
    for backend in ("banded", "reference"):
        o = scoped_attention(*qkv, visibility, backend=backend)
        found.append((o, *torch.autograd.grad(o, qkv, do)))
    torch.testing.assert_close(*found)
    r1, r2 = visibility.bias.coefficients_PN.double()[..., None, None]
    distance = (torch.arange(50)[:, None] - torch.arange(50)).double()
    seen = (distance >= 0) & (distance < visibility.scopes_N[:, None, None])
    mask = torch.where(seen, -r1 * torch.log(1 + r2 * distance.clamp(min=0)), -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found[0][0], exact, rtol=1e-6, atol=1e-6)  # the formula is computed in fp32 coefficients


def test_the_config_names_the_backends_of_the_kernels():
    named = typing.get_args(typing.get_type_hints(Attention)["backend"])
    assert named == ("auto", *BACKENDS)
