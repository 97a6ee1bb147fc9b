"""Attention over segments against the reference on whole sequences: outputs, and gradients of queries, keys and values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.kernels.scoped_attention import Segments, documents, scoped_attention, segmented_attention
from farsight.kernels.scoped_attention.triton import attention as triton_attention
from farsight.kernels.scoped_attention.triton.tiles import Tiles, use_tiles
from tests.kernels import test_scoped_attention as cases
from tests.kernels.test_scoped_attention import INT32_MAX, draw, sees
from tests.kernels.test_triton_attention import DEVICE, on_device

SMALL = dict.fromkeys(("forward", "dq", "dkv"), Tiles(16, 16, 4, 1))
"""Many blocks in few tokens."""
DESCRIPTORS = dict.fromkeys(("forward", "dq", "dkv"), Tiles(16, 32, 4, 2, descriptors=True))


def segments_of(pieces, scopes, K, more=0):
    """The pieces with the fewest keys of each head, and `more`."""
    group = len(scopes) // K
    reach = [max(scopes[k * group : (k + 1) * group]) for k in range(K)]
    return Segments(tuple(pieces), tuple(tuple(max(0, a - far + 1 - more) for far in reach) for a, _ in pieces))


def packed(k_BLKH, v_BLKH, segments):
    """Keys and values of all segments, copied one by one."""
    rows = [torch.stack([x[:, a:b, n] for x in (k_BLKH, v_BLKH)]).permute(2, 0, 1, 3) for _, n, (a, b) in segments]
    return torch.cat(rows)


def compared(
    T, pieces, scopes, K, backend, *, B=1, H=16, dtype=torch.float32, more=0, starts=None, slopes=None, seed=0
):
    """Name, found and exact value of the output and each gradient; those of keys and values on the whole sequence."""
    qkv, do = draw(B=B, Lq=T, N=len(scopes), K=K, H=H, seed=seed)
    qkv, do = [x.detach().to(dtype) for x in qkv], do.to(dtype)
    own = torch.cat([torch.arange(a, b) for a, b in pieces])
    wide = [x.double().requires_grad_() for x in qkv]
    o = scoped_attention(*wide, sees(scopes, starts, slopes), backend="reference")[:, own]
    exact = o, *torch.autograd.grad(o, wide, do[:, own].double())
    q, k, v = on_device(qkv)
    starts, slopes = (None if x is None else x.to(DEVICE) for x in (starts, slopes))
    visibility = sees(torch.tensor(scopes, device=DEVICE), starts, slopes)
    segments = segments_of(pieces, scopes, K, more)
    o = segmented_attention(q[:, own], packed(k, v, segments), segments, visibility, backend=backend)
    found = o, *torch.autograd.grad(o, (q, k, v), do[:, own].to(DEVICE))
    return [(name, a.cpu(), b) for name, a, b in zip(("o", "dq", "dk", "dv"), found, exact, strict=True)]


def assert_equals_the_whole(*arguments, tolerance=1e-5, **options):
    for name, found, exact in compared(*arguments, **options):
        assert found.isfinite().all(), name
        assert (found - exact).abs().max() <= tolerance * max(1.0, float(exact.detach().abs().max())), name


@pytest.fixture
def uninitialised():
    """torch.empty returns NaN, so that a row that no kernel writes is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


ONE, TWO, ODD = [(40, 75)], [(16, 48), (80, 112)], [(3, 40), (50, 51), (70, 99)]
SCOPES = [1, 5, 20, 60, INT32_MAX, 33, 7, 7]


