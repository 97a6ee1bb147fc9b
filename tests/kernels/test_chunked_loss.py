"""The chunked cross-entropy against PyTorch's on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from farsight.kernels import chunked_loss
from farsight.kernels.chunked_loss import chunked_cross_entropy


def draw(T=50, D=12, V=37, dtype=torch.float64, ignored=0.2, ignore_index=-100, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(T, D, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(V, (T,), generator=g)
    labels[torch.rand(T, generator=g) < ignored] = ignore_index
    return h.requires_grad_(), weight.requires_grad_(), labels


def whole(h, weight, labels, ignore_index=-100):
    return F.cross_entropy(
        (h @ weight.T).float() if h.dtype == torch.bfloat16 else h @ weight.T,
        labels,
        reduction="sum",
        ignore_index=ignore_index,
    )


def with_grads(loss, h, weight, dloss=1.7):
    return loss, *torch.autograd.grad(loss * dloss, (h, weight))


@pytest.mark.parametrize("chunk_tokens", [0, 1, 7, 49, 50, 51, 1000])
@pytest.mark.parametrize("ignored", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 99])
def test_equals_pytorch(chunk_tokens, ignored, ignore_index):
    h, weight, labels = draw(ignored=ignored, ignore_index=ignore_index)
    found = with_grads(chunked_cross_entropy(h, weight, labels, chunk_tokens, ignore_index), h, weight)
    expected = with_grads(whole(h, weight, labels, ignore_index), h, weight)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.integers(0, 40), D=st.integers(1, 9), V=st.integers(1, 30), chunk=st.integers(0, 45), seed=st.integers(0, 99)
)
def test_any_shape(T, D, V, chunk, seed):
    h, weight, labels = draw(T, D, V, ignored=(seed % 3) / 3, seed=seed)
    found = with_grads(chunked_cross_entropy(h, weight, labels, chunk), h, weight)
    for a, b in zip(found, with_grads(whole(h, weight, labels), h, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adds", [True, False])
def test_products_written_in_fp32(monkeypatch, adds):
    """As on GPUs, where bf16 products need not be rounded to bf16: the logits' gradient is the only rounding left."""

    def mm(a, b, out_dtype):
        return a.to(out_dtype) @ b.to(out_dtype)

    def dtype_out(self, a, b, out_dtype, *, out):
        return out.copy_(self + mm(a, b, out_dtype))

    monkeypatch.setattr(chunked_loss, "_writes_fp32", lambda device, dtype: (True, adds))
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", dtype_out)
    h, weight, labels = draw(dtype=torch.bfloat16)
    _, dh, dw = chunked_loss.loss_and_grads(
        h.detach(), weight.detach(), labels, 7, -100, torch.bfloat16, True, True, ""
    )
    exact = [x.detach().float().requires_grad_() for x in (h, weight)]
    loss = whole(*exact, labels)
    expected = loss, *torch.autograd.grad(loss, exact)
    found = chunked_cross_entropy(h, weight, labels, 7), dh, dw
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=2**-7)


def test_chunks_on_accelerators():
    """128,256 tokens of vocabulary: eight whole tiles of 256 where the head trains, and one where it is frozen."""
    assert chunked_loss.chunk_of(128_256, "cuda", True) == 2048
    assert chunked_loss.chunk_of(128_256, "cuda", False) == 256
    assert chunked_loss.chunk_of(4096, "cuda", True) == 8192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_pytorch_in_the_same_dtype(dtype):
    h, weight, labels = draw(T=300, D=64, V=500, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in (h, weight)]
    exact = with_grads(whole(*wide, labels), *wide)
    theirs = with_grads(whole(h, weight, labels), h, weight)
    ours = with_grads(chunked_cross_entropy(h, weight, labels, 64), h, weight)
    assert ours[0].dtype == torch.float32
    for name, e, t, o in zip(("loss", "dh", "dweight"), exact, theirs, ours, strict=True):
        floor = 4 * torch.finfo(o.dtype).eps * e.abs().max()
        assert (o.double() - e).abs().max() <= 2 * (t.double() - e).abs().max() + floor, name


