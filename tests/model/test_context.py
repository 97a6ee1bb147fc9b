"""The value that says who sees whom, on its way from a compiled block to the kernel: no graph more than its tensors take."""

import pytest
import torch
from torch._dynamo.utils import counters

from farsight.configs.schema import Alibi, NoRotary, Position, Scope
from farsight.kernels.scoped_attention import Visibility, scoped_attention
from farsight.model.build import ModelConfig
from farsight.model.context import OwnKV, PassThrough
from farsight.model.position.layers import resolve_layers
from tests.kernels.test_scoped_attention import documents
from tests.model.test_model import SMALL, fresh_model

POSITION = Position(rotary=NoRotary(), heads=Scope(), bias=Alibi())


class Broken:
    """A context of which nothing is compiled, like the halo exchange."""

    rotates = False

    @torch.compiler.disable
    def exchange(self, k_BLKH, v_BLKH, scopes):
        return self.Pending(k_BLKH, v_BLKH)

    class Pending(OwnKV):
        @torch.compiler.disable
        def attend(self, q_BLNH, visibility, backend):
            assert isinstance(visibility, Visibility)
            return super().attend(q_BLNH, visibility, backend)


@pytest.fixture
def block():
    torch._dynamo.reset()
    counters.clear()
    return fresh_model(ModelConfig(SMALL, POSITION, trained_length=32)).layers["0"]


def runs(block, lengths):
    """Inputs that must share programs: other tokens, documents and slopes, and the scopes of sequences of these lengths."""
    a = SMALL
    for seed, length in enumerate(lengths):
        (layer,) = set(resolve_layers(POSITION, 1, a.n_heads, a.n_kv_heads, a.head_dim, length, length))
        bias = layer.bias._replace(
            coefficients=tuple(tuple(x / 2**seed for x in row) for row in layer.bias.coefficients)
        )
        block.attention.set_position(type(layer)(layer.rotary, layer.scopes, bias))
        x_BLD = torch.randn(2, 40, a.dim, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        yield x_BLD, documents(2, 40, 0.1, seed=seed)


def with_gradient(block, x_BLD, starts_BL):
    out_BLD = block(x_BLD, document_starts_BL=starts_BL)
    return out_BLD, *torch.autograd.grad(out_BLD.square().sum(), x_BLD)


@pytest.mark.parametrize("backend", ["reference", "banded"])
def test_a_block_compiles_whole_and_once(block, backend):
    block.attention.backend = backend
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for number, inputs in enumerate(runs(block, (32, 512))):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = with_gradient(compiled, *inputs)
        torch.testing.assert_close(found, with_gradient(block, *inputs))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_context_that_is_not_compiled_breaks_a_block_at_its_two_calls(block):
    block.attention.context = Broken()
    compiled = torch.compile(block, backend="aot_eager")
    for number, inputs in enumerate(runs(block, (32, 32))):  # a plan of the exchange is compiled for its scopes
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = with_gradient(compiled, *inputs)
        torch.testing.assert_close(found, with_gradient(block, *inputs))
    # Nothing else breaks the graph: the value is made in the second part and handed over whole.
    assert len(counters["graph_break"]) == 2
    for name, reason in zip(("exchange", "attend"), counters["graph_break"], strict=True):
        assert reason.startswith("Skip inlining `torch.compiler.disable()`d function")
        assert f"{name} at" in reason
    assert counters["stats"]["unique_graphs"] == 5  # around the two calls in the attention, and around it in the block
    assert counters["frames"]["ok"] == counters["frames"]["total"]


def test_a_pass_through_hands_on_what_it_changed(block):
    class Halved(PassThrough):
        def pass_keys(self, k_BLKH):
            return k_BLKH / 2

        def pass_queries(self, q_BLNH):
            return q_BLNH * 2

    x_BLD, starts_BL = next(runs(block, (32,)))
    alone = block(x_BLD, document_starts_BL=starts_BL)
    for inner in (None, Broken(), PassThrough(Broken())):
        block.attention.context = Halved(inner)
        assert not block.attention.context.rotates
        torch.testing.assert_close(block(x_BLD, document_starts_BL=starts_BL), alone)


def test_a_value_is_cut_to_heads_and_keys():
    """Heads and keys of a call, as contexts cut them, against the same part of the whole call's mask."""
    scopes, starts = torch.tensor([3, 9, 40, 2]), documents(2, 40, 0.1)
    whole = Visibility(scopes, starts)
    for heads in (slice(1, 3), torch.tensor([3, 0])):
        part = whole.for_heads(heads).for_keys(slice(25, 40), 5)
        assert torch.equal(part.mask(10), whole.mask(40)[:, heads, 30:, 25:])
    q, k, v = torch.randn(3, 2, 40, 4, 8, generator=torch.Generator().manual_seed(0))
    found = scoped_attention(q[:, 30:], k, v, whole.for_keys(slice(0, 40), 30))
    torch.testing.assert_close(found, scoped_attention(q, k, v, whole)[:, 30:])