@pytest.mark.usefixtures("uninitialised")
@pytest.mark.parametrize("tiles", [SMALL, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("pieces", [ONE, TWO, ODD, [(0, 17)]], ids=["one", "two", "odd", "first"])
def test_pieces(pieces, tiles):
    with use_tiles(**tiles):
        assert_equals_the_whole(112, pieces, SCOPES, 4, "triton")


@pytest.mark.usefixtures("uninitialised")
@pytest.mark.parametrize("tiles", [SMALL, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("new_document", [1.0, 0.2, 0.03])
def test_documents_and_slopes(new_document, tiles):
    starts, slopes = cases.documents(2, 112, new_document, seed=1).int(), torch.tensor([0.5, 0.1, 0.0, 1.0])
    with use_tiles(**tiles):
        assert_equals_the_whole(112, TWO, [3, 40, INT32_MAX, 9], 2, "triton", B=2, starts=starts, slopes=slopes)


@pytest.mark.parametrize("new_document", [0.0, 0.03])
def test_nothing_past_the_last_row_is_read(new_document):
    """Queries, gradients, keys and values end in the middle of memory that is NaN elsewhere; documents go on after the piece."""

    def amid_nans(x, dim):
        beyond = torch.full_like(x, torch.nan)
        return torch.cat((beyond, x, beyond), dim).narrow(dim, x.shape[dim], x.shape[dim])

    (q, k, v), do = draw(Lq=112, N=2, K=2, H=16, dtype=torch.float32)
    q, do = q.detach()[:, 40:75], do[:, 40:75]
    segments, visibility = (
        segments_of([(40, 75)], [9, 70], 2),
        sees([9, 70], cases.documents(1, 112, new_document).int()),
    )
    kv = packed(k.detach(), v.detach(), segments)
    results = []
    for place in (lambda x, dim: x, amid_nans):
        with use_tiles(**SMALL):
            leaves = [place(x.to(DEVICE), dim).requires_grad_() for x, dim in ((q, 1), (kv, 0))]
            o = segmented_attention(*leaves, segments, visibility.to(torch.device(DEVICE)), backend="triton")
            results.append((o, *torch.autograd.grad(o, leaves, place(do.to(DEVICE), 1))))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("ratio", [1, 3])
def test_grouped_query_ratios_and_shipped_tiles(ratio):
    assert_equals_the_whole(300, [(0, 130), (150, 290)], (SCOPES * 2)[: 4 * ratio], 4, "triton", H=24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    with use_tiles(**DESCRIPTORS):
        assert_equals_the_whole(112, TWO, SCOPES, 4, "triton", dtype=dtype, tolerance=3 * torch.finfo(dtype).eps)


def any_segments(data):
    T = data.draw(st.integers(2, 70))
    ends = sorted(data.draw(st.sets(st.integers(0, T), min_size=2, max_size=4)))
    pieces = list(zip(ends[::2], ends[1::2], strict=False))
    K, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    scope = st.one_of(st.integers(1, T + 2), st.just(INT32_MAX))
    scopes = data.draw(st.lists(scope, min_size=K * group, max_size=K * group))
    options = {"B": data.draw(st.integers(1, 2)), "more": data.draw(st.sampled_from([0, 3])), "seed": len(scopes)}
    if data.draw(st.booleans()):
        options["starts"] = cases.documents(options["B"], T, data.draw(st.sampled_from([0.05, 0.5])))
    return T, pieces, scopes, K, options


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_segments(data):
    T, pieces, scopes, K, options = any_segments(data)
    with use_tiles(**SMALL):
        assert_equals_the_whole(T, pieces, scopes, K, "triton", **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_calls_of_other_backends(data):
    T, pieces, scopes, K, options = any_segments(data)
    slopes = torch.rand(len(scopes), dtype=torch.float64) if data.draw(st.booleans()) else None
    backend = data.draw(st.sampled_from(["banded", "reference"]))
    arguments = {**options, "slopes": slopes, "dtype": torch.float64, "tolerance": 1e-11}
    assert_equals_the_whole(T, pieces, scopes, K, backend, **arguments)


def test_opcheck():
    segments = segments_of(TWO, [7, 50], 1)
    q, kv = (torch.randn(*shape, 16, device=DEVICE).requires_grad_() for shape in ((1, 64, 2), (segments.rows, 2, 1)))
    scopes, starts = torch.tensor([7, 50], device=DEVICE), cases.documents(1, 112).int().to(DEVICE)
    rest = segments.numbers, 0.3
    for extra in ((None, None), (starts, torch.tensor([0.5, 0.0], device=DEVICE))):
        torch.library.opcheck(triton_attention.segmented_forward, (q, kv, scopes, *extra, *rest))
        with torch.no_grad():
            o, lse = triton_attention.segmented_forward(q, kv, scopes, *extra, *rest)
            torch.library.opcheck(triton_attention.segmented_backward, (o, q, kv, o, lse, scopes, *extra, *rest))


def test_numbers_are_the_segments():
    for pieces in (ONE, TWO, ODD):
        segments = segments_of(pieces, SCOPES, 4)
        assert Segments.of_numbers(*segments.numbers) == segments


@pytest.mark.parametrize("pieces", [ONE, TWO, ODD, [(0, 17)]])
@pytest.mark.parametrize("new_document", [1.0, 0.2, 0.01])
@pytest.mark.parametrize("reach", [1, 20, 112])
def test_sequences_are_the_documents_of_each_piece(pieces, new_document, reach):
    """Counted token by token."""
    starts = cases.documents(2, 112, new_document)
    first_keys = tuple(max(0, a - reach + 1) for a, _ in pieces)
    found = documents.sequences_of(starts, tuple(pieces), first_keys, starts.device)
    keys, queries = [], []
    for row in starts.tolist():
        for (begin, end), first in zip(pieces, first_keys, strict=True):
            for start in sorted(set(row[first:end])):
                tokens = [t for t in range(first, end) if row[t] == start]
                keys.append(len(tokens))
                queries.append(sum(t >= begin for t in tokens))
    empty = len(found.cu_seqlens_k) - 1 - len(keys)
    assert empty >= 0
    assert found.cu_seqlens_k.diff().tolist() == keys + [0] * empty
    assert found.cu_seqlens_q.diff().tolist() == queries + [0] * empty
    assert found.max_seqlen_k >= max(keys)
    assert found.max_seqlen_q >= max(queries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 63, 2, 16)}, "the pieces have 64 queries and q_BLNH 63"),
        ({"kv": torch.zeros(9, 2, 1, 16)}, r"kv_R2BH is \[9, 2, 1, 16\]"),
        ({"q": torch.zeros(1, 64, 3, 16), "K": 2}, "3 query heads do not share 2 key-value heads"),
        ({"visibility": sees([7, 50], q_offset=4)}, "has no q_offset"),
        ({"visibility": sees([7, 50], torch.zeros(1, 111, dtype=torch.int32))}, "for the whole sequence"),
        ({"visibility": sees([7, 50, 3])}, r"scopes_N has shape \[3\]"),
        ({"backend": "none"}, 'backend is "none"'),
    ],
)
def test_refuses(change, message):
    segments = Segments(tuple(TWO), ((0,) * change.get("K", 1),) * 2)
    q, kv = change.get("q", torch.zeros(1, 64, 2, 16)), change.get("kv", torch.zeros(segments.rows, 2, 1, 16))
    with pytest.raises(ValueError, match=message):
        segmented_attention(
            q, kv, segments, change.get("visibility", sees([7, 50])), backend=change.get("backend", "banded")
        )