def test_autocast():
    """fp32 parameters under bf16 autocast: products are bf16, softmax and results fp32, as with F.linear and cross_entropy."""
    h, weight, labels = draw(T=300, D=64, V=500, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_cross_entropy(h, weight, labels, 77)
        theirs = F.cross_entropy(F.linear(h, weight).float(), labels, reduction="sum")
    full = whole(h, weight, labels)
    assert ours.dtype == torch.float32
    assert 0 < abs(ours - full) < 2 * abs(theirs - full) + 1e-3 * full  # bf16 was used, and is no worse than PyTorch's
    exact = torch.autograd.grad(full, (h, weight))
    for grad, like, e in zip(
        torch.autograd.grad(ours, (h, weight)), torch.autograd.grad(theirs, (h, weight)), exact, strict=True
    ):
        assert grad.dtype == torch.float32
        assert (grad - e).norm() <= 2 * (like - e).norm()


def test_mixed_dtypes_under_autocast():
    h, weight, labels = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(h.bfloat16(), weight, labels)
    torch.testing.assert_close(loss, whole(h, weight, labels), rtol=2e-2, atol=0)
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


def test_all_ignored():
    h, weight, labels = draw(ignored=2.0)
    loss, dh, dweight = with_grads(chunked_cross_entropy(h, weight, labels), h, weight)
    assert loss == 0
    assert dh.shape == h.shape
    assert dweight.shape == weight.shape
    assert not dh.any()
    assert not dweight.any()


def test_only_what_needs_a_gradient():
    h, weight, labels = draw()
    with torch.no_grad():
        loss = chunked_cross_entropy(h, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole(h, weight, labels))
    frozen = chunked_cross_entropy(h, weight.detach(), labels)
    torch.testing.assert_close(torch.autograd.grad(frozen, h)[0], torch.autograd.grad(whole(h, weight, labels), h)[0])
    frozen = chunked_cross_entropy(h.detach(), weight, labels)
    dweight = torch.autograd.grad(whole(h, weight, labels), weight)[0]
    torch.testing.assert_close(torch.autograd.grad(frozen, weight)[0], dweight)


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_logits_never_exist_at_once():
    h, weight, labels = draw(T=400, D=4, V=300)
    with LargestTensor() as largest:
        chunked_loss.loss_and_grads(h, weight, labels, 10, -100, torch.float64, True, True, "")
    assert largest.elements <= 10 * 300


def test_operator():
    h, weight, labels = draw(dtype=torch.float32)
    arguments = (h, weight, labels, 7, -100, torch.float32, True, True, "")
    torch.library.opcheck(torch.ops.farsight.chunked_cross_entropy.default, arguments)
    compiled = torch.compile(
        lambda h, w: chunked_cross_entropy(h * 1.0, w, labels), fullgraph=True, backend="aot_eager"
    )
    for a, b in zip(
        with_grads(compiled(h, weight), h, weight), with_grads(whole(h, weight, labels), h, weight), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradcheck():
    h, weight, labels = draw(T=7, D=3, V=5)
    assert torch.autograd.gradcheck(lambda *x: chunked_cross_entropy(*x, labels, 3), (h, weight))


def test_nothing_depends_on_uninitialised_memory():
    torch.use_deterministic_algorithms(True)  # makes torch.empty return NaN
    try:
        for ignored in (0.0, 0.5):
            h, weight, labels = draw(ignored=ignored)
            found = with_grads(chunked_cross_entropy(h, weight, labels, 7), h, weight)
            assert all(x.isfinite().all() for x in found)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels_T": torch.tensor([1, 2, 9, 0])}, r"labels_T\[2\] is 9, outside the vocabulary of 9"),
        ({"labels_T": torch.tensor([1, -1, 3, 0])}, r"labels_T\[1\] is -1, outside the vocabulary of 9"),
        ({"labels_T": torch.tensor([1, 2, 3])}, r"one int64 id a token, \[4\]"),
        ({"labels_T": torch.zeros(4)}, "torch.float32"),
        ({"weight_VD": torch.zeros(9, 4)}, r"weight_VD \[9, 4\]"),
        ({"weight_VD": torch.zeros(9, 3, dtype=torch.bfloat16)}, "turn autocast on"),
        ({"chunk_tokens": -2}, "chunk_tokens is -2"),
    ],
)
def test_refuses(change, message):
    arguments = {"h_TD": torch.zeros(4, 3), "weight_VD": torch.zeros(9, 3), "labels_T": torch.tensor([1, 2, 3, -100])}
    chunked_cross_entropy(**arguments)
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**(arguments | change))
