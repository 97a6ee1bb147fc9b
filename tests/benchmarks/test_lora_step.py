"""The benchmark's own check: PEFT on transformers is the independent source of the loss and of all adapters' gradients."""

import json
from functools import cache

import pytest
import torch

from farsight.benchmarks import lora_step

pytestmark = pytest.mark.slow


def test_losses_and_gradients_are_those_of_peft(tmp_path, capsys, monkeypatch):
    for name in ("our_model", "peft_model"):  # built once
        monkeypatch.setattr(lora_step, name, cache(getattr(lora_step, name)))
    out = tmp_path / "out.json"
    small = ["--rounds", "1", "--rows", "1", "--seq-len", "24", "--layers", "1", "--json", str(out)]
    lora_step.main([*small, "--dropout", "0"])
    result = json.loads(out.read_text())
    assert max(result["agreement"].values()) < 1e-5
    assert [row["what"] for row in result["rows"]] == [lora_step.OURS, lora_step.PLAIN_HEAD, lora_step.PEFT]
    assert {row["dropout"] for row in result["rows"]} == {0.0}
    assert result["ratio"] == result["rows"][0]["tokens_per_second"] / result["rows"][2]["tokens_per_second"]
    assert "losses agree to" in capsys.readouterr().out

    def shifted(model, batch):
        return lora_step.our_loss(model, batch) + 0.5 * sum(p.sum() for p in model.parameters() if p.requires_grad)

    ours = lora_step.our_model(0.0, 1)
    losses = {
        lora_step.OURS: shifted,
        lora_step.PLAIN_HEAD: lora_step.plain_head_loss,
        lora_step.PEFT: lora_step.peft_loss,
    }
    tokens = torch.randint(32000, (1, 9))
    with pytest.raises(RuntimeError, match="differ by"):
        lora_step.check_agreement(ours, lora_step.peft_model(ours, 0.0), losses, (tokens[:, :-1], tokens[:, 1:]))
