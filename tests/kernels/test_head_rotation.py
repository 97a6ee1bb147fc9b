"""Rotation with separate frequencies for each head: PyTorch and Triton against complex numbers."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from farsight.configs.schema import Llama3Rope, Rope, YarnRope
from farsight.kernels import head_rotation
from farsight.kernels.head_rotation import rotate_heads
from farsight.model.position.garfa import head_scales
from farsight.model.position.rope import RopeFrequencies, rope_frequencies, rope_tables, rotate
from tests.running import ROOT, environment


def draw(B=2, L=9, K=3, H=8, dtype=torch.float64, shared=False):
    generator = torch.Generator().manual_seed(B + L + H)
    x, dy = (torch.randn(B, L, K, H, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    positions = torch.arange(L)[None] if shared else torch.randint(0, 500, (B, L), generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = torch.rand(K, H // 2, generator=generator, dtype=torch.float64).to(wide)
    return x, dy, positions, frequencies, torch.tensor(1.3, dtype=wide)


def written_out(x, positions, frequencies, factor):
    """By complex numbers: dimensions i and i + H/2 form one, multiplied by factor · exp(i · position · frequency)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None].double() * frequencies.double()
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(factor.double(), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("shared", [False, True])
def test_rotation_and_gradients_against_complex_numbers(shared):
    x, dy, positions, frequencies, factor = draw(shared=shared)
    leaves = x.requires_grad_(), frequencies.requires_grad_()
    exact = written_out(*leaves[:1], positions, leaves[1], factor)
    expected = torch.autograd.grad(exact, leaves, dy)
    for function in (rotate_heads, torch.compile(rotate_heads, backend="eager", fullgraph=True)):
        y = function(leaves[0], positions, leaves[1], factor)
        for a, b in zip((y, *torch.autograd.grad(y, leaves, dy)), (exact, *expected), strict=True):
            assert_close(a, b, rtol=1e-12, atol=1e-10)
    assert torch.autograd.gradcheck(lambda x, f: rotate_heads(x, positions, f, factor), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_frequencies_are_ropes_tables_to_the_last_bit(dtype):
    for rotary in (Rope(), YarnRope(factor=4.0, original_length=16), Llama3Rope(original_length=16)):
        frequencies = rope_frequencies(rotary, 16, 300)
        x = torch.randn(2, 300, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        positions = torch.arange(600).view(2, 300)
        scales = head_scales(torch.full((3,), -math.log(10)), 16, 14)
        y = rotate_heads(x, positions, frequencies.inv_freq * scales, torch.tensor(frequencies.attention_factor))
        assert torch.equal(y, rotate(x, *rope_tables(positions, frequencies)))


def test_only_what_is_needed_is_kept():
    x, _, positions, frequencies, factor = draw(dtype=torch.bfloat16, L=40)
    for trained, kept in ((False, 0), (True, x.numel())):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):  # noqa: B023
            rotate_heads(x.requires_grad_(), positions, frequencies.clone().requires_grad_(trained), factor)
        assert sum(sizes) == kept + positions.numel() + frequencies.numel() + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "L", "shared"), [(8, 37, True), (24, 300, False), (128, 70, True)])
