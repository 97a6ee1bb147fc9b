"""Decoding with a rolling cache: every step against the reference over all keys and values so far."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from farsight.kernels.scoped_attention import RollingCache, choice, scoped_attention, scoped_decode, scoped_prefill
from farsight.kernels.scoped_attention.triton import attention as triton_attention
from farsight.kernels.scoped_attention.triton import decode as triton_decode
from tests.kernels.test_scoped_attention import INT32_MAX, draw, math_attention, sees
from tests.kernels.test_triton_attention import DEVICE, on_device

BACKENDS = ("banded", "triton")

pytestmark = pytest.mark.slow


def cache_for(k, scopes, most_tokens):
    return RollingCache(scopes, k.shape[2], most_tokens, k.shape[0], k.shape[3], k.dtype, k.device)


def decoded(q, k, v, cache, visibility, starts_B=None, backend="auto"):
    """Decodes the last token."""
    return scoped_decode(q[:, -1], k[:, -1], v[:, -1], cache, visibility, starts_B, backend=backend)


@torch.no_grad()
def assert_steps_equal_reference(q, k, v, scopes, chunks, backend, starts_B=None, slopes=None):
    """Appends the chunks in turn, decoding the last token of each: its error is at most twice that of PyTorch's attention."""
    scopes_N = torch.tensor(scopes, device=q.device)
    cache = cache_for(k, scopes, k.shape[1])
    end = 0
    for chunk in chunks:
        if chunk > 1:
            cache.append(k[:, end : end + chunk - 1], v[:, end : end + chunk - 1])
        end += chunk
        documents_BL = None if starts_B is None else starts_B[:, None].minimum(torch.arange(end)).to(q.device)
        qkv = (x[:, :end].double() for x in (q, k, v))
        wide = None if slopes is None else slopes.double()
        exact = scoped_attention(*qkv, sees(scopes_N, documents_BL, wide), backend="reference")[:, -1]
        found = decoded(q[:, :end], k[:, :end], v[:, :end], cache, sees(scopes_N, slopes=slopes), starts_B, backend)
        assert found.dtype == q.dtype
        assert int(cache.tokens) == end
        same_dtype = q[:, end - 1 : end], k[:, :end], v[:, :end]
        pytorch = math_attention(*same_dtype, scopes_N, documents_BL, slopes, end - 1)[:, 0]
        off, theirs_off = (float((x.double() - exact).abs().max()) for x in (found, pytorch))
        floor = 8 * torch.finfo(q.dtype).eps * max(1.0, float(exact.abs().max()))
        assert off <= 2 * theirs_off + floor, (end, off, theirs_off)
    return cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunks", [[1] * 12, [40, 1, 1, 7, 1], [5, 60, 1]])
def test_prefill_and_steps(backend, chunks):
    q, k, v = on_device(draw(B=2, Lq=sum(chunks), N=6, K=3, H=16, dtype=torch.float32)[0])
    assert_steps_equal_reference(q, k, v, [1, 2, 9, 4, INT32_MAX, 20], chunks, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [1, 3, 4, 8, 17])
