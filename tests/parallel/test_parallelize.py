"""Selective checkpointing's choice of operators."""

import pytest
import torch

import farsight.kernels.scoped_attention.banded.banded  # noqa: F401  registers the operator
from farsight.configs.load import build_config
from farsight.parallel.recompute import attention_ops


@pytest.mark.parametrize(
    ("backend", "op"),
    [
        ("auto", torch.ops.farsight.banded_attention.default),
        ("banded", torch.ops.farsight.banded_attention.default),
        ("flex", torch._higher_order_ops.flex_attention),
    ],
)
def test_selective_checkpointing_keeps_the_backends_operator(backend, op):
    assert op in attention_ops(build_config({"attention": {"backend": backend}}))


@pytest.mark.parametrize("backend", ["auto", "hybrid", "triton"])
def test_selective_checkpointing_keeps_the_operators_of_gpus(monkeypatch, backend):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    saved = attention_ops(build_config({"attention": {"backend": backend}}))
    ours = torch.ops.farsight
    assert {ours.hybrid_attention.default, ours.triton_attention.default} <= saved
    assert {ours.hybrid_segmented_attention.default, ours.triton_segmented_attention.default} <= saved


def test_a_missing_package_is_named():
    with pytest.raises(ValueError, match="pip install flash-attn"):
        attention_ops(build_config({"attention": {"backend": "flash"}}))