def test_triton_against_torch(dtype, H, L, shared):
    """On a GPU if there is one, else interpreted, where bf16 is truncated instead of rounded: the tolerance allows an ulp."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, dy, positions, frequencies, factor = draw(H=H, L=L, dtype=dtype, shared=shared)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens in memory
    found, expected = [], []
    for backend, results in (("triton", found), ("torch", expected)):
        on = device if backend == "triton" else "cpu"
        leaves = [z.detach().to(on).requires_grad_() for z in (x, frequencies)]
        y = rotate_heads(leaves[0], positions.to(on), leaves[1], factor.to(on), backend)
        results += [z.detach().cpu() for z in (y, *torch.autograd.grad(y, leaves, dy.to(on)))]
        # The gradient of x is the same without that of the frequencies.
        y = rotate_heads(leaves[0], positions.to(on), leaves[1].detach(), factor.to(on), backend)
        assert torch.equal(torch.autograd.grad(y, leaves[0], dy.to(on))[0].cpu(), results[1])
    ulp = torch.finfo(dtype).eps
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert_close(a, b, rtol=ulp if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5 * float(expected[2].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "L", "shared"), [(8, 37, True), (24, 300, False), (128, 1, False)])
def test_triton_by_tables_against_complex_numbers(dtype, H, L, shared):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, _, positions, frequencies, _ = draw(H=H, L=L, dtype=dtype, shared=shared)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    tables = rope_tables(positions, RopeFrequencies(frequencies[0], 1.3))
    found = head_rotation.rotate_by_tables(x.to(device), *(table.to(device) for table in tables)).cpu()
    exact = written_out(x, positions, frequencies[:1], torch.tensor(1.3)).to(dtype)
    # Angles of up to 500 radians are rounded to fp32; the interpreter truncates bf16 instead of rounding it.
    assert_close(found, exact, rtol=torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5, atol=3e-4)


def test_heads_that_lie_far_apart(tmp_path):
    """The third head is 2^31 numbers behind the first: in a sparse file, of which only a few pages are read."""
    from farsight.kernels import triton_head_rotation as kernels

    if torch.cuda.is_available():
        pytest.skip("the interpreter's tensors are the CPU's")
    x, dy, positions, frequencies, factor = draw(B=1, dtype=torch.bfloat16)
    large = torch.from_file(str(tmp_path / "holes"), shared=True, size=2**32 + 2**20, dtype=torch.bfloat16)
    (tmp_path / "holes").unlink()
    # They start in the middle of the storage, so that an offset that overflows stays inside it and reads wrong numbers.
    far, far_dy = (large.as_strided(x.shape, (0, 8, 2**30, 1), 2**31 + begin) for begin in (0, 2**19))
    far.copy_(x)
    far_dy.copy_(dy)
    found, expected = (
        (
            kernels.triton_rotate_heads(x, positions, frequencies, factor),
            *kernels.triton_rotate_heads_backward(dy, x, positions, frequencies, factor),
        )
        for x, dy in ((far, far_dy), (x, dy))
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_compiled_checkpointed_and_under_autocast():
    x, dy, positions, frequencies, factor = draw(dtype=torch.bfloat16)

    def loss(x, frequencies):
        return (rotate_heads(x * 1.0, positions, frequencies, factor).float() * dy).sum()

    leaves = x.requires_grad_(), frequencies.requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again = torch.utils.checkpoint.checkpoint
    with torch.autocast("cpu", torch.bfloat16):
        autocast = torch.autograd.grad(loss(*leaves), leaves)
    for found in (
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(again(loss, *leaves, use_reentrant=False), leaves),
        autocast,
    ):
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):  # layers with another temperature share the compiled program
        factor.fill_(1.1)
        compiled(*leaves)


def test_a_gpu_that_computes_wrongly_is_refused(monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert head_rotation.try_triton(device, "torch.float32", 16)

    assert head_rotation.try_triton(device, "torch.float32", 16, by_tables=True)

    monkeypatch.setattr(head_rotation, "_rotated", lambda x, cos, sin: x.to(cos.dtype) * cos)
    with pytest.raises(RuntimeError, match=r"are off by .* for torch\.float32, head dim 18"):
        head_rotation.try_triton(device, "torch.float32", 18)
    with pytest.raises(RuntimeError, match=r"are off by .* for torch\.float32, head dim 18"):
        head_rotation.try_triton(device, "torch.float32", 18, by_tables=True)


def test_triton_under_compile_and_opcheck():
    from farsight.kernels import triton_head_rotation as kernels

    x, dy, positions, frequencies, factor = draw(dtype=torch.float32)
    torch.library.opcheck(kernels.triton_rotate_heads, (x, positions, frequencies, factor))
    torch.library.opcheck(kernels.triton_rotate_by_tables, (x, *torch.rand(2, 1, 9, 8)))
    for saved in (x, None):
        torch.library.opcheck(kernels.triton_rotate_heads_backward, (dy, saved, positions, frequencies, factor))
    leaves = x.requires_grad_(), frequencies.requires_grad_()

    def turned(x, frequencies):
        return rotate_heads(x * 1.0, positions, frequencies, factor, "triton")

    compiled = torch.compile(turned, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves, dy) for f in (compiled, turned)), strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frequencies": torch.rand(2, 4)}, r"inv_freq_KF \[2, 4\]"),
        ({"positions": torch.zeros(3, 9)}, r"pass \[2, 9\] or \[1, 9\]"),
        ({"backend": "triton"}, r"does not take torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x, _, positions, frequencies, factor = draw()
    given = {"positions": positions, "frequencies": frequencies, "backend": "auto", **change}
    with pytest.raises(ValueError, match=message):
        rotate_heads(x, given["positions"], given["frequencies"], factor, given["backend"])


def test_kernels_compile_for_gpus_without_spills():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ahead_of_time", "rotate", "rotate_by_tables", "rotate_backward", "--head-dims", "128"],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["kernel"], row["dtype"], row["sm"]) for row in rows} == {
        (k, d, s)
        for k in ("rotate", "rotate_by_tables", "rotate_backward")
        for d in ("bfloat16", "float32")
        for s in (80, 90, 100)
    }
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared"] <= 163 * 1024, row
