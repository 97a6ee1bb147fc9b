"""The FlexAttention backend: its block tables against brute force, its compiled forward against the reference.

FlexAttention has no backward pass on a CPU; that test needs a GPU.
"""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from farsight.kernels.scoped_attention import flex, scoped_attention
from tests.kernels.test_scoped_attention import INT32_MAX, documents, draw, math_attention, sees

BLOCK = flex.BLOCK
MIXED = [1, 40, 150, INT32_MAX]
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])

pytestmark = pytest.mark.slow  # most of it compiles


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """One thread, and nothing compiled or cached by earlier tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(flex, "_compiled", None)
    monkeypatch.setattr(flex, "_variants", {})
    flex._kept.clear()
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def uncompiled_kernel(monkeypatch):
    """Dynamo as usual, but no C++: it traces and retraces without spending seconds in a compiler."""
    monkeypatch.setattr(flex, "_compiled", torch.compile(flex._attend, fullgraph=True, backend="eager"))


def attend(qkv, scopes, starts=None, slopes=None, q_offset=0):
    """The outputs of FlexAttention, the reference and PyTorch."""
    q, k, v = (x.detach() for x in qkv)
    visibility = sees(scopes, starts, slopes, q_offset)
    found = flex.flex_attention(q, k, v, visibility, q.shape[-1] ** -0.5)
    wide = (x.double() for x in (q, k, v))
    exact = scoped_attention(*wide, visibility, backend="reference")
    return found, exact, math_attention(q, k, v, visibility.scopes_N, starts, slopes, q_offset)


def assert_equal(found_exact_and_pytorch):
    """At most twice the error of PyTorch's math attention in the same dtype, or a few ulp."""
    found, exact, pytorch = found_exact_and_pytorch
    assert found.shape == exact.shape
    off, theirs_off = (float((x.double() - exact).abs().max()) for x in (found, pytorch))
    assert off <= 2 * theirs_off + 8 * torch.finfo(found.dtype).eps, (off, theirs_off)


# Block tables


def seen_pairs(scopes, starts, queries, q_offset):
    """bool [B or 1, N, Lq, Lk], from the rule."""
    t, i = torch.arange(q_offset, queries + q_offset)[:, None], torch.arange(queries + q_offset)
    seen = (i <= t) & (i > t - torch.as_tensor(scopes).long()[:, None, None])
    return seen[None] if starts is None else seen & (i >= starts[:, None, q_offset:, None])


def listed(num_blocks, indices):
    """[..., rows, columns], True where a row lists a column; every index must be valid, and none may be repeated."""
    columns = indices.shape[-1]
    assert num_blocks.shape == indices.shape[:-1]
    assert num_blocks.dtype == indices.dtype == torch.int32
    for x in (num_blocks, indices):  # the kernels assume the strides of a contiguous table
        assert x.stride() == torch.empty(x.shape).stride()
    assert ((indices >= 0) & (indices < columns)).all()
    counted = torch.arange(columns) < num_blocks[..., None]
    times = torch.zeros(*indices.shape, dtype=torch.int64).scatter_add_(-1, indices.long(), counted.long())
    assert (times <= 1).all()
    return times.bool()