def test_many_parts_and_grouped_query_ratios(backend, ratio):
    """Rings of several parts, in some of which a narrow head sees nothing."""
    q, k, v = on_device(draw(Lq=700, N=2 * ratio, K=2, H=16, dtype=torch.float32)[0])
    scopes = [5, *[700] * (ratio - 1), *[300] * (ratio - 1), 129]
    assert_steps_equal_reference(q, k, v, scopes, [600, 99, 1], backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", [8, 24, 64, 80, 128])
def test_dtypes_and_head_dims(dtype, H):
    q, k, v = on_device(draw(B=2, Lq=150, N=4, K=2, H=H, dtype=dtype)[0])
    for backend in BACKENDS:
        assert_steps_equal_reference(q, k, v, [10, 140, 64, 20], [149, 1], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_on_the_left_and_slopes(backend):
    """Each row equals its own run without padding."""
    q, k, v = on_device(draw(B=3, Lq=60, N=4, K=2, H=16, dtype=torch.float32)[0])
    starts, slopes = torch.tensor([0, 13, 57]), torch.tensor([0.5, 0.25, 0.1, 0.0])
    assert_steps_equal_reference(q, k, v, [3, 60, 30, 8], [1, 1, 1], backend, None, slopes)
    # The last row is padding up to its token 57, and a padding token sees itself.
    assert_steps_equal_reference(q, k, v, [3, 60, 30, 8], [55, 1, 1, 1, 1, 1], backend, starts, slopes)
    scopes = torch.tensor([3, 60, 30, 8], device=DEVICE)
    together = cache_for(k, scopes.tolist(), 60)
    together.append(k[:, :-1], v[:, :-1])
    o = decoded(q, k, v, together, sees(scopes, slopes=slopes), starts, backend)
    for row, start in enumerate(starts.tolist()):
        alone = cache_for(k[:1], scopes.tolist(), 60)
        own = [x[row : row + 1, start:] for x in (q, k, v)]
        alone.append(own[1][:, :-1], own[2][:, :-1])
        single = decoded(*own, alone, sees(scopes, slopes=slopes), backend=backend)
        torch.testing.assert_close(o[row : row + 1], single, rtol=1e-5, atol=1e-6)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_steps(data):
    B, K, ratio = (data.draw(st.integers(1, 3)) for _ in range(3))
    chunks = data.draw(st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=4))
    L, N = sum(chunks), K * ratio
    scope = st.one_of(st.integers(1, L + 2), st.integers(1, 8), st.just(INT32_MAX))
    scopes = data.draw(st.lists(scope, min_size=N, max_size=N))
    slopes = torch.rand(N, generator=torch.Generator().manual_seed(0)) if data.draw(st.booleans()) else None
    starts = torch.tensor(data.draw(st.lists(st.integers(0, L - 1), min_size=B, max_size=B)))
    q, k, v = on_device(draw(B=B, Lq=L, N=N, K=K, H=16, dtype=torch.float32, seed=data.draw(st.integers(0, 9)))[0])
    for backend in BACKENDS:
        assert_steps_equal_reference(q, k, v, scopes, chunks, backend, starts, slopes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_prompts_in_any_chunks(data):
    """A prompt read in chunks that may be longer than a ring, against the reference over the whole prompt."""
    B, K, ratio = (data.draw(st.integers(1, 3)) for _ in range(3))
    chunks = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    L, N = sum(chunks), K * ratio
    scope = st.one_of(st.integers(1, L + 2), st.integers(1, 8), st.just(INT32_MAX))
    scopes = torch.tensor(data.draw(st.lists(scope, min_size=N, max_size=N)), device=DEVICE)
    slopes = torch.rand(N, generator=torch.Generator().manual_seed(0)) if data.draw(st.booleans()) else None
    starts = torch.tensor(data.draw(st.lists(st.integers(0, L - 1), min_size=B, max_size=B)))
    (q, k, v), _ = draw(B=B, Lq=L, N=N, K=K, H=8, seed=data.draw(st.integers(0, 9)))
    documents_BL = starts[:, None].minimum(torch.arange(L))
    exact = scoped_attention(q, k, v, sees(scopes.cpu(), documents_BL, slopes), backend="reference")
    q, k, v = on_device((q, k, v))
    cache = cache_for(k, scopes.tolist(), L)
    slopes = None if slopes is None else slopes.to(DEVICE)
    found = [
        scoped_prefill(*parts, cache, sees(scopes, slopes=slopes), starts.to(DEVICE))
        for parts in zip(*(x.split(chunks, dim=1) for x in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, dim=1), exact.to(DEVICE), rtol=1e-9, atol=1e-9)
    assert int(cache.tokens) == L
    with pytest.raises(ValueError, match=f"{L} tokens and 1 more do not fit into a cache of most_tokens = {L}"):
        scoped_prefill(q[:, :1], k[:, :1], v[:, :1], cache, sees(scopes))


def test_the_cache_keeps_what_can_be_seen_and_no_more():
    """SCOPE at 131,072 tokens, 32 heads on 8: 0.1622 of a dense cache in scope order, 0.3845 interleaved."""
    T, N, K = 131072, 32, 8
    ascending = [math.ceil(round(T ** (h / N), 9)) for h in range(1, N + 1)]
    interleaved = [ascending[group + K * member] for group in range(K) for member in range(N // K)]
    for scopes, share in ((ascending, 0.1622), (interleaved, 0.3845)):
        cache = RollingCache(scopes, K, T, 1, 2, torch.bfloat16, "meta")
        assert cache.capacities == tuple(max(scopes[4 * k : 4 * k + 4]) for k in range(K))
        assert cache.nbytes == 2 * 2 * 2 * sum(cache.capacities)
        assert round(cache.nbytes / (2 * 2 * 2 * K * T), 4) == share


def test_memory_never_written_is_never_used():
    torch.use_deterministic_algorithms(True)  # makes torch.empty return NaN
    try:
        q, k, v = on_device(draw(B=2, Lq=30, N=4, K=2, H=16, dtype=torch.float32)[0])
        for backend in BACKENDS:
            cache = cache_for(k, [3, 900, 200, 8], 900)
            assert cache.keys_BSH.isnan().all()
            cache.append(k[:, :-1], v[:, :-1])
            o = decoded(q, k, v, cache, sees([3, 900, 200, 8]), backend=backend)
            assert o.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


@torch.no_grad()
def test_opcheck_and_strided_inputs():
    q, k, v = (x.detach() for x in on_device(draw(B=2, Lq=40, N=4, K=2, H=16, dtype=torch.float32)[0]))
    scopes, strided = [1, 7, 30, 99], [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert strided[0].stride() != q.stride()
    outputs = []
    for inputs in ((q, k, v), strided):
        cache = cache_for(k, scopes, 40)
        cache.append(k[:, :-1], v[:, :-1])
        outputs.append(decoded(*inputs, cache, sees(scopes), backend="triton"))
    assert torch.equal(*outputs)
    token, held = [x[:, -1] for x in (q, k, v)], (cache.keys_BSH, cache.values_BSH, cache.tokens)
    parts = triton_decode._parts_of[cache]
    for extra in ((None, None), (torch.tensor([0, 4]), torch.tensor([0.5, 0.25, 0.1, 0.0]))):
        torch.library.opcheck(triton_decode.decode_op, (*token, *held, *parts, torch.tensor(scopes), *extra, 0.3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_BNH": torch.zeros(1, 4, 8)}, "batch 1 and head dim 8, the cache 2 and 8"),
        ({"q_BNH": torch.zeros(2, 4, 6)}, "batch 2 and head dim 6"),
        ({"q_BNH": torch.zeros(2, 1, 4, 8)}, "pass .batch, heads, head dim"),
        ({"q_BNH": torch.zeros(2, 3, 8), "visibility": sees([1] * 3)}, "3 query heads do not share 2"),
        ({"q_BNH": torch.zeros(2, 4, 8).half()}, "q_BNH is torch.float16 and the cache torch.float32"),
        ({"v_BKH": torch.zeros(2, 2, 8).half()}, "v_BKH is torch.float16 and the cache torch.float32"),
        ({"k_BKH": torch.zeros(2, 4, 8)}, r"both have to be \[2, 2, 8\]"),
        ({"visibility": sees([1] * 3)}, "one scope a query head, .4."),
        ({"document_starts_B": torch.zeros(2, 1).long()}, "one token index a row, .2."),
        ({"document_starts_B": torch.zeros(2)}, "pass an integer tensor"),
        ({"visibility": sees([4] * 4, slopes=torch.ones(3))}, "one value a query head"),
        ({"visibility": sees([4] * 4, torch.zeros(2, 3).long())}, "pass document_starts_B"),
        ({"visibility": sees([4] * 4, q_offset=3)}, "neither document_starts_BL nor q_offset"),
        ({"backend": "flash"}, 'set it to "auto", "banded" or "triton"'),
    ],
)
def test_refuses(change, message):
    cache = RollingCache([4, 4, 4, 4], 2, 10, 2, 8)
    cache.append(torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 2, 8))
    good = {"q_BNH": torch.zeros(2, 4, 8), "visibility": sees([4] * 4)}
    good |= {"k_BKH": torch.zeros(2, 2, 8), "v_BKH": torch.zeros(2, 2, 8)}
    scoped_decode(cache=cache, **good)
    with pytest.raises(ValueError, match=message):
        scoped_decode(cache=cache, **(good | change))


def test_scopes_that_the_cache_does_not_keep_are_refused():
    cache, token = RollingCache([2, 3, 5, 4], 2, 10, 1, 8), [torch.zeros(1, heads, 8) for heads in (4, 2, 2)]
    scoped_decode(*token, cache, sees([3, 2, 1, 5]), backend="banded")
    with pytest.raises(ValueError, match="key-value head 1 has scope 6, of which the cache keeps 5 tokens"):
        scoped_decode(*token, cache, sees([2, 3, 6, 4]), backend="banded")
    assert int(cache.tokens) == 1


def test_the_cache_refuses():
    with pytest.raises(ValueError, match="most_tokens is 0"):
        RollingCache([4, 4], 2, 0, 1, 8)
    with pytest.raises(ValueError, match="3 query heads do not share 2 key-value heads"):
        RollingCache([4, 4, 4], 2, 9, 1, 8)
    with pytest.raises(ValueError, match=r"scopes_N\[1\] is 0"):
        RollingCache([4, 0], 2, 9, 1, 8)
    with pytest.raises(ValueError, match=r"both have to be \[1, tokens, 2, 8\]"):
        RollingCache([4, 4], 2, 9, 1, 8).append(torch.zeros(1, 1, 2, 6), torch.zeros(1, 1, 2, 6))


class TestChoice:
    """The choice of "auto" on a GPU: the rule is told that this CPU, on which Triton is interpreted, is one."""

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(choice, "_can_run_triton", lambda *_: True)
        monkeypatch.setattr(choice, "TRIAL_TOKENS", 40)  # interpreted, the whole trial takes seconds
        monkeypatch.setattr(choice, "TRIAL_DOCUMENT", 17)
        choice._pick.cache_clear()
        yield
        choice._pick.cache_clear()

    def test_triton_is_tried_first_and_then_used(self, caplog):
        caplog.set_level("INFO", logger="farsight.kernels")
        q, k, v = on_device(draw(Lq=9, H=16, dtype=torch.float32)[0])
        scopes = torch.tensor([3, 4, 5, 6])
        with torch.inference_mode():
            o = scoped_attention(q, k, v, sees(scopes))
            cache = cache_for(k, scopes.tolist(), 9)
            cache.append(k[:, :-1], v[:, :-1])
            last = decoded(q, k, v, cache, sees(scopes))
        assert torch.equal(o, scoped_attention(q, k, v, sees(scopes), backend="triton"))
        torch.testing.assert_close(last, o[:, -1])
        said = [r.getMessage() for r in caplog.records]
        assert len(said) == 2
        assert said[0].startswith(f"attention backend for float32, head dim 16, on {DEVICE}: triton (tried")
        assert said[1].startswith(f"decoding backend for float32, head dim 16, on {DEVICE}: triton (tried")

    @pytest.mark.parametrize("wrong", [1.01, float("nan")])
    def test_wrong_numbers_stop_it(self, monkeypatch, wrong):
        right = triton_attention.triton_attention
        monkeypatch.setattr(triton_attention, "triton_attention", lambda *args: right(*args) * wrong)
        q, k, v = on_device(draw(Lq=9, H=16, dtype=torch.float32)[0])
        with pytest.raises(RuntimeError, match=r'are off by .* set the attention backend to "banded"'):
            scoped_attention(q, k, v, sees([3, 4, 5, 6]))

    def test_inside_compilation_and_checkpointing(self):
        """The trial's own operators must not be recorded as the caller's."""
        qkv, do = draw(Lq=20, H=16, dtype=torch.float32)
        (q, k, v), do = on_device(qkv), do.to(DEVICE)
        scopes = torch.tensor([3, 4, 5, 30], device=DEVICE)
        expected = scoped_attention(q, k, v, sees(scopes), backend="reference")
        grads = torch.autograd.grad(expected, (q, k, v), do)
        save = partial(create_selective_checkpoint_contexts, [torch.ops.farsight.triton_attention.default])
        o = checkpoint(lambda *x: scoped_attention(*x, sees(scopes)), q, k, v, use_reentrant=False, context_fn=save)
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
        for a, b in zip(torch.autograd.grad(o, (q, k, v), do), grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        choice._pick.cache_clear()
        compiled = torch.compile(lambda *x: scoped_attention(*x, sees(scopes)), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), expected, rtol=1e-4, atol=1e-5)
