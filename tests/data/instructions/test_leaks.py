"""Packed conversations do not see each other: changing one changes no other's logits, and packing changes no gradient."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from farsight.configs.typed import from_dict
from farsight.data.packing import IGNORE
from farsight.model.build import ModelConfig, build_model
from tests.data.instructions.conftest import L, build, global_batches


class TestPackingDoesNotLeak:
    @pytest.mark.parametrize(
        "position",
        [
            {"rotary": {"kind": "rope"}},
            {"heads": {"kind": "scope"}, "lasp": {"s_max": 2.0, "anchor_layers": 1}},
        ],
    )
    def test_changing_one_document_changes_no_logit_of_another(self, data, position):
        batch = global_batches([build(data, micro=1, global_batch_size=1)], 1)[0]
        starts = batch["document_starts"][0]
        edges = [*sorted(set(starts.tolist())), L]
        assert len(edges) > 3
        model = small_model(position)
        logits = model(*(batch[name] for name in ("input", "positions", "document_starts")))[0]
        for begin, end in pairwise(edges[:-1]):
            changed = batch["input"].clone()
            changed[0, begin:end] = (changed[0, begin:end] + 1) % 256
            other = model(changed, batch["positions"], batch["document_starts"])[0]
            own = torch.zeros(L, dtype=torch.bool)
            own[begin:end] = True
            assert torch.equal(logits[~own], other[~own])
            assert not torch.equal(logits[own], other[own])

    @pytest.mark.slow
    @pytest.mark.parametrize("position", [{"rotary": {"kind": "rope"}}, {"heads": {"kind": "scope"}}])
    def test_packed_and_not_packed_have_the_same_loss_and_gradients(self, data, position):
        found = []
        for packing in (True, False):
            loader = build(replace(data, packing=packing), micro=1, global_batch_size=1)
            batches = global_batches([loader], len(loader.sequence.plan(0)))
            model = small_model(position)
            count = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
            total = 0.0
            for batch in batches:
                loss = model(*(batch[n] for n in ("input", "positions", "document_starts", "labels"))) / count
                loss.backward()
                total += loss.item()
            found.append((total, {name: p.grad for name, p in model.named_parameters()}))
        (packed, gradients), (single, others) = found
        assert packed == pytest.approx(single, rel=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, others[name], rtol=1e-4, atol=1e-6 * float(others[name].abs().max())), name


def small_model(position: dict):
    values = {
        "architecture": {"vocab_size": 300, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
        | {"ffn_dim": 48},
        "position": position,
        "trained_length": L,
        "attention": {"backend": "reference"},
    }
    model = build_model(from_dict(ModelConfig, values))
    model.init_weights()
    return model