def assert_tables(scopes, starts, queries, q_offset):
    tables = flex.block_tables(sees(scopes, starts, q_offset=q_offset), queries)
    seen = seen_pairs(scopes, starts, queries, q_offset)
    rows, columns = (math.ceil(n / BLOCK) for n in seen.shape[-2:])
    padded = torch.zeros(*seen.shape[:2], rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    padded[:, :, :queries, : queries + q_offset] = seen
    blocks = padded.unflatten(3, (columns, BLOCK)).unflatten(2, (rows, BLOCK))
    some, every = blocks.any(5).any(3), blocks.all(5).all(3)
    for kind, expected in ((0, some & ~every), (2, every)):
        by_query, by_key = listed(*tables[kind : kind + 2]), listed(*tables[kind + 4 : kind + 6])
        assert torch.equal(by_query, expected)
        assert torch.equal(by_key, expected.transpose(-1, -2))


@pytest.mark.parametrize("q_offset", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("queries", [1, 63, 127, 128, 129, 300, 512])
@pytest.mark.parametrize("new_document", [None, 1.0, 0.02, 0.004])
def test_tables_list_what_is_seen(queries, q_offset, new_document):
    L = queries + q_offset
    starts = None if new_document is None else documents(2, L, new_document)
    assert_tables([1, 2, 127, 128, 129, 255, 256, 257, L, INT32_MAX], starts, queries, q_offset)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_tables_of_any_inputs(data):
    queries, q_offset = data.draw(st.integers(1, 700)), data.draw(st.sampled_from([0, 0, 1, 37, 128, 400]))
    L = queries + q_offset
    scope = st.one_of(st.integers(1, L + 2), st.integers(1, 20), st.just(INT32_MAX))
    scopes = data.draw(st.lists(scope, min_size=1, max_size=4))
    starts = None
    if data.draw(st.booleans()):
        new_document = data.draw(st.sampled_from([0.5, 0.05, 0.01, 0.003]))
        starts = documents(data.draw(st.integers(1, 3)), L, new_document, seed=data.draw(st.integers(0, 99)))
    assert_tables(scopes, starts, queries, q_offset)


def test_narrow_integers():
    """int8 can't hold a length; neither it nor the largest int64 may overflow."""
    for scopes in (torch.tensor([1, 100], dtype=torch.int8), torch.tensor([1, 2**63 - 1])):
        assert_tables(scopes, None, 300, 5)


@pytest.mark.parametrize("with_documents", [False, True])
def test_tables_are_those_of_create_block_mask(with_documents):
    queries, q_offset, scopes = 300, 70, torch.tensor(MIXED)
    starts = documents(2, 370, 0.01) if with_documents else None

    def mask_mod(b, n, row, key):
        t = row + q_offset
        seen = (key <= t) & (key > t - scopes[n])
        return seen if starts is None else seen & (key >= starts[b, t])

    B = 2 if with_documents else 1
    theirs = create_block_mask(mask_mod, B, len(scopes), queries, queries + q_offset, device="cpu")
    ours = BlockMask(
        (300, 370),
        *flex.block_tables(sees(scopes, starts, q_offset=q_offset), queries),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(getattr(ours, f"{name}_num_blocks"), getattr(theirs, f"{name}_num_blocks")), name


# Compiled


def test_compiled_forward(monkeypatch):
    """Lengths, scopes, documents, slopes, offsets, grouped queries; other values reuse the compiled program."""
    # Two lengths and numbers of blocks first, so that both are dynamic from then on.
    with monkeypatch.context() as patch:
        patch.setattr(flex, "_compiled", torch.compile(flex._attend, fullgraph=True, backend="eager"))
        for L in (290, 140):
            attend(draw(2, L, 4, 1, 16, dtype=torch.float32)[0], MIXED, documents(2, L, 0.02), SLOPES)

    for L in (300, 63, 1):  # several blocks; one; and one token
        qkv, _ = draw(2, L, 4, 1, 16, dtype=torch.float32)
        assert_equal(attend(qkv, MIXED, documents(2, L, 0.02), SLOPES))
        with torch.compiler.set_stance("fail_on_recompile"):
            for scopes in ([1, 1, 1, 1], [L, L + 1, INT32_MAX, max(1, L - 1)], [129, 128, 127, 2]):
                for new_document in (1.0, 0.2, 0.004):
                    assert_equal(attend(qkv, scopes, documents(2, L, new_document, seed=1).int(), SLOPES.flip(0)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for L, q_offset in ((129, 0), (130, 70), (257, 7), (1000, 0), (129, 500)):
            qkv, _ = draw(2, L, 4, 1, 16, q_offset, dtype=torch.float32)
            assert_equal(attend(qkv, MIXED, documents(2, L + q_offset, 0.02), SLOPES, q_offset))


def test_autocast_and_gradients_off(uncompiled_kernel):
    """Inputs that require grad are accepted where gradients are off."""
    (q, k, v), _ = draw(Lq=90, dtype=torch.float32)
    scopes = torch.tensor(MIXED)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = flex.flex_attention(q, k, v, sees(scopes), 0.3)
    expected = scoped_attention(q, k, v, sees(scopes), scale=0.3, backend="reference")
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 3e-6


def test_lengths_do_not_recompile_forever(uncompiled_kernel):
    """Many shapes: each result is right, and few programs are compiled."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for L in range(1, 400, 19):
        B = 1 + L % 2
        qkv, _ = draw(B, L, 4, 2, 16, q_offset=L % 7, dtype=torch.float32)
        starts = documents(B, L + L % 7, 0.05)
        assert_equal(attend(qkv, MIXED, starts, SLOPES, L % 7))
    assert 1 < torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= flex.RECOMPILE_LIMIT // 2


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiles_whole(backend):
    """In a compiled block the mask is built in the graph, and follows the scopes."""
    q, k, v = (x.detach() for x in draw(1, 300, 4, 2, 16, dtype=torch.float32)[0])
    starts = documents(1, 300, 0.01) if backend == "aot_eager" else None

    @torch.compile(fullgraph=True, backend=backend)
    def block(q, k, v, scopes, starts):
        return flex.flex_attention(q * 2.0, k, v, sees(scopes, starts), 0.25) + 1.0

    for i, scopes in enumerate((torch.tensor(MIXED), torch.tensor([300, 9, 1, 128]))):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            found = block(q, k, v, scopes, starts)
        expected = scoped_attention(q * 2.0, k, v, sees(scopes, starts), scale=0.25, backend="reference") + 1.0
        assert (found - expected).abs().max() < 3e-6
    assert not flex._kept


def test_recompile_limit_is_an_error(uncompiled_kernel, monkeypatch):
    """Past Dynamo's limit it still compiles; past the backend's own limit it raises, naming what varied, and never runs eagerly."""
    monkeypatch.setattr(flex, "RECOMPILE_LIMIT", 3)
    with torch._dynamo.config.patch(recompile_limit=1):
        for H in (16, 24, 32):
            assert_equal(attend(draw(1, 200, 4, 2, H, dtype=torch.float32)[0], MIXED))
        with pytest.raises(
            RuntimeError, match=r"compiled 3 variants.*head dim \(.*40.*\).*RECOMPILE_LIMIT.*\"banded\""
        ):
            attend(draw(1, 200, 4, 2, 40, dtype=torch.float32)[0], MIXED)
        assert_equal(attend(draw(1, 200, 4, 2, 24, dtype=torch.float32)[0], MIXED))  # an existing program still runs


def test_never_runs_uncompiled():
    qkv, _ = draw(1, 20, 4, 2, 16, dtype=torch.float32)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="without compilation"):
        attend(qkv, MIXED)


# Sharing


def shared(scopes, starts=None, queries=300, q_offset=0):
    return flex.shared_mask(sees(scopes, starts, q_offset=q_offset), queries, torch.device("cpu"))


def test_layers_of_equal_scopes_share_a_mask():
    one, two = torch.tensor(MIXED), torch.tensor(MIXED, dtype=torch.int32)
    for starts in (None, documents(1, 300)):
        assert shared(one, starts) is shared(two, starts)
    assert shared(one) is not shared(one, queries=299)
    assert shared(one) is not shared(one, queries=299, q_offset=1)
    kept = shared(one)
    two[1] = 41
    assert shared(one) is kept
    changed = shared(two)
    assert changed is not kept
    assert changed.scopes_N.tolist() == [1, 41, 150, 300]


def test_scopes_are_read_once(monkeypatch):
    scopes, read = torch.tensor(MIXED), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x) or tolist(x))
    for _ in range(3):
        shared(scopes)
    assert len(read) == 1
    scopes += 1
    shared(scopes)
    assert len(read) == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_mask_follows_its_documents(dtype):
    scopes, starts = torch.tensor(MIXED), documents(1, 300, 0.02).to(dtype)
    kept = shared(scopes, starts)
    assert shared(scopes, starts) is kept
    assert shared(scopes, starts.clone()) is not kept
    starts.zero_()
    changed = shared(scopes, starts)
    assert changed is not kept
    assert not changed.document_starts_BL.any()
    assert [x.sum() for x in changed.tables[::2]] == [x.sum() for x in shared(scopes).tables[::2]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_few_masks_are_kept_and_none_without_its_documents(dtype, monkeypatch):
    scopes = torch.tensor(MIXED)
    starts = documents(1, 300).to(dtype)
    size = shared(scopes, starts).nbytes
    assert size > 0
    assert len(flex._kept) == 1
    del starts
    gc.collect()
    assert not flex._kept
    monkeypatch.setattr(flex, "BYTES_KEPT", 4 * size)
    alive = [documents(1, 300) for _ in range(9)]
    for starts in alive:
        shared(scopes, starts)
    assert len(flex._kept) == 4
    assert shared(scopes, alive[-1]) is next(reversed(flex._kept.values())).mask


def test_inference_tensors():
    """They do not track changes; and masks cached by an evaluation have to work in training."""
    scopes = torch.tensor(MIXED)
    with torch.inference_mode():
        starts = documents(1, 300)
        first = shared(scopes, starts)
        starts.zero_()
        assert not shared(scopes, starts).document_starts_BL.any()
        assert first.document_starts_BL.any()
        made_here = torch.tensor(MIXED)
        shared(made_here)
        made_here[0] = 7
        assert shared(made_here).scopes_N[0] == 7
        kept = shared(scopes)
    assert shared(scopes) is kept
    assert not any(x.is_inference() for x in (*kept.tables, kept.scopes_N, kept.q_offset))


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, 'does not take torch.float64: use bfloat16, float16 or float32, or "banded"'),
        ({}, 'no backward on a CPU: use "banded"'),
    ],
)
def test_refuses(change, message):
    (q, k, v), _ = draw(**{"Lq": 8, "dtype": torch.float32, **change})
    with pytest.raises(ValueError, match=message):
        flex.flex_attention(q, k, v, sees([1] * 4), 1.0)


def test_refuses_values(uncompiled_kernel):
    qkv, _ = draw(Lq=4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"scopes_N\[1\] is 0"):
        attend(qkv, [1, 0, 2, 3])
    with pytest.raises(ValueError, match="falls from 1 to 0"):
        attend(qkv, MIXED, torch.tensor([[0, 1, 0, 0]]))


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on GPUs only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "documents and slopes"])
def test_backward_on_a_gpu(kind, dtype):
    for L, q_offset in ((1, 0), (63, 0), (129, 0), (300, 0), (130, 70), (1000, 0)):
        B, starts, slopes = 1, None, None
        if kind != "plain":
            B, starts, slopes = 2, documents(2, L + q_offset, 0.02).int().cuda(), SLOPES.cuda()
        qkv, do = draw(B, L, 4, 2, 64, q_offset, dtype=dtype)
        qkv, do = [x.detach().cuda().requires_grad_() for x in qkv], do.cuda()
        scopes = torch.tensor(MIXED, device="cuda")
        o = flex.flex_attention(*qkv, sees(scopes, starts, slopes, q_offset), 0.125)
        found = o, *torch.autograd.grad(o, qkv, do)
        wide = [x.detach().double().requires_grad_() for x in qkv]
        o = scoped_attention(*wide, sees(scopes, starts, slopes, q_offset), scale=0.125, backend="reference")
        expected = o, *torch.autograd.grad(o, wide, do.double())
        for name, a, b in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
            assert a.dtype == dtype
            tolerance = 16 * torch.finfo(dtype).eps * max(1.0, float(b.detach().abs().max()))
            assert (a.double() - b).abs().max() < tolerance, (name, L, q_offset)
    del starts
    gc.collect()
    assert all(kept.documents is None for kept in flex._kept.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU takes any head dim")
def test_refuses_small_heads_on_a_gpu():
    q = torch.zeros(1, 8, 4, 8, device="cuda")
    with pytest.raises(ValueError, match='head dims from 16 on a GPU, not 8: use "triton"'):
        flex.flex_attention(q, q, q, sees(torch.ones(4, dtype=torch.long, device="cuda")), 1.0)
